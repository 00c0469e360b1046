"""How many tokens to draft in a round, per request, 0 included.

In: what the last rounds accepted, what widths cost on this machine, what drafting cost. Out: a draft length.
The text never depends on it. Objective (design, section 6): committed tokens per second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from hyflash.core import Prices
from hyflash.engine.round_costs import RoundCosts
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

    def tokens(self) -> list[float]:
        """Expected committed tokens of a round by draft tokens, from 0 on: 1 + sum of cumulative products."""
        run, out = 1.0, [1.0]
        for hits, tries in zip(self._hits, self._tries, strict=True):
            run *= hits / tries
            out.append(out[-1] + run)
        return out


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

    def begin_round(self, *, num_rows: int, context_tokens: int) -> int:
        """Most draft tokens of any row in a round of rows with that many tokens each, on average."""
        return self.max_draft_tokens

    def asks(self, stats: RowStats) -> bool:
        """Whether to ask a drafter that decides for itself how much to draft (`Drafter.weighs_prices`) this round."""
        return True

    def hears(self, stats: RowStats, *, num_asked: int, num_drafted: int) -> None:  # noqa: B027
        """What a drafter was asked for, and what it drafted."""

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

    `costs` and `one_sec` as in `RoundCosts`. When no draft pays, drafting pauses for a number of rounds that doubles
    with each fruitless try.
    """

    MAX_PAUSE = 64
    FIRST_PAUSE_AT_MOST = 32
    """After a first try in vain, where the request before ended with longer ones: this may be another kind of text."""
    EMPTY = 8
    """Rounds without a draft before pauses begin, and the longest pause."""

    def __init__(self, costs: Mapping[int, float], *, max_draft_tokens: int = 8, one_sec: float = 0.0) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._costs = RoundCosts(costs, max_draft_tokens=max_draft_tokens, one_sec=one_sec)
        self._record = RowStats(max(1, max_draft_tokens))
        self._last_pause = RowStats.FIRST_PAUSE

    def new_stats(self) -> RowStats:
        """Starts from what earlier requests accepted, and with a longer pause where theirs were long."""
        stats = RowStats(max(1, self.max_draft_tokens), self._record)
        stats.pause = min(self._last_pause, self.FIRST_PAUSE_AT_MOST)
        return stats

    def prices(self, num_rows: int) -> Prices | None:
        """From the table as it is by now."""
        return self._costs.prices(num_rows)

    def asks(self, stats: RowStats) -> bool:
        """Not in a pause, for asking costs as much as a tenth of a forward, nor where a plain round is due."""
        if stats.rounds_off:
            stats.rounds_off -= 1
            return False
        return not self._costs.is_plain_due

    def hears(self, stats: RowStats, *, num_asked: int, num_drafted: int) -> None:
        """Pause after some rounds without a draft; a draft ends the pauses."""
        stats.rounds_empty = 0 if num_drafted else stats.rounds_empty + 1
        if stats.rounds_empty >= self.EMPTY:
            stats.rounds_off = min(stats.rounds_empty - self.EMPTY + 1, self.EMPTY)

    def choose(self, stats: RowStats, *, most: int, num_rows: int) -> int:
        """Best length by expected tokens over expected cost; 0 when plain decoding is cheaper."""
        if not self.asks(stats):
            return 0
        most = min(most, self.max_draft_tokens)
        # The other rows of the batch are taken to draft as much as this one.
        tokens, forward, draft = stats.tokens(), self._costs.of_rounds(num_rows), self._costs.draft
        best = max(range(most + 1), key=lambda k: tokens[k] / (forward[k] + (draft if k else 0.0)), default=0)
        if best == 0 and most > 0:
            stats.rounds_off = stats.pause
            stats.pause = self._last_pause = min(2 * stats.pause, self.MAX_PAUSE)
            return min(most, 2)  # one cheap try, then the pause
        stats.pause = self._last_pause = RowStats.FIRST_PAUSE
        return best

    def observe_times(self, *, draft_sec: float, verify_sec: float, width: int, num_rows: int) -> None:
        """For the table."""
        self._costs.observe(draft_sec=draft_sec, verify_sec=verify_sec, width=width, num_rows=num_rows)
