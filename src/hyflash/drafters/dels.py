"""DeLS: a frozen block drafter and a small local head, whose logits are added as experts (arXiv 2607.07409).

In: what the backbone reads, a DFlash or a HyFlash (the long expert: features of the context, no view of its own
drafts), and tokens of the block for the local head (the short expert: the drafts, no context). Out: greedy tokens of
log p_long + alpha log p_short - beta log p_unigram, position after position; what both know, how frequent a token is,
counts once. The head learns from text alone. Ours: the unigram is its bias, so that a new one changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from hyflash.core import DraftCost, DraftOutput, LossTerms, TargetHooks, TrainBatch
from hyflash.drafters import hyflash
from hyflash.drafters.base import DrafterConfig
from hyflash.drafters.hyflash import BackboneConfig
from hyflash.drafters.local_expert import LocalExpert, fold, folds
from hyflash.drafters.logit_drafter import LogitDrafter
from hyflash.drafters.objective import (
    PLAIN,
    HeadTraining,
    block_labels,
    hit_metrics,
    row_weights,
    tokens_before,
    training_head,
)
from hyflash.drafters.vocab import HeadRows, ReducedHead
from hyflash.errors import HyflashError, UserError
from hyflash.layers import GRUCorrection
from hyflash.ops.losses import Addition, head_losses

GRU_WIDTH = 256
TABLE_ROWS = 8192
"""Rows of the table that are made at a time, each from a row of the target's head."""


class DeLSConfig(BackboneConfig):
    """Options of `dels`."""

    expert: Literal["gru", "markov"] = Field(default="gru", description="the short expert's view: all drafts, or one")
    expert_width: int = Field(default=0, ge=0, description=f"state width of the gru; 0 is {GRU_WIDTH}")
    expert_rank: int = Field(default=128, ge=1, description="width of the short expert's output")
    expert_activation: Literal["none", "silu"] = Field(default="none", description="between output and logits")
    expert_head: Literal["target", "vocab"] = Field(
        default="target", description="logits by the target's frozen head, or by a table of all tokens to be learnt"
    )
    alpha: float | tuple[float, ...] = Field(default=0.3, description="weight of the short expert, one or per position")
    beta: float | tuple[float, ...] = Field(default=0.3, description="weight of the unigram, one or per position")

    @classmethod
    def tiny(cls) -> Self:
        return cls(num_layers=1, num_draft_tokens=3, num_taps=2, expert_width=8, expert_rank=8)

    def resolved(self, hooks: TargetHooks) -> Self:
        """Fill in what the target decides and check the whole. Raises UserError."""
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if isinstance(value, tuple) and len(value) != self.num_draft_tokens:
                raise UserError(
                    f"{name} has {len(value)} values; expected one number, or one for each of the "
                    f"{self.num_draft_tokens} draft tokens."
                )
        if self.expert == "markov" and self.expert_width:
            raise UserError("expert_width is of the gru expert, and expert is markov; leave it out.")
        width = (self.expert_width or GRU_WIDTH) if self.expert == "gru" else 0
        return super().resolved(hooks).model_copy(update={"expert_width": width})


