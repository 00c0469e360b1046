"""The head of a block drafter: the target's own, or a few of its rows.

On a small target the head is most of a draft pass. A reduced head has a static list of frequent tokens and adds
every token already seen in this context, which covers more than a list twice as long (FR-Spec, arXiv 2502.14856,
has the static part). In: hidden states and which tokens each row has seen. Out: logits and the ids they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hyflash.core import TargetHooks

# Finite, so that a masked column is not taken for a fault of the drafter.
HIDDEN_LOGIT = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingHead:
    """Head of one round for B rows."""

    hooks: TargetHooks
    ids: Tensor | None  # (M,) int64, ids of the logit columns; None: the whole vocabulary
    weight: Tensor | None  # (M, D)
    allowed: Tensor | None  # (B, M) bool, columns each row may choose

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (B, L, M) of hidden (B, L, D)."""
        if self.weight is None or self.allowed is None:
            return self.hooks.head(hidden)
        out = hidden.to(self.weight.dtype) @ self.weight.T
        return out.masked_fill(~self.allowed[:, None], HIDDEN_LOGIT)

    def token_ids(self, columns: Tensor) -> Tensor:
        """Token ids of logit columns."""
        return columns if self.ids is None else self.ids[columns]


class ReducedHead:
    """Keeps the head rows of a static list and adds rows per round. Logits lack the target's soft-cap (same order)."""

    def __init__(self, hooks: TargetHooks, ids: Tensor) -> None:
        self.hooks = hooks
        self.ids = ids
        self.rows = hooks.head_rows(ids).detach()
        self.is_static = torch.zeros(hooks.info.vocab_size, dtype=torch.bool, device=ids.device)
        self.is_static[ids] = True

    def serving(self, seen: Tensor, anchors: Tensor) -> ServingHead:
        """Head for rows with seen tokens (B, V) uint8 and anchors (B,): static, seen and the anchor's own token."""
        extra = seen.bool()
        extra[torch.arange(len(anchors), device=seen.device), anchors] = True
        extra &= ~self.is_static
        more = extra.any(0).nonzero()[:, 0]
        static = torch.ones(len(anchors), len(self.ids), dtype=torch.bool, device=seen.device)
        return ServingHead(
            hooks=self.hooks,
            ids=torch.cat((self.ids, more)),
            weight=torch.cat((self.rows, self.hooks.head_rows(more).detach())),
            allowed=torch.cat((static, extra[:, more]), dim=1),
        )


def training_vocab(static: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (M,) sorted, the static list and the labels (N,), and each label's index among them."""
    ids = torch.unique(torch.cat((static, labels)))  # sorted
    return ids, torch.searchsorted(ids, labels)
