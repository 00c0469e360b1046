"""DCOCO: all neighbours among each slot's candidates corrected in one pass by a scorer without a vocabulary.

In: what its backbone reads, a DFlash or (`memory_core`, `window`) a HyFlash. Out: draft tokens along the best path.
Tokens enter as rows of the target's own embedding and head, so the scorer is small whatever the vocabulary. Sizes
are those of TD-Labs' published models, whose code is not public; the network inside them is ours.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hyflash.core import TargetHooks
from hyflash.drafters.base import DrafterConfig
from hyflash.drafters.selecting import SelectingConfig, SelectingDrafter
from hyflash.drafters.selector import PairScorer
from hyflash.layers import init_linear, rms


class DCOCOConfig(SelectingConfig):
    """Options of `dcoco`."""

    candidate_width: int = Field(default=128, ge=1, description="width of a token as predecessor and as successor")
    pair_width: int = Field(default=128, ge=1, description="width of the state of two neighbouring slots")
    score_width: int = Field(default=256, ge=1, description="hidden width of the scoring MLP")


class PairCorrector(PairScorer):
    """A two-layer MLP over predecessor, successor, their product, and the hidden states of both slots."""

    rates_list: ClassVar[bool] = True

    def __init__(
        self, hooks: TargetHooks, *, dim: int, candidate_width: int, pair_width: int, score_width: int, eps: float
    ) -> None:
        super().__init__()
        self.hooks, self.eps = hooks, eps
        self.sizes = (candidate_width, candidate_width, candidate_width, pair_width)
        self.predecessor = init_linear(nn.Linear(dim, candidate_width, bias=False))
        self.successor = init_linear(nn.Linear(dim, candidate_width, bias=False))
        self.pair = init_linear(nn.Linear(2 * dim, pair_width, bias=False))
        self.predecessor_norm = nn.LayerNorm(candidate_width)
        self.successor_norm = nn.LayerNorm(candidate_width)
        self.pair_norm = nn.LayerNorm(pair_width)
        self.hidden = init_linear(nn.Linear(sum(self.sizes), score_width))
        self.out = nn.Linear(score_width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def _normed(self, x: Tensor) -> Tensor:
        return rms(x, self.eps).to(self.out.weight.dtype)

    def contexts(self, hidden: Tensor) -> Tensor:
        """State of slots t - 1 and t; before the first there is the anchor, which is certain: zeros."""
        normed = self._normed(hidden)
        earlier = F.pad(normed[:, :-1], (0, 0, 1, 0))
        out: Tensor = self.pair_norm(self.pair(torch.cat((earlier, normed), dim=-1)))
        return out

    def predecessors(self, ids: Tensor) -> Tensor:
        """From the target's embedding."""
        rows = self.hooks.embed(ids).detach()
        out: Tensor = self.predecessor_norm(self.predecessor(self._normed(rows)))
        return out

    def successors(self, ids: Tensor) -> Tensor:
        """From the rows of the target's head."""
        rows = self.hooks.head_rows(ids.flatten()).detach().view(*ids.shape, self.successor.in_features)
        out: Tensor = self.successor_norm(self.successor(self._normed(rows)))
        return out

    def score(self, context: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """The MLP's first layer is taken apart: only the product has to be multiplied for every pair."""
        first, second, both, state = torch.split_with_sizes(self.hidden.weight, self.sizes, dim=1)
        inner = (before[..., :, None, :] * after[..., None, :, :]) @ both.T
        # In place: a fresh megabyte for each step would cost more than its arithmetic.
        inner += (before @ first.T)[..., :, None, :]
        inner += (after @ second.T + F.linear(context, state, self.hidden.bias)[..., None, :])[..., None, :, :]
        out: Tensor = self.out(F.silu(inner, inplace=not inner.requires_grad))[..., 0].float()
        return out

    def flops(self, num_slots: int, num_candidates: int) -> int:
        """Projections of tokens and states, and the MLP of each pair."""
        width, pair, score = self.sizes[0], self.sizes[-1], self.hidden.out_features
        dim, tokens = self.predecessor.in_features, num_slots * num_candidates
        pairs = num_candidates + (num_slots - 1) * num_candidates**2
        return 2 * (tokens * 2 * width * (dim + score) + num_slots * pair * (2 * dim + score) + pairs * score * width)


class DrafterImpl(SelectingDrafter):
    """Block drafter whose candidates are corrected by their neighbours."""

    Config: ClassVar[type[DrafterConfig]] = DCOCOConfig
    source: ClassVar[str] = "DCOCO, TD-Labs (model cards); sizes theirs, scorer and loss ours"
    config: DCOCOConfig

    def _new_selector(self) -> PairScorer:
        cfg = self.config
        return PairCorrector(
            self.hooks,
            dim=cfg.hidden_size,
            candidate_width=cfg.candidate_width,
            pair_width=cfg.pair_width,
            score_width=cfg.score_width,
            eps=cfg.rms_norm_eps,
        )
