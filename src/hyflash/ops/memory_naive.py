"""Recurrent memory cores token by token: the definition that `memory.py`'s chunked forms are tested against.

Same names, signatures, shapes and dtypes as there; time is one small update a token, and `read_at_anchors` holds
a state per token, so this is for tests and for reading.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyflash.ops.memory import MemoryCore, masked_inputs, math_dtype, read


def write(
    core: MemoryCore, *, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """As `memory.write`: the state after T tokens, one after the other."""
    return _states(core, k=k, v=v, beta=beta, g=g, state=state, lengths=lengths)[-1].clone()


def read_at_anchors(
    core: MemoryCore,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    initial_state: Tensor,
    anchors: Tensor,
    lengths: Tensor | None = None,
) -> Tensor:
    """As `memory.read_at_anchors`: every state is kept and each anchor reads its own."""
    states = torch.stack(_states(core, k=k, v=v, beta=beta, g=g, state=initial_state, lengths=lengths), 1)
    row = torch.arange(q.shape[0], device=q.device)[:, None]
    picked = states[row, anchors]  # (B, A, H, K, V)
    return torch.unflatten(read(q.flatten(0, 1), picked.flatten(0, 1)), 0, anchors.shape)


def _states(
    core: MemoryCore, *, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor, lengths: Tensor | None
) -> list[Tensor]:
    """States after 0, 1, .. T tokens."""
    dtype = math_dtype(k, v, beta, g, state)
    k, v, w, g = masked_inputs(core, k=k, v=v, beta=beta, g=g, dtype=dtype, lengths=lengths)
    states = [state.to(dtype)]
    for t in range(k.shape[1]):
        s = g[:, t].exp()[..., None, None] * states[-1]
        held = (s * k[:, t, :, :, None]).sum(-2) if core.delta else 0.0  # S^T k, (B, H, V)
        u = w[:, t, :, None] * (v[:, t] - held)
        states.append(s + k[:, t, :, :, None] * u[:, :, None])
    return states