class DrafterImpl(LogitDrafter):
    """A block drafter and a local head that knows the drafts alone."""

    Config: ClassVar[type[DrafterConfig]] = DeLSConfig
    source: ClassVar[str] = "DeLS-Spec, arXiv 2607.07409; dt-3t/DeLS-Spec"
    optional_tensors: ClassVar[tuple[str, ...]] = ("expert.*", "log_prior")
    tunable: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "alpha": (0.0, 0.1, 0.2, 0.3, 0.5, 0.7),
        "beta": (0.0, 0.1, 0.2, 0.3, 0.5, 0.7),
    }
    config: DeLSConfig
    log_prior: Tensor
    alpha: Tensor
    beta: Tensor

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        """Build with fresh weights; the head says nothing yet. Raises UserError."""
        super().__init__(config, hooks)
        cfg, vocab_size = self.config, hooks.info.vocab_size
        self.state_width, self.latent_width = cfg.expert_width, cfg.expert_rank + 1
        self.expert = LocalExpert(
            cfg.hidden_size,
            kind=cfg.expert,
            width=cfg.expert_width,
            rank=cfg.expert_rank,
            activation=cfg.expert_activation,
            num_tokens=vocab_size if cfg.expert_head == "vocab" else 0,
            eps=cfg.rms_norm_eps,
        )
        self.register_buffer("log_prior", torch.full((vocab_size,), 1.0 / vocab_size).log())
        for name, value in (("alpha", cfg.alpha), ("beta", cfg.beta)):
            weights = torch.tensor(value, dtype=torch.float32).expand(cfg.num_draft_tokens).clone()
            self.register_buffer(name, weights, persistent=False)
        uniform = all(not isinstance(value, tuple) or len({*value}) == 1 for value in (cfg.alpha, cfg.beta))
        self._folds = uniform and folds(self.expert)
        self._target_rows: HeadRows | None = self._rows
        self._table: Tensor | None = None
        self._folded_head: ReducedHead | None = None

    # --------------------------------------------------------------------------------------- training

    @property
    def trains_on_text(self) -> bool:
        """The head alone does."""
        return self.frozen

    @property
    def counts_labels(self) -> bool:
        """As long as the unigram has every token alike."""
        return bool((self.log_prior == self.log_prior[0]).all())

    def set_label_counts(self, counts: Tensor) -> None:
        """Take the unigram from counts (V,) of the training labels, one added to each."""
        smooth = counts.to(self.log_prior.device).double() + 1.0
        self.log_prior.copy_((smooth / smooth.sum()).log())
        self.forget()

    def forward(self, batch: TrainBatch) -> DraftOutput:
        """As the backbone's; `extra` has the short expert's vectors (B, A, L, R), "short", and what they add, "latent".

        Over a frozen backbone features may be missing; the hidden states are then of width 0.
        """
        if self.frozen and batch.features.shape[2] == 0:
            self.forget()  # a step will follow
            tokens, mask = block_labels(batch, self.config.num_draft_tokens)
            nothing = torch.zeros(*mask.shape, 0, device=mask.device)
            out = DraftOutput(hidden=nothing, labels=tokens[..., 1:], mask=mask)
        else:
            out = hyflash.DrafterImpl.forward(self, batch)
        embeds = self._embed(tokens_before(out, batch)).flatten(0, 1)
        short, _ = self.expert(embeds, embeds.new_zeros(len(embeds), self.state_width))
        short = short.view(*out.mask.shape, -1)
        return replace(out, extra={"short": short, "latent": self._weighted(short, 0)})

    def loss(self, out: DraftOutput, batch: TrainBatch) -> LossTerms:
        """Cross-entropy of the short expert alone; a backbone that is not frozen has its own loss added.

        Metrics are of both experts together, of the short one where the batch had no features.
        """
        mask = out.mask
        head = training_head(self.hooks, self._reduced(), out.labels[mask])
        ids = self._all_ids() if head.ids is None else head.ids
        rows, prior, short = self._expert_rows(ids), self.log_prior[ids], out.extra["short"][mask]
        alone = Addition(latent=short, table=rows)
        found = head_losses(short, head.labels, head=lambda some: prior.expand(len(some), -1), addition=alone)
        weights = row_weights(found, mask, batch, self.config)
        terms = LossTerms(
            numerator=(found.loss * weights).sum(),
            denominator=weights.sum(),
            metrics=hit_metrics(found.correct, mask),
        )
        if out.hidden.shape[-1] == 0:
            return terms
        with torch.no_grad():
            both = Addition(latent=out.extra["latent"][mask], table=torch.cat((rows, prior[:, None]), dim=-1))
            fused = head_losses(out.hidden[mask], head.labels, head=head.logits, addition=both)
        terms = replace(terms, metrics=hit_metrics(fused.correct, mask))
        if self.frozen:
            return terms
        base = super().loss(out, batch)
        return LossTerms(
            numerator=base.numerator + terms.numerator,
            denominator=base.denominator,
            metrics={**terms.metrics, **{f"base_{name}": figure for name, figure in base.metrics.items()}},
        )

    def _head_training(self, out: DraftOutput, batch: TrainBatch) -> HeadTraining:
        """The experts learn apart."""
        return PLAIN

    # ------------------------------------------------------------------------------------ both experts

    def _latents(self, hidden: Tensor, previous: Tensor, state: Tensor, first: int) -> tuple[Tensor, Tensor]:
        short, state = self.expert(self._embed(previous), state)
        return self._weighted(short, first), state

    def _weighted(self, short: Tensor, first: int) -> Tensor:
        """Latents (..., L, R + 1) of vectors (..., L, R): alpha (S r + log u) - beta log u, of rows [S, log u]."""
        some = slice(first, first + short.shape[-2])
        alpha, rest = self.alpha[some, None], (self.alpha - self.beta)[some, None]
        return torch.cat((alpha * short, rest.expand(*short.shape[:-1], 1)), dim=-1).to(short.dtype)

    def _expert_rows(self, ids: Tensor) -> Tensor:
        """Rows S (n, R) of tokens (n,)."""
        up = self.expert.up
        if self.expert.own_rows:
            return up[ids]
        if self._target_rows is None:
            self._target_rows = HeadRows(self.hooks)
        return self._target_rows(ids)[0].to(up.dtype) @ up

    def _all_ids(self) -> Tensor:
        return torch.arange(len(self.log_prior), device=self.log_prior.device)

    @torch.no_grad()
    def _logit_table(self) -> Tensor:
        if self._table is None:
            rows = torch.cat([self._expert_rows(some) for some in torch.split(self._all_ids(), TABLE_ROWS)])
            self._table = torch.cat((rows, self.log_prior[:, None].to(rows.dtype)), dim=-1)
        return self._table

    def _step_weights(self) -> int:
        return sum(p.numel() for p in self.expert.parameters()) - self.expert.up.numel()

    def cost(self, context_tokens: int) -> DraftCost:
        """As with any head in logit space, and the table that is made from its weights."""
        cost = super().cost(context_tokens)
        made = self.hooks.info.vocab_size * self.latent_width * self.expert.up.itemsize
        return replace(cost, weight_bytes=cost.weight_bytes + made)

    def forget(self) -> None:
        """Drop what was made from the weights."""
        super().forget()
        self._table = self._folded_head = None

    # ------------------------------------------------------------------------------------- on the kernels

    def _head_packs(self) -> bool:
        """Whether the kernels can do a whole pass: the backbone's, with a short expert of one weight for all positions
        in its correction.
        """
        return self._folds and hyflash.DrafterImpl._head_packs(self)

    def _packed_gru(self) -> GRUCorrection | None:
        if not self._head_packs():
            return super()._packed_gru()
        assert self.correction is None or isinstance(self.correction, GRUCorrection)
        return fold(self.expert, float(self.alpha[0]), self.correction)

    def _packed_head(self) -> ReducedHead:
        """What beta leaves of the unigram is a bias of the rows."""
        if self._rows is None or self.draft_ids is None:
            raise HyflashError("this drafter uses the full vocabulary.")
        if self._folded_head is None:
            rest = float(self.alpha[0] - self.beta[0])
            self._folded_head = ReducedHead(self._rows.with_bias(rest * self.log_prior), self.draft_ids)
        return self._folded_head
