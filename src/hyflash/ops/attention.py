"""Attention of draft blocks: each slot sees a masked part of one shared context and its own block (DFlash).

In: queries and keys of blocks, keys of the context they share. Out: one vector per query slot. Context scores
and in-block scores are two small products joined before one softmax, so no (anchors x slots)^2 mask exists.
A far context (FOLD) adds a third: queries of its own, scores sharpened and weighted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hyflash.ops.online_softmax import Span, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class FarContext:
    """Context that stands at one distance from every slot, so that only content tells its tokens apart (FOLD)."""

    keys: Tensor  # (B, T, G, K) normed, not rotated
    values: Tensor  # (B, T, G, K)
    mask: Tensor  # (B, 1 or A, T) bool, True = visible
    cos: Tensor  # (B, A, S, K) of the distance, for the queries
    sin: Tensor
    sharpness: Tensor  # (B, 1 or A) float32 factor of the scores
    log_weight: float  # added to the sharpened scores


def context_mask(
    key_positions: Tensor, anchors: Tensor, *, window: Tensor | None, num_slots: int, counts_slots: bool
) -> Tensor:
    """Which context rows the query slots of each anchor see.

    In: key_positions (B, T), anchors (B, A), window (B,) or None for the full context. The context is strictly
    before the anchor. Out: (B, A, 1, T) bool when every slot sees the same rows: anchor - W <= t < anchor;
    with `counts_slots` (the convention where the window counts the query itself) (B, A, num_slots, T):
    slot s sees anchor + s - W < t < anchor, where slot 0 is the anchor.
    """
    keys = key_positions[:, None, None, :]
    starts = anchors[:, :, None, None]
    before = keys < starts
    if window is None:
        return before
    width = window[:, None, None, None]
    if not counts_slots:
        return before & (keys >= starts - width)
    slots = torch.arange(num_slots, device=anchors.device)[None, None, :, None]
    return before & (keys > starts + slots - width)


def block_attention(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    mask: Tensor,
    *,
    causal: bool,
    far: tuple[Tensor, FarContext] | None = None,
    summary: tuple[Tensor, Tensor] | None = None,
    elsewhere: Span | None = None,
) -> Tensor:
    """Attend from the last Q slots of each block to the context and to the block.

    In: q (B, A, Q, H, K); context_k, context_v (B, T, G, K); block_k, block_v (B, A, S, G, K) with Q <= S;
    mask (B, A, 1 or Q, T) bool, True = visible; `causal` hides later slots of the block; `far` queries
    (B, A, Q, H, K) and what they see; `summary` adds keys (H, M, K) and values (B, A, H, M, K) of each query head,
    visible to all slots; `elsewhere` is what the queries have found in other tokens already, outputs (B, A, Q, H, K)
    and log-sum-exps (B, A, Q, H). T may be 0. Out: (B, A, Q, H * K). Scores and softmax are float32. One softmax over
    scores s and kappa s + ln w is the attention to each part merged by log-sum-exp, the far one with weight w.
    """
    num_rows, num_anchors, num_queries, num_heads, dim = q.shape
    groups, num_slots = context_k.shape[2], block_k.shape[2]
    reps = num_heads // groups

    grouped = _grouped(q, groups)
    seen = _context_scores(grouped, context_k).masked_fill(~mask[:, None, :, None], float("-inf"))

    by_anchor = grouped.permute(0, 1, 3, 4, 2, 5)  # (B, A, G, R, Q, K)
    near = by_anchor.reshape(num_rows, num_anchors, groups, reps * num_queries, dim) @ block_k.permute(0, 1, 3, 4, 2)
    near = near.float().view(num_rows, num_anchors, groups, reps, num_queries, num_slots).transpose(1, 2)
    if causal:
        ones = torch.ones(num_queries, num_slots, dtype=torch.bool, device=q.device)
        near = near.masked_fill(ones.triu(num_slots - num_queries + 1), float("-inf"))

    parts = [seen, near]
    if far is not None:
        parts.append(_far_scores(_grouped(far[0], groups), far[1]))
    if summary is not None:
        more = torch.einsum("baqhk,hmk->bahqm", q.mul(dim**-0.5), summary[0].to(q.dtype)).float()
        parts.append(torch.unflatten(more, 2, (groups, reps)).transpose(1, 2))
    scores = torch.cat(parts, dim=-1)
    weights = torch.split(scores.softmax(-1).to(block_v.dtype), [part.shape[-1] for part in parts], dim=-1)
    out = _mixed(weights[0], context_v)
    to_near = weights[1].transpose(1, 2).reshape(num_rows, num_anchors, groups, reps * num_queries, num_slots)
    own = to_near @ block_v.permute(0, 1, 3, 2, 4)
    out = out + own.view(num_rows, num_anchors, groups, reps, num_queries, dim).permute(0, 1, 4, 2, 3, 5)
    if far is not None:
        out = out + _mixed(weights[2], far[1].values)
    if summary is not None:
        rest = weights[-1].transpose(1, 2).flatten(2, 3)  # (B, A, H, Q, M)
        out = out + (rest @ summary[1].to(rest.dtype)).transpose(2, 3).view_as(out)
    if elsewhere is not None:
        here = out.float(), scores.logsumexp(-1).permute(0, 2, 4, 1, 3)
        merged, _ = merge(here, (elsewhere[0].view_as(out).float(), elsewhere[1].view(out.shape[:-1])))
        out = merged.to(out.dtype)
    return out.reshape(num_rows, num_anchors, num_queries, num_heads * dim)


def _grouped(q: Tensor, groups: int) -> Tensor:
    """Scaled queries (B, A, Q, H, K) by the key head they share: (B, A, Q, G, R, K)."""
    return q.mul(q.shape[-1] ** -0.5).view(*q.shape[:3], groups, q.shape[3] // groups, q.shape[4])


def _context_scores(grouped: Tensor, keys: Tensor) -> Tensor:
    """Scores (B, G, A, R, Q, T) float32 of grouped queries (B, A, Q, G, R, K) and keys (B, T, G, K)."""
    num_rows, num_anchors, num_queries, groups, reps, dim = grouped.shape
    by_group = grouped.permute(0, 3, 1, 4, 2, 5)  # (B, G, A, R, Q, K)
    flat = by_group.reshape(num_rows, groups, num_anchors * reps * num_queries, dim) @ keys.permute(0, 2, 3, 1)
    return flat.float().view(num_rows, groups, num_anchors, reps, num_queries, keys.shape[1])


def _far_scores(grouped: Tensor, far: FarContext) -> Tensor:
    """As `_context_scores`, sharpened, weighted, and -inf where nothing is."""
    scores = _context_scores(grouped, far.keys) * far.sharpness[:, None, :, None, None, None] + far.log_weight
    return scores.masked_fill(~far.mask[:, None, :, None, None], float("-inf"))


def _mixed(weights: Tensor, values: Tensor) -> Tensor:
    """Values (B, T, G, K) mixed by weights (B, G, A, R, Q, T): (B, A, Q, G, R, K)."""
    num_rows, groups, num_anchors, reps, num_queries, num_keys = weights.shape
    flat = weights.reshape(num_rows, groups, num_anchors * reps * num_queries, num_keys) @ values.permute(0, 2, 1, 3)
    return flat.view(num_rows, groups, num_anchors, reps, num_queries, -1).permute(0, 2, 4, 1, 3, 5)
