"""How many tokens to draft in a round, per request, 0 included.

In: what the last rounds accepted, what widths cost on this machine, what drafting cost. Out: a draft length.
The text never depends on it. Objective (design, section 6): committed tokens per second.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping

from hyflash.core import Prices
from hyflash.errors import UserError


class RowStats:
    """Running acceptance of one request: P(draft i accepted | all before accepted), with a prior of two rounds.

    The prior is the acceptance of earlier requests, if there is a record of them, which then learns of this one too.
    """

    DECAY = 0.98
    PRIOR_RATE, PRIOR_WEIGHT = 0.5, 2.0
    FIRST_PAUSE = 4

    def __init__(self, max_tokens: int, record: RowStats | None = None) -> None:
        rates = [self.PRIOR_RATE] * max_tokens if record is None else record.rates()
        self._hits = [rate * self.PRIOR_WEIGHT for rate in rates]
        self._tries = [self.PRIOR_WEIGHT] * max_tokens
        self._record = record
        self.rounds_off = 0
        self.pause = self.FIRST_PAUSE
        """Rounds without drafting before the next try; doubles while tries do not pay."""
        self.rounds_empty = 0
        """Rounds in a row in which a drafter that decides for itself drafted nothing."""

    def rates(self) -> list[float]:
        """Acceptance by position."""
        return [hits / tries for hits, tries in zip(self._hits, self._tries, strict=True)]

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take in one round; positions behind the first rejection were not tested."""
        if self._record is not None:
            self._record.observe(num_drafted, num_accepted)
        for i in range(min(num_drafted, num_accepted + 1, len(self._hits))):
            self._hits[i] = self._hits[i] * self.DECAY + (i < num_accepted)
            self._tries[i] = self._tries[i] * self.DECAY + 1.0

    def expected_tokens(self, num_draft_tokens: int) -> float:
        """Expected committed tokens of a round with this many drafts: 1 + sum of cumulative products."""
        total, run = 1.0, 1.0
        for i in range(min(num_draft_tokens, len(self._hits))):
            run *= self._hits[i] / self._tries[i]
            total += run
        return total


class LengthPolicy(ABC):
    """Chooses draft lengths; one object serves all requests of an engine."""

    max_draft_tokens: int
    """Most draft tokens the policy ever asks for."""

    def new_stats(self) -> RowStats:
        """For a new request."""
        return RowStats(max(1, self.max_draft_tokens))

    def prices(self, num_rows: int) -> Prices | None:
        """What rounds of `num_rows` rows cost, as far as the policy knows it."""
        return None

    def asks(self, stats: RowStats) -> bool:
        """Whether to ask a drafter that decides for itself how much to draft (`Drafter.weighs_prices`) this round."""
        return True

    def hears(self, stats: RowStats, num_drafted: int) -> None:  # noqa: B027
        """What it drafted."""

    @abstractmethod
    def choose(self, stats: RowStats, *, most: int, num_rows: int) -> int:
        """Draft tokens for one row of a batch of `num_rows`, from 0 to `most`."""

    def observe_times(self, *, draft_sec: float, verify_sec: float, width: int, num_rows: int) -> None:  # noqa: B027
        """Wall-clock of one round; draft_sec is 0 where the drafter did not run. Some policies do not measure."""


class FixedLength(LengthPolicy):
    """Always the same number of draft tokens."""

    def __init__(self, num_draft_tokens: int) -> None:
        if num_draft_tokens < 0:
            raise UserError(f"num_draft_tokens is {num_draft_tokens}; expected at least 0.")
        self.max_draft_tokens = num_draft_tokens

    def choose(self, stats: RowStats, *, most: int, num_rows: int) -> int:
        """The fixed length, cut to what fits."""
        return min(most, self.max_draft_tokens)


