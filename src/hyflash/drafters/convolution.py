"""Two-tap convolutions along the block axis around the sublayers of a draft layer (DFlash 2, inco.ai/blog/dflash2).

In: slots of a block. Out: each slot mixed with the one before it, y_t = k_0 x_t + k_1 x_(t-1), with coefficients of
the channel plus a part that is predicted from the slot and shared by a group of channels. Slot 0 has none before it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyflash.layers import DraftLayer, LayerContext


def convolve(x: Tensor, dynamic: Tensor, base: Tensor) -> Tensor:
    """Slots x (..., S, D), coefficients dynamic (..., S, O, G) and base (O, D) -> (..., S, D); D / G channels a group.

    Tap o of slot t reads slot t - o of the same block, or zeros.
    """
    groups = x.view(*x.shape[:-1], dynamic.shape[-1], -1)  # (..., S, G, D / G)
    kernel = dynamic[..., None] + base.view(len(base), *groups.shape[-2:]).to(x.dtype)  # (..., S, O, G, D / G)
    out = kernel[..., 0, :, :] * groups
    for tap in range(1, len(base)):
        earlier = F.pad(groups[..., :-tap, :, :], (0, 0, 0, 0, tap, 0))
        out = out + kernel[..., tap, :, :] * earlier
    return out.flatten(-2)


class BlockConvolution(nn.Module):
    """The convolutions before and after one sublayer; both sets of coefficients come from the sublayer's input."""

    def __init__(self, dim: int, *, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.shape = (2, kernel_size, dim // group_size)
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, dim))
        self.kernel_projection = nn.Linear(dim, 2 * kernel_size * dim // group_size, bias=False)
        with torch.no_grad():  # the identity
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sublayer's input (..., S, D) from normed slots of that shape, and what `after` needs (..., S, O, G)."""
        dynamic = self.kernel_projection(x).view(*x.shape[:-1], *self.shape)
        return convolve(x, dynamic[..., 0, :, :], self.base_kernel[0]), dynamic[..., 1, :, :]

    def after(self, x: Tensor, dynamic: Tensor) -> Tensor:
        """Addition to the residual (..., S, D) from the sublayer's output of that shape."""
        return convolve(x, dynamic, self.base_kernel[1])


class ConvolvedLayer(DraftLayer):
    """A draft layer with convolutions around attention and MLP; a memory is read beside the attention, inside them."""

    def __init__(self, dim: int, *, kernel_size: int, group_size: int, **parts: Any) -> None:
        super().__init__(dim, **parts)
        self.attention_conv = BlockConvolution(dim, kernel_size=kernel_size, group_size=group_size)
        self.mlp_conv = BlockConvolution(dim, kernel_size=kernel_size, group_size=group_size)

    def forward(self, x: Tensor, context: LayerContext, first: int = 0) -> Tensor:
        """Slots (B, A, S, D) -> (B, A, S - first, D). All slots are computed: each reads the one before it."""
        mixed, dynamic = self.attention_conv.before(self.input_layernorm(x))
        added = self.self_attn(mixed, context, 0)
        if context.memory is not None:
            added = added + context.memory(mixed)
        x = x + self.attention_conv.after(added, dynamic)
        mixed, dynamic = self.mlp_conv.before(self.post_attention_layernorm(x))
        x = x + self.mlp_conv.after(self.mlp(mixed), dynamic)
        return x[:, :, first:]
