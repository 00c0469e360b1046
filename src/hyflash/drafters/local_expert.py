"""A local expert: predicts a block's next token from the block's tokens alone, the anchor first (DeLS-Spec).

In: the target's frozen embeddings of the tokens so far. Out: a short vector per position, which one row per token turns
into logits. `fold` makes it part of a block drafter's GRU correction.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyflash.layers import GRUCorrection, init_linear, rms


class LocalExpert(nn.Module):
    """A GRU over the block's tokens, or of the last one a bigram of low rank (Markov).

    Its rows are the target's head times a matrix (D, R), or with `num_tokens` a table (V, R) of its own. They start at
    zero: a new expert says nothing.
    """

    def __init__(
        self,
        dim: int,
        *,
        kind: Literal["gru", "markov"],
        width: int,
        rank: int,
        activation: Literal["none", "silu"],
        num_tokens: int = 0,
        eps: float,
    ) -> None:
        super().__init__()
        self.eps, self.silu, self.own_rows = eps, activation == "silu", num_tokens > 0
        self.gru = nn.GRU(dim, width, bias=False, batch_first=True) if kind == "gru" else None
        self.down = init_linear(nn.Linear(width if kind == "gru" else dim, rank, bias=False))
        self.up = nn.Parameter(torch.zeros(num_tokens or dim, rank))

    def forward(self, embeds: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors (N, L, R) after each token with embeddings (N, L, D), and the state (N, S) behind the last.

        The state is zeros before the anchor; a bigram has none and gives it back.
        """
        x = rms(embeds, self.eps).to(embeds.dtype)
        if self.gru is not None:
            x, last = self.gru(x, state[None])
            state = last[0]
        low = self.down(x)
        return F.silu(low) if self.silu else low, state


def folds(expert: LocalExpert) -> bool:
    """Whether a GRU correction can stand for it: not for a bigram, nor for rows that no hidden state stands for."""
    return expert.gru is not None and not expert.own_rows


def fold(expert: LocalExpert, weight: float, correction: GRUCorrection | None) -> GRUCorrection:
    """A correction that adds what `correction` adds and `weight` times the expert: the same logits from one network.

    Both are GRUs of the same tokens, so they are one of block-diagonal weights; an output without activation is
    SiLU(x) - SiLU(-x). Only for `folds` experts.
    """
    assert expert.gru is not None
    dim, signs = len(expert.up), (1.0,) if expert.silu else (1.0, -1.0)
    down = torch.cat([sign * expert.down.weight for sign in signs])
    up = torch.cat([sign * weight * expert.up for sign in signs], dim=1)
    width, before = expert.gru.hidden_size, 0 if correction is None else correction.state_width
    rank = len(down) + (0 if correction is None else correction.down.out_features)
    both = GRUCorrection(dim, width=before + width, rank=rank, eps=expert.eps).to(up)
    with torch.no_grad():
        for part in both.parameters():
            part.zero_()
        own, start = rank - len(down), dim + before
        both.down.weight[own:, start:], both.up.weight[:, own:] = down, up
        _place_gru(both.gru, expert.gru, before)
        if correction is not None:
            both.down.weight[:own, :start], both.down.bias[:own] = correction.down.weight, correction.down.bias
            both.up.weight[:, :own] = correction.up.weight
            _place_gru(both.gru, correction.gru, 0)
    return both.eval().requires_grad_(False)


def _place_gru(into: nn.GRU, gru: nn.GRU, first: int) -> None:
    """Copy a GRU's weights, gate by gate, to the states from `first` on of a wider one."""
    states = slice(first, first + gru.hidden_size)
    for name, columns in (("weight_ih_l0", slice(None)), ("weight_hh_l0", states)):
        wide, narrow = into.get_parameter(name), gru.get_parameter(name)
        wide.view(3, into.hidden_size, -1)[:, states, columns] = narrow.view(3, gru.hidden_size, -1)
