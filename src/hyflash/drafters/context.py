"""State of block drafters: keys and values of committed tokens per layer, in a ring of fixed size or growing.

In: keys (normed, not rotated) and values of newly committed tokens. Out: views of what a block may attend to.
A ring holds the last W tokens and rotates at read, with positions counted from the oldest row it holds, so no
position exceeds W + L. The growing store rotates once, at absolute positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hyflash.drafters.base import State
from hyflash.errors import HyflashError
from hyflash.ops.blocks import Place
from hyflash.ops.kernels import Ring
from hyflash.ops.rope import rope_tables, rotate

GROW_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextView:
    """Context of B rows at one layer."""

    keys: Tensor  # (B, T, G, K) rotated
    values: Tensor  # (B, T, G, K)
    positions: Tensor  # (B, T) int64 of the keys; empty places have a position at or after the row's anchor
    anchors: Tensor  # (B,) int64, position of slot 0 in the same count


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextShape:
    """Sizes shared by the stores of a drafter."""

    num_kv_heads: int
    head_dim: int
    rope_theta: float
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, weight: Tensor, *, num_kv_heads: int, head_dim: int, rope_theta: float) -> ContextShape:
        """Of a weight's dtype and device."""
        return cls(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=rope_theta,
            dtype=weight.dtype,
            device=weight.device,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values at one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def turns(self, first: int, last: int) -> Tensor:
        """Cosines, then sines, of half a head at positions first..last - 1: (n, K)."""
        size = GROW_TOKENS
        while size < last:
            size *= 2
        return _turn_table(size, self.head_dim, self.rope_theta)[first:last]

    def empty(self, *lead: int) -> Tensor:
        """Zeros (*lead, 2, G, K): keys at index 0, values at 1."""
        return torch.zeros(*lead, 2, self.num_kv_heads, self.head_dim, dtype=self.dtype, device=self.device)


@lru_cache(maxsize=8)
def _turn_table(num: int, dim: int, theta: float) -> Tensor:
    cos, sin = rope_tables(torch.arange(num), dim=dim, theta=theta)
    return torch.cat((cos[:, : dim // 2], sin[:, : dim // 2]), dim=-1)


class ContextStore(ABC):
    """Keys and values of one layer. The caller keeps the lengths and passes them in."""

    def __init__(self, shape: ContextShape) -> None:
        self.shape = shape

    @abstractmethod
    def append(self, rows: list[int], starts: list[int], lengths: list[int], keys: Tensor, values: Tensor) -> None:
        """Add keys, values (B, T, G, K), the first `lengths[b]` of each row, at positions from `starts[b]`."""

    @abstractmethod
    def view(self, rows: list[int], lengths: list[int]) -> ContextView:
        """What rows of these lengths hold."""

    @abstractmethod
    def place(self, row: int, start: int, count: int, memory: Tensor | None) -> Place:
        """Where the CPU kernels put a row's next `count` tokens, at positions from `start` on."""

    @abstractmethod
    def ring(self, row: int, length: int, num_slots: int) -> Ring:
        """The same view of one row for the CPU kernels."""

    @abstractmethod
    def clear(self, row: int) -> None:
        """Forget one row."""

    @abstractmethod
    def nbytes(self, length: int) -> int:
        """Bytes of a row of this length, spare room for growth not counted."""

    @abstractmethod
    def save(self, row: int, length: int) -> Tensor:
        """Copy of one row."""

    @abstractmethod
    def load(self, row: int, saved: Tensor) -> None:
        """Put a copy back."""


class RingStore(ContextStore):
    """The last `window` tokens of each row, allocated at once."""

    def __init__(self, shape: ContextShape, num_rows: int, window: int) -> None:
        super().__init__(shape)
        self.window = window
        self.data = shape.empty(num_rows, window)  # (rows, W, 2, G, K)

    def append(self, rows: list[int], starts: list[int], lengths: list[int], keys: Tensor, values: Tensor) -> None:
        device = self.data.device
        count = torch.tensor(lengths, device=device)[:, None]
        step = torch.arange(keys.shape[1], device=device)[None]
        kept = (step < count) & (step >= count - self.window)  # older ones would be overwritten at once
        place = (torch.tensor(starts, device=device)[:, None] + step) % self.window
        row = torch.tensor(rows, device=device)[:, None].expand_as(place)
        self.data[row[kept], place[kept]] = torch.stack((keys, values), dim=2)[kept].to(self.data.dtype)

    def view(self, rows: list[int], lengths: list[int]) -> ContextView:
        device = self.data.device
        total = torch.tensor(lengths, device=device)[:, None]
        held = total.clamp(max=self.window)
        place = torch.arange(min(self.window, max(lengths, default=0)), device=device)[None]
        # Place p holds the newest token whose position is p modulo W; count from the oldest token held.
        position = (place - total) % self.window + held - self.window
        position = torch.where(position < 0, held, position)
        data = self.data[torch.tensor(rows, device=device), : place.shape[1]]
        cos, sin = rope_tables(position, dim=self.shape.head_dim, theta=self.shape.rope_theta)
        keys = rotate(data[:, :, 0], cos, sin)
        return ContextView(keys=keys, values=data[:, :, 1], positions=position, anchors=held[:, 0])

    def place(self, row: int, start: int, count: int, memory: Tensor | None) -> Place:
        return Place(data=self.data[row], first=start % self.window, turns=None, memory=memory)

    def ring(self, row: int, length: int, num_slots: int) -> Ring:
        held = min(length, self.window)
        return Ring(
            data=self.data[row],
            first=length % self.window if length > self.window else 0,
            held=held,
            key_turns=self.shape.turns(0, held),
            slot_turns=self.shape.turns(held, held + num_slots),
        )

    def clear(self, row: int) -> None:
        self.data[row].zero_()

    def nbytes(self, length: int) -> int:
        return self.window * self.shape.token_bytes

    def save(self, row: int, length: int) -> Tensor:
        return self.data[row].clone()

    def load(self, row: int, saved: Tensor) -> None:
        self.data[row].copy_(saved)


class GrowingStore(ContextStore):
    """Every committed token of each row."""

    def __init__(self, shape: ContextShape, num_rows: int) -> None:
        super().__init__(shape)
        self.data = [shape.empty(0) for _ in range(num_rows)]  # each (capacity, 2, G, K)

    def append(self, rows: list[int], starts: list[int], lengths: list[int], keys: Tensor, values: Tensor) -> None:
        for b, (row, start, count) in enumerate(zip(rows, starts, lengths, strict=True)):
            if count == 0:
                continue
            stop = start + count
            self._grow(row, start, stop)
            self.data[row][start:stop, 0] = self._kept_keys(keys[b, :count], start).to(self.shape.dtype)
            self.data[row][start:stop, 1] = values[b, :count].to(self.shape.dtype)

    def _kept_keys(self, keys: Tensor, start: int) -> Tensor:
        """Keys (T, G, K) of tokens from position `start` on, as they are kept: rotated."""
        position = torch.arange(start, start + len(keys), device=keys.device)
        cos, sin = rope_tables(position, dim=self.shape.head_dim, theta=self.shape.rope_theta)
        return rotate(keys, cos, sin)

    def _grow(self, row: int, held: int, wanted: int) -> None:
        """Make room for `wanted` tokens where there is less; the first `held` stay."""
        if wanted > self.data[row].shape[0]:
            bigger = self.shape.empty(-(-wanted // GROW_TOKENS) * GROW_TOKENS)
            bigger[:held] = self.data[row][:held]
            self.data[row] = bigger

    def slices(self, rows: list[int], starts: list[int], lengths: list[int]) -> Tensor:
        """What each row holds from `starts[b]` on, `lengths[b]` tokens, zeros behind: (B, T, 2, G, K)."""
        if len(rows) == 1:
            return self.data[rows[0]][None, starts[0] : starts[0] + lengths[0]]
        data = self.shape.empty(len(rows), max(lengths, default=0))
        for b, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
            data[b, :length] = self.data[row][start : start + length]
        return data

    def view(self, rows: list[int], lengths: list[int]) -> ContextView:
        data = self.slices(rows, [0] * len(rows), lengths)
        device = self.shape.device
        position = torch.arange(data.shape[1], device=device).expand(len(rows), -1)
        anchors = torch.tensor(lengths, dtype=torch.int64, device=device)
        return ContextView(keys=data[:, :, 0], values=data[:, :, 1], positions=position, anchors=anchors)

    def place(self, row: int, start: int, count: int, memory: Tensor | None) -> Place:
        self._grow(row, start, start + count)
        turns = self.shape.turns(start, start + count)
        return Place(data=self.data[row], first=start, turns=turns, memory=memory)

    def ring(self, row: int, length: int, num_slots: int) -> Ring:
        turns = self.shape.turns(length, length + num_slots)
        return Ring(data=self.data[row], first=0, held=length, key_turns=None, slot_turns=turns)

    def clear(self, row: int) -> None:
        self.data[row] = self.shape.empty(0)

    def nbytes(self, length: int) -> int:
        return length * self.shape.token_bytes

    def save(self, row: int, length: int) -> Tensor:
        return self.data[row][:length].clone()

    def load(self, row: int, saved: Tensor) -> None:
        self.data[row] = saved.clone()


def new_store(shape: ContextShape, num_rows: int, window: int | None) -> ContextStore:
    """A layer's store: a ring of `window` tokens, or without one all that come."""
    return RingStore(shape, num_rows, window) if window else GrowingStore(shape, num_rows)


@dataclass(slots=True, kw_only=True)
class BlockState(State):
    """Rows of a block drafter. Tensors beside the stores have one fixed-size entry per row."""

    lengths: list[int]
    """Committed tokens per row."""
    stores: list[ContextStore]
    """One per layer."""
    fixed: dict[str, Tensor] = field(default_factory=dict)
    """Name -> (rows, ...): last features, words, memories."""

    @classmethod
    def of(cls, state: State) -> BlockState:
        """The state, known to be a block drafter's. Raises HyflashError for another's."""
        if not isinstance(state, cls):
            raise HyflashError(f"expected a block drafter's state, found {type(state).__name__}.")
        return state

    def reset(self, row: int) -> None:
        self.lengths[row] = 0
        for store in self.stores:
            store.clear(row)
        for tensor in self.fixed.values():
            tensor[row].zero_()

    def nbytes(self, row: int) -> int:
        fixed = sum(tensor[row].nbytes for tensor in self.fixed.values())
        return fixed + sum(store.nbytes(self.lengths[row]) for store in self.stores)

    def snapshot(self, row: int) -> dict[str, Any]:
        length = self.lengths[row]
        return {
            "length": length,
            "stores": [store.save(row, length) for store in self.stores],
            "fixed": {name: tensor[row].clone() for name, tensor in self.fixed.items()},
        }

    def restore(self, row: int, saved: dict[str, Any]) -> None:
        self.lengths[row] = saved["length"]
        for store, data in zip(self.stores, saved["stores"], strict=True):
            store.load(row, data)
        for name, tensor in self.fixed.items():
            tensor[row].copy_(saved["fixed"][name])
