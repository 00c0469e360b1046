"""DSpark: DFlash whose first slot drafts too, with a Markov head on the logits and a confidence for every draft.

In: as DFlash. The token before a position adds W1[token] W2 to its logits, plain, gated by the hidden state, or through
a recurrent state (arXiv 2607.05147). The confidence is learnt from the overlap of the drafter's distribution and the
target's, calibrated after training on held-out rounds, and decides how many drafts are worth verifying. Names and
layout of the published checkpoints are kept. Ours: W2 starts at zero, so step 0 is the backbone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hyflash.core import Draft, DraftOutput, DraftRequest, Outcomes, Proposal, TargetHooks, TrainBatch
from hyflash.drafters.base import DrafterConfig, State
from hyflash.drafters.confidence import ConfidenceHead, admit, errors_by_position, fit_temperatures
from hyflash.drafters.logit_drafter import LogitConfig, LogitDrafter
from hyflash.drafters.objective import HeadTraining
from hyflash.errors import UserError
from hyflash.layers import init_linear
from hyflash.ops.losses import LossKind

MarkovKind = Literal["none", "plain", "gated", "rnn"]
TEMPERATURE = "confidence_temperature"


class DSparkConfig(LogitConfig):
    """Options of `dspark`."""

    markov: MarkovKind = Field(default="plain", description="what of the token before reaches the logits")
    confidence_head: bool = Field(default=True, description="state how likely each draft is accepted")
    confidence_with_markov: bool = Field(default=True, description="the confidence reads the token before as well")
    confidence_weight: float = Field(default=1.0, ge=0, description="weight of its loss; 0 leaves it as it is")
    loss: LossKind = Field(default="ce_tv", description="ce, ce_tv (0.1 ce + 0.9 total variation to the target) or kl")

    @classmethod
    def tiny(cls) -> Self:
        return cls(num_layers=1, num_draft_tokens=3, num_taps=2, correction_rank=4)

    @property
    def needs_final_tap_for_loss(self) -> bool:
        """The loss compares with the target's distribution."""
        return super().needs_final_tap_for_loss or (self.confidence_head and self.confidence_weight > 0)

    def resolved(self, hooks: TargetHooks) -> Self:
        """Fill in what the target decides and check the whole. Raises UserError."""
        if self.confidence_head and self.confidence_with_markov and self.markov == "none":
            raise UserError("confidence_with_markov needs a markov head; set markov, or confidence_with_markov=false.")
        return super().resolved(hooks)


