"""Attention of ragged packed rows over a slot cache, as an attention function for transformers.

In: queries of N packed rows of several sequences. Out: their attention outputs, causal inside the new rows.
A plan, made once per forward, groups rows whose reductions have the same length. In the row-invariant plan a
row reads ceil((position + 1) / 64) whole buckets, so its arithmetic does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hyflash.cache import BUCKET_TOKENS, SlotCache, round_up
from hyflash.errors import UserError

NAME = "ragged_slots"
"""The name under which transformers knows this attention (one with "flash" in it would mean flash-attn there)."""


@dataclass
class Group:
    """Rows of the slots low..high-1 that read the first `num_tokens` cached tokens."""

    low: int
    high: int
    num_tokens: int
    index: Tensor  # (high-low, Q) packed row of each query; dummies repeat a row
    positions: Tensor  # (high-low, Q) position of each query
    real: Tensor | None  # (high-low, Q) bool, None = every query is real
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask (high-low, Q, num_tokens): causal, and only the last `window` tokens where given."""
        if window not in self.masks:
            keys = torch.arange(self.num_tokens)
            seen = keys <= self.positions[..., None]
            if window is not None:
                seen &= keys > self.positions[..., None] - window
            zeros = torch.zeros(seen.shape, dtype=dtype)
            self.masks[window] = zeros.masked_fill(~seen, float("-inf"))
        return self.masks[window]


@dataclass
class Plan:
    """What one forward needs to know about its rows."""

    cache: SlotCache
    slots: Tensor  # (N,)
    positions: Tensor  # (N,)
    groups: list[Group]


def make_plan(cache: SlotCache, seqs: tuple[int, ...], lengths: tuple[int, ...], *, invariant: bool) -> Plan:
    """Plan for `lengths[b]` new rows of each slot `seqs[b]`, packed in that order."""
    starts = [cache.lengths[s] for s in seqs]
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(starts, lengths, strict=True)])
    slots = torch.repeat_interleave(torch.tensor(seqs), torch.tensor(lengths))
    groups = _bucket_groups(seqs, starts, lengths) if invariant else [_one_group(seqs, starts, lengths)]
    return Plan(cache, slots, positions, groups)


def _bucket_groups(seqs: tuple[int, ...], starts: list[int], lengths: tuple[int, ...]) -> list[Group]:
    groups, first = [], 0
    for seq, start, n in zip(seqs, starts, lengths, strict=True):
        position, end = start, start + n
        while position < end:
            num_tokens = round_up(position + 1, BUCKET_TOKENS)
            stop = min(end, num_tokens)
            index = torch.arange(first + position - start, first + stop - start)[None]
            groups.append(Group(seq, seq + 1, num_tokens, index, torch.arange(position, stop)[None], None))
            position = stop
        first += n
    return groups


def _one_group(seqs: tuple[int, ...], starts: list[int], lengths: tuple[int, ...]) -> Group:
    low, high, width = min(seqs), max(seqs) + 1, max(lengths)
    num_tokens = round_up(max(p + n for p, n in zip(starts, lengths, strict=True)), BUCKET_TOKENS)
    index = torch.zeros(high - low, width, dtype=torch.long)
    positions = torch.zeros(high - low, width, dtype=torch.long)
    real = torch.zeros(high - low, width, dtype=torch.bool)
    first = 0
    for seq, start, n in zip(seqs, starts, lengths, strict=True):
        index[seq - low, :n] = torch.arange(first, first + n)
        positions[seq - low, :n] = torch.arange(start, start + n)
        real[seq - low, :n] = True
        first += n
    return Group(low, high, num_tokens, index, positions, real)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    hyflash_plan: Plan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers: query (1, H, N, K), key/value (1, G, N, K) -> output (1, N, H, K)."""
    if hyflash_plan is None or s_aux is not None:
        raise UserError(
            "this model's attention uses sinks or does not pass on what hyflash needs; "
            "expected a family such as Llama, Qwen, Gemma, Phi or Mistral."
        )
    plan, layer = hyflash_plan, int(module.layer_idx)  # type: ignore[arg-type]
    rows = query[0].transpose(0, 1)  # (N, H, K)
    plan.cache.append(layer, plan.slots, plan.positions, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = rows.shape[-1] ** -0.5 if scaling is None else scaling
    out = rows.new_empty(rows.shape[0], rows.shape[1], value.shape[-1])
    for group in plan.groups:
        k, v = plan.cache.view(layer, group.low, group.high, group.num_tokens)
        mask = group.mask(sliding_window, rows.dtype)
        if group.real is None or softcap is not None:
            result = _grouped(rows[group.index], k, v, mask, scale, softcap)
        else:
            result = _fused(rows[group.index], k, v, mask, scale)
        if group.real is None:
            out[group.index[0]] = result[0]
        else:
            out[group.index[group.real]] = result[group.real]
    return out[None], None


def _fused(rows: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`_grouped` by torch's fused kernel: several times faster in bf16, but a row's bits depend on its neighbours."""
    out = nn.functional.scaled_dot_product_attention(
        rows.transpose(1, 2), k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _grouped(rows: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Masked GQA: rows (B, Q, H, K), k/v (B, G, T, K), mask (B, Q, T) -> (B, Q, H, K)."""
    B, Q, H, K = rows.shape
    G = k.shape[1]
    repeat = H // G
    if repeat * Q == 1:  # a one-row bmm takes another code path, with other bits, than the same row among others
        return _grouped(rows.expand(B, 2, H, K), k, v, mask.expand(B, 2, -1), scale, softcap)[:, :1]
    q = rows.view(B, Q, G, repeat, K).permute(0, 2, 3, 1, 4).reshape(B, G, repeat * Q, K)
    scores = (q @ k.transpose(-1, -2)) * scale  # (B, G, repeat*Q, T)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(B, G, repeat, Q, -1) + mask[:, None, None]
    weights = scores.float().softmax(-1).to(v.dtype).view(B, G, repeat * Q, -1)
    out = weights @ v  # (B, G, repeat*Q, K)
    return out.view(B, G, repeat, Q, -1).permute(0, 3, 1, 2, 4).reshape(B, Q, H, -1)
