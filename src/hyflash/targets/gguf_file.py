"""A GGUF file as a decoder: sizes, switches and tensors, checked before anything is computed with them.

In: a path. Out: `DecoderSpec` and `Weights` whose matrices stay in the file. Files are untrusted: `gguf_read.py`
checks the container, `gguf_spec.py` the keys, this file names, types and shapes of all tensors.
Architectures: llama (Llama, SmolLM2, Mistral), qwen2, qwen3, gemma2, gemma3, phi3.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hyflash.errors import UserError
from hyflash.ops.gguf_rows import BLOCKS
from hyflash.targets.decoder import DecoderSpec, Rows, Weights
from hyflash.targets.gguf_read import GgufReader
from hyflash.targets.gguf_spec import read_spec

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
_LAYER = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_VECTORS = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn_post_norm": "post_attention_norm",
    "ffn_post_norm": "post_ffw_norm",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
}
_UNUSED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", ".attn_rot_embd.weight")
"""Ends of the names of tensors that hold rotations."""


class GgufFile:
    """An opened file. Raises UserError for anything that is no GGUF decoder the native target can run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.reader = GgufReader(path)
        self.architecture = str(self.reader.value("general.architecture") or "")
        if self.architecture not in ARCHITECTURES:
            raise UserError(
                f"{path} holds a {self.architecture or 'nameless'} model; the native target knows "
                f"{', '.join(ARCHITECTURES)}. The torch target may serve it (--backend torch)."
            )
        parts = self.reader.value("split.count")
        if parts not in (None, 0, 1):
            raise UserError(f"{path} is one of {parts} parts of a model; join them first (llama-gguf-split --merge).")

    def spec(self) -> DecoderSpec:
        """Sizes and switches. Raises UserError."""
        return read_spec(self.reader, self.architecture)

    def weights(self, spec: DecoderSpec) -> Weights:
        """All tensors, checked against the sizes. Raises UserError for one that is missing, foreign or unknown."""
        used: set[str] = set()
        embedding = self._rows("token_embd", spec.vocab_size, spec.hidden_size, used)
        tied = "output.weight" not in self.reader.tensors
        weights = Weights(
            embedding=embedding,
            head=embedding if tied else self._rows("output", spec.vocab_size, spec.hidden_size, used),
            final_norm=self.reader.vector("output_norm.weight", spec.hidden_size),
            layers=tuple(self._layer(f"blk.{index}.", spec, used) for index in range(spec.num_layers)),
            vectors=tuple(
                {
                    name: self.reader.vector(f"blk.{index}.{_VECTORS[name]}.weight", size)
                    for name, size in spec.vector_sizes().items()
                }
                for index in range(spec.num_layers)
            ),
        )
        used |= {f"blk.{i}.{_VECTORS[name]}.weight" for i in range(spec.num_layers) for name in spec.vector_sizes()}
        unknown = sorted(set(self.reader.tensors) - used - {"output_norm.weight"})
        unknown = [name for name in unknown if not name.endswith(_UNUSED)]
        if unknown:
            raise UserError(
                f"{self.path} has tensors that a {self.architecture} model here has not: {', '.join(unknown[:3])}"
                f"{f' and {len(unknown) - 3} more' * (len(unknown) > 3)}. Use the torch target (--backend torch)."
            )
        return weights

    def _layer(self, at: str, spec: DecoderSpec, used: set[str]) -> dict[str, Rows]:
        """The matrices of a layer; query, key and value may be one, and Phi-3's gate and up are."""
        sizes = spec.matrix_sizes()
        out: dict[str, Rows] = {}
        if f"{at}attn_qkv.weight" in self.reader.tensors:
            out |= self._fused(f"{at}attn_qkv", {name: sizes[name] for name in ("query", "key", "value")}, used)
        if self.architecture == "phi3":
            out |= self._fused(f"{at}ffn_up", {name: sizes[name] for name in ("gate", "up")}, used)
        return out | {k: self._rows(at + name, *sizes[k], used) for k, name in _LAYER.items() if k not in out}

    def _rows(self, name: str, num_outputs: int, num_inputs: int, used: set[str]) -> Rows:
        stored = self.reader.tensor(f"{name}.weight")
        if stored.type not in BLOCKS:
            raise UserError(f"{self.path}: {name} has type {stored.type}; the native target knows {', '.join(BLOCKS)}.")
        if stored.shape != (num_outputs, num_inputs):
            raise UserError(
                f"{self.path}: {name} has shape {list(stored.shape)}; expected {[num_outputs, num_inputs]}."
            )
        bias = f"{name}.bias"
        used |= {f"{name}.weight", bias}
        return Rows(
            type=stored.type,
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            stored=stored,
            bias=self.reader.vector(bias, num_outputs) if bias in self.reader.tensors else None,
        )

    def _fused(self, name: str, sizes: dict[str, tuple[int, int]], used: set[str]) -> dict[str, Rows]:
        """Several matrices that share their inputs, kept one below the other."""
        whole = self._rows(name, sum(n for n, _ in sizes.values()), next(iter(sizes.values()))[1], used)
        out, first = {}, 0
        for part, (num, _) in sizes.items():
            bias = None if whole.bias is None else whole.bias[first : first + num]
            out[part] = replace(whole, num_outputs=num, first=first, bias=bias)
            first += num
        return out
