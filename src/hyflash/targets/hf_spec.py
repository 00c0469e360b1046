"""From a Hugging Face config to a `DecoderSpec`: what each family does, and what a config may change about it.

In: a directory's config.json and generation_config.json. Out: sizes and switches as transformers understands them.
A field of the family's config that is not known here and not at its default is refused, so that a switch of a newer
transformers is never passed over. Rotations come from transformers' own functions.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from hyflash.errors import UserError, reason
from hyflash.targets.decoder import DecoderSpec, Rope, frequencies
from hyflash.targets.safetensors_read import read_json

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
_ACTS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
_SERVED = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "max_position_embeddings"),
    *("original_max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "attention_bias"),
    *("mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "eos_token_id"),
    *("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"),
}
"""Fields that the spec is made from."""
_HARMLESS = {
    *("transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype", "use_cache"),
    *("chunk_size_feed_forward", "id2label", "label2id", "problem_type", "initializer_range", "pretraining_tp"),
    *("pad_token_id", "bos_token_id", "attention_dropout", "resid_pdrop", "embd_pdrop"),
}
"""Fields that change nothing about a forward."""
_FOREIGN = {
    *("quantization_config", "per_layer_config", "num_kv_shared_layers", "use_qk_norm", "qk_norm", "num_experts"),
    *("num_local_experts", "attention_sinks", "logit_scale", "logits_scaling", "embedding_multiplier"),
    *("residual_multiplier", "attention_multiplier", "use_bidirectional_attention", "auto_map"),
}
"""Keys of other families' configs, or of remote code, that say the weights are not what the family name says."""
_ROPES = ("default", "linear", "llama3", "yarn", "longrope")


def load_config(path: Path) -> Any:
    """transformers' config of the decoder in a directory. Raises UserError for a family that is not served."""
    from transformers import AutoConfig

    raw = read_json(path / "config.json")
    family = raw.get("model_type")
    if family not in (*FAMILIES, "gemma3"):
        raise UserError(
            f"{path} holds a {family} model; the native target knows {', '.join(FAMILIES)}. "
            "The torch target may serve it (--backend torch)."
        )
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False).get_text_config()
    except MemoryError:
        raise
    except Exception as err:  # transformers raises errors of every kind for configs it cannot use
        raise UserError(f"cannot read {path / 'config.json'}: {reason(err)}") from err
    known = {f.name: f.default for f in fields(config)}
    changed = {
        name
        for name, default in known.items()
        if name not in _SERVED | _HARMLESS and (value := getattr(config, name)) != default and (value or default)
    }
    text = raw.get("text_config")
    changed |= {key for key in _FOREIGN if raw.get(key) or (isinstance(text, dict) and text.get(key))}
    if config.model_type.startswith("gemma3") and config.attn_logit_softcapping is not None:
        changed.add("attn_logit_softcapping")
    if changed:
        raise UserError(
            f"{path / 'config.json'} sets {', '.join(sorted(changed))}, which the native target does not serve for "
            f"{config.model_type}. Use the torch target (--backend torch)."
        )
    return config


def has_bias(config: Any, slot: str) -> bool:
    """Whether a matrix of a layer (by MATRICES) has a bias in this family."""
    family = config.model_type
    if slot in ("gate", "up", "down"):
        return family == "llama" and bool(config.mlp_bias)
    if family == "qwen2":
        return slot != "output"
    return family not in ("mistral", "phi3") and bool(config.attention_bias)


def read_spec(config: Any, path: Path) -> DecoderSpec:
    """Sizes and switches, checked against each other. Raises UserError."""
    try:
        spec = _spec(config, path)
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as err:
        raise UserError(f"cannot use {path / 'config.json'}: {reason(err)}.") from err
    spec.check(str(path))
    return spec


