"""Losses of draft tokens, one value per row, computed chunk by chunk so that no (rows, vocabulary) tensor is kept.

In: hidden states before a frozen head, labels, and for distillation a second head input that gives the target's
distribution. Out: loss per row with gradient to the hidden states only, and what the metrics need. A trained low-rank
addition to the logits has gradients too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LossKind = Literal["ce", "ce_tv", "kl"]
Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLosses:
    """Per-row results. Only `loss` carries a gradient."""

    loss: Tensor  # (N,) float32
    prob: Tensor  # (N,) float32, the drafter's probability of the label
    correct: Tensor  # (N,) bool, the label is the most likely token
    overlap: Tensor  # (N,) float32, 1 - total variation to the target's distribution; 0 where that is not given


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """Low-rank addition to the logits: `latent @ table.T`."""

    latent: Tensor  # (N, R)
    table: Tensor  # (V, R), rows in the order of the head's logits
    base_share: float = 0.0
    """Share of the loss, 0 to 1, that is of the logits without the addition."""
    alone: bool = False
    """It takes the place of the head's logits: a head of the drafter's own; the other is the target's only."""


def chunk_loss(
    logits: Tensor, labels: Tensor, target_logits: Tensor | None, kind: LossKind
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, cross-entropy and overlap per row (n,) of float32 logits (n, V).

    ce: cross-entropy of the label. ce_tv: 0.1 ce + 0.9 total variation to the target's distribution (DSpark).
    kl: KL(target || drafter). The last two need `target_logits` (n, V), and so does the overlap, else 0.
    """
    ce = F.cross_entropy(logits, labels, reduction="none")
    if target_logits is None:
        assert kind == "ce", f"loss {kind!r} needs the target's logits"
        return ce, ce, torch.zeros_like(ce)
    target = target_logits.softmax(-1)
    overlap = torch.minimum(target, logits.softmax(-1)).sum(-1)
    if kind == "kl":
        return F.kl_div(logits.log_softmax(-1), target, reduction="none").sum(-1), ce, overlap
    return ce if kind == "ce" else 0.1 * ce + 0.9 * (1.0 - overlap), ce, overlap


class _HeadLoss(torch.autograd.Function):
    """Takes each chunk's gradient at once, in the forward pass; the backward pass only scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        target_hidden: Tensor | None,
        head: Head,
        kind: LossKind,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        want_grad = ctx.needs_input_grad[0]
        losses, probs, corrects, overlaps, grads = [], [], [], [], []
        for start in range(0, hidden.shape[0], chunk_rows):
            part = slice(start, start + chunk_rows)
            with torch.set_grad_enabled(want_grad):
                rows = hidden[part].detach().requires_grad_(want_grad)
                logits = head(rows).float()
                with torch.no_grad():
                    target_logits = None if target_hidden is None else head(target_hidden[part]).float()
                loss, ce, overlap = chunk_loss(logits, labels[part], target_logits, kind)
                if want_grad:
                    grads.append(torch.autograd.grad(loss.sum(), rows)[0])
            probs.append(ce.detach().neg().exp())
            corrects.append(logits.detach().argmax(-1) == labels[part])
            losses.append(loss.detach())
            overlaps.append(overlap.detach())
        empty = hidden.new_zeros(0, dtype=torch.float32)
        ctx.save_for_backward(torch.cat(grads) if grads else torch.zeros_like(hidden))
        prob = torch.cat([empty, *probs])
        correct = torch.cat([empty.bool(), *corrects])
        overlap = torch.cat([empty, *overlaps])
        ctx.mark_non_differentiable(prob, correct, overlap)
        return torch.cat([empty, *losses]), prob, correct, overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return (grads[0][:, None] * rows).to(rows.dtype), None, None, None, None, None


def head_losses(
    hidden: Tensor,
    labels: Tensor,
    *,
    head: Head,
    kind: LossKind = "ce",
    target_hidden: Tensor | None = None,
    addition: Addition | None = None,
    chunk_rows: int = 512,
) -> RowLosses:
    """Loss of each row of hidden (N, D) against labels (N,) under a frozen `head` (n, D) -> (n, V).

    `target_hidden` (N, D) gives the target's distribution through the same head. With an `addition` all else is of
    the sum of both logits. N may be 0.
    """
    if addition is not None:
        return _added_losses(hidden, labels, head, kind, target_hidden, addition, chunk_rows)
    loss, prob, correct, overlap = _HeadLoss.apply(hidden, labels, target_hidden, head, kind, chunk_rows)  # type: ignore[no-untyped-call]
    return RowLosses(loss=loss, prob=prob, correct=correct, overlap=overlap)


def _added_losses(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
    kind: LossKind,
    target_hidden: Tensor | None,
    addition: Addition,
    chunk_rows: int,
) -> RowLosses:
    """The table's gradient sums over rows, whose weights the caller has yet to choose: chunks are computed again in the
    backward pass, where `_HeadLoss` need not."""
    share = addition.base_share

    def chunk(rows: Tensor, latent: Tensor, table: Tensor, part: slice) -> tuple[Tensor, ...]:
        added = (latent @ table.T).float()
        base = torch.zeros_like(added) if addition.alone else head(rows).float()
        logits = base + added
        with torch.no_grad():
            target_logits = None if target_hidden is None else head(target_hidden[part]).float()
        loss, ce, overlap = chunk_loss(logits, labels[part], target_logits, kind)
        if share > 0:
            loss = (1.0 - share) * loss + share * chunk_loss(base, labels[part], target_logits, kind)[0]
        return loss, ce.detach().neg().exp(), logits.argmax(-1) == labels[part], overlap.detach()

    empty = hidden.new_zeros(0, dtype=torch.float32)
    outs: list[tuple[Tensor, ...]] = [(empty, empty, empty.bool(), empty)]
    for start in range(0, hidden.shape[0], chunk_rows):
        part = slice(start, start + chunk_rows)
        rows = (hidden[part], addition.latent[part], addition.table)
        outs.append(checkpoint(chunk, *rows, part, use_reentrant=False, preserve_rng_state=False))
    loss, prob, correct, overlap = (torch.cat(parts) for parts in zip(*outs, strict=True))
    return RowLosses(loss=loss, prob=prob, correct=correct, overlap=overlap)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestColumns:
    """The likeliest columns of each row, best first."""

    logprobs: Tensor  # (N, K) float32, with gradient
    columns: Tensor  # (N, K) int64


def best_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities, float32, and columns (..., K) of the `count` best of logits (..., M), best first."""
    values, columns = logits.float().topk(count, dim=-1)
    return values - logits.float().logsumexp(-1, keepdim=True), columns


def candidate_losses(
    hidden: Tensor,
    labels: Tensor,
    *,
    head: Head,
    num_candidates: int,
    kind: LossKind = "ce",
    target_hidden: Tensor | None = None,
    chunk_rows: int = 512,
) -> tuple[RowLosses, BestColumns]:
    """`head_losses` and the K = `num_candidates` best columns of each row, through which gradients flow as well.

    What comes back to those is known only later, so each chunk's logits are computed again in the backward pass.
    """

    def chunk(rows: Tensor, labels: Tensor, target_rows: Tensor | None) -> tuple[Tensor, ...]:
        logits = head(rows).float()
        with torch.no_grad():
            target_logits = None if target_rows is None else head(target_rows).float()
        loss, ce, overlap = chunk_loss(logits, labels, target_logits, kind)
        return loss, ce, overlap.detach(), *best_logprobs(logits, num_candidates)

    count, parts = len(hidden), []
    for start in range(0, max(count, 1), chunk_rows):
        part = slice(start, start + chunk_rows)
        inputs = (hidden[part], labels[part], None if target_hidden is None else target_hidden[part])
        parts.append(checkpoint(chunk, *inputs, use_reentrant=False, preserve_rng_state=False))
    loss, ce, overlap, logprobs, columns = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    rows = RowLosses(loss=loss, prob=ce.detach().neg().exp(), correct=columns[:, 0] == labels, overlap=overlap)
    return rows, BestColumns(logprobs=logprobs, columns=columns)


def decay_weights(num_positions: int, gamma: float, device: torch.device) -> Tensor:
    """Weights exp(-(k-1)/gamma) of draft positions k = 1..L, (L,) float32; gamma 0 weighs all alike (DFlash)."""
    steps = torch.arange(num_positions, dtype=torch.float32, device=device)
    return torch.exp(-steps / gamma) if gamma > 0 else torch.ones_like(steps)


def dpace_weights(prob: Tensor, mask: Tensor, *, alpha: float = 0.5) -> Tensor:
    """What each position is worth: w_k = sum_{m>=k} prod_{i<=m} ((1-alpha) p_i + alpha) (D-PACE, 2605.18810).

    In: prob (..., L) of the labels without gradient, mask (..., L). Out: (..., L) float32, 0 where masked.
    """
    smooth = ((1.0 - alpha) * prob + alpha) * mask
    survive = smooth.cumprod(-1)
    return survive.flip(-1).cumsum(-1).flip(-1) * mask


def leading_run(hits: Tensor) -> Tensor:
    """Number of leading True values along the last axis of hits (..., L)."""
    return hits.long().cumprod(-1).sum(-1)
