"""What a drafter's memory of one text takes: as its arithmetic has it, and as it is found after a real text.

In: drafters, and their target where bytes are to be found too. Out: bytes at a few contexts. The arithmetic is that of
`Drafter.cost`; the finding is what `State.nbytes` says once so many tokens, read by the target, were committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hyflash.core import Commit, Rows
from hyflash.drafters.base import Drafter
from hyflash.engine.target_kv import RowKV
from hyflash.targets.base import Target

CONTEXTS = (1000, 8000, 32_000, 128_000)
MEASURED_UP_TO = 8000
"""Longer texts take minutes to read."""
PIECE = 500
"""Tokens of a forward and a commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Drafter bytes of one text of `context` tokens."""

    context: int
    computed_bytes: int
    measured_bytes: int | None
    """None where it was not measured."""


def footprints(
    drafters: Sequence[Drafter], target: Target, contexts: Sequence[int] = CONTEXTS
) -> list[list[Footprint]]:
    """Bytes of each drafter at each context, ascending; found ones from one reading of random tokens for all, as far as
    target and drafter go and patience lasts."""
    found = _measured(drafters, target, [c for c in contexts if c <= min(MEASURED_UP_TO, target.info.max_context)])
    return [
        [
            Footprint(context=c, computed_bytes=drafter.cost(c).total_bytes(c), measured_bytes=own.get(c))
            for c in contexts
        ]
        for drafter, own in zip(drafters, found, strict=True)
    ]


@torch.no_grad()
def _measured(drafters: Sequence[Drafter], target: Target, contexts: Sequence[int]) -> list[dict[int, int]]:
    """By context, where the drafter goes so far."""
    taps = tuple(sorted({tap for drafter in drafters for tap in drafter.target_layer_ids}))
    states = [drafter.new_state(1) for drafter in drafters]
    found: list[dict[int, int]] = [{} for _ in drafters]
    seq, kv, done = target.open(), RowKV(target), 0
    kv.seqs[0] = seq
    generator = torch.Generator().manual_seed(0)
    for context in contexts:
        while done < context:
            tokens = torch.randint(target.info.vocab_size, (min(PIECE, context - done),), generator=generator)
            rows = Rows(tokens=tokens, seqs=(seq,), lengths=(len(tokens),), taps=taps, logits="none")
            features = target.forward(rows).features
            done += len(tokens)
            for drafter, state in zip(drafters, states, strict=True):
                if done <= (drafter.max_positions or done):
                    own = [taps.index(tap) for tap in drafter.target_layer_ids]
                    picked = features[None, :, own] if features is not None and own else None
                    drafter.commit(state, Commit(rows=[0], tokens=[tokens.tolist()], features=picked, kv=kv))
        for drafter, state, own_found in zip(drafters, states, found, strict=True):
            if context <= (drafter.max_positions or context):
                own_found[context] = state.nbytes(0)
    target.close(seq)
    return found
