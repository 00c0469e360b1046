"""How a block's tokens are chosen, position after position: the likeliest, or a sample where the request asks for one.

In: scores of the tokens a position may have, given those before it. Out: one of them for each row, and at the end the
distributions the drafts are samples of. A sample must stand whatever it turned out to be, so it states no confidence
of its own by which somebody could cut it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyflash.core import Draw, Proposal
from hyflash.sampling import sample


class Picker:
    """Choices for B rows; `draws` as in `DraftRequest`."""

    def __init__(self, draws: Sequence[Draw | None] | None) -> None:
        self.draws = draws
        self._columns: list[Tensor] = []
        self._probs: list[Tensor] = []

    def __call__(self, scores: Tensor) -> Tensor:
        """Columns (B,) int64 of the next position, from its scores (B, M). One that is not finite ends the draft, so
        nobody reads what is picked there."""
        columns = scores.argmax(-1)
        if self.draws is None:
            return columns
        clean = torch.where(scores.isfinite().all(-1, keepdim=True), scores, torch.zeros_like(scores))
        probs = torch.zeros(scores.shape, dtype=torch.float64, device=scores.device)
        for b, draw in enumerate(self.draws):
            if draw is not None:
                columns[b], probs[b] = sample(clean[b], draw, len(self._columns))
            else:
                probs[b, columns[b]] = 1.0
        self._columns.append(columns)
        self._probs.append(probs)
        return columns

    def columns(self, greedy: Tensor) -> Tensor:
        """What was picked, (B, L); `greedy` where all rows take the likeliest."""
        return greedy if self.draws is None else torch.stack(self._columns, dim=1)

    def finish(self, proposal: Proposal, ids: Tensor, vocab_size: int, *, stated: bool) -> Proposal:
        """The proposal with the distributions over the whole vocabulary, where there are draws.

        `ids` (M,) or (B, L, M) are the columns' token ids, each at most once a position; `stated` says that confidences
        come from the tokens before each draft.
        """
        if self.draws is None:
            return proposal
        own = torch.stack(self._probs, dim=1)
        probs = own.new_zeros(*own.shape[:2], vocab_size).scatter_(2, ids.expand_as(own), own)
        drafts = [
            draft if draw is None or stated else draft._replace(confidence=())
            for draft, draw in zip(proposal.drafts, self.draws, strict=True)
        ]
        return proposal._replace(drafts=drafts, probs=probs)
