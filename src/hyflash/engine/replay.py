"""Acceptance on known answers: run a drafter through the real engine over recorded target texts.

In: a drafter and recordings. Out: one `Result` per recording, with its rounds. Since output never depends on the
drafter, the rounds are those of real decoding; only times mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyflash.core import Request, Result, Rows, SamplingParams
from hyflash.drafters.base import Drafter
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.targets.base import Target
from hyflash.targets.replay import Recording, ReplayTarget

__all__ = ["Recording", "measure", "record"]


def record(target: Target, taps: Sequence[int], prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Recording:
    """Capture the features of one answered prompt, in one forward."""
    ids = [*prompt_ids, *answer_ids]
    features = None
    if taps:
        seq = target.open()
        rows = Rows(tokens=torch.tensor(ids), seqs=(seq,), lengths=(len(ids),), taps=tuple(taps), logits="none")
        features = target.forward(rows).features
        target.close(seq)
    return Recording(prompt_ids=tuple(prompt_ids), answer_ids=tuple(answer_ids), features=features, taps=tuple(taps))


def measure(
    drafter: Drafter, recordings: Sequence[Recording], num_draft_tokens: int, *, max_rows: int = 16
) -> list[Result]:
    """Replay each recording that has an answer to its end, with a fixed draft length."""
    kept = [r for r in recordings if r.answer_ids]
    replay = ReplayTarget(drafter.hooks, list(kept))
    engine = Engine(replay, drafter, policy=FixedLength(num_draft_tokens), max_rows=max(1, min(max_rows, len(kept))))
    return engine.generate(
        [
            Request(prompt_ids=r.prompt_ids, params=SamplingParams(max_tokens=len(r.answer_ids), ignore_eos=True))
            for r in kept
        ]
    )
