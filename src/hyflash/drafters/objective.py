"""Training objective of drafters with features, from the hidden states of all draft positions to sums.

In: a DraftOutput and its batch. Out: LossTerms: weighted row losses, accuracy per position, teacher-forced tau.
With a reduced vocabulary the loss sees its static list and the batch's labels, as serving adds what a context holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hyflash.core import DraftOutput, LossTerms, TargetHooks, TrainBatch
from hyflash.drafters.feature_config import FeatureConfig
from hyflash.drafters.vocab import HeadRows, full_head, head_logits, training_vocab
from hyflash.ops.losses import Addition, Head, RowLosses, decay_weights, dpace_weights, head_losses, leading_run

Reduced = tuple[HeadRows, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTraining:
    """What a head of the drafter's own brings into the objective."""

    latent: Tensor | None = None  # (B, A, L, R): `latent @ table.T` is added to the logits
    table: Tensor | None = None  # (V, R)
    base_share: float = 0.0  # of the loss, on the logits without the addition
    confidence: Tensor | None = None  # (B, A, L) logits of P(draft accepted), learnt from the overlap with the target
    confidence_weight: float = 0.0


PLAIN = HeadTraining()


def block_loss(
    out: DraftOutput,
    batch: TrainBatch,
    *,
    config: FeatureConfig,
    hooks: TargetHooks,
    reduced: Reduced | None,
    target: Tensor | None,
    extra: HeadTraining = PLAIN,
) -> LossTerms:
    """Sum of row losses times position and anchor weights, over labelled positions.

    `reduced` has the head's rows and the static ids (n,), or is None for all tokens; `target` (B, A, L, D) is the
    target's own input of the head, for losses that need its distribution. Metrics: "acc@k", and "tau" = mean of
    1 + leading right drafts.
    """
    mask = out.mask
    labels = out.labels[mask]
    head = training_head(hooks, reduced, labels)
    addition = None
    if extra.latent is not None and extra.table is not None:
        table = extra.table if head.ids is None else extra.table[head.ids]
        addition = Addition(latent=extra.latent[mask], table=table, base_share=extra.base_share)
    rows = head_losses(
        out.hidden[mask],
        head.labels,
        head=head.logits,
        kind=config.loss,
        target_hidden=None if target is None else target[mask],
        addition=addition,
    )
    loss, metrics = _with_confidence(rows, mask, extra)
    weights = row_weights(rows, mask, batch, config)
    metrics |= hit_metrics(rows.correct, mask)
    return LossTerms(numerator=(loss * weights).sum(), denominator=weights.sum(), metrics=metrics)


def own_head_loss(
    out: DraftOutput,
    batch: TrainBatch,
    *,
    config: FeatureConfig,
    hooks: TargetHooks,
    reduced: Reduced | None,
    target: Tensor | None,
    weight: Tensor,
) -> LossTerms:
    """As `block_loss`, of a head of the drafter's own: rows `weight` (M, D) of the static ids, or of all tokens.

    Labels that it does not list count as wrong and weigh nothing; the target's distribution is over the same ids.
    """
    mask, columns = out.mask, out.labels[out.mask]
    head: Head = partial(full_head, hooks)
    if reduced is not None:
        rows, ids = reduced
        places = torch.full((hooks.info.vocab_size,), -1, device=ids.device)
        places[ids] = torch.arange(len(ids), device=ids.device)
        columns, own = places[columns], rows(ids)
        head = partial(head_logits, weight=own[0], bias=own[1])
    listed = columns >= 0
    found = head_losses(
        out.hidden[mask],
        columns.clamp(min=0),
        head=head,
        kind=config.loss,
        target_hidden=None if target is None else target[mask],
        addition=Addition(latent=out.hidden[mask], table=weight, alone=True),
    )
    found = replace(found, prob=found.prob * listed, correct=found.correct & listed)
    weights = row_weights(found, mask, batch, config) * listed
    metrics = hit_metrics(found.correct, mask)
    return LossTerms(numerator=(found.loss * weights).sum(), denominator=weights.sum(), metrics=metrics)


