"""Where texts with a drafter left those of plain decoding. In: results of both. Out: counts for a result file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyflash.core import Result


def compare(got: Sequence[Result], plain: Sequence[Result]) -> dict[str, Any]:
    """Texts, tokens, pooled acceptance length, accepted lengths that occurred, and each fork's prompt and index."""
    num_tokens = sum(len(r.token_ids) for r in got)
    return {
        "num_texts": len(got),
        "num_tokens": num_tokens,
        "tau": num_tokens / max(1, sum(len(r.rounds) for r in got)),
        "accepted_lengths": sorted({trace.num_accepted for r in got for trace in r.rounds}),
        "forks": [
            {"prompt": i, "index": first_difference(a.token_ids, b.token_ids)}
            for i, (a, b) in enumerate(zip(got, plain, strict=True))
            if a.token_ids != b.token_ids
        ],
    }


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length where one begins the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def verdict(found: dict[str, Any]) -> str:
    """For a line of progress: identical, or how many texts forked and where the first did."""
    forks = found["forks"]
    return "identical" if not forks else f"{len(forks)} FORKS, first at {forks[0]}"
