"""Commits that wait: tokens of rows and their features, kept until a state needs them.

A commit costs a drafter much more than its tokens do, so one of many costs little more than one of a single token; and
while a row is decoded without this drafter, nobody needs its state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyflash.core import Commit, TargetKV

LATE_PIECES = 64
"""Pieces of a row after which the caller should commit them: they are memory, and a pause before the next token."""

MOST_SPARE = 8
"""A piece is copied out of a forward's features where these are so many times its size; else copying is the dearer."""

Piece = tuple[Sequence[int], Tensor | None]


class LateCommits:
    """What waits, by row, in order."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Piece]] = {}

    def add(self, row: int, ids: Sequence[int], features: Tensor | None) -> bool:
        """Keep a row's tokens and their features (n, C, D), which nobody may write to; True when there are enough to be
        committed."""
        pieces = self._rows.setdefault(row, [])
        if features is not None and features.untyped_storage().nbytes() > MOST_SPARE * features.nbytes:
            features = features.clone()
        pieces.append((ids, features))
        return len(pieces) >= LATE_PIECES

    def take(self, rows: Sequence[int], kv: TargetKV | None) -> Commit | None:
        """One commit of all that waits for these rows, with the target's keys and values of them; None when nothing
        does."""
        found = [(row, self._rows.pop(row)) for row in rows if row in self._rows]
        if not found:
            return None
        tokens = [[token for ids, _ in pieces for token in ids] for _, pieces in found]
        features = None
        for b, (_, pieces) in enumerate(found):
            parts = [part for _, part in pieces if part is not None]
            if parts:
                own = torch.cat(parts)
                if features is None:
                    features = own.new_zeros(len(found), max(map(len, tokens)), *own.shape[1:])
                features[b, : len(own)] = own
        return Commit(rows=[row for row, _ in found], tokens=tokens, features=features, kv=kv)

    def waiting(self, row: int) -> list[Piece]:
        """A row's pieces, for a snapshot."""
        return list(self._rows.get(row, ()))

    def put_back(self, row: int, pieces: list[Piece]) -> None:
        """The row has just these pieces now; none drops it."""
        self._rows.pop(row, None)
        if pieces:
            self._rows[row] = list(pieces)
