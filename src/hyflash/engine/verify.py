"""Verification of one request's block: walk its rows, let the target choose, stop at the first disagreement.

In: what the target says after the rows [anchor, d_1 .. d_n], and the draft tokens d. Out: what was committed, through
`Progress.push`, one token at a time, so penalties, budgets and stops see the block as plain decoding would.
A draft is accepted iff it equals the target's choice at that position. That is its own, whatever the draft, or with
`draft_sampling` one that takes draft and distribution together (`sampling.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyflash.core import Draft, TargetOutput
from hyflash.engine.progress import Progress
from hyflash.sampling import Choice, Proposed, choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one round did to one request."""

    num_accepted: int
    num_committed: int
    num_near_ties: int
    num_rechecks: int


def verify(
    progress: Progress,
    chosen: Callable[[int], Choice],
    drafts: Sequence[int],
    *,
    weighed: Sequence[Proposed | None],
    epsilon: float,
    recheck: Callable[[], Tensor] | None,
    recheck_ties: bool,
) -> Outcome:
    """Commit the target's choices along the block; `chosen(i)` is the one after row i, 0 to len(drafts), and
    `weighed[i]` the draft it was made with, if any.

    `recheck()` computes the logits after the anchor anew at width 1; it is None where they are already. The block then
    ends there, since the rows behind it were forwarded beside others. A choice that a change of every logit by
    `epsilon` could turn is a near tie, rechecked with `recheck_ties`. Logits that are not finite, also alone (a draft
    behind them may be the cause), end the request with an error.
    """
    accepted = committed = near_ties = rechecks = 0
    for i in range(len(drafts) + 1):
        choice = chosen(i)
        near_tie = choice.finite and choice.margin < epsilon
        near_ties += near_tie
        ends_block = recheck is not None and (not choice.finite or (near_tie and recheck_ties))
        if recheck is not None and ends_block:
            choice = choose_next(progress, recheck(), weighed[i])
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


def judged_part(draft: Draft, *, num_accepted: int, num_committed: int) -> Draft:
    """What a round judged of a draft: all that counts as hit or miss. Where a stop or a recheck ended the round without
    a token of the target's own, nothing judged the draft after the accepted ones."""
    if num_committed > num_accepted:
        return draft
    return draft._replace(tokens=draft.tokens[:num_accepted], confidence=draft.confidence[:num_accepted])


def weigh(progress: Progress, drafts: Sequence[int], probs: Tensor | None) -> list[Proposed | None]:
    """For each row of a block the draft that its choice is made with: none after the last one, and none at all where
    the request wants the tokens of its seed. `probs` (L, V) are the drafts' distributions, None where certain."""
    if not progress.params.draft_sampling:
        return [None] * (len(drafts) + 1)
    return [*(Proposed(token, None if probs is None else probs[i]) for i, token in enumerate(drafts)), None]


def choices(
    progress: Progress, out: TargetOutput, first: int, weighed: Sequence[Proposed | None], *, epsilon: float
) -> Callable[[int], Choice]:
    """The target's choice after each row of a block, which begins at row `first` of a forward and has a row for each of
    `weighed`.

    Plain greedy requests have all rows decided at once; the others ask row by row, since what was committed counts.
    """
    rows = slice(first, first + len(weighed))
    if out.top_ids is not None and out.top_values is not None:
        return _greedy(out.top_ids[rows], out.top_values[rows]).__getitem__
    assert out.logits is not None
    logits = out.logits[rows]
    if progress.is_plain_greedy:
        ids, values = best(logits, num_best(epsilon))
        return _greedy(ids.tolist(), values.tolist()).__getitem__
    return lambda i: choose_next(progress, logits[i], weighed[i])


def replies(out: TargetOutput, drafts: Sequence[Draft]) -> list[list[tuple[int, int]]]:
    """Of each row's block [anchor, d_1 .. d_n] in a forward the pairs (d_i, most likely token after it)."""
    if out.top_ids is not None:
        ids = [row[0] for row in out.top_ids]
    else:
        assert out.logits is not None
        ids = best(out.logits, 1)[0][:, 0].tolist()
    pairs, first = [], 0
    for draft in drafts:
        after = ids[first + 1 : first + 1 + len(draft.tokens)]
        pairs.append(list(zip(draft.tokens, after, strict=True)))
        first += 1 + len(draft.tokens)
    return pairs


def choose_next(progress: Progress, row: Tensor, draft: Proposed | None) -> Choice:
    """The request's next token from logits (V,), and with a draft where it weighs one."""
    return choose(
        row,
        progress.params,
        position=progress.position,
        prompt=progress.request.prompt_ids,
        generated=progress.token_ids,
        banned=progress.banned,
        draft=draft,
    )


def num_best(epsilon: float) -> int:
    """Best logits of a row that greedy decoding needs: with an epsilon, the runner-up decides whether it is a tie."""
    return 2 if epsilon > 0 else 1


def best(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Ids and values (N, num) of the best logits (N, V). Among equals the lowest id is first, and NaN before all."""
    values, ids = logits.max(-1, keepdim=True)
    if num == 1 or logits.shape[1] < num:
        return ids, values
    top = logits.topk(num)
    return torch.cat([ids, top.indices[:, 1:]], 1), top.values


def _greedy(ids: Sequence[Sequence[int]], values: Sequence[Sequence[float]]) -> list[Choice]:
    """A choice for each row from its best logits; margins only where there is a second."""
    return [
        Choice(
            token_id=tokens[0],
            margin=(best[0] - best[1]) / 2 if len(best) > 1 else float("inf"),
            finite=math.isfinite(best[0]),
        )
        for tokens, best in zip(ids, values, strict=True)
    ]
