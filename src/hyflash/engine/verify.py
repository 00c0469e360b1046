"""Verification of one request's block: walk its rows, let the target choose, stop at the first disagreement.

In: logits of the rows [anchor, d_1 .. d_n] and the draft tokens d. Out: what was committed, through
`Progress.push`, one token at a time, so penalties, budgets and stops see the block as plain decoding would.
A deterministic proposal is accepted iff it equals the target's own choice at that position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyflash.engine.progress import Progress
from hyflash.sampling import Choice, choose, is_plain_greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one round did to one request."""

    num_accepted: int
    num_committed: int
    num_near_ties: int
    num_rechecks: int


def verify(
    progress: Progress,
    logits: Tensor,
    drafts: Sequence[int],
    *,
    epsilon: float,
    recheck: Callable[[], Tensor] | None,
    recheck_ties: bool,
) -> Outcome:
    """Commit the target's choices along the block: logits (len(drafts)+1, V) float32.

    `recheck()` computes the logits after the anchor anew at width 1; it is None where they are already. The block then
    ends there, since the rows behind it were forwarded beside others. A choice that a change of every logit by
    `epsilon` could turn is a near tie, rechecked with `recheck_ties`. Logits that are not finite, also alone (a draft
    behind them may be the cause), end the request with an error.
    """
    accepted = committed = near_ties = rechecks = 0
    greedy = _greedy_rows(logits, epsilon) if is_plain_greedy(progress.params) else None
    for i in range(len(drafts) + 1):
        choice = greedy[i] if greedy is not None else _choose(progress, logits[i])
        near_tie = choice.finite and choice.margin < epsilon
        near_ties += near_tie
        ends_block = recheck is not None and (not choice.finite or (near_tie and recheck_ties))
        if recheck is not None and ends_block:
            choice = _choose(progress, recheck())
            rechecks += 1
        if not choice.finite:
            progress.finish("error", f"the target gave non-finite logits at position {progress.position}.")
            break
        matches = i < len(drafts) and choice.token_id == drafts[i]
        ended = progress.push(choice.token_id, choice.logprob)
        committed += 1
        accepted += matches
        if ended or ends_block or not matches:
            break
    return Outcome(num_accepted=accepted, num_committed=committed, num_near_ties=near_ties, num_rechecks=rechecks)


def _choose(progress: Progress, row: Tensor) -> Choice:
    return choose(
        row,
        progress.params,
        position=progress.position,
        prompt=progress.request.prompt_ids,
        generated=progress.token_ids,
        banned=progress.banned,
    )


def _greedy_rows(logits: Tensor, epsilon: float) -> list[Choice]:
    """Argmax of every row at once; margins only where somebody asks for them. max() propagates NaN."""
    values, tokens = logits.max(-1)
    margins = [float("inf")] * logits.shape[0]
    if epsilon > 0 and logits.shape[1] > 1:
        top = logits.topk(2).values
        margins = ((top[:, 0] - top[:, 1]) / 2).tolist()
    finite = torch.isfinite(values).tolist()
    return [Choice(token_id=t, margin=m, finite=f) for t, m, f in zip(tokens.tolist(), margins, finite, strict=True)]
