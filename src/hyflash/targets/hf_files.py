"""A Hugging Face directory as a decoder: config.json and safetensors, quantised while it is read where asked.

In: a directory and a weight type. Out: `DecoderSpec` (`hf_spec.py` reads the config) and `Weights` in GGUF's row form,
matrices still in their files. Families: Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3 (text), Phi-3.
`quant`: none keeps what is stored; q8_0, q4_0 and q4_1 turn matrices into these types, but for the head and the
embedding, which are q8_0 in all three (their errors go straight into the logits; llama.cpp's mixes keep them higher
too), and for rows that are no whole number of blocks of 32, which stay as stored. Norms and biases become float32.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyflash.errors import UserError
from hyflash.ops.gguf_rows import BLOCKS, quantize
from hyflash.targets.decoder import DecoderSpec, Rows, Stored, Weights, to_float
from hyflash.targets.hf_spec import has_bias, load_config, read_spec
from hyflash.targets.safetensors_read import read_tensors

QUANTS = {"none": None, "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}
_LAYER = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_FUSED = {"self_attn.qkv_proj": ("query", "key", "value"), "mlp.gate_up_proj": ("gate", "up")}
"""Matrices that Phi-3 keeps in one, in this order."""
_VECTORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
_GEMMA_VECTORS = _VECTORS | {
    "attn_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
"""Where the decoder sits in its checkpoint, alone or beside a vision tower."""


class HfFiles:
    """An opened directory. Raises UserError for anything that is no decoder the native target can run."""

    def __init__(self, path: str | Path, *, quant: str = "none") -> None:
        self.path = Path(path)
        if quant not in QUANTS:
            raise UserError(f"quant is {quant!r}; expected one of {', '.join(QUANTS)}.")
        self._quant = QUANTS[quant]
        self._config = load_config(self.path)
        self._tensors = read_tensors(self.path)
        prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in self._tensors), None)
        if prefix is None:
            raise UserError(f"{path} lacks the tensor model.embed_tokens.weight; expected the files of a whole model.")
        self._prefix = prefix
        self._gemma = self._config.model_type.startswith("gemma")

    def spec(self) -> DecoderSpec:
        """Sizes and switches. Raises UserError."""
        return read_spec(self._config, self.path)

    def weights(self, spec: DecoderSpec) -> Weights:
        """All tensors, checked against the sizes. Raises UserError for one that is missing, foreign or unknown."""
        used: set[str] = set()
        sizes = (spec.vocab_size, spec.hidden_size)
        embedding = self._rows(f"{self._prefix}embed_tokens", *sizes, used, quant=self._quant and "Q8_0")
        head = embedding
        own = next((n for n in ("lm_head", "language_model.lm_head") if f"{n}.weight" in self._tensors), "lm_head")
        if f"{own}.weight" in self._tensors or not self._config.tie_word_embeddings:
            head = self._rows(own, *sizes, used, quant=self._quant and "Q8_0")
        names = _GEMMA_VECTORS if self._gemma else _VECTORS
        at = [f"{self._prefix}layers.{index}." for index in range(spec.num_layers)]
        weights = Weights(
            embedding=embedding,
            head=head,
            final_norm=self._norm(f"{self._prefix}norm.weight", spec.hidden_size, used),
            layers=tuple(self._layer(one, spec, used) for one in at),
            vectors=tuple(
                {name: self._norm(f"{one}{names[name]}.weight", n, used) for name, n in spec.vector_sizes().items()}
                for one in at
            ),
        )
        unknown = [name for name in self._tensors if name.startswith(tuple(at)) and name not in used]
        unknown = [name for name in unknown if not name.endswith("rotary_emb.inv_freq")]
        if unknown:
            raise UserError(
                f"{self.path} has tensors that a {spec.family} model here has not: {', '.join(sorted(unknown)[:3])}. "
                "Use the torch target (--backend torch)."
            )
        return weights

    # --------------------------------------------------------------------------------------- parts

    def _tensor(self, name: str, shape: tuple[int, ...], used: set[str]) -> Stored:
        if name not in self._tensors:
            raise UserError(f"{self.path} lacks the tensor {name}; expected the files of a whole model.")
        found = self._tensors[name]
        if found.shape != shape or found.type not in BLOCKS:
            raise UserError(
                f"{self.path}: {name} is {found.type} {list(found.shape)}; expected F32, F16 or BF16 {list(shape)}."
            )
        used.add(name)
        return found

    def _vector(self, name: str, size: int, used: set[str]) -> NDArray[np.float32]:
        stored = self._tensor(name, (size,), used)
        out: NDArray[np.float32] = to_float(stored.type, stored.read())[0]
        return out

    def _norm(self, name: str, size: int, used: set[str]) -> NDArray[np.float32]:
        """Gemma stores its norms without the 1 that is added to them."""
        weight = self._vector(name, size, used)
        return weight + np.float32(1.0) if self._gemma else weight

    def _layer(self, at: str, spec: DecoderSpec, used: set[str]) -> dict[str, Rows]:
        sizes = spec.matrix_sizes()
        out: dict[str, Rows] = {}
        for name, parts in _FUSED.items() if spec.family == "phi3" else ():
            whole = self._rows(at + name, sum(sizes[p][0] for p in parts), sizes[parts[0]][1], used, quant=self._quant)
            first = 0
            for part in parts:
                out[part] = replace(whole, num_outputs=sizes[part][0], first=first)
                first += sizes[part][0]
        for slot, name in _LAYER.items():
            if slot not in out:
                bias = has_bias(self._config, slot)
                out[slot] = self._rows(at + name, *sizes[slot], used, quant=self._quant, bias=bias)
        return out

    def _rows(
        self, name: str, num_outputs: int, num_inputs: int, used: set[str], *, quant: str | None, bias: bool = False
    ) -> Rows:
        stored = self._tensor(f"{name}.weight", (num_outputs, num_inputs), used)
        kind = quant if quant and num_inputs % BLOCKS[quant][0] == 0 else stored.type
        return Rows(
            type=kind,
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            stored=stored,
            convert=None if kind == stored.type else partial(_convert, stored.type, kind),
            bias=self._vector(f"{name}.bias", num_outputs, used) if bias else None,
        )


def _convert(stored: str, kind: str, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return quantize(to_float(stored, rows), kind)
