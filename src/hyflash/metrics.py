"""The definitions of every acceptance number the project prints, in one place and without torch.

In: finished `Result`s. Out: `Acceptance` and bootstrap intervals over prompts. A round counts what it committed,
after stop rules, so an end-of-sequence token inside a block never counts as accepted + 1.

- tau: committed tokens / rounds, pooled over all rounds (bonus included).
- tau of requests: mean over requests of each request's own tau. Always named, never mixed with the former.
- tau loop-free: pooled over rounds whose first committed token is not inside a loop (see `in_loop`).
- acceptance at position i: of the rounds that drafted position i and accepted everything before it, the share
  that accepted it. A draft that was cut off by a stop rule was not judged and does not count.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hyflash.core import Result
from hyflash.errors import UserError

MAX_PERIOD_TOKENS = 48
MIN_LOOP_TOKENS = 12
MIN_LOOP_PERIODS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Acceptance of some results. Rates are None where nothing was counted."""

    tau: float
    """Committed tokens per target forward, pooled over rounds; 0 without rounds."""
    tau_mean_of_requests: float
    tau_loop_free: float | None
    acceptance_by_position: tuple[float, ...]
    """P(draft i accepted | all before accepted and i drafted); up to the last position that was ever judged."""
    num_judged_by_position: tuple[int, ...]
    num_rounds: int
    num_loop_free_rounds: int
    num_tokens: int
    num_drafted: int
    num_accepted: int

    @property
    def loop_share(self) -> float:
        """Share of rounds that start inside a loop."""
        return 1 - self.num_loop_free_rounds / self.num_rounds if self.num_rounds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value and its bootstrap percentile interval over prompts."""

    value: float
    low: float
    high: float
    level: float


def in_loop(token_ids: Sequence[int]) -> list[bool]:
    """Mark the tokens that lie in a loop: a run that repeats with a period of at most 48 tokens.

    A run of length n has period p when token[i] == token[i + p] for all i in it; it counts as a loop from
    max(3 p, 12) tokens on. All tokens of the run are marked, its first period included.
    """
    total = len(token_ids)
    marks = [False] * total
    for period in range(1, min(MAX_PERIOD_TOKENS, total // MIN_LOOP_PERIODS) + 1):
        start = 0  # of the current stretch of equalities token[i] == token[i + period]
        for i in range(total - period + 1):
            if i < total - period and token_ids[i] == token_ids[i + period]:
                continue
            if i > start and i - start + period >= max(MIN_LOOP_PERIODS * period, MIN_LOOP_TOKENS):
                marks[start : i + period] = [True] * (i + period - start)
            start = i + 1
    return marks


def summarize(results: Sequence[Result]) -> Acceptance:
    """Pool the rounds of `results`."""
    num_rounds = num_tokens = num_drafted = num_accepted = loop_free_rounds = loop_free_tokens = 0
    judged: list[int] = []
    kept: list[int] = []
    taus: list[float] = []
    for result in results:
        free_tokens, free_rounds = loop_free_counts(result)
        loop_free_tokens += free_tokens
        loop_free_rounds += free_rounds
        for r in result.rounds:
            accepted = min(r.num_accepted, r.num_committed)
            num_drafted += r.num_drafted
            num_accepted += accepted
            # Without a bonus token a stop rule ended the round: the next draft was never judged.
            last = accepted + 1 if r.num_committed > accepted else accepted
            for i in range(min(last, r.num_drafted)):
                if i == len(judged):
                    judged.append(0)
                    kept.append(0)
                judged[i] += 1
                kept[i] += i < accepted
        tokens, rounds = counts(result)
        num_rounds += rounds
        num_tokens += tokens
        if rounds:
            taus.append(tokens / rounds)
    return Acceptance(
        tau=num_tokens / num_rounds if num_rounds else 0.0,
        tau_mean_of_requests=sum(taus) / len(taus) if taus else 0.0,
        tau_loop_free=loop_free_tokens / loop_free_rounds if loop_free_rounds else None,
        acceptance_by_position=tuple(k / n for k, n in zip(kept, judged, strict=True)),
        num_judged_by_position=tuple(judged),
        num_rounds=num_rounds,
        num_loop_free_rounds=loop_free_rounds,
        num_tokens=num_tokens,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
    )


def bootstrap_interval(
    results: Sequence[Result], *, seed: int = 0, level: float = 0.95, num_samples: int = 2000
) -> Interval:
    """Pooled tau with its percentile interval; prompts are resampled, since rounds of one text are not independent.

    Raises UserError without any round.
    """
    return counts_interval([counts(r) for r in results], seed=seed, level=level, num_samples=num_samples)


def counts_interval(
    of_prompts: Sequence[tuple[int, int]], *, seed: int = 0, level: float = 0.95, num_samples: int = 2000
) -> Interval:
    """As `bootstrap_interval`, from (committed tokens, rounds) of each prompt."""
    return _bootstrap(len(of_prompts), lambda picks: _pooled(of_prompts, picks), seed, level, num_samples)


def difference_interval(
    a: Sequence[Result], b: Sequence[Result], *, seed: int = 0, level: float = 0.95, num_samples: int = 2000
) -> Interval:
    """Pooled tau of `a` minus that of `b` with its interval; `a[i]` and `b[i]` must be the same prompt.

    Raises UserError when the prompts differ or there is no round.
    """
    if [r.prompt_ids for r in a] != [r.prompt_ids for r in b]:
        raise UserError(
            f"cannot compare {len(a)} with {len(b)} results: expected the same prompts in the same order; "
            "run both drafters on one prompt file."
        )
    left, right = [counts(r) for r in a], [counts(r) for r in b]
    return counts_difference(left, right, seed=seed, level=level, num_samples=num_samples)


def counts_difference(
    left: Sequence[tuple[int, int]],
    right: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    level: float = 0.95,
    num_samples: int = 2000,
) -> Interval:
    """As `difference_interval`, from (committed tokens, rounds) of each prompt, the same prompts in the same order."""
    return _bootstrap(len(left), lambda picks: _pooled(left, picks) - _pooled(right, picks), seed, level, num_samples)


def mean_over_domains(taus: Sequence[float]) -> float:
    """The plain mean of the tau of several domains, each of which counts alike; `taus` must not be empty."""
    return sum(taus) / len(taus)


def quantile(values: Sequence[float], q: float) -> float:
    """Quantile `q` in 0..1 by linear interpolation between order statistics; `values` must not be empty."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def counts(result: Result) -> tuple[int, int]:
    """Committed tokens and rounds."""
    return sum(r.num_committed for r in result.rounds), len(result.rounds)


def loop_free_counts(result: Result) -> tuple[int, int]:
    """Committed tokens and rounds of the rounds whose first committed token is not inside a loop."""
    loops, first, free = in_loop(result.token_ids), 0, []
    for r in result.rounds:
        if not (first < len(loops) and loops[first]):
            free.append(r.num_committed)
        first += r.num_committed
    return sum(free), len(free)


def _pooled(counts: Sequence[tuple[int, int]], picks: Sequence[int]) -> float:
    rounds = sum(counts[i][1] for i in picks)
    return sum(counts[i][0] for i in picks) / rounds if rounds else 0.0


def _bootstrap(
    num_prompts: int, statistic: Callable[[Sequence[int]], float], seed: int, level: float, num_samples: int
) -> Interval:
    if num_prompts == 0:
        raise UserError("no results: an interval needs at least one prompt.")
    rng = random.Random(seed)
    prompts = range(num_prompts)
    values = [statistic(rng.choices(prompts, k=num_prompts)) for _ in range(num_samples)]
    tail = (1 - level) / 2
    return Interval(value=statistic(prompts), low=quantile(values, tail), high=quantile(values, 1 - tail), level=level)
