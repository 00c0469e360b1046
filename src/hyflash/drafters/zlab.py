"""The checkpoint format of z-lab's DFlash, which SGLang, vLLM, llama.cpp and the training tools read too.

In: their config.json and tensor names. Out: our options and names, and back. Whatever the format can say that we
cannot honour is refused by name: a key read past silently would make a drafter that loads and is never accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hyflash.core import TargetInfo
from hyflash.drafters.block_config import DFlashConfig
from hyflash.drafters.feature_config import tap_rule
from hyflash.errors import UserError

ARCHITECTURE, ARCHITECTURE_2 = "DFlashDraftModel", "DFlash2DraftModel"

# Keys that change the network, with the only value under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_swa_attention_sink_bias": (None, False),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "conv_group_size": (None,),
    "conv_kernel_size": (None,),
    "hidden_act": (None, "silu"),
    "is_neox_style": (None, True),
    "logit_scale": (None, 1, 1.0),
    "mlp_bias": (None, False),
    "output_multiplier": (None, 1, 1.0),
    "partial_rotary_factor": (None, 1, 1.0),
    "projector_type": (None, "dflash"),
    "quantization_config": (None,),
    "rope_is_neox_style": (None, True),
    "selector_rank": (None,),
    "selector_top_k": (None,),
    "shift_label": (None, False),
    "speculators_model_type": (None,),
    "final_logit_softcapping": (None,),  # the target's own is applied by its head
}
# Keys of a DFlash 2, which are options of ours of the same names.
_NEEDED_2 = ("conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k")
_KNOWN_2 = (*_NEEDED_2, "final_logit_softcapping", "output_multiplier")
_NESTED = {
    "block_size",
    "causal",
    "is_causal",
    "mask_token",
    "mask_token_id",
    "num_target_layers",
    "sample_from_anchor",
    "swa_window_size",
    "target_layer_ids",
    "use_aux_hidden_state",
    "use_swa",
    *_NEUTRAL,
}


# What a value must be before anybody asks what it says: a flag that is text, say, would count as set.
_SIZES = (
    "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "vocab_size",
)  # fmt: skip
_FLAGS = (
    "attention_bias", "causal", "confidence_head_with_markov", "enable_confidence_head", "fc_norm", "is_causal",
    "norm_before_fc", "norm_before_residual", "norm_output", "sample_from_anchor", "shift_label",
    "tie_word_embeddings", "use_confidence_head", "use_sliding_window", "use_swa",
)  # fmt: skip


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("architectures", "layer_types"),
        lambda x: isinstance(x, list) and all(isinstance(y, str) for y in x),
        "a list of names",
    ),
    (("markov_head_type", "model_type", "projector_type"), lambda x: isinstance(x, str), "a name"),
    (_SIZES, lambda x: _is_real(x) and isinstance(x, int) and 0 < x < 1 << 31, "a whole number of at least 1"),
    (_FLAGS, lambda x: x in (True, False), "true or false"),
    (("confidence_head_alpha", "max_window_layers"), _is_real, "a number"),
    (("rms_norm_eps", "rope_theta"), lambda x: _is_real(x) and x > 0, "a number above 0"),
)


def check_types(config: Mapping[str, Any], where: str) -> None:
    """Refuse a config.json of a drafter whose values, at the top or in a table, are of another kind than its readers
    take them for. Raises UserError, naming the key."""
    for keys, fits, want in _KINDS:
        for place, table in (("", config), *((f"{key}.", x) for key, x in config.items() if isinstance(x, Mapping))):
            for key in keys:
                value = table.get(key)
                if value is not None and not fits(value):
                    raise UserError(f"{where}: {place}{key} is {value!r}; expected {want}.")


def method(config: Mapping[str, Any]) -> str:
    """Our drafter that a z-lab config.json is for."""
    return "dflash2" if ARCHITECTURE_2 in (config.get("architectures") or ()) else "dflash"


def read_config(config: Mapping[str, Any], info: TargetInfo, *, where: str) -> dict[str, Any]:
    """Options of `method` for a z-lab config.json, nested or flat. Raises UserError, naming the key."""
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise UserError(f"{where}: dflash_config is {nested!r}; expected a table.")
    _refuse_foreign(config, nested, where)

    def need(key: str, *others: str) -> Any:
        value = either(config, nested, key, where)
        for other in others:
            value = config.get(other) if value is None else value
        if value is None:
            raise UserError(f"{where}: {key} is missing; expected a config.json of a DFlash drafter.")
        return value

    block, layers, width = need("block_size"), need("num_hidden_layers"), need("hidden_size")
    heads, vocab = need("num_attention_heads"), need("vocab_size")
    anchor_drafts = bool(either(config, nested, "sample_from_anchor", where))
    least = 1 if anchor_drafts else 2
    if not isinstance(block, int) or block < least:
        raise UserError(f"{where}: block_size is {block!r}; expected a whole number of at least {least}.")
    for key, found, want in (
        ("vocab_size", vocab, info.vocab_size),
        ("hidden_size", width, info.hidden_size),
        ("target_hidden_size", config.get("target_hidden_size"), info.hidden_size),
        ("num_target_layers", either(config, nested, "num_target_layers", where), info.num_layers),
        ("draft_vocab_size", config.get("draft_vocab_size"), info.vocab_size),
    ):
        if found is not None and found != want:
            raise UserError(f"{where}: {key} is {found}; target {info.name!r} has {want}. Load the target it is for.")
    taps = either(config, nested, "target_layer_ids", where)
    listed = taps is None or isinstance(taps, list | tuple)
    if not listed or any(not isinstance(tap, int) or not 0 <= tap < info.num_layers - 1 for tap in taps or ()):
        raise UserError(
            f"{where}: target_layer_ids is {taps}; expected layers from 0 to {info.num_layers - 2} (readers of the "
            "format disagree on whether the last layer's output is normed)."
        )
    return {
        "num_layers": layers,
        "num_draft_tokens": block if anchor_drafts else block - 1,
        "sample_from_anchor": anchor_drafts,
        "hidden_size": width,
        "intermediate_size": need("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or width // heads,
        "attention_bias": bool(config.get("attention_bias")),
        "target_layer_ids": taps if taps is not None else tap_rule(info.num_layers, layers),
        "tap_norm": False,
        "final_norm": True,
        "mask_token_id": need("mask_token_id"),
        "rope_theta": rope_theta(config, where),
        "rms_norm_eps": need("rms_norm_eps"),
        "max_positions": need("max_position_embeddings"),
        **_attention(config, nested, layers, where),
        **(_second(config, nested, where) if method(config) == "dflash2" else {}),
    }


def _second(config: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options that a DFlash 2 has beside those of a DFlash."""
    found = {key: either(config, nested, key, where) for key in _KNOWN_2}
    for key in _NEEDED_2:
        if not isinstance(found[key], int):
            raise UserError(f"{where}: {key} is {found[key]!r}; expected a whole number, as every DFlash 2 has.")
    return found


