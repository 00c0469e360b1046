"""A block drafter with a head of its own in logit space: what the block's tokens so far say is added to the logits.

In: the slots' hidden states and, position after position, the tokens before each. Out: a latent (R) per position, whose
product with a table (V, R) is added to the target's logits. These do not depend on the tokens chosen, so they are one
product for the whole block; a step costs R products per token in use. With a reduced vocabulary only its rows of the
table count. The backbone is HyFlash's with DFlash's defaults (no window, no memory): every head goes on either.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from pydantic import Field
from torch import Tensor

from hyflash.core import DraftCost, DraftOutput, TargetHooks, TrainBatch
from hyflash.drafters import hyflash, zlab_heads
from hyflash.drafters.base import DrafterConfig
from hyflash.drafters.hyflash import BackboneConfig
from hyflash.drafters.objective import HeadTraining, tokens_before
from hyflash.drafters.picking import Picker
from hyflash.drafters.vocab import ServingHead, Step
from hyflash.errors import UserError


class LogitConfig(BackboneConfig):
    """Options of drafters whose in-block dependence is a head in logit space."""

    sample_from_anchor: bool = Field(
        default=True, description="the anchor's slot drafts the first token: one slot fewer for as many drafts"
    )
    correction_rank: int = Field(default=256, ge=1, description="rank of what is added to the logits")

    def resolved(self, hooks: TargetHooks) -> Self:
        """Fill in what the target decides and check the whole. Raises UserError."""
        if self.correction != "none":
            raise UserError(
                f"correction is {self.correction!r}; expected none, as this drafter has in-block dependence of its own."
            )
        return super().resolved(hooks)


class LogitDrafter(hyflash.DrafterImpl):
    """Trains and serves a head that `_latents` and `_logit_table` describe."""

    state_width: int
    """Width of what the head carries from position to position."""
    latent_width: int
    """Width R of a latent and of the table's rows."""

    @classmethod
    def import_config(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Options of another block drafter's checkpoint, whose anchor drafts nothing unless they say so."""
        return {"sample_from_anchor": False, **super().import_config(values)}

    @classmethod
    def import_weights(cls, weights: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        """As the backbone's; the head's names are the published ones, of which there are three spellings."""
        return zlab_heads.own_names(super().import_weights(weights, config))

    @abstractmethod
    def _latents(self, hidden: Tensor, previous: Tensor, state: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Latents (N, L, R) of positions `first` on, and the state after them.

        In: hidden (N, L, D), the token ids before each position (N, L), the state (N, state_width), zeros at first.
        """

    @abstractmethod
    def _logit_table(self) -> Tensor:
        """Rows (V, R) that the latents multiply."""

    @abstractmethod
    def _step_weights(self) -> int:
        """Weights that a position multiplies, the table's excepted."""

    def _confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Logits (N, L) of P(draft accepted), float32; None where the head states none.

        Only from tokens before each position: what decides whether a sample is verified may not depend on it.
        """
        return None

    def _calibrated(self, confidence: Tensor) -> Tensor:
        """Probabilities (B, L) of confidence logits."""
        return confidence.sigmoid()

    # --------------------------------------------------------------------------------------- training

    def forward(self, batch: TrainBatch) -> DraftOutput:
        """As the backbone's; `extra` has the latents and the confidence logits of teacher-forced positions."""
        out = super().forward(batch)
        previous = tokens_before(out, batch)
        hidden, ids = out.hidden.flatten(0, 1), previous.flatten(0, 1)
        latent, _ = self._latents(hidden, ids, hidden.new_zeros(len(hidden), self.state_width), 0)
        extra = {"latent": latent.view(*previous.shape, latent.shape[-1])}
        confidence = self._confidence(hidden, ids)
        if confidence is not None:
            extra["confidence"] = confidence.view_as(previous)
        return replace(out, extra=extra)

    def logits(self, out: DraftOutput) -> Tensor:
        """Logits (B, A, L, V) of a training forward, float32, the head's addition included."""
        return super().logits(out).float() + (out.extra["latent"] @ self._logit_table().T).float()

    def _head_training(self, out: DraftOutput, batch: TrainBatch) -> HeadTraining:
        return HeadTraining(latent=out.extra["latent"], table=self._logit_table())

    # ---------------------------------------------------------------------------------------- serving

    def _draft(
        self, hidden: Tensor, head: ServingHead, anchors: Tensor, picker: Picker
    ) -> tuple[Tensor, Tensor | None]:
        logits, previous = head.chain(anchors, hidden.shape[1], self._step(hidden, head), picker)
        confidence = self._confidence(hidden, previous)
        # One that is not finite counts as none at all.
        return logits, None if confidence is None else self._calibrated(confidence).nan_to_num(0.0)

    def _step(self, hidden: Tensor, head: ServingHead) -> Step:
        base, state = super()._step(hidden, head), hidden.new_zeros(len(hidden), self.state_width)

        def step(k: int, previous: Tensor) -> Tensor:
            nonlocal state
            latent, state = self._latents(hidden[:, k : k + 1], previous[:, None], state, k)
            return base(k, previous).float() + head.addition(latent)[:, 0]

        return step

    def _head_packs(self) -> bool:
        """The kernels run the layers; this head is computed on torch."""
        return False

    def cost(self, context_tokens: int) -> DraftCost:
        """As the backbone's, and the head's weights and steps."""
        base, cfg = super().cost(context_tokens), self.config
        copied = cfg.draft_vocab_size * self.latent_width * self.fc.weight.itemsize
        step = self._step_weights() + self._head_size * self.latent_width
        return replace(
            base,
            weight_bytes=base.weight_bytes + copied,
            propose_flops=base.propose_flops + 2 * cfg.num_draft_tokens * step,
        )
