"""What a drafter's memory of one text takes: as its arithmetic has it, and as it is found after a real text.

In: a drafter, and its target where bytes are to be found too. Out: bytes at a few contexts. The arithmetic is that of
`Drafter.cost`; the finding is what `State.nbytes` says at the end of a request of that length.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hyflash.core import Request, SamplingParams
from hyflash.drafters.base import Drafter
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.errors import HyflashError
from hyflash.targets.base import Target

CONTEXTS = (1000, 8000, 32_000, 128_000)
MEASURED_UP_TO = 8000
"""Longer texts take minutes to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Drafter bytes of one text of `context` tokens."""

    context: int
    computed_bytes: int
    measured_bytes: int | None
    """None where it was not measured."""


def computed(drafter: Drafter, context: int) -> int:
    """Bytes of one text, as the drafter's arithmetic has them."""
    cost = drafter.cost(context)
    return cost.state_bytes + context * cost.kv_bytes_per_token


def measured(target: Target, drafter: Drafter, context: int) -> int | None:
    """Bytes found after a text of random tokens; None where target or drafter does not go so far, or reading it takes
    too long. Raises HyflashError where the target fails."""
    fits = context < target.info.max_context and context <= (drafter.max_positions or context)
    if not fits or context > MEASURED_UP_TO:
        return None
    rng = random.Random(0)
    prompt = tuple(rng.randrange(target.info.vocab_size) for _ in range(context - 1))
    params = SamplingParams(max_tokens=2, ignore_eos=True)  # of which the second is never committed
    result = Engine(target, drafter, policy=FixedLength(1)).generate([Request(prompt_ids=prompt, params=params)])[0]
    if result.error is not None:
        raise HyflashError(f"the run stopped: {result.error}")
    return result.draft_state_bytes


def footprints(drafter: Drafter, target: Target, contexts: Sequence[int] = CONTEXTS) -> list[Footprint]:
    """Bytes at each context."""
    return [
        Footprint(
            context=context,
            computed_bytes=computed(drafter, context),
            measured_bytes=measured(target, drafter, context),
        )
        for context in contexts
    ]
