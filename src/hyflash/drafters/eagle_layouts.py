"""Published EAGLE-3 checkpoints: SafeAILab's and SpecForge's layout, vLLM's, and speculators'.

In: a config.json and tensor names. Out: our options and names. All are one network with other spellings; what a
checkpoint can say that we cannot honour is refused by name, as a key read past silently would make a drafter that loads
and is never accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hyflash.core import TargetInfo
from hyflash.drafters import zlab
from hyflash.drafters.feature_config import FeatureConfig
from hyflash.errors import UserError

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",  # SafeAILab, SpecForge, ModelOpt
    "Eagle3LlamaForCausalLM",  # vLLM, AngelSlim
    "Eagle3Speculator",  # speculators
    "Eagle3DraftModel",  # speculators
)
TRAINED_STEPS = 7
"""Steps of the training-time test in the paper, for checkpoints that state no number of drafts."""
# Keys that change the network, with the only values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "draft_attention_bias": (None, False),
    "final_logit_softcapping": (None,),
    "hidden_act": (None, "silu"),
    "is_causal": (None, True),
    "logit_scale": (None, 1, 1.0),
    "mlp_bias": (None, False),
    "num_hidden_layers": (1,),
    "parallel_drafting": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "use_aux_hidden_state": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": (None, False),
}
_FLAGS = {"fc_norm": "tap_norm", "norm_before_fc": "input_norm"} | {
    name: name for name in ("norm_output", "norm_before_residual")
}
_TAPS = "eagle_aux_hidden_state_layer_ids"
_NOT_OURS = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d", "d2t")


def knows(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is an EAGLE-3's. SafeAILab's names a plain Llama with a draft vocabulary."""
    names = config.get("architectures") or ()
    plain = "LlamaForCausalLM" in names and config.get("num_hidden_layers") == 1 and "draft_vocab_size" in config
    return plain or config.get("speculators_model_type") == "eagle3" or any(name in ARCHITECTURES for name in names)


def read_config(config: Mapping[str, Any], info: TargetInfo, *, where: str) -> tuple[str, dict[str, Any]]:
    """Method and options for a published config.json. Raises UserError, naming the key."""
    body = _table(config, "transformer_layer_config", where) or config
    nested = _table(config, "eagle_config", where)
    for key, neutral in _NEUTRAL.items():
        for table in (config, body, nested):
            if key in table and table[key] not in neutral:
                raise UserError(f"{where}: {key} is {table[key]!r}, which we cannot honour.")
    width, heads = zlab.whole(body, "hidden_size", where), zlab.whole(body, "num_attention_heads", where)
    for key, found, want in (
        ("vocab_size", body.get("vocab_size"), info.vocab_size),
        ("hidden_size", width, info.hidden_size),
        ("target_hidden_size", config.get("target_hidden_size"), info.hidden_size),
    ):
        if found is not None and found != want:
            raise UserError(f"{where}: {key} is {found}; target {info.name!r} has {want}. Load the target it is for.")
    listed = config.get("draft_vocab_size")
    return "eagle", {
        "num_draft_tokens": _num_drafts(config, where),
        "hidden_size": width,
        "intermediate_size": zlab.whole(body, "intermediate_size", where),
        "num_heads": heads,
        "num_kv_heads": body.get("num_key_value_heads") or heads,
        "head_dim": body.get("head_dim") or width // heads,
        "attention_bias": bool(body.get("attention_bias")),
        "target_layer_ids": _taps(config, nested, info, where),
        **{own: any(bool(table.get(name)) for table in (config, nested)) for name, own in _FLAGS.items()},
        "qk_norm": body.get("model_type") == "qwen3",
        "rope_theta": zlab.rope_theta(_with_llamas_base(body), where),
        "rms_norm_eps": body.get("rms_norm_eps", 1e-6),  # what Llama's config means without it
        "max_positions": body.get("max_position_embeddings", 2048),
        "draft_vocab_size": 0 if listed in (None, info.vocab_size) else zlab.whole(config, "draft_vocab_size", where),
        "own_head": listed is not None,
        # The weights serve as they are; training them on the target's distribution needs another tap.
        "loss": "ce",
        **_window(body, where),
    }


