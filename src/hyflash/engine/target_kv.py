"""The target's keys and values as a drafter sees them: by state row, read-only.

In: a target and which sequence each state row is. Out: a `TargetKV`. Nothing is kept and nothing copied here; whether
`Target.kv_view` gives a view or a copy is the target's business.
"""

from __future__ import annotations

from torch import Tensor

from hyflash.targets.base import Target


class RowKV:
    """A `TargetKV` over a target's caches."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.seqs: dict[int, int] = {}
        """State row -> sequence."""

    def read(self, row: int, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values (T, G, K) of tokens first..last-1. Raises HyflashError for tokens that are not there."""
        return self._target.kv_view(self.seqs[row], layer, first, last)

    def attend(self, row: int, layer: int, first: int, last: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        """What queries (Q, H, K) see in tokens first..last-1, at least one. Raises as `read`."""
        return self._target.kv_attend(self.seqs[row], layer, first, last, queries)