def _with_confidence(
    rows: RowLosses, mask: Tensor, extra: HeadTraining
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """Loss per row (N,) with that of the confidence, and its metrics: mean error and its mean size."""
    if extra.confidence is None or not extra.confidence_weight:
        return rows.loss, {}
    stated = extra.confidence[mask].float()
    wrong = F.binary_cross_entropy_with_logits(stated, rows.overlap, reduction="none")
    error, count = stated.detach().sigmoid() - rows.overlap, float(len(stated))
    metrics = {
        "confidence_bias": (float(error.sum()), count),
        "confidence_error": (float(error.abs().sum()), count),
        "overlap": (float(rows.overlap.sum()), count),
    }
    return rows.loss + extra.confidence_weight * wrong, metrics


def row_weights(rows: RowLosses, mask: Tensor, batch: TrainBatch, config: FeatureConfig) -> Tensor:
    """What each labelled position weighs, (N,) in the order of the mask (B, A, L)."""
    if config.dpace:
        prob = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, rows.prob)
        position = dpace_weights(prob, mask)
    else:
        position = decay_weights(mask.shape[-1], config.gamma, mask.device).expand(mask.shape)
    return (position * batch.weights[..., None])[mask]


def hit_metrics(correct: Tensor, mask: Tensor, prefix: str = "") -> dict[str, tuple[float, float]]:
    """Teacher-forced tau and accuracy by position of right drafts (N,), in the order of the mask (B, A, L)."""
    hits, counted = torch.zeros_like(mask).masked_scatter(mask, correct), mask[..., 0]
    metrics = {f"{prefix}tau": (float((1 + leading_run(hits))[counted].sum()), float(counted.sum()))}
    for k in range(mask.shape[-1]):
        metrics[f"{prefix}acc@{k + 1}"] = (float(hits[..., k].sum()), float(mask[..., k].sum()))
    return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHead:
    """The head to train against."""

    logits: Head
    labels: Tensor  # (N,) int64, each label's column
    ids: Tensor | None  # (M,) int64, token ids of the columns; None: the whole vocabulary

    def token_ids(self, columns: Tensor) -> Tensor:
        """Token ids of logit columns."""
        return columns if self.ids is None else self.ids[columns]


def training_head(hooks: TargetHooks, reduced: Reduced | None, labels: Tensor) -> TrainingHead:
    """The whole head, or with a reduced vocabulary its static list and the labels (N,)."""
    if reduced is None:
        return TrainingHead(logits=partial(full_head, hooks), labels=labels, ids=None)
    rows, static = reduced
    ids, index = training_vocab(static, labels)
    weight, bias = rows(ids)
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        weight = weight.to(torch.get_autocast_dtype(device))  # once, not once a chunk
    return TrainingHead(logits=partial(head_logits, weight=weight, bias=bias), labels=index, ids=ids)


def block_labels(batch: TrainBatch, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids (B, A, 1 + L) from each anchor on, and which of the L after it are labels (B, A, L).

    A position after a gap is never reached in decoding, so it is not a label either.
    """
    last = batch.tokens.shape[1] - 1
    ahead = batch.anchors.clamp(0, last)[..., None] + torch.arange(1 + num_draft_tokens, device=batch.anchors.device)
    exists = (ahead < batch.lengths[:, None, None]) & batch.anchor_mask[..., None]
    wanted = at_positions(batch.loss_mask, ahead.clamp(max=last)) & exists
    return at_positions(batch.tokens, ahead.clamp(max=last)), wanted[..., 1:].long().cumprod(-1).bool()


def tokens_before(out: DraftOutput, batch: TrainBatch) -> Tensor:
    """Token ids (B, A, L) before each draft position: the anchor's, then the labels."""
    anchors = batch.tokens.gather(1, batch.anchors.clamp(0, batch.tokens.shape[1] - 1))
    return torch.cat((anchors[..., None], out.labels[..., :-1]), dim=-1)


def at_positions(values: Tensor, positions: Tensor) -> Tensor:
    """values (B, T, ...) at positions (B, A, L) -> (B, A, L, ...)."""
    rows = torch.arange(len(values), device=values.device)[:, None, None]
    return values[rows, positions]