def _spec(config: Any, path: Path) -> DecoderSpec:
    family, gemma = config.model_type, config.model_type.startswith("gemma")
    heads = _count(config, "num_attention_heads", path)
    hidden = _count(config, "hidden_size", path)
    head_dim = _head_dim(config, hidden, heads)
    act = config.hidden_activation if gemma else config.hidden_act
    if act not in _ACTS:
        raise UserError(f"{path}: its activation is {act!r}; the native target knows {', '.join(_ACTS)}.")
    context = _count(config, "max_position_embeddings", path)
    kinds = _kinds(config, path)
    ropes, kind_of, scale, context = _ropes(config, path, context)
    window = config.sliding_window if "sliding_attention" in kinds else None
    if window is not None and window < 1:
        raise UserError(f"{path}: its sliding_window is {window}; expected at least 1, or null.")
    local = 0 if window is None or window >= context else int(window)
    tables = _tables(config)
    main_table = tables.get("full_attention") or next(iter(tables.values()))
    return DecoderSpec(
        family=family,
        num_layers=len(kinds),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_count(config, "num_key_value_heads", path),
        head_dim=head_dim,
        intermediate_size=_count(config, "intermediate_size", path),
        vocab_size=_count(config, "vocab_size", path),
        max_context=context,
        rms_norm_eps=float(config.rms_norm_eps),
        act=_ACTS[act],
        ropes=ropes,
        rope_theta=float(main_table["rope_theta"]),
        rope_interleaved=False,
        rope_scale=scale,
        attn_scale=float(config.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        attn_softcap=float((config.attn_logit_softcapping if family == "gemma2" else None) or 0.0),
        final_softcap=float((config.final_logit_softcapping if gemma else None) or 0.0),
        embed_scale=float(hidden) ** 0.5 if gemma else 1.0,
        windows=tuple(local if kind == "sliding_attention" else 0 for kind in kinds),
        rope_of_layer=tuple(kind_of.get(kind, 0) for kind in kinds),
        eos_token_ids=_eos(config, path),
    )


def _count(config: Any, name: str, path: Path) -> int:
    value = getattr(config, name)
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise UserError(f"{path}: its {name} is {value!r}; expected a whole number of at least 1.")
    return value


def _head_dim(config: Any, hidden: int, heads: int) -> int:
    out = getattr(config, "head_dim", None) or hidden // heads
    if type(out) is not int or not 1 <= out <= 4096:
        raise ValueError(f"heads of {out!r} dimensions")
    return out


def _kinds(config: Any, path: Path) -> list[str]:
    """Kind of attention of each layer."""
    num = _count(config, "num_hidden_layers", path)
    if num > 1 << 12:
        raise ValueError(f"{num} layers")
    if config.model_type in ("llama", "mistral", "phi3"):
        sliding = config.model_type != "llama" and config.sliding_window is not None
        return ["sliding_attention" if sliding else "full_attention"] * num
    kinds = list(config.layer_types)
    if len(kinds) != num or set(kinds) - {"sliding_attention", "full_attention"}:
        raise UserError(f"{path}: its layer_types are {sorted(set(kinds))} for {len(kinds)} of {num} layers.")
    return kinds


def _tables(config: Any) -> dict[str, dict[str, Any]]:
    """Rotation parameters by kind of layer; one for all under the name `all`."""
    table = config.rope_parameters
    nested = {kind: values for kind, values in table.items() if isinstance(values, dict)}
    return nested or {"all": table}


def _ropes(config: Any, path: Path, context: int) -> tuple[tuple[Rope, ...], dict[str, int], float, int]:
    """Rotations, which kind of layer has which, the factor on sines and cosines, and the context they serve."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim = _head_dim(config, config.hidden_size, config.num_attention_heads)
    ropes: dict[str, Rope] = {}
    scales: set[float] = set()
    for kind, values in _tables(config).items():
        name, part = values.get("rope_type", "default"), float(values.get("partial_rotary_factor") or 1.0)
        if name not in _ROPES or (part != 1.0 and config.model_type != "phi3"):
            raise UserError(
                f"{path}: its rotations are {name!r} on {part:g} of a head; the native target knows "
                f"{', '.join(_ROPES)}, and parts of a head for phi3. Use the torch target (--backend torch)."
            )
        if name == "default":
            ropes[kind] = Rope(frequencies=tuple(frequencies(int(head_dim * part), float(values["rope_theta"]))))
            scales.add(1.0)
        else:
            if name == "longrope":
                # Past the trained context other frequencies hold, for the keys in the cache as well; so it ends there.
                context = min(context, int(values["original_max_position_embeddings"]))
            layer = None if kind == "all" else kind
            numbers, scale = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), layer_type=layer)
            ropes[kind] = Rope(frequencies=tuple(numbers.double().tolist()))
            scales.add(float(scale))
    if len(scales) != 1:
        raise UserError(f"{path}: its layers scale rotations by different factors {sorted(scales)}.")
    return tuple(ropes.values()), {kind: index for index, kind in enumerate(ropes)}, scales.pop(), context


def _eos(config: Any, path: Path) -> tuple[int, ...]:
    """Tokens that end an answer, by either config."""
    generation = path / "generation_config.json"
    ids: set[int] = set()
    for value in (config.eos_token_id, read_json(generation).get("eos_token_id") if generation.is_file() else None):
        ids |= {one for one in (value if isinstance(value, list) else [value]) if type(one) is int}
    return tuple(sorted(one for one in ids if 0 <= one < config.vocab_size))
