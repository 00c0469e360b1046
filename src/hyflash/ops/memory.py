"""Recurrent memory cores: fixed-size states that compress the features of all committed tokens.

In: per-token keys, values, write strengths and log-decays. Out: the state after them, or what queries read from
the state before given anchors. One recurrence serves every core; per head, with S of shape (K, V):

    S <- e^g S;  S <- S + k u^T;  u = w (v - S^T k) with the delta rule, u = w v without

    core     delta  w        from
    mean     no     1 - e^g  exponential moving average of k v^T (of v, if all keys are one unit vector)
    gla      no     beta     gated linear attention with one decay a head (Yang et al. 2024; RetNet when g is fixed)
    mamba2   no     dt       state-space duality (Dao and Gu 2024): gla whose write strength also sets the decay
    delta    yes    beta     gated delta rule (Yang et al. 2025): a write replaces what its key held before

gla and mamba2 differ only in `gates`. The chunked forms here follow the WY form of the gated delta rule: matrix
products inside chunks, one small product from chunk to chunk, linear in T. `memory_naive.py` has the recurrence
token by token with the same signatures; tests hold the two equal. Arithmetic is float32 (float64 for float64
inputs) whatever the input dtype and autocast say, and states are stored so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCore:
    """Which recurrence a memory follows."""

    name: str
    delta: bool
    """A write subtracts what the state already returns for its key."""
    strength: Literal["beta", "dt", "decay"]
    """Write strength w: `beta` from its own gate, `dt` shared with the decay, or `decay` for 1 - e^g."""


MEMORY_CORES = {
    core.name: core
    for core in (
        MemoryCore(name="mean", delta=False, strength="decay"),
        MemoryCore(name="gla", delta=False, strength="beta"),
        MemoryCore(name="delta", delta=True, strength="beta"),
        MemoryCore(name="mamba2", delta=False, strength="dt"),
    )
}


@dataclass(frozen=True, slots=True)
class _Chunks:
    """A sequence cut in N chunks of C tokens; the state enters only through `states`."""

    k: Tensor  # (B, N, H, C, K)
    total: Tensor  # (B, N, H, C) log-decay from the chunk's start to after each token
    u_own: Tensor  # (B, N, H, C, V) writes when the chunk starts from an empty state
    u_state: Tensor | None  # (B, N, H, C, K) what each write subtracts, times the chunk's first state; None: nothing


def empty_state(*, batch: int, heads: int, key_dim: int, value_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Zero state (B, H, K, V) float32."""
    return torch.zeros(batch, heads, key_dim, value_dim, device=device)


