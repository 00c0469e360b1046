"""From the keys of a GGUF file to a `DecoderSpec`: what each family does, and what a file may change about it.

In: an opened file and its architecture. Out: sizes and switches. Keys mean what llama.cpp's graphs make of them
(src/models/*.cpp there), with one difference: Phi-3's sliding window is honoured, as its authors' code does, while
llama.cpp leaves it out. A key that changes the arithmetic in a way not served here is refused.
"""

from __future__ import annotations

import math

from hyflash.errors import UserError
from hyflash.targets.decoder import DecoderSpec, Rope, frequencies
from hyflash.targets.gguf_read import GgufReader

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "nextn_predict_layers": (0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
}
"""Keys that change the arithmetic, with the values that do not."""
_TURN_ENDS = (b"<|im_end|>", b"<|eot_id|>", b"<|end|>", b"<end_of_turn>")
"""Tokens that end a turn where the file names none, as llama.cpp has it."""
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the two models whose queries are scaled by hidden size over heads, which no key says."""


def read_spec(file: GgufReader, architecture: str) -> DecoderSpec:
    """Sizes and switches, checked against each other. Raises UserError."""
    spec = _Keys(file, architecture).spec()
    spec.check(str(file.path))
    return spec


class _Keys:
    """The keys of one architecture."""

    def __init__(self, file: GgufReader, architecture: str) -> None:
        self._file, self._family = file, architecture
        for key, neutral in _NEUTRAL.items():
            value = file.value(f"{architecture}.{key}")
            if value is not None and value not in neutral:
                raise UserError(f"{file.path}: its key {architecture}.{key} is {value!r}, which is not served here.")

    def _number(self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e6) -> float:
        """A number from low to high; a list of one number for each layer is taken where all agree."""
        values = self._file.numbers(f"{self._family}.{key}")
        if values is None:
            values = [] if default is None else [default]
        if not values or any(v != values[0] for v in values) or not low <= values[0] <= high:
            raise UserError(
                f"{self._file.path}: its key {self._family}.{key} is {values[:4]}; expected a number from {low:g} to "
                f"{high:g}, the same for all layers."
            )
        return values[0]

    def _count(self, key: str, default: int | None = None, *, high: int, low: int = 1) -> int:
        value = self._number(key, default, low=low, high=high)
        if value != int(value):
            raise UserError(f"{self._file.path}: its key {self._family}.{key} is {value:g}; expected a whole number.")
        return int(value)

    def _text(self, key: str) -> str | None:
        value = self._file.value(f"{self._family}.{key}")
        return None if value is None else str(value)

    def spec(self) -> DecoderSpec:
        """Everything but the checks of sizes against each other."""
        family, gemma = self._family, self._family.startswith("gemma")
        num_layers = self._count("block_count", high=1024)
        hidden = self._count("embedding_length", high=1 << 17)
        heads = self._count("attention.head_count", high=1024)
        head_dim = self._count("attention.key_length", max(1, hidden // heads), high=1024)
        for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
            if self._count(key, head_dim, high=1 << 20) != head_dim:
                raise UserError(f"{self._file.path}: its key {family}.{key} is not {head_dim}, as keys have it.")
        embedding = self._file.tensor("token_embd.weight")
        context = self._count("context_length", high=1 << 30)
        main, scale, context = self._main_rope(head_dim, context)
        windows, local = self._windows(num_layers, context)
        ropes = (main, self._local_rope(head_dim)) if gemma else (main,)
        return DecoderSpec(
            family=family,
            num_layers=num_layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=self._count("attention.head_count_kv", heads, high=1024),
            head_dim=head_dim,
            intermediate_size=self._count("feed_forward_length", high=1 << 20),
            vocab_size=embedding.rows,
            max_context=context,
            rms_norm_eps=self._number("attention.layer_norm_rms_epsilon", high=1.0),
            act="gelu" if gemma else "silu",
            ropes=ropes,
            rope_theta=self._base(),
            rope_interleaved=family == "llama",
            rope_scale=scale,
            attn_scale=(hidden // heads if _GEMMA_27B.get(family) == num_layers else head_dim) ** -0.5,
            attn_softcap=self._number("attn_logit_softcapping", 50.0) if family == "gemma2" else 0.0,
            final_softcap=self._number("final_logit_softcapping", 30.0 * (family == "gemma2")) if gemma else 0.0,
            embed_scale=hidden**0.5 if gemma else 1.0,
            windows=windows,
            rope_of_layer=tuple(int(gemma and one) for one in local),
            eos_token_ids=self._eos(embedding.rows),
        )

    # ------------------------------------------------------------------------------------ windows

    def _windows(self, num_layers: int, context: int) -> tuple[tuple[int, ...], list[bool]]:
        """Window of each layer (0: none), and which layers are local ones."""
        window = self._count("attention.sliding_window", 4096 * (self._family == "gemma2"), low=0, high=1 << 31)
        if self._family in ("qwen2", "qwen3") and 0 < window < context:
            raise UserError(
                f"{self._file.path}: a {self._family} file with a sliding window does not say which layers have it; "
                "use the original model's directory."
            )
        local = [window > 0] * num_layers
        if self._family.startswith("gemma") and window:
            period = {"gemma2": 2, "gemma3": 6}[self._family]
            given = self._file.numbers(f"{self._family}.attention.sliding_window_pattern") or [float(period)]
            if len(given) == num_layers > 1:
                local = [bool(one) for one in given]
            else:
                period = self._count("attention.sliding_window_pattern", period, low=0, high=1024)
                local = [period == 0 or index % period < period - 1 for index in range(num_layers)]
        return tuple(window if one and window < context else 0 for one in local), local

    # ---------------------------------------------------------------------------------- rotations

    def _base(self) -> float:
        return self._number("rope.freq_base", 10000.0, low=1.0, high=1e12)

    def _dim(self, head_dim: int) -> int:
        dim = self._count("rope.dimension_count", head_dim, high=head_dim)
        other = self._count("rope.dimension_count_swa", dim, high=1 << 20)
        if dim % 2 or other != dim or (self._family == "llama" and dim != head_dim):
            raise UserError(
                f"{self._file.path}: it rotates {dim} (local layers: {other}) of {head_dim} dimensions of a head; "
                f"expected an even number, for all layers alike{', and whole heads' * (self._family == 'llama')}."
            )
        return dim

    def _linear(self) -> float:
        """The divisor of positions, 1 for none."""
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 0.0))
        return factor if factor and self._text("rope.scaling.type") != "none" else 1.0

    def _main_rope(self, head_dim: int, context: int) -> tuple[Rope, float, int]:
        """Rotation of global layers, the factor on sines and cosines, and the longest context that they serve."""
        dim, base, factor = self._dim(head_dim), self._base(), self._linear()
        kind = self._text("rope.scaling.type") or "linear"
        scale = self._number("rope.scaling.attn_factor", 1.0, high=100.0)
        trained = self._count("rope.scaling.original_context_length", context, high=1 << 30)
        short = "rope_factors_short.weight" in self._file.tensors
        numbers = frequencies(dim, base)
        if kind == "longrope" or (short and self._family == "phi3"):
            # Past the trained context other factors hold, for the keys in the cache as well; so it ends there.
            divisors = self._divisors("rope_factors_short.weight", dim)
            return _rope(numbers, divisors), scale, min(context, trained)
        if kind == "yarn" and self._family != "gemma3" and "rope_freqs.weight" not in self._file.tensors:
            yarn, magnitude = self._yarn(dim, base, factor, trained)
            return yarn, scale * magnitude, context
        if kind not in ("linear", "none"):
            raise UserError(
                f"{self._file.path}: its rotations are scaled by {kind!r}, which is not served for {self._family}; "
                "expected none, linear, llama3's, yarn or longrope."
            )
        if "rope_freqs.weight" in self._file.tensors and self._family == "llama":  # llama3's smooth scaling
            numbers = [f / x for f, x in zip(numbers, self._divisors("rope_freqs.weight", dim), strict=True)]
        return _rope(numbers, [factor] * len(numbers)), scale, context

    def _local_rope(self, head_dim: int) -> Rope:
        """Rotation of Gemma's local layers: Gemma 3 has a base of its own there, and scales global ones only."""
        default = 10000.0 if self._family == "gemma3" else self._base()
        base = self._number("rope.freq_base_swa", default, low=1.0, high=1e12)
        numbers = frequencies(self._dim(head_dim), base)
        return _rope(numbers, [1.0 if self._family == "gemma3" else self._linear()] * len(numbers))

    def _divisors(self, name: str, dim: int) -> list[float]:
        out = [float(x) for x in self._file.vector(name, dim // 2)]
        if not all(1e-3 <= x <= 1e6 for x in out):
            raise UserError(f"{self._file.path}: {name} holds numbers that are no scaling of rotations.")
        return out

    def _yarn(self, dim: int, base: float, factor: float, trained: int) -> tuple[Rope, float]:
        """YaRN (arXiv 2309.00071) as transformers and llama.cpp both compute it."""
        magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
        given = self._number("rope.scaling.yarn_attn_factor", magnitude)
        if not math.isclose(given, magnitude, rel_tol=1e-3):
            raise UserError(
                f"{self._file.path}: a yarn_attn_factor of {given:g} is not served; expected {magnitude:g}."
            )
        fast = self._number("rope.scaling.yarn_beta_fast", 32.0, low=1e-3)
        slow = self._number("rope.scaling.yarn_beta_slow", 1.0, low=1e-3)
        if base == 1.0:
            raise UserError(f"{self._file.path}: rotations with base 1 cannot be scaled by yarn.")
        ends = [dim * math.log(trained / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in (fast, slow)]
        low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
        numbers = []
        for index, number in enumerate(frequencies(dim, base)):
            ramp = min(max((index - low) / max(high - low, 0.001), 0.0), 1.0)
            numbers.append(number / factor * ramp + number * (1.0 - ramp))
        return Rope(frequencies=tuple(numbers)), magnitude

    def _eos(self, vocab_size: int) -> tuple[int, ...]:
        """Tokens that end an answer: those the file names, and the end of a turn where it names none."""
        ids = {self._file.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
        if self._file.value("tokenizer.ggml.eot_token_id") is None:
            ids |= {i for i, token in enumerate(self._file.strings("tokenizer.ggml.tokens")) if token in _TURN_ENDS}
        return tuple(sorted(i for i in ids if type(i) is int and 0 <= i < vocab_size))


def _rope(numbers: list[float], divisors: list[float]) -> Rope:
    return Rope(frequencies=tuple(f / x for f, x in zip(numbers, divisors, strict=True)))
