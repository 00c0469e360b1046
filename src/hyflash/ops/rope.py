"""Rotary position embedding, rotate-half (NeoX) form over the full head width (RoFormer, arXiv 2104.09864).

In: positions and heads. Out: rotated heads. Angles are made in float64, so a position of 100k is as exact as 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(positions: Tensor, *, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (..., dim) float32, for integer positions (...). `dim` is even."""
    steps = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device)
    return turn_tables(positions, theta ** (-steps / dim))


def turn_tables(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same, each (..., 2P), for given radians per position (P,) and a factor on both halves (yarn)."""
    angles = positions[..., None].double() * frequencies.to(positions.device).double()
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x (..., N, K) by tables (..., K); computed in float32, returned in x's dtype.

    Tables (..., 2P) narrower than the heads turn their first 2P numbers and leave the others (partial rotary).
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos[..., None, :] + turned * sin[..., None, :]).to(x.dtype)
