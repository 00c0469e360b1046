"""The decoder layer of EAGLE-3: attention that reads a token's embedding and the feature before it side by side.

In: embeddings and recurrent features (..., D). Out: the next recurrent features. Keys and values come from the pair
alone, so those of the context need no attention when they are made. Parameter names are the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hyflash.drafters.mirrors import mirror
from hyflash.layers import MLP, RMSNorm, init_linear
from hyflash.ops.attention import block_attention
from hyflash.ops.rope import rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What the steps of a draft see: the context, and the steps before, which each step adds itself to."""

    keys: Tensor  # (B, T, G, K) of the context, rotated
    values: Tensor  # (B, T, G, K)
    mask: Tensor  # (B, A, 1 or S, T) bool, True = visible
    cos: Tensor  # (B, A, S, K) of the steps' positions
    sin: Tensor
    own_keys: list[Tensor] = field(default_factory=list)  # (B, A, 1, G, K) a step, rotated
    own_values: list[Tensor] = field(default_factory=list)


class PairAttention(nn.Module):
    """Attention whose queries, keys and values are of pairs (..., 2D); slots have projections of their own."""

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        bias: bool,
        qk_norm: bool,
        mirrored: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = init_linear(nn.Linear(2 * dim, num_heads * head_dim, bias=bias))
        self.k_proj = init_linear(nn.Linear(2 * dim, num_kv_heads * head_dim, bias=bias))
        self.v_proj = init_linear(nn.Linear(2 * dim, num_kv_heads * head_dim, bias=bias))
        self.o_proj = init_linear(nn.Linear(num_heads * head_dim, dim, bias=bias))
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else None
        if mirrored:
            self.slot_k_proj, self.slot_v_proj = mirror(self.k_proj), mirror(self.v_proj)

    def keys_values(self, pairs: Tensor, *, of_slots: bool = False) -> tuple[Tensor, Tensor]:
        """Keys, not yet rotated, and values (..., G, K) of pairs (..., 2D), or of slots by the mirrored projections."""
        projections = (self.slot_k_proj, self.slot_v_proj) if of_slots else (self.k_proj, self.v_proj)
        keys, values = (self._heads(proj(pairs)) for proj in projections)
        return keys if self.k_norm is None else self.k_norm(keys), values

    def step(self, pairs: Tensor, chain: Chain) -> Tensor:
        """Pairs (B, A, 2D) of the next step -> (B, A, D); the chain takes its keys and values."""
        at = len(chain.own_keys)
        cos, sin = (table[:, :, at : at + 1] for table in (chain.cos, chain.sin))
        keys, values = self.keys_values(pairs[:, :, None])
        chain.own_keys.append(rotate(keys, cos, sin))
        chain.own_values.append(values)
        queries = self._heads(self.q_proj(pairs[:, :, None]))
        queries = queries if self.q_norm is None else self.q_norm(queries)
        mixed = block_attention(
            rotate(queries, cos, sin),
            chain.keys,
            chain.values,
            torch.cat(chain.own_keys, dim=2),
            torch.cat(chain.own_values, dim=2),
            chain.mask if chain.mask.shape[2] == 1 else chain.mask[:, :, at : at + 1],
            causal=False,  # no later step is there yet
        )
        out: Tensor = self.o_proj(mixed[:, :, 0])
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)


class PairLayer(nn.Module):
    """Pre-norm decoder layer over pairs of a token's embedding and the feature before it."""

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
        qk_norm: bool,
        norm_before_residual: bool,
        mirrored: bool = False,
    ) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(dim, eps)
        self.hidden_norm = RMSNorm(dim, eps)
        self.self_attn = PairAttention(
            dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            eps=eps,
            bias=bias,
            qk_norm=qk_norm,
            mirrored=mirrored,
        )
        self.post_attention_layernorm = RMSNorm(dim, eps)
        self.mlp = MLP(dim, inner)

    def pairs(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Committed tokens (..., D) and the features (..., D) before them as the attention reads them: (..., 2D)."""
        return self._pairs(embeds, self.hidden_norm(features))

    def forward(self, embeds: Tensor, features: Tensor, chain: Chain) -> Tensor:
        """Features (B, A, D) after the next step of a chain."""
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        x = residual + self.self_attn.step(self._pairs(embeds, normed), chain)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def _pairs(self, embeds: Tensor, normed: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embeds), normed), dim=-1)