def gates(
    core: MemoryCore, *, strength: Tensor, decay: Tensor, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Write strength and log-decay from projections of the features.

    In: strength and decay (B, T, H), a_log and dt_bias (H,). Out: beta (B, T, H) and g (B, T, H) <= 0, float32.
    dt = softplus(decay + dt_bias); g = -exp(a_log) dt. `strength` counts only where the core has a gate of its own
    (delta, gla: beta = sigmoid(strength)); for mamba2 beta is dt, for mean it is 1 and not used.
    """
    dtype = math_dtype(decay)
    dt = F.softplus(decay.to(dtype) + dt_bias.to(dtype))
    g = -a_log.to(dtype).exp() * dt
    if core.strength == "beta":
        return strength.to(dtype).sigmoid(), g
    return (dt if core.strength == "dt" else torch.ones_like(g)), g


def read(q: Tensor, state: Tensor) -> Tensor:
    """Read the state: q (B, S, H, K), L2-normalised by the caller, and state (B, H, K, V) -> (B, S, H, V)."""
    dtype = math_dtype(q, state)
    with torch.autocast(q.device.type, enabled=False):
        return torch.einsum("bshk,bhkv->bshv", q.to(dtype), state.to(dtype)) / math.sqrt(q.shape[-1])


def write(
    core: MemoryCore, *, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """Advance a state by T >= 0 tokens, in chunks.

    In: k (B, T, H, K), v (B, T, H, V), beta and g (B, T, H) with g <= 0, state (B, H, K, V), lengths (B,) valid
    tokens a row (None: all); tokens past them neither decay nor write, whatever they hold. Out: a new state
    (B, H, K, V); the given one is not changed.
    """
    with torch.autocast(k.device.type, enabled=False):
        dtype = math_dtype(k, v, beta, g, state)
        if k.shape[1] == 0:
            return state.to(dtype, copy=True)
        size = min(CHUNK, k.shape[1])
        inputs = masked_inputs(core, k=k, v=v, beta=beta, g=g, dtype=dtype, lengths=lengths)
        chunks = _cut(core, inputs, size=size, num_chunks=-(-k.shape[1] // size))
        return _boundary_states(chunks, state.to(dtype))[-1]


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
    """For every anchor a, what `read` returns from the state after exactly the tokens 0..a-1.

    In: q (B, A, S, H, K), anchors (B, A) int64 in 0..T (any order, also repeated), the rest as in `write`.
    Out: (B, A, S, H, V). Time and memory are linear in T and in A; only the T/C states between chunks are held.
    A read is the chunk's first state times q, decayed, plus a masked product with the writes inside the chunk.
    """
    with torch.autocast(k.device.type, enabled=False):
        dtype = math_dtype(q, k, v, beta, g, initial_state)
        inputs = masked_inputs(core, k=k, v=v, beta=beta, g=g, dtype=dtype, lengths=lengths)
        # One chunk more than a multiple of C needs, so that an anchor at T has a chunk to start from.
        num_chunks = k.shape[1] // CHUNK + 1
        chunks = _cut(core, inputs, size=CHUNK, num_chunks=num_chunks)
        states = torch.stack(_boundary_states(chunks, initial_state.to(dtype))[:-1], 1)  # (B, N, H, K, V)
        u = chunks.u_own if chunks.u_state is None else chunks.u_own - chunks.u_state @ states

        slot, num_slots = _group(anchors // CHUNK, num_chunks)
        row = torch.arange(q.shape[0], device=q.device)[:, None]
        grouped = q.new_zeros(q.shape[0], num_chunks * num_slots, *q.shape[2:], dtype=dtype)
        grouped = grouped.index_put((row, slot), q.to(dtype) / math.sqrt(q.shape[-1]))
        inside = anchors.new_zeros(grouped.shape[:2]).index_put((row, slot), anchors % CHUNK)
        places = (num_chunks, num_slots)
        grouped, inside = torch.unflatten(grouped, 1, places), torch.unflatten(inside, 1, places)
        out = _read_chunks(grouped, inside=inside, chunks=chunks, states=states, u=u)
        return out.flatten(1, 2)[row, slot]


def masked_inputs(
    core: MemoryCore, *, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, dtype: torch.dtype, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return k, v, write strength w and g in `dtype`, zeroed past `lengths` so that padding is a no-op."""
    k, v, beta, g = k.to(dtype), v.to(dtype), beta.to(dtype), g.to(dtype)
    if lengths is not None:
        padded = (torch.arange(k.shape[1], device=k.device) >= lengths[:, None])[..., None]  # (B, T, 1)
        k, v = k.masked_fill(padded[..., None], 0.0), v.masked_fill(padded[..., None], 0.0)
        beta, g = beta.masked_fill(padded, 0.0), g.masked_fill(padded, 0.0)
    return k, v, (-torch.expm1(g) if core.strength == "decay" else beta), g


def math_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _cut(core: MemoryCore, inputs: tuple[Tensor, Tensor, Tensor, Tensor], *, size: int, num_chunks: int) -> _Chunks:
    """Cut masked inputs into chunks and solve each chunk's writes up to their dependence on its first state."""
    k, v, w, g = (_split(x, size=size, num_chunks=num_chunks) for x in inputs)
    w = w[..., None]
    total = g.cumsum(-1)
    if not core.delta:
        return _Chunks(k, total, w * v, None)
    # u_i = w_i (v_i - e^{G_i} S^T k_i - sum_{j<i} e^{G_i-G_j} (k_i.k_j) u_j): unit lower triangular in u.
    before = torch.ones(size, size, dtype=torch.bool, device=k.device).tril(-1)
    within = w * (k @ k.mT) * _decays(total, since=total, mask=before)
    rhs = torch.cat([w * v, w * total.exp()[..., None] * k], -1)
    # unitriangular: the solver takes the diagonal as one without reading it.
    solved = torch.linalg.solve_triangular(within, rhs, upper=False, unitriangular=True)
    return _Chunks(k, total, *solved.split([v.shape[-1], k.shape[-1]], -1))


def _split(x: Tensor, *, size: int, num_chunks: int) -> Tensor:
    """(B, T, H, ...) -> (B, N, H, C, ...), zero-padded on the right."""
    pad = num_chunks * size - x.shape[1]
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad))
    return torch.unflatten(x, 1, (num_chunks, size)).transpose(2, 3)