def own_names(weights: Mapping[str, Tensor], config: FeatureConfig) -> dict[str, Tensor]:
    """A published checkpoint's tensors under our names; our own pass as they are. Raises UserError."""
    short = {name.removeprefix("model.").replace("layers.0.", "midlayer."): t for name, t in weights.items()}
    out = {name: t for name, t in short.items() if name not in _NOT_OURS and not name.endswith("rotary_emb.inv_freq")}
    norms = [name for name in out if name.startswith("fc_norm.")]
    if norms:
        pieces = [out.pop(f"fc_norm.{i}.weight", None) for i in range(len(norms))]
        found = [piece for piece in pieces if piece is not None]
        if len(found) < len(norms) or len(norms) != len(config.taps):
            raise UserError(f"the checkpoint has norms {norms}; expected fc_norm.0 to fc_norm.{len(config.taps) - 1}.")
        out["tap_norm.weight"] = torch.stack(found)
    if "d2t" in short:
        ids = short["d2t"].long() + torch.arange(len(short["d2t"]))
        _check_list(ids, short.get("t2d"), config)
        if config.draft_vocab_size:
            out["draft_ids"] = ids
    return out


def _check_list(ids: Tensor, listed: Tensor | None, config: FeatureConfig) -> None:
    """The ids that d2t makes are those that t2d marks, and all of them where the vocabulary is whole."""
    if listed is not None and not torch.equal(ids.sort().values, listed.bool().nonzero()[:, 0]):
        raise UserError("tensors d2t and t2d do not agree on the draft vocabulary; the checkpoint is damaged.")
    if not config.draft_vocab_size and not torch.equal(ids, torch.arange(len(ids))):
        raise UserError("tensor d2t reorders the whole vocabulary, which we cannot honour.")


def _table(config: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: {key} is {value!r}; expected a table.")
    return value


def _num_drafts(config: Mapping[str, Any], where: str) -> int:
    """What speculators' default proposal asks for; the others leave it to whoever serves."""
    methods = _table(config, "speculators_config", where).get("proposal_methods") or []
    if not isinstance(methods, list):
        raise UserError(f"{where}: proposal_methods is {methods!r}; expected a list.")
    stated = [method.get("speculative_tokens") for method in methods if isinstance(method, Mapping)]
    return zlab.whole({"speculative_tokens": stated[0]}, "speculative_tokens", where) if stated else TRAINED_STEPS


def _taps(config: Mapping[str, Any], nested: Mapping[str, Any], info: TargetInfo, where: str) -> tuple[int, ...]:
    """Layers whose outputs are read.

    Published lists name outputs of layers (SpecForge; they start with 1) or how many layers have run (vLLM; they start
    with 2 or more), and SGLang tells them apart by the first. Without a list: after 2, N / 2 and N - 3 layers.
    """
    stated = [table[_TAPS] for table in (config, nested) if table.get(_TAPS) is not None]
    if len(stated) == 2 and stated[0] != stated[1]:
        raise UserError(f"{where}: {_TAPS} is {stated[0]!r} at the top and {stated[1]!r} in eagle_config; which holds?")
    ids = stated[0] if stated else [2, info.num_layers // 2, info.num_layers - 3]
    if not isinstance(ids, list | tuple) or not ids or any(not isinstance(i, int) for i in ids):
        raise UserError(f"{where}: {_TAPS} is {ids!r}; expected a list of layers.")
    taps = tuple(ids if ids[0] == 1 else (i - 1 for i in ids))
    if len(set(taps)) < len(taps) or any(not 0 <= tap < info.num_layers for tap in taps):
        raise UserError(
            f"{where}: {_TAPS} is {list(ids)}, the outputs of layers {list(taps)}; expected distinct ones from 0 to "
            f"{info.num_layers - 1}."
        )
    return taps


def _with_llamas_base(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Llama's config means a rotary base of 10,000 where it does not say one."""
    stated = body.get("rope_theta") is not None or body.get("rope_parameters")
    return body if stated else {**body, "rope_theta": 10000.0}


def _window(body: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Sliding attention counts the step itself, as Hugging Face's does."""
    window, types = body.get("sliding_window"), body.get("layer_types")
    slides = "sliding_attention" in types if types else window is not None and body.get("use_sliding_window", True)
    if not slides:
        return {"window": 0, "window_counts_slots": False}
    return {"window": zlab.whole(body, "sliding_window", where), "window_counts_slots": True}
