"""Mirrored projections: a slot's keys and values have projections of their own, which start as those of tokens.

After MASW, "Strong Drafts Need Compact Memories" (arXiv 2608.30252): from random ones slots never catch up. In: a
projection, or the tensors of a checkpoint that knows no slots. Out: its copy under the name `slot_...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from torch import Tensor, nn

PARTS = ("k_proj", "v_proj")


def mirror(projection: nn.Linear) -> nn.Linear:
    """A copy that learns by itself."""
    return deepcopy(projection)


def with_mirrors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, and those of every key and value projection once more under its mirror's name; as they are where
    some mirror is among them."""
    out = dict(weights)
    if any(f".slot_{part}." in name for name in weights for part in PARTS):
        return out
    for name, tensor in weights.items():
        for part in PARTS:
            if f".{part}." in name:
                out[name.replace(part, f"slot_{part}")] = tensor
    return out
