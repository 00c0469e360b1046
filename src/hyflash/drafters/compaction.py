"""Compact memory of an autoregressive drafter: a sink, a window, and one slot for every r tokens that left it.

After MASW, "Strong Drafts Need Compact Memories" (arXiv 2608.30252). In: keys (rotated) and values of committed tokens
and of slots, for any number of layers. Out: what queries may attend to, and a mask. A slot stands in the place of the
last of its r tokens: it reads what that one reads (if keys are made by reading), and is read in the tokens' stead once
the window has moved past them. Ours: that place (MASW: the next token's); and the window begins where a slot's tokens
begin, so every token before a query is seen exactly once, itself or in its slot, and a draft never needs a slot of
tokens that are not committed yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyflash.drafters.base import State
from hyflash.drafters.context import ContextShape
from hyflash.errors import HyflashError, UserError

NOWHERE = 1 << 40
"""Position of an empty place: after every query, so that none sees it."""
GROW_SLOTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Tokens and slots, as queries or as keys."""

    positions: Tensor  # (B, N) int64; of a slot that of the last of its tokens
    is_slot: Tensor  # (N,) bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """The rule: which tokens get slots, and who sees whom."""

    sink: int
    """First tokens of the text, seen by all."""
    window: int
    """Last tokens before and with a query; up to `ratio` - 1 more, to where a slot's tokens begin."""
    ratio: int
    """Tokens behind the sink that share a slot; 0 is no slots: what left the window is lost."""

    def check(self, num_draft_tokens: int) -> None:
        """Raises UserError where drafts would need a slot that is not there yet, or a slot could not see its tokens."""
        least = max(num_draft_tokens, self.ratio) + 1
        if self.ratio and self.window < least:
            raise UserError(
                f"window is {self.window}; expected at least {least}, one more than num_draft_tokens "
                f"({num_draft_tokens}) and ratio ({self.ratio}), or ratio 0."
            )

    @property
    def ring(self) -> int:
        """Tokens behind the sink that a query may need beside itself and those committed with it."""
        return max(1, self.window + max(self.ratio, 1) - 2)

    def num_slots(self, length: int) -> int:
        """Slots of a text of this length."""
        return max(0, length - self.sink) // self.ratio if self.ratio else 0

    def slot_positions(self, first: int, last: int) -> list[int]:
        """Positions of slots first..last - 1."""
        return [self.sink + self.ratio * (slot + 1) - 1 for slot in range(first, last)]

    def window_starts(self, positions: Tensor) -> Tensor:
        """First token of each query's window; at most the sink's end for early queries."""
        step = max(self.ratio, 1)
        return self.sink + (positions - (self.window - 1 + self.sink)).clamp(min=0) // step * step

    def visible(self, queries: Entries, keys: Entries) -> Tensor:
        """Mask (B, Q, N), True = visible. A slot also sees itself."""
        query, key = queries.positions[:, :, None], keys.positions[:, None, :]
        by_slot, start = queries.is_slot[:, None], self.window_starts(queries.positions)[:, :, None]
        before = key < query + (~by_slot).long()  # a slot is there instead of the token in whose place it stands
        token = before & ((key >= start) | (key < self.sink))
        slot = (key < start) | (by_slot & (key == query))
        return torch.where(keys.is_slot, slot, token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What rows hold, with places for new entries behind it."""

    data: Tensor  # (layers, B, M + spare, 2, G, K), keys at index 0
    entries: Entries  # M of them


class CompactState(State):
    """Rows of keys and values: sink and ring of all layers allocated at once, slots as they come."""

    def __init__(self, rule: Compaction, shape: ContextShape, *, num_layers: int, num_rows: int) -> None:
        self.rule, self.shape, self.num_layers = rule, shape, num_layers
        self.lengths = [0] * num_rows
        self.fixed = shape.empty(num_rows, num_layers, rule.sink + rule.ring)
        self.slots = [shape.empty(num_layers, 0) for _ in range(num_rows)]  # each (layers, capacity, 2, G, K)

    @classmethod
    def of(cls, state: State) -> CompactState:
        """The state, known to be of this kind. Raises HyflashError for another's."""
        if not isinstance(state, cls):
            raise HyflashError(f"expected a compact state, found {type(state).__name__}.")
        return state

    def held(self, rows: Sequence[int], spare: int = 0) -> Held:
        """A copy of what rows hold, padded to the fullest, with `spare` places more."""
        rule, lengths = self.rule, [self.lengths[row] for row in rows]
        counts = [rule.num_slots(length) for length in lengths]
        num_sink = min(rule.sink, max(lengths))
        num_ring = min(rule.ring, max(0, max(lengths) - rule.sink))
        num_slots, num = max(counts), num_sink + num_ring
        data = self.shape.empty(self.num_layers, len(rows), num + num_slots + spare)
        positions = torch.full((len(rows), num + num_slots), NOWHERE)
        for b, (row, length, count) in enumerate(zip(rows, lengths, counts, strict=True)):
            data[:, b, :num_sink] = self.fixed[row, :, :num_sink]
            data[:, b, num_sink:num] = self.fixed[row, :, rule.sink : rule.sink + num_ring]
            data[:, b, num : num + count] = self.slots[row][:, :count]
            positions[b, : min(num_sink, length)] = torch.arange(min(num_sink, length))
            positions[b, num_sink:num] = self._ring_positions(length, num_ring)
            positions[b, num : num + count] = torch.tensor(rule.slot_positions(0, count), dtype=torch.int64)
        is_slot = torch.arange(num + num_slots) >= num
        device = data.device
        return Held(data=data, entries=Entries(positions=positions.to(device), is_slot=is_slot.to(device)))

    def _ring_positions(self, length: int, places: int) -> Tensor:
        """Position of the newest token at each place of the ring."""
        sink, ring, behind = self.rule.sink, self.rule.ring, length - self.rule.sink
        newest = (torch.arange(places) - behind) % ring + behind - ring
        return torch.where(newest < 0, NOWHERE, newest + sink)

    def append(self, row: int, tokens: Tensor, slots: Tensor) -> None:
        """Take in the next tokens (layers, T, 2, G, K) of a row and the slots (layers, n, 2, G, K) that they fill."""
        rule, start = self.rule, self.lengths[row]
        num, stop = tokens.shape[1], start + tokens.shape[1]
        into_sink = max(0, min(num, rule.sink - start))
        self.fixed[row, :, start : start + into_sink] = tokens[:, :into_sink].to(self.shape.dtype)
        first = max(into_sink, num - rule.ring)  # older ones would be overwritten at once
        places = rule.sink + (torch.arange(start + first, stop, device=tokens.device) - rule.sink) % rule.ring
        self.fixed[row, :, places] = tokens[:, first:].to(self.shape.dtype)
        held, wanted = rule.num_slots(start), rule.num_slots(stop)
        if wanted > self.slots[row].shape[1]:
            bigger = self.shape.empty(self.num_layers, -(-wanted // GROW_SLOTS) * GROW_SLOTS)
            bigger[:, :held] = self.slots[row][:, :held]
            self.slots[row] = bigger
        self.slots[row][:, held:wanted] = slots.to(self.shape.dtype)
        self.lengths[row] = stop

    def reset(self, row: int) -> None:
        self.lengths[row] = 0
        self.fixed[row].zero_()
        self.slots[row] = self.shape.empty(self.num_layers, 0)

    def nbytes(self, row: int) -> int:
        """Bytes of the row, each token charged with its share of a slot; spare room for growth not counted."""
        fixed, per_token = state_bytes(self.rule, self.shape, self.num_layers)
        return fixed + self.lengths[row] * per_token

    def snapshot(self, row: int) -> dict[str, Any]:
        count = self.rule.num_slots(self.lengths[row])
        return {
            "length": self.lengths[row],
            "fixed": self.fixed[row].clone(),
            "slots": self.slots[row][:, :count].clone(),
        }

    def restore(self, row: int, saved: dict[str, Any]) -> None:
        self.lengths[row] = saved["length"]
        self.fixed[row].copy_(saved["fixed"])
        self.slots[row] = saved["slots"].clone()


def state_bytes(rule: Compaction, shape: ContextShape, num_layers: int) -> tuple[int, int]:
    """Bytes of a row that do not grow, and bytes per token, which are the r-th part of a slot."""
    entry = num_layers * shape.token_bytes
    return (rule.sink + rule.ring) * entry, -(-entry // rule.ratio) if rule.ratio else 0
