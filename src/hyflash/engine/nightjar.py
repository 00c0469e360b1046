"""Draft length by a bandit that knows what switching costs: Nightjar (arXiv 2512.22420), planner ADA-BINGREEDY.

In: what rounds took and accepted, by context (rows of the batch, length of their texts). Out: one draft length for all
rows of a round, 0 included, kept for a bin of rounds. Loss of arm gamma: seconds per committed token, plus
[drafting was off and gamma > 0] * seconds to bring the drafter's state up / gamma. Ours: losses are pieced together
from what every round tells of every arm and from the price table, arms that look hopeless are hardly tried, tries are
short, and exploring never ends (docs/length.md).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from hyflash.core import Prices
from hyflash.engine.length import LengthPolicy, RowStats
from hyflash.engine.round_costs import FOLLOW, RoundCosts, follow

SHORT_TOKENS = 512
"""Texts below this length are one context; above it, each doubling is another."""


class BinGreedy:
    """When to look for an arm, and when to explore, in one context: blocks of 2^(j-1) rounds, split in bins.

    A bin of a block of H rounds has ceil(sqrt(H)); the b-th of a block explores with probability 1/b. Ours: blocks end
    growing at `most_rounds`, and exploring takes at most `try_rounds`, after which the bin goes on greedily.
    """

    def __init__(self, *, most_rounds: int, try_rounds: int) -> None:
        self.arm = 0
        """Of the bin."""
        self._most, self._try = most_rounds, try_rounds
        self._block = self._left = 0  # rounds of this block, and those of them to come
        self._num_bins = 0
        self._bin_left = 0  # rounds until an arm is chosen anew
        self._greedy = 0  # rounds of the bin after a try

    def next(self, rng: random.Random) -> str:
        """Go to the next round: "keep" the arm, or "exploit" or "explore" with a new one."""
        if self._left == 0:
            self._block = min(max(1, 2 * self._block), self._most)
            self._left, self._num_bins, self._bin_left, self._greedy = self._block, 0, 0, 0
        self._left -= 1
        if self._bin_left:
            self._bin_left -= 1
            return "keep"
        if self._greedy:
            self._bin_left, self._greedy = self._greedy - 1, 0
            return "exploit"
        self._num_bins += 1
        size = min(math.isqrt(self._block - 1) + 1 if self._block > 1 else 1, self._left + 1)
        if rng.random() * self._num_bins >= 1.0:
            self._bin_left = size - 1
            return "exploit"
        tried = min(size, self._try)
        self._bin_left, self._greedy = tried - 1, size - tried
        return "explore"

    def only_once(self) -> None:
        """Try the new arm for one round, and be greedy for the rest of the bin."""
        self._greedy += self._bin_left
        self._bin_left = 0


class Acceptance:
    """Expected committed tokens of a row by draft length. A round of any length informs on the others.

    A draft that was asked for and not made counts as not accepted. What was seen fades with every round: soon, as texts
    go within a few sentences from what is easy to foresee to what is not, and slowly for what to believe else. A place
    where nothing is known (any more) has the rate of the place before it.
    """

    SLOW, SOON = 0.995, 0.9
    PRIOR_RATE, PRIOR_WEIGHT = 0.5, 4.0

    def __init__(self, max_tokens: int) -> None:
        self._slow_hits, self._slow_tries = [0.0] * max_tokens, [0.0] * max_tokens
        self._hits, self._tries = [0.0] * max_tokens, [0.0] * max_tokens

    def observe(self, num_asked: int, num_accepted: int) -> None:
        """Take in one row of a round."""
        for i in range(min(num_asked, num_accepted + 1)):
            is_hit = i < num_accepted
            self._slow_hits[i] += is_hit
            self._slow_tries[i] += 1.0
            self._hits[i] += is_hit
            self._tries[i] += 1.0

    def fade(self) -> None:
        """End of a round."""
        self._slow_hits = [x * self.SLOW for x in self._slow_hits]
        self._slow_tries = [x * self.SLOW for x in self._slow_tries]
        self._hits = [x * self.SOON for x in self._hits]
        self._tries = [x * self.SOON for x in self._tries]

    def tokens(self) -> list[float]:
        """Expected tokens, bonus included, by length from 0 on."""
        rate, run, out, weight = self.PRIOR_RATE, 1.0, [1.0], self.PRIOR_WEIGHT
        for slow_hits, slow_tries, hits, tries in zip(
            self._slow_hits, self._slow_tries, self._hits, self._tries, strict=True
        ):
            rate = (slow_hits + weight * rate) / (slow_tries + weight)
            run *= (hits + weight * rate) / (tries + weight)
            out.append(out[-1] + run)
        return out


class Arms:
    """One context: its schedule, and the seconds of rounds by arm, a mean of what was seen and what the table says.

    What was seen fades with every round of the context, so an arm long not played costs what the table says by now.
    """

    MEMORY = 0.99
    PRIOR_ROUNDS = 1.0
    FIRST_PAUSE, MOST_PAUSE = 4, 32

    def __init__(self, num_arms: int, costs: RoundCosts, schedule: BinGreedy) -> None:
        self.costs, self.schedule = costs, schedule
        # Tries left out while drafting looks hopeless, and how many are to be.
        self._skipped, self._pause = 0, self.FIRST_PAUSE
        self._sec, self._rounds = [0.0] * num_arms, [0.0] * num_arms

    def observe(self, arm: int, sec: float, num_rows: int) -> None:
        """A round of this arm took `sec`; one that was held up by other work counts as four usual ones at most."""
        sec = min(sec, 4 * self._expected(arm, num_rows))
        self._sec = [x * self.MEMORY for x in self._sec]
        self._rounds = [x * self.MEMORY for x in self._rounds]
        self._sec[arm] += sec
        self._rounds[arm] += 1.0

    def seconds(self, num_rows: int) -> list[float]:
        """Of a round by arm; in forwards of one token while no time is known at all."""
        return [self._expected(arm, num_rows) for arm in range(len(self._sec))]

    def _expected(self, arm: int, num_rows: int) -> float:
        costs = self.costs
        tabled = (costs.one_sec or 1.0) * (costs.forward(num_rows * (arm + 1)) + (costs.draft if arm else 0.0))
        return (self._sec[arm] + self.PRIOR_ROUNDS * tabled) / (self._rounds[arm] + self.PRIOR_ROUNDS)

    def worth_trying(self, losses: list[float], share: float) -> list[int]:
        """Arms whose loss is at most `share` of the least. Where all drafting is worse, the best of it now and then,
        after pauses that double: it may have been measured in a slow moment, or the text may have changed."""
        limit = share * min(losses)
        good = [arm for arm, loss in enumerate(losses) if loss <= limit]
        if good[-1] > 0 or len(losses) == 1:
            self._skipped, self._pause = 0, self.FIRST_PAUSE
            return good
        self._skipped += 1
        if self._skipped < self._pause:
            return [0]
        self._skipped, self._pause = 0, min(2 * self._pause, self.MOST_PAUSE)
        return [min(range(1, len(losses)), key=losses.__getitem__)]


class NightjarLength(LengthPolicy):
    """The bandit over an engine's rounds. `costs` and `one_sec` as in `RoundCosts`; `seed` is of what is explored."""

    MOST_ROUNDS, TRY_ROUNDS = 64, 2
    WORTH_TRYING = 1.1
    """Exploring draws among arms whose loss is at most so many times the least."""
    STEADINESS = 0.25
    """Of the price table, as an arm is held for many rounds on its word."""
    FORGET = 0.99
    """What a round without drafting leaves of the switching cost, which is not measured then."""

    def __init__(
        self, costs: Mapping[int, float], *, max_draft_tokens: int = 8, one_sec: float = 0.0, seed: int = 0
    ) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._costs = RoundCosts(  # of the last context
            costs, max_draft_tokens=max_draft_tokens, one_sec=one_sec, steadiness=self.STEADINESS
        )
        self._rng = random.Random(seed)
        self._acceptance = Acceptance(max_draft_tokens)
        self._contexts: dict[tuple[int, int], Arms] = {}
        self._was_off = False
        self._draft_sec = 0.0  # of a round whose drafter was up to date
        self._switch_sec = 0.0
        self._arms: Arms | None = None  # of this round's context
        self._arm = 0  # of this round
        self._num_whole = 0  # rows that were asked for all of it

    def new_stats(self) -> RowStats:
        """Which tell the bandit what became of the length it gave."""
        return _Asked(self)

    def prices(self, num_rows: int) -> Prices | None:
        """From the table of this context as it is by now."""
        return self._costs.prices(num_rows)

    def begin_round(self, *, num_rows: int, context_tokens: int) -> int:
        """The arm of the bin of this context, or 0 where a plain round is due."""
        key = (num_rows.bit_length(), (context_tokens // SHORT_TOKENS).bit_length())
        arms = self._contexts.get(key)
        if arms is None:
            schedule = BinGreedy(most_rounds=self.MOST_ROUNDS, try_rounds=self.TRY_ROUNDS)
            arms = self._contexts[key] = Arms(self.max_draft_tokens + 1, self._costs.copy(), schedule)
        self._arms, self._costs, self._num_whole = arms, arms.costs, 0
        self._arm = 0 if arms.costs.is_plain_due else self._next_arm(arms, num_rows)
        return self._arm

    def _next_arm(self, arms: Arms, num_rows: int) -> int:
        schedule = arms.schedule
        what = schedule.next(self._rng)
        if what != "keep":
            losses = self.losses(arms, num_rows)
            if what == "explore":
                schedule.arm = self._rng.choice(arms.worth_trying(losses, self.WORTH_TRYING))
                if schedule.arm and losses[schedule.arm] > self.WORTH_TRYING * min(losses):
                    schedule.only_once()
            else:
                schedule.arm = losses.index(min(losses))
        return schedule.arm

    def choose(self, stats: RowStats, *, most: int, num_rows: int) -> int:
        """The arm of this round, cut to what fits the row."""
        return min(most, self._arm)

    def hears(self, stats: RowStats, *, num_asked: int, num_drafted: int) -> None:
        """Note what was asked for: what was not made of it counts as not accepted."""
        if isinstance(stats, _Asked):
            stats.num_asked = num_asked
        self._num_whole += num_asked == self._arm

    def losses(self, arms: Arms, num_rows: int) -> list[float]:
        """Expected loss by arm."""
        tokens = self._acceptance.tokens()
        out = [sec / (num_rows * n) for sec, n in zip(arms.seconds(num_rows), tokens, strict=True)]
        if self._was_off:
            out = [loss + (self._switch_sec / arm if arm else 0.0) for arm, loss in enumerate(out)]
        return out

    def observe_row(self, num_asked: int, num_accepted: int) -> None:
        """What became of one row of the round."""
        self._acceptance.observe(num_asked, num_accepted)

    def observe_times(self, *, draft_sec: float, verify_sec: float, width: int, num_rows: int) -> None:
        """End of the round. It counts for its arm if most rows had room for that length."""
        if draft_sec > 0:
            draft_sec = self._without_switch(draft_sec)
        self._was_off = draft_sec == 0
        if self._was_off:
            self._switch_sec *= self.FORGET
        self._costs.observe(draft_sec=draft_sec, verify_sec=verify_sec, width=width, num_rows=num_rows)
        self._acceptance.fade()
        if self._arms is not None and (self._arm == 0 or 2 * self._num_whole > num_rows):
            self.learn(self._arms, self._arm, draft_sec + verify_sec, num_rows)

    def learn(self, arms: Arms, arm: int, sec: float, num_rows: int) -> None:
        """What a round of this arm took."""
        arms.observe(arm, sec, num_rows)

    def _without_switch(self, draft_sec: float) -> float:
        """Seconds of drafting less those of late commits, which the first round after a pause bears."""
        usual = self._draft_sec
        if self._was_off and usual:
            switch = max(0.0, draft_sec - usual)
            self._switch_sec += (0.5 if switch < self._switch_sec else FOLLOW) * (switch - self._switch_sec)
            return min(draft_sec, usual)
        self._draft_sec = follow(usual, draft_sec) if usual else draft_sec
        return draft_sec


class _Asked(RowStats):
    """Of one request: hands what a round accepted to the bandit, with the length that it had given."""

    def __init__(self, policy: NightjarLength) -> None:
        super().__init__(max(1, policy.max_draft_tokens))
        self._policy = policy
        self.num_asked = 0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take in one round."""
        self._policy.observe_row(self.num_asked, num_accepted)
        self.num_asked = 0
