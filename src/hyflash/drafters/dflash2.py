"""DFlash 2: a DFlash with convolutions along the block and a candidate selector (inco.ai/blog/dflash2).

In: what a DFlash reads (with `memory_core` and `window`, a HyFlash). Out: draft tokens along the selector's path.
Convolutions take over what neighbouring slots have to tell one another (`convolution.py`); the selector scores pairs
of candidates by two codebooks, S_t(a, b) = U_t(b) + <A[a] * H h_t, B[b]>. A new one computes what a DFlash computes.
Names and shapes of its tensors are those of published checkpoints.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hyflash.core import TargetHooks
from hyflash.drafters.base import DrafterConfig
from hyflash.drafters.convolution import ConvolvedLayer
from hyflash.drafters.packed_drafter import PackedDrafter
from hyflash.drafters.selecting import SelectingConfig, SelectingDrafter
from hyflash.drafters.selector import PairScorer
from hyflash.errors import UserError
from hyflash.layers import DraftLayer, init_linear
from hyflash.ops.kernels import Kernels


class DFlash2Config(SelectingConfig):
    """Options of `dflash2`."""

    conv_kernel_size: int = Field(default=2, ge=1, description="taps of the convolutions: the slot and those before it")
    conv_group_size: int = Field(default=16, ge=1, description="channels that share a predicted coefficient")
    selector_rank: int = Field(default=256, ge=1, description="width of the selector's codebooks (vocabulary x rank)")
    output_multiplier: float | None = Field(
        default=None, gt=0, description="imported checkpoints: scale that the target's head must have; none: any"
    )
    final_logit_softcapping: float | None = Field(
        default=None, gt=0, description="imported checkpoints: soft-cap that the target's head must have; none: any"
    )

    def resolved(self, hooks: TargetHooks) -> Self:
        """Fill in what the target decides and check the whole. Raises UserError."""
        base = super().resolved(hooks)
        if base.hidden_size % self.conv_group_size:
            raise UserError(
                f"conv_group_size is {self.conv_group_size}; expected a divisor of the width {base.hidden_size}."
            )
        if self.conv_kernel_size > 1 + self.num_draft_tokens:
            raise UserError(
                f"conv_kernel_size is {self.conv_kernel_size}; expected at most the {1 + self.num_draft_tokens} slots."
            )
        if self.output_multiplier is not None or self.final_logit_softcapping is not None:
            _check_head(hooks, self.output_multiplier or 1.0, self.final_logit_softcapping)
        return base


class CandidateSelector(PairScorer):
    """Low-rank bilinear scores of neighbours, gated by the later slot's hidden state."""

    def __init__(self, dim: int, *, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.hidden_projection = init_linear(nn.Linear(dim, rank, bias=False))
        self.predecessor_codebook = nn.Parameter(0.02 * torch.randn(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))

    def contexts(self, hidden: Tensor) -> Tensor:
        """The gate."""
        out: Tensor = self.hidden_projection(hidden)
        return out

    def predecessors(self, ids: Tensor) -> Tensor:
        """Rows of the first codebook."""
        return F.embedding(ids, self.predecessor_codebook)

    def successors(self, ids: Tensor) -> Tensor:
        """Rows of the second codebook."""
        return F.embedding(ids, self.successor_codebook)

    def score(self, context: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """<before * context, after>."""
        return ((before * context[..., None, :]) @ after.transpose(-1, -2)).float()

    def flops(self, num_slots: int, num_candidates: int) -> int:
        """The gate and the products of all pairs."""
        dim, rank = self.hidden_projection.in_features, self.hidden_projection.out_features
        pairs = num_candidates + (num_slots - 1) * num_candidates**2
        return 2 * rank * (num_slots * dim + pairs)


class DrafterImpl(SelectingDrafter):
    """Block drafter with in-block convolutions and a codebook selector."""

    Config: ClassVar[type[DrafterConfig]] = DFlash2Config
    source: ClassVar[str] = "DFlash 2, inco.ai/blog/dflash2; z-lab/dflash, NVIDIA-NeMo/Automodel"
    optional_tensors: ClassVar[tuple[str, ...]] = (
        *SelectingDrafter.optional_tensors,
        "layers.*.attention_conv.*",
        "layers.*.mlp_conv.*",
    )
    config: DFlash2Config

    def _new_layer(self) -> DraftLayer:
        cfg = self.config
        return ConvolvedLayer(
            cfg.hidden_size,
            kernel_size=cfg.conv_kernel_size,
            group_size=cfg.conv_group_size,
            **self._layer_parts(),
        )

    def _new_selector(self) -> PairScorer:
        cfg = self.config
        return CandidateSelector(cfg.hidden_size, vocab_size=self.hooks.info.vocab_size, rank=cfg.selector_rank)

    def pack(self, kernels: Kernels) -> PackedDrafter | None:
        """The kernels know no convolutions, so this drafter serves on torch."""
        return None


def _check_head(hooks: TargetHooks, scale: float, cap: float | None) -> None:
    """The head is the target's own, so what a checkpoint says of it must be what the target does. Raises UserError."""
    ids = torch.arange(min(64, hooks.info.vocab_size), device=hooks.info.device)
    rows = hooks.head_rows(ids).detach()
    probe = rows.float().mean(0) + rows[0].float()
    # Long enough to reach where a cap bends.
    probe = (probe * (cap or 10.0) / (scale * (rows.float() @ probe).abs().max().clamp(min=1e-12))).to(rows.dtype)
    want = scale * (rows @ probe).float()
    want = want if cap is None else cap * torch.tanh(want / cap)
    found = hooks.head(probe).detach().float()[ids]
    if not torch.allclose(found, want, rtol=0.02, atol=0.02 * float(want.abs().max())):
        raise UserError(
            f"the checkpoint was trained for a head with output_multiplier {scale} and final_logit_softcapping {cap}; "
            f"that of target {hooks.info.name!r} computes something else. Load the target it is for."
        )
