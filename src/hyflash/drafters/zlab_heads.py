"""Published drafters that are a DFlash with a head: Domino, and DSpark in the layouts of DeepSpec, SpecForge, ModelOpt.

In: a config.json and tensor names. Out: the method's name, our options and names. What the heads' keys say is taken
here; the rest is read as a DFlash (`zlab.py`), which refuses whatever it does not know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from hyflash.core import TargetHooks, TargetInfo
from hyflash.drafters import zlab
from hyflash.errors import UserError

_DOMINO, _DSPARK = ("DominoDraftModel",), ("Qwen3DSparkModel", "DSparkDraftModel")
_MARKOV = {"vanilla": "plain", "gated": "gated", "rnn": "rnn"}
_KEYS = (
    "confidence_head_alpha",
    "confidence_head_with_markov",
    "emb_dim",
    "enable_confidence_head",
    "gru_hidden_dim",
    "markov_head_type",
    "markov_rank",
    "projector_type",
    "pure_draft_prefix_len",
    "sample_from_anchor",
    "shift_label",
    "use_confidence_head",
)
_FLAT = {  # ModelOpt's names
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "gate_proj": "markov_head.gate_proj",
    "joint_proj": "markov_head.joint_proj",
    "confidence_proj": "confidence_head.proj",
}
COPY_ROWS, COPY_COSINE = 64, 0.98
"""How many rows of a shipped embedding or head are compared with the target's, and how alike they must be."""


def read_config(config: Mapping[str, Any], info: TargetInfo, *, where: str) -> tuple[str, dict[str, Any]]:
    """Method and options for a published config.json. Raises UserError, naming the key."""
    nested = config.get("dflash_config") or {}
    method = _method(config, nested) if isinstance(nested, Mapping) else "dflash"
    if method == "dflash":
        return zlab.method(config), zlab.read_config(config, info, where=where)
    found = {key: zlab.either(config, nested, key, where) for key in _KEYS}
    options = _domino(found, where) if method == "domino" else _dspark(found, where)
    drop = {*_KEYS, "architectures"}
    body = {key: value for key, value in config.items() if key not in drop}
    body["dflash_config"] = {key: value for key, value in nested.items() if key not in drop}
    body["sample_from_anchor"] = _anchor_drafts(found, config, where)
    # The weights serve as they are; training them on needs the target's distribution, and so another tap.
    return method, {**zlab.read_config(body, info, where=where), "loss": "ce", **options}


def own_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's tensors without early checkpoints' `logit_head.` prefix, and ModelOpt's flat names nested."""
    out = {}
    for name, tensor in weights.items():
        short = name.removeprefix("logit_head.")
        first, dot, rest = short.partition(".")
        if first in _FLAT:
            short = f"{_FLAT[first]}{dot or '.'}{rest or 'weight'}"
        out[short] = tensor
    return out


def without_copies(
    weights: Mapping[str, Tensor], hooks: TargetHooks, *, where: str, own: Collection[str] = ()
) -> dict[str, Tensor]:
    """The tensors without copies of the target's embedding and head, which DeepSpec ships.

    Of the names in `own` the drafter has tensors itself, and they stay.
    Raises UserError for a copy that is not the target's: drafts would come from other words.
    """
    out = dict(weights)
    ids = torch.linspace(0, hooks.info.vocab_size - 1, min(COPY_ROWS, hooks.info.vocab_size)).long()
    for name, rows in (("embed_tokens.weight", hooks.embed), ("lm_head.weight", hooks.head_rows)):
        for key in () if name in own else (name, f"model.{name}"):
            copy = out.pop(key, None)
            if copy is None:
                continue
            want = rows(ids.to(hooks.info.device)).detach().float().cpu()
            same = copy.shape == (hooks.info.vocab_size, hooks.info.hidden_size)
            if not same or bool((torch.cosine_similarity(copy[ids].float(), want) < COPY_COSINE)[want.any(-1)].any()):
                raise UserError(
                    f"{where}: tensor {key} is not the one of target {hooks.info.name!r}; load the target it is for."
                )
    return out


def _method(config: Mapping[str, Any], nested: Mapping[str, Any]) -> str:
    tables = (config, nested)
    names = {*(config.get("architectures") or ()), *(table.get("projector_type") for table in tables)}
    if names & {*_DOMINO, "domino"}:
        return "domino"
    if names & {*_DSPARK, "dspark"} or any(table.get("markov_rank") for table in tables):
        return "dspark"
    return "dflash"


def _anchor_drafts(found: Mapping[str, Any], config: Mapping[str, Any], where: str) -> bool:
    """Whether slot 0 drafts the first token. Where no key says so: DSpark's own classes do, others do not."""
    said = [found[key] for key in ("shift_label", "sample_from_anchor") if found[key] is not None]
    if len({bool(value) for value in said}) > 1:
        raise UserError(f"{where}: shift_label and sample_from_anchor contradict each other; expected the same value.")
    return bool(said[0]) if said else bool({*(config.get("architectures") or ())} & {*_DSPARK})


def _domino(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {
        "correction_rank": _whole(found, "emb_dim", where),
        "correction_width": _whole(found, "gru_hidden_dim", where),
        "pure_draft_prefix_len": found["pure_draft_prefix_len"] or 0,
    }


def _dspark(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    rank = found["markov_rank"] or 0
    kind = str(found["markov_head_type"] or "vanilla").lower()
    if kind not in _MARKOV:
        raise UserError(f"{where}: markov_head_type is {kind!r}; expected {', '.join(_MARKOV)}.")
    states = found["enable_confidence_head"]
    if states is None:
        states = found["use_confidence_head"]
    if states is None:
        states = (found["confidence_head_alpha"] or 0) > 0
    return {
        "markov": _MARKOV[kind] if rank else "none",
        **({"correction_rank": _whole(found, "markov_rank", where)} if rank else {}),
        "confidence_head": bool(states),
        "confidence_with_markov": bool(states and found["confidence_head_with_markov"]),
        "confidence_weight": 0.0,
    }


def _whole(found: Mapping[str, Any], key: str, where: str) -> int:
    value = found[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where}: {key} is {value!r}; expected a whole number of at least 1.")
    return value
