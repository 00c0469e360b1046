"""Softmax attention of fixed queries over a growing text, kept as a state of fixed size: output and log-sum-exp.

In: scores and values of tokens as they come. Out: for each query what attention over all tokens so far gives, exactly
(online softmax, arXiv 1805.02867). Two spans merge by their log-sum-exps, in any pieces. Of no tokens the output is
zero and the log-sum-exp EMPTY, which is finite so that nothing turns into NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

EMPTY = -1e30
CHUNK = 64

Span = tuple[Tensor, Tensor]
"""Outputs (..., K) and log-sum-exps (...)."""


def attend(scores: Tensor, values: Tensor, mask: Tensor) -> Span:
    """Scores (..., M, T), values (..., T, K), mask broadcast to the scores, True = seen -> (..., M, K), (..., M)."""
    scores = scores.masked_fill(~mask, EMPTY)
    most = (
        scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), EMPTY)
    )
    weights = (scores - most).exp() * mask
    total = weights.sum(-1, keepdim=True)
    seen = total > 0
    out = (weights @ values) / torch.where(seen, total, 1.0)
    lse = torch.where(seen, most + torch.where(seen, total, 1.0).log(), EMPTY)
    return out, lse[..., 0]


def merge(one: Span, other: Span) -> Span:
    """The attention over both spans."""
    most = torch.maximum(one[1], other[1]).detach()
    a, b = (one[1] - most).exp(), (other[1] - most).exp()
    total = a + b
    out = (a[..., None] * one[0] + b[..., None] * other[0]) / total[..., None]
    return out, torch.where(most > EMPTY / 2, most + total.log(), EMPTY)


def nothing(like: Tensor) -> Span:
    """The span of no tokens, for outputs like (..., K)."""
    return torch.zeros_like(like), like.new_full(like.shape[:-1], EMPTY)


def at_anchors(queries: Tensor, keys: Tensor, values: Tensor, anchors: Tensor) -> Tensor:
    """For every anchor a what the queries find in the tokens before it.

    In: queries (H, M, K), keys and values (B, T, G, K), anchors (B, A) in 0..T. Out: (B, A, H, M, K) float32. Linear in
    T and in A: whole chunks are merged one after the other, and each anchor adds the tokens of its own chunk.
    """
    with torch.autocast(keys.device.type, enabled=False):
        heads, groups = queries.shape[0], keys.shape[2]
        pad = -keys.shape[1] % CHUNK + CHUNK  # one chunk more, so that an anchor at T has one to start from
        size = (-1, CHUNK)
        keys, values = (
            torch.unflatten(torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, pad)), 1, size).transpose(2, 3)
            for x in (keys, values)
        )  # (B, N, G, C, K)
        asked = (queries.float() * queries.shape[-1] ** -0.5).view(groups, -1, queries.shape[-1])  # (G, R * M, K)
        scores = torch.einsum("gmk,bngck->bngmc", asked, keys)
        whole = attend(scores, values, torch.ones_like(scores, dtype=torch.bool))
        spans = [nothing(whole[0][:, 0])]
        for n in range(keys.shape[1] - 1):
            spans.append(merge(spans[-1], (whole[0][:, n], whole[1][:, n])))
        row, chunk = torch.arange(len(keys), device=keys.device)[:, None], anchors // CHUNK
        inside = torch.arange(CHUNK, device=keys.device) < (anchors % CHUNK)[..., None]  # (B, A, C)
        own = attend(scores[row, chunk], values[row, chunk], inside[:, :, None, None])
        before = tuple(torch.stack(part, 1)[row, chunk] for part in zip(*spans, strict=True))
        found, _ = merge((before[0], before[1]), own)  # (B, A, G, R * M, K)
        return found.reshape(*anchors.shape, heads, -1, found.shape[-1])


def find(queries: Tensor, keys: Tensor, values: Tensor) -> Span:
    """What queries (H, M, K) find in keys and values (T, G, K): outputs (H, M, K), log-sum-exps (H, M), float32."""
    out, lse = look((queries.float() * queries.shape[-1] ** -0.5).transpose(0, 1), keys, values)
    return out.transpose(0, 1), lse.transpose(0, 1)


def look(queries: Tensor, keys: Tensor, values: Tensor) -> Span:
    """What scaled queries (Q, H, K) see in keys and values (T, G, K): outputs (Q, H, K), log-sum-exps (Q, H),
    float32."""
    num, heads, width = queries.shape
    groups = keys.shape[1]
    asked = queries.float().view(num, groups, -1, width)
    scores = torch.einsum("qgrk,tgk->gqrt", asked, keys.float()).flatten(1, 2)
    out, lse = attend(scores, values.float().transpose(0, 1), torch.ones_like(scores, dtype=torch.bool))
    by_query = (num, heads)
    return (
        torch.unflatten(out, 1, (num, -1)).transpose(0, 1).reshape(*by_query, width),
        torch.unflatten(lse, 1, (num, -1)).transpose(0, 1).reshape(by_query),
    )