def write_config(config: DFlashConfig, info: TargetInfo, *, dtype: str) -> dict[str, Any]:
    """A config.json for resolved options, in z-lab's newer and older spelling at once."""
    windowed = ["full_attention" if i in config.full_layers else "sliding_attention" for i in range(config.num_layers)]
    dflash = {
        "block_size": config.num_draft_tokens + 1,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.taps),
    }
    out = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": dflash["block_size"],
        "dflash_config": dflash,
        "num_target_layers": info.num_layers,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_positions,
        "vocab_size": info.vocab_size,
        "tie_word_embeddings": False,
        "layer_types": windowed if config.window else ["full_attention"] * config.num_layers,
        "sliding_window": config.window or None,
        "use_sliding_window": bool(config.window),
        "max_window_layers": config.num_layers,
        "dtype": dtype,
    }
    if not (config.causal_block and config.full_layers):  # such a mixture follows from the layer types alone
        out["is_causal"] = config.causal_block
    return out


def can_write(config: DFlashConfig, info: TargetInfo) -> bool:
    """Whether z-lab's format can hold a `dflash` of these resolved options without losing anything."""
    ordinary = not config.tap_norm and config.final_norm and config.correction == "none" and config.start == "none"
    ordinary = ordinary and not config.sample_from_anchor
    same_window = not config.window or config.window_counts_slots
    ordinary_taps = max(config.taps) < info.num_layers - 1
    return bool(ordinary and ordinary_taps and same_window and config.draft_vocab_size == 0)


def own_names(weights: Mapping[str, Tensor], config: DFlashConfig) -> dict[str, Tensor]:
    """Tensors without a `model.` prefix and with fused query-key-value projections split by head counts."""
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        short = name.removeprefix("model.")
        if ".self_attn.qkv_proj." not in short:
            out[short] = tensor
            continue
        sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        if tensor.shape[0] != sum(sizes):
            raise UserError(f"tensor {name} has {tensor.shape[0]} rows; expected {' + '.join(map(str, sizes))}.")
        for part, piece in zip("qkv", torch.split_with_sizes(tensor, sizes), strict=True):
            out[short.replace("qkv_proj", f"{part}_proj")] = piece
    return out