class MarkovHead(nn.Module):
    """Latents from the token before each position, and the table they multiply."""

    def __init__(self, kind: MarkovKind, *, vocab_size: int, dim: int, rank: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.5)
        nn.init.zeros_(self.markov_w2.weight)
        self.gate_proj = init_linear(nn.Linear(dim + rank, rank)) if kind == "gated" else None
        self.joint_proj = init_linear(nn.Linear(2 * rank + dim, 3 * rank)) if kind == "rnn" else None

    def forward(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Latents (N, L, R) of hidden (N, L, D) and token ids (N, L), and the state (N, R) after them."""
        before = self.markov_w1(previous)
        if self.gate_proj is not None:
            return before * self.gate_proj(torch.cat((hidden.to(before.dtype), before), dim=-1)).sigmoid(), state
        if self.joint_proj is None:
            return before, state
        latents = []
        for k in range(hidden.shape[1]):
            z = self.joint_proj(
                torch.cat((state.to(before.dtype), before[:, k], hidden[:, k].to(before.dtype)), dim=-1)
            )
            gate, candidate, out = z.chunk(3, dim=-1)
            gate = gate.sigmoid()
            state = gate * state + (1.0 - gate) * candidate.tanh()
            latents.append(out.tanh())
        return torch.stack(latents, dim=1), state


class DrafterImpl(LogitDrafter):
    """Block drafter with a Markov head and a calibrated confidence."""

    Config: ClassVar[type[DrafterConfig]] = DSparkConfig
    source: ClassVar[str] = "DSpark, arXiv 2607.05147; deepseek-ai/DeepSpec"
    optional_tensors: ClassVar[tuple[str, ...]] = (
        "layers.*.memory.*", "markov_head.*", "confidence_head.*", TEMPERATURE,
    )  # fmt: skip
    config: DSparkConfig
    confidence_temperature: Tensor | None

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        """Build with fresh weights; the Markov head adds nothing yet. Raises UserError."""
        super().__init__(config, hooks)
        cfg = self.config
        self.markov_head: MarkovHead | None = None
        if cfg.markov != "none":
            self.markov_head = MarkovHead(
                cfg.markov, vocab_size=hooks.info.vocab_size, dim=cfg.hidden_size, rank=cfg.correction_rank
            )
        self.state_width = cfg.correction_rank if cfg.markov == "rnn" else 0
        self.latent_width = 0 if cfg.markov == "none" else cfg.correction_rank
        self.confidence_head: ConfidenceHead | None = None
        if cfg.confidence_head:
            self.confidence_head = ConfidenceHead(
                cfg.hidden_size + (cfg.correction_rank if cfg.confidence_with_markov else 0)
            )
        temperature = torch.ones(cfg.num_draft_tokens) if cfg.confidence_head else None
        self.register_buffer(TEMPERATURE, temperature)
        self.calibrates = self.cuts_by_prices = cfg.confidence_head

    @classmethod
    def import_weights(cls, weights: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        """As the backbone's; published confidences are taken as calibrated."""
        out = super().import_weights(weights, config)
        if isinstance(config, DSparkConfig) and config.confidence_head and "confidence_head.proj.weight" in out:
            out.setdefault(TEMPERATURE, torch.ones(config.num_draft_tokens))
        return out

    def _logit_table(self) -> Tensor:
        if self.markov_head is None:
            return self.fc.weight.new_zeros(self.hooks.info.vocab_size, 0)
        return self.markov_head.markov_w2.weight

    def _step_weights(self) -> int:
        heads = (self.markov_head, self.confidence_head)
        tables = 0 if self.markov_head is None else 2 * self._logit_table().numel()
        return sum(p.numel() for head in heads if head is not None for p in head.parameters()) - tables

    def _latents(self, hidden: Tensor, previous: Tensor, state: Tensor, first: int) -> tuple[Tensor, Tensor]:
        if self.markov_head is None:
            return hidden.new_zeros(*hidden.shape[:2], 0), state
        latent, state = self.markov_head(hidden, previous, state)
        return latent, state

    def _confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        if self.confidence_head is None:
            return None
        if self.config.confidence_with_markov and self.markov_head is not None:
            hidden = torch.cat((hidden, self.markov_head.markov_w1(previous).to(hidden.dtype)), dim=-1)
        logits: Tensor = self.confidence_head(hidden)
        return logits

    def _head_training(self, out: DraftOutput, batch: TrainBatch) -> HeadTraining:
        return replace(
            super()._head_training(out, batch),
            confidence=out.extra.get("confidence"),
            confidence_weight=self.config.confidence_weight,
        )

    # ------------------------------------------------------------------------------------- confidence

    def _calibrated(self, confidence: Tensor) -> Tensor:
        if self.confidence_temperature is None:
            return super()._calibrated(confidence)
        return (confidence / self.confidence_temperature[: confidence.shape[1]]).sigmoid()

    @torch.no_grad()
    def calibrate(self, outcomes: Outcomes) -> dict[str, float]:
        """Fit the temperatures to every second round; the others give the error before and after, by position."""
        if self.confidence_temperature is None:
            return {}
        depth = outcomes.confidence.shape[1]
        before = self.confidence_temperature[:depth].cpu()
        logits = outcomes.confidence.clamp(1e-6, 1 - 1e-6).logit() * before
        parts = [
            Outcomes(
                confidence=logits[i::2],
                num_drafted=outcomes.num_drafted[i::2],
                num_accepted=outcomes.num_accepted[i::2],
            )
            for i in (0, 1)
        ]
        after = fit_temperatures(parts[0].confidence, parts[0])
        self.confidence_temperature[:depth] = after.to(self.confidence_temperature)
        figures = {"calibration_rounds": float(len(logits))}
        for name, scale in (("ece_before", torch.ones_like(after)), ("ece_after", after)):
            errors = errors_by_position((parts[1].confidence / scale).sigmoid(), parts[1])
            figures[name] = sum(errors) / max(1, len(errors))
            figures |= {f"{name}@{k}": error for k, error in enumerate(errors, start=1)}
        return figures

    @torch.no_grad()
    def propose(self, state: State, request: DraftRequest) -> Proposal:
        """As the backbone's; with prices, only the drafts that are worth verifying by their confidence."""
        proposal = super().propose(state, request)
        if request.prices is None or not self.cuts_by_prices:
            return proposal
        if request.draws is None:
            lengths = admit([draft.confidence for draft in proposal.drafts], request.prices)
        else:  # a row whose samples another row's decide about might share its seed
            lengths = [admit([draft.confidence], request.prices)[0] for draft in proposal.drafts]
        drafts = [Draft(d.tokens[:n], d.confidence[:n]) for d, n in zip(proposal.drafts, lengths, strict=True)]
        return proposal._replace(drafts=drafts)
