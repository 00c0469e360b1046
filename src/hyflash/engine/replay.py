"""Acceptance on known answers: run a drafter through the real engine over recorded target texts.

In: a drafter and recordings. Out: one `Result` per recording, with its rounds. Since output never depends on the
drafter, the rounds are those of real decoding; only times mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyflash.core import (
    Commit,
    DraftCost,
    DraftRequest,
    Outcomes,
    Proposal,
    Request,
    Result,
    Rows,
    SamplingParams,
)
from hyflash.drafters.base import Drafter, State
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.errors import HyflashError
from hyflash.targets.base import Target, copy_kv
from hyflash.targets.replay import Recording, ReplayTarget

__all__ = ["Recording", "measure", "record", "watch"]


def record(
    target: Target,
    taps: Sequence[int],
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    *,
    kv_layers: Sequence[int] = (),
) -> Recording:
    """Capture the features, keys and values of one answered prompt, in one forward."""
    ids = [*prompt_ids, *answer_ids]
    features = kv = None
    if taps or kv_layers:
        seq = target.open()
        rows = Rows(tokens=torch.tensor(ids), seqs=(seq,), lengths=(len(ids),), taps=tuple(taps), logits="none")
        features = target.forward(rows).features
        kv = copy_kv(target, seq, kv_layers) if kv_layers else None
        target.close(seq)
    return Recording(
        prompt_ids=tuple(prompt_ids),
        answer_ids=tuple(answer_ids),
        features=features,
        taps=tuple(taps),
        kv=kv,
        kv_layers=tuple(kv_layers),
    )


def measure(
    drafter: Drafter,
    recordings: Sequence[Recording],
    num_draft_tokens: int,
    *,
    max_rows: int = 16,
    target: Target | None = None,
) -> list[Result]:
    """Replay each recording that has an answer to its end, with a fixed draft length. No replay knows what the target
    says after rejected drafts, so a drafter that recycles that runs on the `target` itself, over greedy answers;
    without one it is refused."""
    if drafter.recycles and target is None:
        raise HyflashError("a drafter that recycles what the target says cannot be replayed.")
    kept = [r for r in recordings if r.answer_ids]
    replay = target if target is not None and drafter.recycles else ReplayTarget(drafter.hooks, list(kept))
    engine = Engine(replay, drafter, policy=FixedLength(num_draft_tokens), max_rows=max(1, min(max_rows, len(kept))))
    return engine.generate(
        [
            Request(prompt_ids=r.prompt_ids, params=SamplingParams(max_tokens=len(r.answer_ids), ignore_eos=True))
            for r in kept
        ]
    )


def watch(drafter: Drafter, recordings: Sequence[Recording], num_draft_tokens: int) -> Outcomes:
    """As `measure`, for what each round's proposal stated and how it fared."""
    watched = _Watched(drafter)
    measure(watched, recordings, num_draft_tokens)
    width = drafter.max_draft_tokens
    stated = torch.zeros(len(watched.seen), width)
    for row, (confidence, _) in zip(stated, watched.seen, strict=True):
        row[: len(confidence)] = torch.tensor(confidence)
    return Outcomes(
        confidence=stated,
        num_drafted=torch.tensor([len(confidence) for confidence, _ in watched.seen], dtype=torch.int64),
        num_accepted=torch.tensor([accepted for _, accepted in watched.seen], dtype=torch.int64),
    )


class _Watched(Drafter):
    """A drafter whose verdicts are kept."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner.config, inner.hooks)
        self.inner = inner
        self.target_layer_ids, self.max_positions = inner.target_layer_ids, inner.max_positions
        self.target_kv_layers = inner.target_kv_layers
        self.max_draft_tokens = inner.max_draft_tokens
        self.seen: list[tuple[Sequence[float], int]] = []  # confidence of each draft, accepted ones

    def new_state(self, num_rows: int) -> State:
        return self.inner.new_state(num_rows)

    def propose(self, state: State, request: DraftRequest) -> Proposal:
        return self.inner.propose(state, request)

    def commit(self, state: State, new: Commit) -> None:
        if new.verdict is not None:
            fared = zip(new.verdict.drafts, new.verdict.num_accepted, strict=True)
            self.seen += [(draft.confidence, hits) for draft, hits in fared if draft.confidence]
        self.inner.commit(state, new)

    def cost(self, context_tokens: int) -> DraftCost:
        return self.inner.cost(context_tokens)
