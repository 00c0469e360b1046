"""The card of a trained drafter: which target, which data, how trained, how good, and how to repeat it.

In: the facts of a run. Out: a JSON object, written beside every checkpoint and read by `hyflash doctor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hyflash.core import TargetInfo
from hyflash.data.capture import SourceInfo
from hyflash.drafters.base import Drafter
from hyflash.environment import provenance
from hyflash.train.recipe import Recipe
from hyflash.train.state import RunState


def target_facts(info: TargetInfo) -> dict[str, Any]:
    """What a card says of the target, by which `checkpoint.made_for` knows it again."""
    return {"name": info.name, "fingerprint": info.fingerprint, "family": info.family, "dtype": info.dtype}


def make_card(
    recipe: Recipe,
    *,
    drafter: Drafter,
    target: TargetInfo,
    data: SourceInfo,
    data_meta: Mapping[str, Any],
    state: RunState,
    evaluation: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Card of the drafter as it is at `state`; `evaluation` is its latest record, None when it has none."""
    sampling = data_meta.get("sampling")
    thinking = sampling.get("thinking") if isinstance(sampling, Mapping) else None
    measured = ("tau", "tau_loop_free", "tau_mean_of_requests", "tau_by_domain", "acceptance_by_position")
    return {
        "target": target_facts(target),
        "drafter": recipe.drafter,
        "init": recipe.init,
        "target_layer_ids": list(drafter.target_layer_ids),
        "target_kv_layers": list(drafter.target_kv_layers),
        "template": data_meta.get("template", "the target's own"),
        "thinking": thinking,
        "data": {**asdict(data), "taps": list(data.taps), "kv_layers": list(data.kv_layers), "sampling": sampling},
        **{name: evaluation[name] if evaluation else None for name in measured},
        "evaluation": dict(evaluation) if evaluation else None,
        "num_draft_tokens": evaluation["num_draft_tokens"] if evaluation else drafter.max_draft_tokens,
        "training": {
            "steps": state.step,
            "train_sec": state.train_sec,
            "num_tokens": state.num_tokens,
            "num_anchors": state.num_anchors,
            "precision": state.precision,
            "seed": recipe.train.seed,
        },
        "recipe": dict(recipe.tables),
        "provenance": provenance(),
    }
