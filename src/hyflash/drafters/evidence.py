"""How the parts of a composition fared: tokens accepted against tokens expected, by part and kind of draft.

In: rounds. Out: a factor for what a part states, or for what it typically reaches. Older rounds count less.
"""

from __future__ import annotations

import copy

NUM_KINDS = 8
"""Kinds of drafts told apart (`Draft.kind`); higher ones count as the last."""
BYTES_PER_PART = 2 * NUM_KINDS * 8
PRIOR_TOKENS = 4.0
"""Accepted tokens, as expected, that the evidence starts from."""

Counts = list[list[float]]


class Evidence:
    """Of one row, or of all rows so far. `keep` is the weight of the rounds before when one of the same kind comes."""

    def __init__(self, num_parts: int, keep: float) -> None:
        self._accepted: Counts = [[0.0] * NUM_KINDS for _ in range(num_parts)]
        self._expected: Counts = [[0.0] * NUM_KINDS for _ in range(num_parts)]
        self._keep = keep

    def learn(self, part: int, kind: int, accepted: float, expected: float) -> None:
        """Take in a round."""
        at = min(kind, NUM_KINDS - 1)
        self._accepted[part][at] = self._keep * self._accepted[part][at] + accepted
        self._expected[part][at] = self._keep * self._expected[part][at] + expected

    def scale(self, part: int, kind: int, prior: float = 1.0) -> float:
        """Accepted over expected; before evidence the prior."""
        at = min(kind, NUM_KINDS - 1)
        return (PRIOR_TOKENS * prior + self._accepted[part][at]) / (PRIOR_TOKENS + self._expected[part][at])

    def scale_of_part(self, part: int) -> float:
        """The same for all kinds of a part together; before evidence 1."""
        return (PRIOR_TOKENS + sum(self._accepted[part])) / (PRIOR_TOKENS + sum(self._expected[part]))

    def saved(self) -> tuple[Counts, Counts]:
        """A copy for a snapshot."""
        return copy.deepcopy((self._accepted, self._expected))

    def put_back(self, saved: tuple[Counts, Counts]) -> None:
        """Put a snapshot back."""
        self._accepted, self._expected = copy.deepcopy(saved)
