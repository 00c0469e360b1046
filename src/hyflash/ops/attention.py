"""Attention of draft blocks: each slot sees a masked part of one shared context and its own block (DFlash).

In: queries and keys of blocks, keys of the context they share. Out: one vector per query slot. Context scores
and in-block scores are two small products joined before one softmax, so no (anchors x slots)^2 mask exists.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    summary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend from the last Q slots of each block to the context and to the block.

    In: q (B, A, Q, H, K); context_k, context_v (B, T, G, K); block_k, block_v (B, A, S, G, K) with Q <= S;
    mask (B, A, 1 or Q, T) bool, True = visible; `causal` hides later slots of the block. T may be 0. `summary` adds
    keys (H, M, K) and values (B, A, H, M, K) of each query head, visible to all slots.
    Out: (B, A, Q, H * K). Scores and softmax are float32.
    """
    num_rows, num_anchors, num_queries, num_heads, dim = q.shape
    num_keys, groups = context_k.shape[1:3]
    num_slots = block_k.shape[2]
    reps = num_heads // groups
    grouped = q.mul(dim**-0.5).view(num_rows, num_anchors, num_queries, groups, reps, dim)

    by_group = grouped.permute(0, 3, 1, 4, 2, 5)  # (B, G, A, R, Q, K)
    far = by_group.reshape(num_rows, groups, num_anchors * reps * num_queries, dim) @ context_k.permute(0, 2, 3, 1)
    far = far.float().view(num_rows, groups, num_anchors, reps, num_queries, num_keys)
    far = far.masked_fill(~mask[:, None, :, None], float("-inf"))

    by_anchor = grouped.permute(0, 1, 3, 4, 2, 5)  # (B, A, G, R, Q, K)
    near = by_anchor.reshape(num_rows, num_anchors, groups, reps * num_queries, dim) @ block_k.permute(0, 1, 3, 4, 2)
    near = near.float().view(num_rows, num_anchors, groups, reps, num_queries, num_slots).transpose(1, 2)
    if causal:
        ones = torch.ones(num_queries, num_slots, dtype=torch.bool, device=q.device)
        near = near.masked_fill(ones.triu(num_slots - num_queries + 1), float("-inf"))

    scores = [far, near]
    if summary is not None:
        more = torch.einsum("baqhk,hmk->bahqm", q.mul(dim**-0.5), summary[0].to(q.dtype)).float()
        scores.append(torch.unflatten(more, 2, (groups, reps)).transpose(1, 2))
    weights = torch.cat(scores, dim=-1).softmax(-1).to(block_v.dtype)
    to_far, to_near = weights[..., :num_keys], weights[..., num_keys : num_keys + num_slots]
    out = to_far.reshape(num_rows, groups, num_anchors * reps * num_queries, num_keys) @ context_v.permute(0, 2, 1, 3)
    out = out.view(num_rows, groups, num_anchors, reps, num_queries, dim).permute(0, 2, 4, 1, 3, 5)
    to_near = to_near.transpose(1, 2).reshape(num_rows, num_anchors, groups, reps * num_queries, num_slots)
    own = to_near @ block_v.permute(0, 1, 3, 2, 4)
    own = own.view(num_rows, num_anchors, groups, reps, num_queries, dim).permute(0, 1, 4, 2, 3, 5)
    out = out + own
    if summary is not None:
        rest = weights[..., num_keys + num_slots :].transpose(1, 2).flatten(2, 3)  # (B, A, H, Q, M)
        out = out + (rest @ summary[1].to(rest.dtype)).transpose(2, 3).view_as(out)
    return out.reshape(num_rows, num_anchors, num_queries, num_heads * dim)