def either(config: Mapping[str, Any], nested: Mapping[str, Any], key: str, where: str) -> Any:
    """Value of a key that may stand in dflash_config, at the top, or in both alike."""
    inner, outer = nested.get(key), config.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise UserError(f"{where}: {key} is {outer!r} at the top and {inner!r} in dflash_config; expected one value.")
    return outer if inner is None else inner


def _refuse_foreign(config: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> None:
    for name in config.get("architectures") or ():
        if name not in (ARCHITECTURE, ARCHITECTURE_2):
            raise UserError(
                f"{where}: architectures names {name!r}; we read {ARCHITECTURE}, {ARCHITECTURE_2} and our own."
            )
    for key in nested:
        if key not in _NESTED:
            raise UserError(f"{where}: dflash_config.{key} is unknown to us, so the drafter might come out wrong.")
    known = _KNOWN_2 if method(config) == "dflash2" else ()
    for key, neutral in _NEUTRAL.items():
        if key in known:
            continue
        for place, table in (("", config), ("dflash_config.", nested)):
            if table.get(key) not in neutral:
                raise UserError(f"{where}: {place}{key} is {table[key]!r}, which we cannot honour.")
    if nested.get("mask_token") is not None and either(config, nested, "mask_token_id", where) is None:
        raise UserError(
            f"{where}: dflash_config.mask_token is {nested['mask_token']!r}; give mask_token_id as a number."
        )


def rope_theta(config: Mapping[str, Any], where: str) -> float:
    """Rotary base from rope_theta or rope_parameters; scaled rotations are refused."""
    tables = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            raise UserError(f"{where}: {key} is {table!r}; expected a table.")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default" or table.get("partial_rotary_factor", 1) != 1:
            raise UserError(f"{where}: {key} is {dict(table)}, which we cannot honour (only plain rotary embedding).")
    theta = config.get("rope_theta", tables.get("rope_parameters", {}).get("rope_theta"))
    if not isinstance(theta, (int, float)):
        raise UserError(f"{where}: rope_theta is {theta!r}; expected a number, there or in rope_parameters.")
    return float(theta)


def whole(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """The count under a key, or the default where nothing is said. Raises UserError for anything else."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where}: {key} is {value!r}; expected a whole number of at least 1.")
    return value


def _attention(config: Mapping[str, Any], nested: Mapping[str, Any], layers: int, where: str) -> dict[str, Any]:
    """Window and causality of the layers.

    Readers disagree on both. Context rows that slot k of a block at anchor a sees with a window W:
    transformers, vLLM, SGLang, SpecForge, NeMo a + k - W < t < a, which is `window_counts_slots` and what we import;
    speculators and z-lab's MLX code a - W <= t < a for every slot, which is our own default. In-block attention of
    sliding layers: as is_causal says, else causal, but not with use_swa (vLLM's order).
    """
    causal = config.get("is_causal")
    for key in ("is_causal", "causal"):
        causal = nested.get(key) if causal is None else causal
    window = config.get("sliding_window")
    if either(config, nested, "use_swa", where):
        window = either(config, nested, "swa_window_size", where) or window
        sliding, causal = list(range(layers)), bool(causal)
    else:
        types = config.get("layer_types")
        if types is None:
            first = config.get("max_window_layers", layers) if config.get("use_sliding_window") else layers
            types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
        if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
            raise UserError(f"{where}: layer_types is {types}; expected {layers} of full_attention, sliding_attention.")
        sliding = [i for i, kind in enumerate(types) if kind == "sliding_attention"]
        if sliding and config.get("use_sliding_window") is False:
            raise UserError(
                f"{where}: layer_types has sliding_attention, but use_sliding_window is false; which holds?"
            )
    if not sliding:
        return {"window": 0, "causal_block": bool(causal)}
    if not isinstance(window, int) or window < 1:
        raise UserError(f"{where}: sliding_window is {window!r}; expected a whole number for the sliding layers.")
    full = [i for i in range(layers) if i not in sliding]
    if full and causal:
        raise UserError(f"{where}: is_causal is true with full and sliding layers mixed, which we cannot honour.")
    # Sliding layers without a word on causality are causal: readers run them so, and published ones were trained so.
    causal = True if causal is None else bool(causal)
    return {"window": window, "window_counts_slots": True, "causal_block": causal, "full_layers": tuple(full)}
