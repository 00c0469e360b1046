"""KV cache in slots: one slot per sequence, truncated by length, shared by every row of a batch.

In: packed rows (N tokens of several slots) with their positions. Out: views of the stored keys and values.
Rows past a slot's length stay in memory until they are overwritten; readers mask them.
"""

from __future__ import annotations

import torch
from torch import Tensor

BUCKET_TOKENS = 64
"""Attention reads whole buckets, so that a row's reduction length depends on its position alone."""


def round_up(value: int, step: int) -> int:
    """Smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


class SlotCache:
    """Keys and values (num_slots, G, capacity, K) per layer; both dimensions grow by doubling."""

    def __init__(self, num_layers: int) -> None:
        self.lengths: list[int] = []
        self._free: list[int] = []
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._capacity = 0

    def open(self) -> int:
        """Take the lowest free slot, empty."""
        if self._free:
            slot = min(self._free)
            self._free.remove(slot)
        else:
            slot = len(self.lengths)
            self.lengths.append(0)
        self.lengths[slot] = 0
        return slot

    def close(self, slot: int) -> None:
        """Free a slot. Its memory is zeroed: stale NaN would leak through masked attention (0 * NaN)."""
        if not self.is_open(slot):
            raise ValueError(f"slot {slot} is not open")
        self.wipe(slot, 0)
        self.lengths[slot] = 0
        self._free.append(slot)

    def is_open(self, slot: int) -> bool:
        """Whether the slot is in use."""
        return 0 <= slot < len(self.lengths) and slot not in self._free

    def truncate(self, slot: int, length: int) -> None:
        """Forget tokens at positions >= length."""
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot truncate a cache of {self.lengths[slot]} tokens to {length}")
        self.lengths[slot] = length

    def wipe(self, slot: int, length: int) -> None:
        """Zero what is stored at positions >= length, also of tokens already forgotten."""
        for store in (*self._keys, *self._values):
            if store is not None and slot < store.shape[0]:
                store[slot, :, length:].zero_()

    def unused_layers(self) -> list[int]:
        """Layers that have never stored anything."""
        return [layer for layer, store in enumerate(self._keys) if store is None]

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of `capacity` tokens; takes effect at the next `append`."""
        if capacity > self._capacity:
            self._capacity = round_up(max(capacity, 2 * self._capacity), BUCKET_TOKENS)

    def append(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (N, G, K) of packed rows at (slots (N,), positions (N,))."""
        k, v = self._grown(layer, keys, values)
        k[slots, :, positions] = keys
        v[slots, :, positions] = values

    def view(self, layer: int, low: int, high: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Views (high-low, G, num_tokens, K) of the slots low..high-1."""
        k, v = self._keys[layer], self._values[layer]
        assert k is not None
        assert v is not None
        return k[low:high, :, :num_tokens], v[low:high, :, :num_tokens]

    def nbytes(self) -> int:
        """Bytes of the tokens that the open slots hold."""
        per_token = sum(
            store.shape[1] * store.shape[3] * store.element_size()
            for store in (*self._keys, *self._values)
            if store is not None
        )
        return per_token * sum(n for slot, n in enumerate(self.lengths) if slot not in self._free)

    def _grown(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        for stores, like in ((self._keys, keys), (self._values, values)):
            old = stores[layer]
            num_slots = len(self.lengths)
            if old is None or old.shape[0] < num_slots or old.shape[2] < self._capacity:
                slots = num_slots if old is None else max(num_slots, old.shape[0])
                if old is not None and old.shape[0] < num_slots:
                    slots = max(num_slots, 2 * old.shape[0])
                new = torch.zeros(
                    slots, like.shape[1], self._capacity, like.shape[2], dtype=like.dtype, device=like.device
                )
                if old is not None:
                    new[: old.shape[0], :, : old.shape[2]] = old
                stores[layer] = new
        k, v = self._keys[layer], self._values[layer]
        assert k is not None
        assert v is not None
        return k, v
