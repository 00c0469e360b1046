"""EAGLE's compact memory: of old pairs one slot in r stays, the mean of its tokens' pairs (after MASW, 2608.30252).

In: normed pairs of committed tokens. Out: keys and values of tokens and slots at their true positions, and who sees
them by the rule of `compaction.py`. Ours: an EAGLE layer makes keys of a pair alone, with nothing read, so a slot's
input is the mean of its pairs; a running sum of the slot that is not full yet waits in the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyflash.drafters.compaction import Compaction, CompactState, Entries
from hyflash.drafters.context import BlockState
from hyflash.drafters.eagle_layer import PairAttention
from hyflash.errors import HyflashError
from hyflash.ops.rope import rope_tables, rotate

PARTIAL = "partial"
"""The state's entry (rows, 2D) float32: sum of the pairs of the slot that is not full yet."""


@dataclass(kw_only=True)
class MemoryState(BlockState):
    """Rows whose keys and values are in a compact memory, which counts its tokens itself."""

    memory: CompactState

    @classmethod
    def of(cls, state: BlockState) -> MemoryState:  # type: ignore[override]
        """The state, known to have a memory. Raises HyflashError for another."""
        if not isinstance(state, cls):
            raise HyflashError(f"expected an eagle's state with slots, found {type(state).__name__}.")
        return state

    def reset(self, row: int) -> None:
        super().reset(row)
        self.memory.reset(row)

    def nbytes(self, row: int) -> int:
        return super().nbytes(row) + self.memory.nbytes(row)

    def snapshot(self, row: int) -> dict[str, Any]:
        return {**super().snapshot(row), "memory": self.memory.snapshot(row)}

    def restore(self, row: int, saved: dict[str, Any]) -> None:
        super().restore(row, saved)
        self.memory.restore(row, saved["memory"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMaker:
    """Makes slots out of pairs."""

    rule: Compaction
    attention: PairAttention
    rope_theta: float

    def entries(self, pairs: Tensor) -> tuple[Tensor, Tensor, Entries]:
        """Rotated keys and values (B, N, G, K) of whole texts' pairs (B, T, P), tokens first and slots behind."""
        rule, num_tokens = self.rule, pairs.shape[1]
        slots = rule.slot_positions(0, rule.num_slots(num_tokens))
        positions = torch.tensor([*range(num_tokens), *slots], device=pairs.device)
        keys, values = self.attention.keys_values(pairs)
        if slots:
            means, _ = slot_means(rule, pairs, 0, None)
            slot_keys, slot_values = self.attention.keys_values(means, of_slots=True)
            keys, values = torch.cat((keys, slot_keys), dim=1), torch.cat((values, slot_values), dim=1)
        is_slot = torch.arange(len(positions), device=pairs.device) >= num_tokens
        known = Entries(positions=positions.expand(len(pairs), -1), is_slot=is_slot)
        return self._turned(keys, positions), values, known

    def take_in(self, state: MemoryState, rows: list[int], lengths: list[int], pairs: Tensor) -> None:
        """Keep keys and values of the next tokens' pairs (B, T, P), and of the slots that they fill."""
        keys, values = self.attention.keys_values(pairs)
        for b, (row, count) in enumerate(zip(rows, lengths, strict=True)):
            if count == 0:
                continue
            start = state.memory.lengths[row]
            positions = torch.arange(start, start + count, device=pairs.device)
            tokens = torch.stack((self._turned(keys[b, :count], positions), values[b, :count]), dim=1)
            state.memory.append(row, tokens[None], self._filled(state, row, start, pairs[b, :count])[None])

    def _filled(self, state: MemoryState, row: int, start: int, pairs: Tensor) -> Tensor:
        """Keys and values (n, 2, G, K) of slots that pairs (T, P) fill; what is left over stays in the state."""
        rule, stop = self.rule, start + len(pairs)
        if not rule.ratio:
            return state.memory.shape.empty(0)
        means, rest = slot_means(rule, pairs, start, state.fixed[PARTIAL][row])
        state.fixed[PARTIAL][row] = rest
        slots = rule.slot_positions(rule.num_slots(start), rule.num_slots(stop))
        keys, values = self.attention.keys_values(means, of_slots=True)
        return torch.stack((self._turned(keys, torch.tensor(slots, device=pairs.device)), values), dim=1)

    def _turned(self, keys: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rope_tables(positions, dim=self.attention.head_dim, theta=self.rope_theta)
        return rotate(keys, cos, sin)


def slot_means(rule: Compaction, pairs: Tensor, start: int, partial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Inputs of the slots that tokens at positions from `start` on fill.

    In: their pairs (..., T, P) and the sum (..., P) float32 of earlier ones in the first slot; None: there are none.
    Out: means (..., n, P) in the pairs' dtype, and the sum (..., P) of the slot that is not full. The text's first
    token has no feature before it and is left out.
    """
    sums = pairs[..., max(0, rule.sink - start) :, :].float()
    if start == 0 and rule.sink == 0 and pairs.shape[-2]:
        sums = torch.cat((torch.zeros_like(sums[..., :1, :]), sums[..., 1:, :]), dim=-2)
    before = max(0, start - rule.sink) % rule.ratio
    if before and partial is not None:
        missing = sums.new_zeros(*sums.shape[:-2], before - 1, sums.shape[-1])
        sums = torch.cat((partial[..., None, :], missing, sums), dim=-2)
    num = sums.shape[-2] // rule.ratio
    full, rest = sums[..., : num * rule.ratio, :], sums[..., num * rule.ratio :, :].sum(-2)
    sizes = torch.full((num, 1), rule.ratio, device=sums.device)
    if num and rule.sink == 0 and start < rule.ratio:
        sizes[0] = max(1, rule.ratio - 1)
    means = torch.unflatten(full, -2, (num, rule.ratio)).sum(-2) / sizes
    return means.to(pairs.dtype), rest


def visible(rule: Compaction, known: Entries, anchors: Tensor, num_steps: int, *, counts_slots: bool) -> Tensor:
    """Which entries the steps of drafts from anchors (B, A) see: (B, A, 1, N), or with `counts_slots`, where each step
    has a window of its own, (B, A, num_steps, N). Only committed tokens, and never the text's first."""
    steps = torch.arange(num_steps if counts_slots else 1, device=anchors.device)
    positions = anchors[..., None] + steps  # (B, A, Q)
    queries = Entries(
        positions=positions.flatten(1),
        is_slot=torch.zeros(positions[0].numel(), dtype=torch.bool, device=anchors.device),
    )
    seen = torch.unflatten(rule.visible(queries, known), 1, positions.shape[1:])
    keys = known.positions[:, None, None]
    return seen & (keys < anchors[..., None, None]) & (keys > 0)
