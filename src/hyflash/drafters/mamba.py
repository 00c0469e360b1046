"""Mamba-2 mixer over the slots of a block (Dao and Gu 2024, arXiv 2405.21060), begun from a given state.

In: normed slots and a state for each head. Out: an addition to the residual. A block is a few slots, so the scan is
its exact masked quadratic form: one small product of slots with slots. Per head, h of shape (P, N):

    h_s = e^(-A dt_s) h_(s-1) + dt_s x_s B_s^T        y_s = h_s C_s + D x_s        out = W norm(y * silu(z))
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyflash.layers import RMSNorm, init_linear

MIN_DT, MAX_DT = 1e-3, 1e-1
"""Step sizes at the start, spread over the heads; Mamba-2's own range."""


class MambaMixer(nn.Module):
    """One Mamba-2 mixer; `groups` of heads share B and C."""

    def __init__(
        self, dim: int, *, num_heads: int, head_dim: int, state_dim: int, groups: int, kernel: int, eps: float
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.state_dim, self.groups, self.kernel = (
            num_heads,
            head_dim,
            state_dim,
            groups,
            kernel,
        )
        self.inner, width = num_heads * head_dim, num_heads * head_dim + 2 * groups * state_dim
        self.in_proj = init_linear(nn.Linear(dim, self.inner + width + num_heads, bias=False))
        self.conv1d = nn.Conv1d(width, width, kernel, groups=width)
        steps = torch.logspace(math.log10(MIN_DT), math.log10(MAX_DT), num_heads)
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus gives the steps
        self.A_log = nn.Parameter(torch.linspace(1.0, 16.0, num_heads).log())
        self.D = nn.Parameter(torch.ones(num_heads))
        self.norm = RMSNorm(self.inner, eps)
        self.out_proj = init_linear(nn.Linear(self.inner, dim, bias=False))

    def forward(self, x: Tensor, seed: Tensor | None) -> Tensor:
        """Slots (B, A, S, D) from a state (B, A, H, P, N), None: empty -> (B, A, S, D). Slots see no later ones."""
        z, mixed, dt = torch.split(self.in_proj(x), [self.inner, self.conv1d.in_channels, self.num_heads], dim=-1)
        mixed = F.pad(mixed.flatten(0, 1).transpose(1, 2), (self.kernel - 1, 0))
        mixed = F.silu(self.conv1d(mixed)).transpose(1, 2).view(*x.shape[:3], -1).float()
        own, write, read = torch.split(mixed, [self.inner, *2 * [self.groups * self.state_dim]], dim=-1)
        own = torch.unflatten(own, -1, (self.num_heads, self.head_dim))  # (B, A, S, H, P)
        write, read = self._by_head(write), self._by_head(read)  # (B, A, S, H, N)
        step = F.softplus(dt.float() + self.dt_bias.float())  # (B, A, S, H)
        total = (-self.A_log.float().exp() * step).cumsum(2)
        between = (total[:, :, :, None] - total[:, :, None]).permute(0, 1, 4, 2, 3)  # (B, A, H, S, S)
        later = torch.ones(between.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        decay = between.masked_fill(later, float("-inf")).exp()
        scores = torch.einsum("bashn,bathn->bahst", read, write) * decay
        y = torch.einsum("bahst,bathp->bashp", scores, own * step[..., None]) + self.D.float()[:, None] * own
        if seed is not None:
            y = y + total.exp()[..., None] * torch.einsum("bashn,bahpn->bashp", read, seed.float())
        out: Tensor = self.out_proj(self.norm(y.flatten(-2) * F.silu(z.float())).to(x.dtype))
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        """(B, A, S, groups * N) -> (B, A, S, H, N)."""
        by_group = torch.unflatten(x, -1, (self.groups, self.state_dim))
        return by_group.repeat_interleave(self.num_heads // self.groups, dim=-2)
