"""What rounds cost on this machine: a table of c(q) that follows the times of the rounds.

In: a table, then wall-clock times. Out: the cost of a forward of any width, in forwards of one token, what drafting
adds to it, `core.Prices` for drafters that choose by them, and when a round without drafts is due.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping

from hyflash.core import Prices
from hyflash.errors import UserError

FOLLOW = 0.1
"""Weight of a new time against those before."""
FORGET = 0.01
"""How far each round without drafts brings wider ones that look dear back to the table: what a slow moment made of them
would otherwise stand for ever, since no draft would pay and no wider forward would tell."""


class RoundCosts:
    """`costs` maps width q to c(q), the cost of a width-q forward over a width-1 forward; q = 1 must be there.

    `one_sec` is what a width-1 forward takes, 0 while unknown. A round whose tokens beyond the first cost x forwards of
    one weighs x^2 / (x^2 + `steadiness`), as tokens that cost next to nothing say little about what many would.
    Raises UserError on costs that no forward can have.
    """

    LEAST_STRETCH = 0.01
    """It follows by factors, so from 0 it would never rise again."""
    MOST_SINCE_PLAIN = 64
    """Rounds with drafts in a row: if all were, what one token took in a slow moment would make more look free."""

    def __init__(
        self, costs: Mapping[int, float], *, max_draft_tokens: int, one_sec: float = 0.0, steadiness: float = 0.0
    ) -> None:
        if 1 not in costs:
            raise UserError("the cost table has no entry for width 1.")
        if not all(0 < cost < float("inf") for cost in costs.values()):
            raise UserError(f"the cost table is {dict(costs)}; expected costs above 0.")
        self.draft = 0.05
        """Cost of drafting, in forwards of one token; measured from the first round on."""
        self.one_sec = one_sec
        self._most, self._steadiness = max_draft_tokens, steadiness
        self._costs = sorted(costs.items())
        self._beyond: dict[int, float] = {}  # width -> c - 1 of the table
        self._rounds: dict[int, list[float]] = {}  # what `of_rounds` says at this stretch
        self._stretch = 1.0  # of what tokens beyond the first cost, against the table
        self._seen_plain = False
        self._since_plain = 0  # rounds since the last without drafts

    def copy(self) -> RoundCosts:
        """As they are by now; followed apart from here on."""
        other = copy.copy(self)
        other._rounds = {}
        return other

    @property
    def is_plain_due(self) -> bool:
        """Whether to leave drafts out once, to see what a round takes without them."""
        return self._since_plain >= self.MOST_SINCE_PLAIN

    def forward(self, width: int) -> float:
        """c(width) as it is by now."""
        return 1.0 + self._stretch * self._tabled_beyond(width)

    def of_rounds(self, num_rows: int) -> list[float]:
        """Cost of the forward of `num_rows` rows by draft tokens of each, from 0 to the most."""
        known = self._rounds.get(num_rows)
        if known is None:
            widths = [num_rows * (drafts + 1) for drafts in range(self._most + 1)]
            known = self._rounds[num_rows] = [self.forward(width) for width in widths]
        return known

    def prices(self, num_rows: int) -> Prices | None:
        """Of rounds of `num_rows` rows; None while no time is known."""
        return Prices(forward=self.of_rounds(num_rows), one_sec=self.one_sec) if self.one_sec else None

    def observe(self, *, draft_sec: float, verify_sec: float, width: int, num_rows: int) -> None:
        """Follow the drafter's share of a width-1 forward, and c(q) itself once a round without drafts has been seen.

        The table may come from a busy moment, and from another context length.
        """
        is_plain = width == num_rows
        if is_plain:
            self._seen_plain = True
            self._stretch -= FORGET * max(0.0, self._stretch - 1.0)
            self._rounds.clear()
        elif self._seen_plain and (beyond := self._tabled_beyond(width)) > 0:
            excess = verify_sec / self.one_sec - 1.0
            weight = max(beyond, excess) ** 2
            stretch = follow(self._stretch, excess / beyond, FOLLOW * weight / (weight + self._steadiness))
            self._stretch = max(stretch, self.LEAST_STRETCH)
            self._rounds.clear()
        if is_plain or not self._seen_plain:
            one = verify_sec / max(self.forward(width), 1e-9)
            share = 0.5 if self.is_plain_due else FOLLOW  # little is known of it after so long
            self.one_sec = follow(self.one_sec, one, share) if self.one_sec else one
        if draft_sec > 0 and self.one_sec > 0:
            self.draft = follow(self.draft, draft_sec / self.one_sec)
        self._since_plain = 0 if is_plain else self._since_plain + 1

    def _tabled_beyond(self, width: int) -> float:
        """c(width) - 1 of the table, linear between and beyond the measured widths; 0 for one token."""
        known = self._beyond.get(width)
        if known is None:
            known = self._beyond[width] = _interpolated(self._costs, width) - 1.0 if width > 1 else 0.0
        return known


def follow(so_far: float, new: float, share: float = FOLLOW) -> float:
    """A running mean on which a round that was held up by other work has little weight."""
    return so_far + share * (min(max(new, so_far / 4), so_far * 4) - so_far)


def _interpolated(known: list[tuple[int, float]], width: int) -> float:
    for (q0, c0), (q1, c1) in itertools.pairwise(known):
        if width <= q1:
            return c0 + (c1 - c0) * (width - q0) / (q1 - q0)
    if len(known) == 1:
        return known[0][1] * width
    (q0, c0), (q1, c1) = known[-2:]
    return c1 + max(0.0, (c1 - c0) / (q1 - q0)) * (width - q1)
