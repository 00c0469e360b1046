"""Building blocks of draft networks: norms, the Qwen3-style draft layer, in-block corrections, the ridge start.

In and out: hidden states (..., D). Parameter names below a layer are those of z-lab's DFlash checkpoints.
Norms are computed in float32; everything else follows the caller's precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyflash.ops.attention import FarContext, block_attention
from hyflash.ops.online_softmax import Span
from hyflash.ops.ridge import NormalEquations
from hyflash.ops.rope import rotate


def rms(x: Tensor, eps: float) -> Tensor:
    """Scale the last axis to root mean square 1, in float32; zeros stay zeros."""
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps)


def init_linear(linear: nn.Linear) -> nn.Linear:
    """Normal weights of deviation 0.5 / sqrt(inputs) (0.02 at width 576, as in the Qwen family), zero bias."""
    nn.init.normal_(linear.weight, std=0.5 * linear.in_features**-0.5)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last axis with a learned scale; out has x's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return (rms(x, self.eps) * self.weight.float()).to(x.dtype)


class TapNorm(nn.Module):
    """One RMSNorm per tapped layer, so that no tap outweighs the others ("attention drift", 2605.09992)."""

    def __init__(self, num_taps: int, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_taps, dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., C, D) -> (..., C, D)."""
        return (rms(x, self.eps) * self.weight.float()).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = init_linear(nn.Linear(dim, inner, bias=False))
        self.up_proj = init_linear(nn.Linear(dim, inner, bias=False))
        self.down_proj = init_linear(nn.Linear(inner, dim, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """What one layer sees beside its block."""

    keys: Tensor  # (B, T, G, K) normed and rotated
    values: Tensor  # (B, T, G, K)
    mask: Tensor  # (B, A, 1 or S, T) bool, True = visible
    cos: Tensor  # (B, A, S, K) of the block's positions
    sin: Tensor
    causal: bool
    memory: Callable[[Tensor], Tensor] | None = None  # normed slots (B, A, Q, D) -> addition (B, A, Q, D)
    summary: tuple[Tensor, Tensor] | None = None  # more keys (H, M, K), values (B, A, H, M, K), of each query head
    far: FarContext | None = None
    attend: Callable[[Tensor], Span] | None = None
    """What rotated queries (B, A, Q, H, K) see in tokens kept elsewhere: outputs alike, log-sum-exps (B, A, Q, H)."""


class BlockAttention(nn.Module):
    """Queries from the block; keys and values from the context features and the block, by the same projections."""

    def __init__(self, dim: int, *, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = init_linear(nn.Linear(dim, num_heads * head_dim, bias=bias))
        self.k_proj = init_linear(nn.Linear(dim, num_kv_heads * head_dim, bias=bias))
        self.v_proj = init_linear(nn.Linear(dim, num_kv_heads * head_dim, bias=bias))
        self.o_proj = init_linear(nn.Linear(num_heads * head_dim, dim, bias=bias))
        self.q_norm = RMSNorm(head_dim, eps)
        self.k_norm = RMSNorm(head_dim, eps)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normed, not yet rotated keys and values (..., G, K) of x (..., D)."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        return self.k_norm(self.k_proj(x).view(shape)), self.v_proj(x).view(shape)

    def forward(self, x: Tensor, context: LayerContext, first: int) -> Tensor:
        """Slots x (B, A, S, D) -> (B, A, S - first, D), for the slots from `first` on."""
        keys, values = self.keys_values(x)
        queries = self.q_norm(self.q_proj(x[:, :, first:]).view(*x.shape[:2], x.shape[2] - first, -1, self.head_dim))
        mask = context.mask if context.mask.shape[2] == 1 else context.mask[:, :, first:]
        far, turned = context.far, rotate(queries, context.cos[:, :, first:], context.sin[:, :, first:])
        mixed = block_attention(
            turned,
            context.keys,
            context.values,
            rotate(keys, context.cos, context.sin),
            values,
            mask,
            causal=context.causal,
            summary=context.summary,
            far=None if far is None else (rotate(queries, far.cos[:, :, first:], far.sin[:, :, first:]), far),
            elsewhere=None if context.attend is None else context.attend(turned),
        )
        out: Tensor = self.o_proj(mixed)
        return out


class DraftLayer(nn.Module):
    """Pre-norm decoder layer over block slots, as in Qwen3, with an optional memory read beside the attention."""

    def __init__(
        self,
        dim: int,
        *,
        inner: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        bias: bool,
        memory: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dim, eps)
        self.self_attn = BlockAttention(
            dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, eps=eps, bias=bias
        )
        self.post_attention_layernorm = RMSNorm(dim, eps)
        self.mlp = MLP(dim, inner)
        self.memory = memory

    def forward(self, x: Tensor, context: LayerContext, first: int = 0) -> Tensor:
        """Slots (B, A, S, D) -> (B, A, S - first, D): earlier slots serve as keys and values only."""
        normed = self.input_layernorm(x)
        x = x[:, :, first:] + self.self_attn(normed, context, first)
        if context.memory is not None:
            x = x + context.memory(normed[:, :, first:])
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def silence(self) -> None:
        """Zero the output projections, so that the layer passes its input through."""
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)


# A parallel block has no dependence between its draft tokens; a correction adds it between the last hidden
# state and the head, from the tokens already chosen in the block (anchor first).


class MarkovCorrection(nn.Module):
    """Low-rank correction from the previous token of the block (after DSpark, without vocabulary-sized tables)."""

    state_width = 0

    def __init__(self, dim: int, *, rank: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.down = init_linear(nn.Linear(dim, rank, bias=False))
        self.up = nn.Linear(rank, dim, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Corrected hidden (N, L, D), given embeddings (N, L, D) of the token before each position."""
        return hidden + self.up(self.down(rms(previous, self.eps).to(hidden.dtype))), state


class GRUCorrection(nn.Module):
    """Correction from a GRU over the block's tokens so far and the hidden state (after Domino, 2605.29707)."""

    def __init__(self, dim: int, *, width: int, rank: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.state_width = width
        self.gru = nn.GRU(dim, width, bias=False, batch_first=True)
        self.down = init_linear(nn.Linear(dim + width, rank))
        self.up = nn.Linear(rank, dim, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Corrected hidden (N, L, D) and the new state (N, width), given embeddings of the tokens before."""
        run, last = self.gru(rms(previous, self.eps).to(previous.dtype), state[None])
        mixed = F.silu(self.down(torch.cat((rms(hidden, self.eps).to(run.dtype), run), dim=-1)))
        return hidden + self.up(mixed), last[0]


class RidgeStart(nn.Module):
    """Slot inputs as a linear map of the features before the anchor and the anchor's embedding; fitted, trained on."""

    def __init__(self, dim: int, *, num_taps: int, num_slots: int, rank: int, eps: float) -> None:
        super().__init__()
        self.dim, self.num_slots, self.rank, self.eps = dim, num_slots, rank, eps
        self.num_inputs = (num_taps + 1) * dim
        if rank > 0:
            self.down = init_linear(nn.Linear(self.num_inputs, rank, bias=False))
        self.up = init_linear(nn.Linear(rank or self.num_inputs, num_slots * dim))

    def inputs(self, taps: Tensor, anchor: Tensor) -> Tensor:
        """Regression inputs (..., F) float32 of taps (..., C, D) at anchor - 1 and the anchor's embedding (..., D)."""
        return torch.cat((rms(taps, self.eps).flatten(-2), rms(anchor, self.eps)), dim=-1)

    def forward(self, taps: Tensor, anchor: Tensor) -> Tensor:
        """Slot inputs (..., L, D)."""
        x = self.inputs(taps, anchor).to(self.up.weight.dtype)
        out: Tensor = self.up(self.down(x) if self.rank > 0 else x)
        return out.view(*out.shape[:-1], self.num_slots, self.dim)

    @torch.no_grad()
    def fit(self, sums: NormalEquations, relative_lambda: float) -> float:
        """Take the ridge solution as weights; returns the explained share of variance."""
        weight, bias = sums.solve(relative_lambda=relative_lambda)
        if self.rank > 0:
            up, down, bias = sums.reduce_rank(weight, self.rank)
            self.down.weight.copy_(down)
            self.up.weight.copy_(up)
            weight = up @ down
        else:
            self.up.weight.copy_(weight)
        self.up.bias.copy_(bias)
        return sums.explained(weight, bias)