def _decays(to: Tensor, *, since: Tensor, mask: Tensor) -> Tensor:
    """exp(to_i - since_j) where the mask holds, else 0. Masked before exp: the other differences may overflow."""
    return (to[..., :, None] - since[..., None, :]).masked_fill(~mask, -torch.inf).exp()


def _boundary_states(chunks: _Chunks, state: Tensor) -> list[Tensor]:
    """States before each chunk and after the last: N + 1 tensors (B, H, K, V)."""
    last = chunks.total[..., -1:]  # (B, N, H, 1)
    k_end = chunks.k * (last - chunks.total).exp()[..., None]  # each key as decayed at the chunk's end
    # unbind: the gradient of N single selects would build N whole tensors.
    added = (k_end.mT @ chunks.u_own).unbind(1)  # N of (B, H, K, V)
    keep = last.exp()[..., None].unbind(1)  # N of (B, H, 1, 1)
    states = [state]
    if chunks.u_state is None:
        for kept, new in zip(keep, added, strict=True):
            states.append(kept * states[-1] + new)
        return states
    forget = (k_end.mT @ chunks.u_state).unbind(1)  # N of (B, H, K, K)
    for kept, lost, new in zip(keep, forget, added, strict=True):
        states.append(kept * states[-1] - lost @ states[-1] + new)
    return states


def _group(chunk: Tensor, num_chunks: int) -> tuple[Tensor, int]:
    """Give each anchor a place of its own among its chunk's: chunk (B, A) -> index (B, A) into N * P places, and P.

    Queries sorted by chunk multiply their chunk's state and writes directly; no copy of either per anchor.
    """
    counts = torch.zeros(chunk.shape[0], num_chunks, dtype=torch.int64, device=chunk.device)
    counts = counts.scatter_add(1, chunk, torch.ones_like(chunk))
    num_slots = int(counts.max()) if chunk.numel() else 0
    in_order, order = chunk.sort(dim=1, stable=True)
    first = counts.cumsum(1) - counts
    rank = torch.arange(chunk.shape[1], device=chunk.device) - first.gather(1, in_order)
    return torch.empty_like(chunk).scatter(1, order, in_order * num_slots + rank), num_slots


def _read_chunks(q: Tensor, *, inside: Tensor, chunks: _Chunks, states: Tensor, u: Tensor) -> Tensor:
    """Queries by chunk: q (B, N, P, S, H, K), inside (B, N, P) tokens of the chunk read -> (B, N, P, S, H, V)."""
    num_slots, num_reads = q.shape[2], q.shape[3]
    q = q.permute(0, 1, 4, 2, 3, 5).flatten(3, 4)  # (B, N, H, P * S, K)
    after = F.pad(chunks.total, (1, 0))  # (B, N, H, C + 1): log-decay after 0, 1, .. C tokens
    index = inside[:, :, None].expand(-1, -1, after.shape[2], -1)
    to = after.gather(-1, index)  # (B, N, H, P)
    seen = torch.arange(CHUNK, device=q.device) < inside[:, :, None, :, None]  # (B, N, 1, P, C)
    decays = _decays(to, since=chunks.total, mask=seen).repeat_interleave(num_reads, 3)  # (B, N, H, P * S, C)
    out = to.exp().repeat_interleave(num_reads, 3)[..., None] * (q @ states)
    out = out + ((q @ chunks.k.mT) * decays) @ u
    return torch.unflatten(out, 3, (num_slots, num_reads)).permute(0, 1, 3, 4, 2, 5)
