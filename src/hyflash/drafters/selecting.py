"""Block drafters that choose their tokens with a candidate selector: options, loss and proposal of them all.

In: what a HyFlash reads; with `memory_core` none, as here by default, that is a DFlash. Out: draft tokens along the
selector's path. The selector is trained with the true tokens as predecessors, together with the backbone or alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from hyflash.core import DraftCost, DraftOutput, DraftRequest, LossTerms, Proposal, TargetHooks, TrainBatch
from hyflash.drafters import hyflash
from hyflash.drafters.base import DrafterConfig, cut_at_nonfinite, to_proposal
from hyflash.drafters.context import BlockState
from hyflash.drafters.hyflash import BackboneConfig
from hyflash.drafters.objective import TrainingHead, hit_metrics, row_weights, tokens_before, training_head
from hyflash.drafters.picking import Picker
from hyflash.drafters.selector import PairScorer, selection_losses, walk
from hyflash.errors import UserError
from hyflash.ops.losses import BestColumns, RowLosses, best_logprobs, candidate_losses


class SelectingConfig(BackboneConfig):
    """Options of drafters with a selector, over those of `hyflash`."""

    selector_top_k: int = Field(default=16, ge=1, description="candidates per slot")
    selector_loss_weight: float = Field(
        default=1.0, ge=0, description="weight of the selector's loss beside the backbone's; alone it needs none"
    )

    @classmethod
    def tiny(cls) -> Self:
        return cls(num_layers=1, num_draft_tokens=3, num_taps=2, selector_top_k=4)

    def resolved(self, hooks: TargetHooks) -> Self:
        """Fill in what the target decides and check the whole. Raises UserError."""
        if self.correction != "none":
            raise UserError(
                f"correction is {self.correction}; expected none: the selector is what makes tokens of a block depend "
                "on one another."
            )
        least = self.draft_vocab_size or hooks.info.vocab_size
        if self.selector_top_k > least:
            raise UserError(f"selector_top_k is {self.selector_top_k}; expected at most the {least} draft tokens.")
        return super().resolved(hooks)


class SelectingDrafter(hyflash.DrafterImpl):
    """A HyFlash, or with its memory off a DFlash, and a candidate selector in place of the in-block correction."""

    Config: ClassVar[type[DrafterConfig]] = SelectingConfig
    optional_tensors: ClassVar[tuple[str, ...]] = ("candidate_selector.*", "layers.*.memory.*")
    config: SelectingConfig

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        """Build with fresh weights; a new selector changes nothing yet. Raises UserError."""
        super().__init__(config, hooks)
        self.candidate_selector = self._new_selector()

    @abstractmethod
    def _new_selector(self) -> PairScorer:
        """A selector that scores every pair alike."""

    @classmethod
    def import_config(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a DFlash or HyFlash checkpoint; the selector takes the place of its in-block correction."""
        return {**values, "correction": "none"}

    @classmethod
    def import_weights(cls, weights: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        """Without the weights of an in-block correction."""
        own = super().import_weights(weights, config)
        return {name: tensor for name, tensor in own.items() if not name.startswith("correction.")}

    # --------------------------------------------------------------------------------------- training

    def loss(self, out: DraftOutput, batch: TrainBatch) -> LossTerms:
        """Backbone loss + weighted selector loss over labelled positions; of a frozen backbone, the selector's alone.

        Metrics are of the path, those of the backbone's own first choices are named `base_`; `candidate_recall` is
        the share of positions whose label is among the candidates.
        """
        mask = out.mask
        target = self._target_hidden(batch)[mask] if self.config.needs_final_tap_for_loss else None
        head, rows, best = self._candidates(out, mask, target)
        found = best.columns == head.labels[:, None]
        scores = self._scores_after_labels(out, batch, mask, best.logprobs, head.token_ids(best.columns))
        loss, counted, correct = selection_losses(self.candidate_selector, scores, best.logprobs, found)
        weights = row_weights(rows, mask, batch, self.config)
        numerator = (loss * weights).sum()
        if self.frozen:
            weights = weights * counted
        else:
            numerator = (rows.loss * weights).sum() + self.config.selector_loss_weight * numerator
        recall = (float(found.any(-1).sum()), float(len(found)))
        return LossTerms(
            numerator=numerator,
            denominator=weights.sum(),
            metrics={
                **hit_metrics(correct, mask),
                **hit_metrics(rows.correct, mask, "base_"),
                "candidate_recall": recall,
            },
        )

    def predict(self, out: DraftOutput, batch: TrainBatch) -> Tensor:
        """The best candidate of every position (B, A, L), each after the label before it."""
        every = torch.ones_like(out.mask)
        head, _, best = self._candidates(out, every, None)
        ids = head.token_ids(best.columns)
        chosen = self._scores_after_labels(out, batch, every, best.logprobs, ids).argmax(-1, keepdim=True)
        return ids.gather(-1, chosen).view(out.labels.shape)

    def _candidates(
        self, out: DraftOutput, mask: Tensor, target: Tensor | None
    ) -> tuple[TrainingHead, RowLosses, BestColumns]:
        head = training_head(self.hooks, self._reduced(), out.labels[mask])
        rows, best = candidate_losses(
            out.hidden[mask],
            head.labels,
            head=head.logits,
            num_candidates=self.config.selector_top_k,
            kind="ce" if target is None else self.config.loss,
            target_hidden=target,
        )
        return head, rows, best

    def _scores_after_labels(
        self, out: DraftOutput, batch: TrainBatch, mask: Tensor, logprobs: Tensor, ids: Tensor
    ) -> Tensor:
        """Scores (N, K) of candidates ids, logprobs (N, K) at the positions of a mask, after the true tokens."""
        selector, before = self.candidate_selector, tokens_before(out, batch)[mask]
        contexts = selector.contexts(out.hidden.flatten(0, 1)).view(*mask.shape, -1)[mask]
        some, where = torch.unique(ids, return_inverse=True)  # few of many: each is projected once
        pairs = selector.score(contexts, selector.predecessors(before)[:, None], selector.successors(some)[where])
        return logprobs + pairs[:, 0]

    # ---------------------------------------------------------------------------------------- serving

    def _head_packs(self) -> bool:
        """The kernels' own pass ends with the likeliest tokens; the selector needs the candidates."""
        return False

    def _choose(self, state: BlockState, request: DraftRequest, hidden: Tensor, wanted: tuple[int, ...]) -> Proposal:
        """Tokens of hidden (B, L, D) along the selector's path, cut at the first position that is not finite. Samples
        are of the candidates alone."""
        logprobs, ids = self._listed(state, request, hidden)
        picker = Picker(request.draws)
        path = walk(self.candidate_selector, hidden, self._anchors(request), logprobs, ids, picker)
        lengths, cut = cut_at_nonfinite(path.finite, wanted)
        tokens = ids.gather(-1, path.places[..., None])[..., 0]
        proposal = to_proposal(tokens, lengths, path.probs.nan_to_num(), cut)
        return picker.finish(proposal, ids, self.hooks.info.vocab_size, stated=False)

    def _listed(self, state: BlockState, request: DraftRequest, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids (B, L, K) of each slot's candidates, best first."""
        count = self.config.selector_top_k
        if self.packed is not None and self.draft_ids is not None:
            return self.packed.candidates(state, request, hidden, count, reduced=self._reduced_head())
        head = self._serving_head(state, request)
        logprobs, columns = best_logprobs(head.logits(hidden), count)
        return logprobs, head.token_ids(columns)

    def cost(self, context_tokens: int) -> DraftCost:
        """As HyFlash, and the selector's pass."""
        cost, cfg = super().cost(context_tokens), self.config
        extra = self.candidate_selector.flops(cfg.num_draft_tokens, cfg.selector_top_k)
        return replace(cost, propose_flops=cost.propose_flops + extra)
