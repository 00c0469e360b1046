"""Domino: DFlash, whose logits a recurrent network over the block's tokens so far corrects (arXiv 2605.29707).

In: as DFlash. A GRU reads the target's embeddings of the anchor and the drafts before a position; a low-rank SiLU
network of the slot's hidden state and the GRU's adds to the logits, from the second draft on. Training starts with
the loss of the uncorrected logits and fades to that of the corrected ones. Names and layout of the published
checkpoints are kept. Ours: the head starts at zero, so step 0 is the backbone.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hyflash.core import DraftOutput, TargetHooks, TrainBatch
from hyflash.drafters.base import DrafterConfig
from hyflash.drafters.logit_drafter import LogitConfig, LogitDrafter
from hyflash.drafters.objective import HeadTraining
from hyflash.layers import init_linear


class DominoConfig(LogitConfig):
    """Options of `domino`."""

    correction_width: int = Field(default=1024, ge=1, description="state width of the recurrent network")
    pure_draft_prefix_len: int = Field(default=1, ge=0, description="first drafts whose logits stay uncorrected")
    base_decay: float = Field(
        default=1.0, ge=0, le=1, description="share of the training over which the uncorrected loss fades; 0 none of it"
    )

    @classmethod
    def tiny(cls) -> Self:
        return cls(num_layers=1, num_draft_tokens=3, num_taps=2, correction_width=8, correction_rank=4)


class DrafterImpl(LogitDrafter):
    """Block drafter with a recurrent correction of the logits."""

    Config: ClassVar[type[DrafterConfig]] = DominoConfig
    source: ClassVar[str] = "Domino, arXiv 2605.29707; layout of SpecForge and NeMo Automodel"
    optional_tensors: ClassVar[tuple[str, ...]] = ("layers.*.memory.*", "prefix_gru.*", "embed_proj.*")
    config: DominoConfig

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        """Build with fresh weights; the correction adds nothing yet. Raises UserError."""
        super().__init__(config, hooks)
        dim, width, rank = self.config.hidden_size, self.config.correction_width, self.config.correction_rank
        self.state_width, self.latent_width = width, rank
        self.prefix_gru = nn.GRU(dim, width, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            init_linear(nn.Linear(dim + width, rank, bias=False)),
            nn.SiLU(),
            nn.Linear(rank, hooks.info.vocab_size, bias=False),
        )
        nn.init.zeros_(self._logit_table())

    def _logit_table(self) -> Tensor:
        return self.embed_proj.get_parameter("2.weight")

    def _step_weights(self) -> int:
        return sum(p.numel() for p in (*self.prefix_gru.parameters(), self.embed_proj.get_parameter("0.weight")))

    def _latents(self, hidden: Tensor, previous: Tensor, state: Tensor, first: int) -> tuple[Tensor, Tensor]:
        run, last = self.prefix_gru(self._embed(previous), state[None])
        latent = self.embed_proj[1](self.embed_proj[0](torch.cat((hidden.to(run.dtype), run), dim=-1)))
        corrected = first + torch.arange(hidden.shape[1], device=hidden.device) >= self.config.pure_draft_prefix_len
        return torch.where(corrected[:, None], latent, 0.0), last[0]

    def _head_training(self, out: DraftOutput, batch: TrainBatch) -> HeadTraining:
        fade = self.config.base_decay
        share = max(0.0, 1.0 - batch.progress / fade) if fade > 0 else 0.0
        return HeadTraining(latent=out.extra["latent"], table=self._logit_table(), base_share=share)