class AdaptiveLength(LengthPolicy):
    """The length with most expected committed tokens per second, from measured costs and running acceptance.

    `costs` maps width q to c(q), the cost of a width-q forward over a width-1 forward. When no draft pays, drafting
    pauses for a number of rounds that doubles with each fruitless try.
    """

    MAX_PAUSE = 64
    FOLLOW = 0.1
    """Weight of a new time against those before."""
    LEAST_STRETCH = 0.01
    """It follows by factors, so from 0 it would never rise again."""
    MOST_SINCE_ONE = 64
    """Rounds that may draft in a row: if all did, what width 1 took in a slow moment would make more rows look free."""
    EMPTY = 8
    """Rounds without a draft before pauses begin, and the longest pause."""

    def __init__(self, costs: Mapping[int, float], *, max_draft_tokens: int = 8, one_sec: float = 0.0) -> None:
        if 1 not in costs:
            raise UserError("the cost table has no entry for width 1.")
        if not all(0 < cost < float("inf") for cost in costs.values()):
            raise UserError(f"the cost table is {dict(costs)}; expected costs above 0.")
        self.max_draft_tokens = max_draft_tokens
        self._costs = dict(sorted(costs.items()))
        self._draft_cost = 0.05  # share of a width-1 forward; measured from the first round on
        self._one_sec, self._seen_one = one_sec, False  # seconds of a width-1 forward, 0 while unknown
        self._beyond: dict[int, list[float]] = {}  # rows of a batch -> c - 1 of the table, by draft tokens
        self._since_one = 0  # rounds since the last of width 1
        self._stretch = 1.0  # of what rows beyond the first cost, against the table
        self._record = RowStats(max(1, max_draft_tokens))

    def new_stats(self) -> RowStats:
        """Starts from what earlier requests accepted."""
        return RowStats(max(1, self.max_draft_tokens), self._record)

    def prices(self, num_rows: int) -> Prices | None:
        """From the table as it is by now."""
        if not self._one_sec:
            return None
        beyond = self._beyond.get(num_rows)
        if beyond is None:
            widths = [num_rows * (drafts + 1) for drafts in range(self.max_draft_tokens + 1)]
            beyond = self._beyond[num_rows] = [self._tabled(width) - 1.0 for width in widths]
        stretch = self._stretch
        return Prices(forward=[1.0 + stretch * c for c in beyond], one_sec=self._one_sec)

    def cost(self, width: float) -> float:
        """c(width) as it is by now."""
        return 1.0 + self._stretch * (self._tabled(width) - 1.0) if width > 1 else 1.0

    def _tabled(self, width: float) -> float:
        """c(width) of the table, linear between and beyond the measured widths."""
        known = list(self._costs.items())
        for (q0, c0), (q1, c1) in itertools.pairwise(known):
            if width <= q1:
                return c0 + (c1 - c0) * (width - q0) / (q1 - q0)
        if len(known) == 1:
            return known[0][1] * width
        (q0, c0), (q1, c1) = known[-2:]
        return c1 + max(0.0, (c1 - c0) / (q1 - q0)) * (width - q1)

    def asks(self, stats: RowStats) -> bool:
        """Not in a pause, for asking costs as much as a tenth of a forward, nor where width 1 is to be seen again."""
        if stats.rounds_off:
            stats.rounds_off -= 1
            return False
        return self._since_one < self.MOST_SINCE_ONE

    def hears(self, stats: RowStats, num_drafted: int) -> None:
        """Pause after some rounds without a draft; a draft ends the pauses."""
        stats.rounds_empty = 0 if num_drafted else stats.rounds_empty + 1
        if stats.rounds_empty >= self.EMPTY:
            stats.rounds_off = min(stats.rounds_empty - self.EMPTY + 1, self.EMPTY)

    def choose(self, stats: RowStats, *, most: int, num_rows: int) -> int:
        """Best length by expected tokens over expected cost; 0 when plain decoding is cheaper."""
        if not self.asks(stats):
            return 0
        most = min(most, self.max_draft_tokens)

        def rate(k: int) -> float:
            # The other rows of the batch are taken to draft as much as this one.
            return stats.expected_tokens(k) / (self.cost(num_rows * (k + 1)) + (self._draft_cost if k else 0.0))

        best = max(range(most + 1), key=rate, default=0)
        if best == 0 and most > 0:
            stats.rounds_off = stats.pause
            stats.pause = min(2 * stats.pause, self.MAX_PAUSE)
            return min(most, 2)  # one cheap try, then the pause
        stats.pause = RowStats.FIRST_PAUSE
        return best

    def observe_times(self, *, draft_sec: float, verify_sec: float, width: int, num_rows: int) -> None:
        """Follow the drafter's share of a width-1 forward, and c(q) itself once width 1 has been seen.

        The table may come from a busy moment, and from another context length.
        """
        share = self.FOLLOW if self._since_one < self.MOST_SINCE_ONE else 0.5
        self._since_one = 0 if width == 1 else self._since_one + 1
        if width == 1:
            self._seen_one = True
        elif self._seen_one and (beyond := self._tabled(width) - 1.0) > 0:
            stretch = self._follow(self._stretch, (verify_sec / self._one_sec - 1.0) / beyond)
            self._stretch = max(stretch, self.LEAST_STRETCH)
        if width == 1 or not self._seen_one:
            one = verify_sec / max(self.cost(width), 1e-9)
            self._one_sec = self._follow(self._one_sec, one, share) if self._one_sec else one
        if draft_sec > 0 and self._one_sec > 0:
            self._draft_cost = self._follow(self._draft_cost, draft_sec / self._one_sec)

    def _follow(self, so_far: float, new: float, share: float = FOLLOW) -> float:
        """A running mean on which a round that was held up by other work has little weight."""
        return so_far + share * (min(max(new, so_far / 4), so_far * 4) - so_far)
