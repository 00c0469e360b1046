"""Operations of draft networks on the CPU kernels: what serving calls instead of torch when a drafter runs natively.

In: tensors and weights packed once (`Kernels.pack`). Out: float32 tensors, as the torch operations of the same layer
give them up to the rounding of quantised weights. Inputs of other types or strides are copied; what is written in
place (rings, states) must be float32 and contiguous. A row's bits do not depend on the rows beside it or on threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hyflash.core import EmbeddingTable
from hyflash.errors import HyflashError, UserError, nearest
from hyflash.ops.gguf_rows import quantize

if TYPE_CHECKING:
    import hyflash_kernels as hk

WEIGHTS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1", "bfloat16": "BF16", "float32": "F32"}
"""Ways to keep a drafter's weights, by their name in options."""
CORES = {"mean": 0, "gla": 1, "delta": 2, "mamba2": 3}
"""Recurrences of `ops.memory`, by the kernels' numbers."""
HEAD_STEP = 16
"""Widths of attention heads and memories are multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A packed linear layer."""

    raw: hk.Matrix
    pointer: int
    num_outputs: int
    num_inputs: int
    keep: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Keys and values of one row's context, and where to turn them."""

    data: Tensor  # (window, 2, G, K) float32; token p, counted from the oldest, lies at (first + p) % window
    first: int
    held: int
    key_turns: Tensor | None  # (held.., K): cosines then sines of half a head; None when the keys are turned
    slot_turns: Tensor  # (slots.., K)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHead:
    """Head of one row: a static list, packed, and rows of the tokens its context adds."""

    static: Matrix
    ids: Tensor  # (M,) int64 of the static list
    rows: Tensor  # (.., D) float32 of single tokens
    more: Tensor  # (E,) int64, indices of those that this head has
    more_bias: Tensor | None  # (E,)
    more_ids: Tensor  # (E,) int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A `layers.GRUCorrection` of one block."""

    anchor: int  # token before the first hidden state's
    parts: tuple[Matrix, Matrix, Matrix, Matrix]  # GRU of inputs, of its state, down, up
    eps: float
    table: EmbeddingTable


class Kernels:
    """The calls on one pool of threads; `owner` keeps the pool alive. Not to be used from two threads at once.

    Raises UserError for unknown `weights` and where no instruction set can run.
    """

    def __init__(self, pool: int, owner: Any, *, weights: str = "q8_0") -> None:
        import hyflash_kernels

        if weights not in WEIGHTS:
            raise UserError(
                f"weights of the drafter are {weights!r}; expected {' or '.join(WEIGHTS)}.{nearest(weights, WEIGHTS)}"
            )
        self.hk, self.lib = hyflash_kernels, hyflash_kernels.library()
        if not self.lib.hk_isa():
            raise UserError("HYFLASH_KERNELS_ISA names an instruction set that does not run here; leave it unset.")
        self.pool, self._owner, self._kind = pool, owner, WEIGHTS[weights]

    def pack(self, linear: nn.Linear) -> Matrix:
        """A linear layer's weights in the kernels' own order; inputs that do not fill blocks stay float32."""
        return self.pack_rows(linear.weight, linear.bias)

    def pack_head(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        """Head rows (n, k), which only have to rank tokens: half as many bits as other weights where those are q8_0.

        A correction reads the head once a draft token, more than all other weights; on SmolLM2 it costs no acceptance.
        """
        return self.pack_rows(weight, bias, kind="Q4_0" if self._kind == "Q8_0" else self._kind)

    def pack_rows(self, weight: Tensor, bias: Tensor | None = None, *, kind: str = "") -> Matrix:
        """Rows (n, k) and bias (n,) in the kernels' own order, as `kind` or else as all weights."""
        n, k = weight.shape
        if bias is not None:
            bias = ready(bias).detach().clone()
        kind = (kind or self._kind) if k % 32 == 0 else "F32"
        number = self.hk.TYPES[kind]
        stored = quantize(ready(weight).detach().numpy(), kind)
        packed = _aligned(self.lib.hk_packed_size(number, n, k))
        self.lib.hk_pack(number, n, k, stored.ctypes.data, packed.ctypes.data)
        raw = self.hk.Matrix(
            type=number, n=n, k=k, packed=packed.ctypes.data, bias=None if bias is None else bias.data_ptr()
        )
        return Matrix(raw=raw, pointer=ctypes.addressof(raw), num_outputs=n, num_inputs=k, keep=(packed, bias))

    def dense(
        self, x: Tensor, matrices: Sequence[Matrix], *, norm: Tensor | None = None, parts: int = 1, eps: float = 0.0
    ) -> list[Tensor]:
        """x (..., k), normed in equal parts if there is a norm (k values), times each matrix: a list of (..., n)."""
        x, norm = ready(x), None if norm is None else ready(norm)
        size = x.shape[-1]
        expect(all(m.num_inputs == size for m in matrices) and size % parts == 0, x.shape)
        expect(norm is None or norm.numel() == size, x.shape)
        lead = x.shape[:-1]
        outs = [torch.empty(*lead, m.num_outputs) for m in matrices]
        pointers = ctypes.c_void_p * len(matrices)
        if x.numel():
            self.check(
                self.lib.hk_dense(
                    self.pool, x.data_ptr(), x.numel() // size, _at(norm), parts, eps,
                    pointers(*[m.pointer for m in matrices]), len(matrices), pointers(*[o.data_ptr() for o in outs]),
                )
            )  # fmt: skip
        return outs

    def mlp(self, x: Tensor, norm: Tensor, eps: float, gate: Matrix, up: Matrix, down: Matrix) -> Tensor:
        """x (..., D) + SwiGLU(norm(x))."""
        x, norm = ready(x), ready(norm)
        size = x.shape[-1]
        expect(gate.num_inputs == up.num_inputs == down.num_outputs == norm.numel() == size, x.shape)
        expect(gate.num_outputs == up.num_outputs == down.num_inputs, x.shape)
        out = torch.empty_like(x)
        if x.numel():
            self.check(
                self.lib.hk_mlp(
                    self.pool, x.data_ptr(), x.numel() // size, norm.data_ptr(), eps, gate.pointer, up.pointer,
                    down.pointer, 0, out.data_ptr(),
                )
            )  # fmt: skip
        return out

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, ring: Ring, *, q_norm: Tensor, k_norm: Tensor, eps: float, causal: bool
    ) -> Tensor:
        """Attention of one row's block: q (Q, H, K), k and v (S, G, K) as projected, 1 <= Q <= S -> (Q, H * K)."""
        q, k, v, q_norm, k_norm = ready(q), ready(k), ready(v), ready(q_norm), ready(k_norm)
        (num_queries, num_heads, dim), (num_slots, num_kv_heads, _) = q.shape, k.shape
        expect(k.shape == v.shape and k.shape[2] == dim and dim % HEAD_STEP == 0, k.shape)
        expect(1 <= num_queries <= num_slots and num_heads % num_kv_heads == 0, q.shape)
        expect(q_norm.numel() == k_norm.numel() == dim, q_norm.shape)
        out = torch.empty(num_queries, num_heads * dim)
        args = self.hk.BlockAttention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=dim,
            num_slots=num_slots,
            num_queries=num_queries,
            causal=int(causal),
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            q_norm=q_norm.data_ptr(),
            k_norm=k_norm.data_ptr(),
            **ring_fields(ring, num_slots, num_kv_heads, dim),
            eps=eps,
            scale=dim**-0.5,
            out=out.data_ptr(),
        )
        self.check(self.lib.hk_attend_block(self.pool, ctypes.byref(args)))
        return out

    def ring_append(self, keys: Tensor, values: Tensor, k_norm: Tensor, eps: float, ring: Tensor, place: int) -> None:
        """Write keys, normed, and values (T, G, K), T <= window, from `place` on to a ring (window, 2, G, K)."""
        keys, values, k_norm = ready(keys), ready(values), ready(k_norm)
        T, G, K = keys.shape
        expect(keys.shape == values.shape and ring.shape[1:] == (2, G, K) and k_norm.numel() == K, keys.shape)
        expect(ring.shape[0] >= max(T, place + 1) and place >= 0, keys.shape)
        self.lib.hk_ring_append(
            keys.data_ptr(), values.data_ptr(), k_norm.data_ptr(), eps, T, G, K, in_place(ring), ring.shape[0], place
        )

    def memory_write(
        self,
        core: str,
        state: Tensor,
        *,
        k: Tensor,
        v: Tensor,
        strength: Tensor | None,
        decay: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
    ) -> None:
        """Advance one row's state (H, K, K) in place by projections k, v (T, H * K), strength and decay (T, H).

        `core` is a name of `ops.memory.MEMORY_CORES`; only gla and delta have a strength.
        """
        k, v, decay, a_log, dt_bias = ready(k), ready(v), ready(decay), ready(a_log), ready(dt_bias)
        strength = None if strength is None else ready(strength)
        heads, width = state.shape[:2]
        expect(state.shape == (heads, width, width) and width % HEAD_STEP == 0, state.shape)
        expect(k.shape == v.shape == (k.shape[0], heads * width), k.shape)
        expect(decay.shape == (k.shape[0], heads) and a_log.shape == dt_bias.shape == (heads,), decay.shape)
        expect(strength.shape == decay.shape if strength is not None else core in ("mean", "mamba2"), decay.shape)
        self.check(
            self.lib.hk_memory_write(
                self.pool, CORES[core], in_place(state), k.data_ptr(), v.data_ptr(), _at(strength), decay.data_ptr(),
                a_log.data_ptr(), dt_bias.data_ptr(), k.shape[0], heads, width,
            )
        )  # fmt: skip

    def memory_read(self, state: Tensor, q: Tensor, gates: Tensor, norm: Tensor, eps: float) -> Tensor:
        """What slots read of one row's state (H, K, K) by queries q and gates (S, H * K): (S, H * K)."""
        q, gates, norm = ready(q), ready(gates), ready(norm)
        heads, width = state.shape[:2]
        expect(state.shape == (heads, width, width) and width % HEAD_STEP == 0, state.shape)
        expect(q.shape == gates.shape == (q.shape[0], heads * width) and norm.numel() == width, q.shape)
        out = torch.empty_like(q)
        self.check(
            self.lib.hk_memory_read(
                self.pool, in_place(state), q.data_ptr(), gates.data_ptr(), norm.data_ptr(), eps, q.shape[0], heads,
                width, out.data_ptr(),
            )
        )  # fmt: skip
        return out

    def draft(self, hidden: Tensor, head: RowHead, *, chain: Chain | None = None) -> tuple[Tensor, Tensor]:
        """Tokens (n,) int64 along hidden (L, D) and their probabilities (n,); n < L where the next is not finite.

        With a `chain` each state is corrected by the token chosen before it.
        """
        hidden = ready(hidden)
        num, dim = hidden.shape
        expect(head.static.num_inputs == dim, hidden.shape)
        tokens, shares = torch.empty(num, dtype=torch.int64), torch.empty(num)
        args = self.chain_of(head.static, head.ids)
        for name, value in self.more_fields(head, dim).items():
            setattr(args, name, value)
        args.hidden, args.num, args.tokens, args.shares = hidden.data_ptr(), num, tokens.data_ptr(), shares.data_ptr()
        if chain is not None:
            args.anchor, args.eps = chain.anchor, chain.eps
            args.gru_in, args.gru_own, args.down, args.up = (part.pointer for part in chain.parts)
            args.embedding_type, args.embedding = self.hk.TYPES[chain.table.kind], chain.table.address
            args.embedding_scale = chain.table.scale
        done = self.lib.hk_draft(self.pool, ctypes.byref(args))
        self.check(done < 0)
        return tokens[:done], shares[:done]

    def chain_of(self, head: Matrix, ids: Tensor) -> hk.DraftChain:
        expect(head.num_outputs == ids.shape[0], ids.shape)
        return self.hk.DraftChain(head=head.pointer, head_ids=in_place(ids, torch.int64))

    @staticmethod
    def more_fields(head: RowHead, dim: int) -> dict[str, int | None]:
        """Fields of what a row's head has beside the static list. `more_bias` must be float32."""
        num, bias = head.more.shape[0], head.more_bias
        expect(head.more_ids.shape[0] == num and head.rows.shape[1] == dim, head.rows.shape)
        expect(bias is None or bias.shape[0] == num, head.more.shape)
        return {
            "rows": in_place(head.rows),
            "more": in_place(head.more, torch.int64),
            "more_bias": None if bias is None else in_place(bias),
            "more_ids": in_place(head.more_ids, torch.int64),
            "num_more": num,
        }

    @staticmethod
    def check(status: int | bool) -> None:
        if status:
            raise MemoryError("not enough memory for a draft pass")


def ready(tensor: Tensor) -> Tensor:
    """The tensor as the kernels read it; the caller keeps it until they are done."""
    if tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous():
        return tensor
    return tensor.detach().to("cpu", torch.float32).contiguous()


def in_place(tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Where a tensor lies that must not be copied. Raises HyflashError for one that the kernels cannot take."""
    if tensor.dtype is not dtype or not tensor.is_cpu or not tensor.is_contiguous():
        raise HyflashError(
            f"the kernels need contiguous {dtype} in main memory; found {tensor.dtype}, {tensor.stride()}."
        )
    return tensor.data_ptr()


def ring_fields(ring: Ring, num_slots: int, num_kv_heads: int, dim: int) -> dict[str, int | None]:
    """Fields that hk_block_attention and hk_draft_row share."""
    window = ring.data.shape[0]
    expect(ring.data.shape[1:] == (2, num_kv_heads, dim) and 0 <= ring.held <= window, ring.data.shape)
    for turns, least in ((ring.key_turns, ring.held), (ring.slot_turns, num_slots)):
        expect(turns is None or (turns.shape[0] >= least and turns.shape[1] == dim), ring.slot_turns.shape)
    return {
        "ring": in_place(ring.data),
        "window": max(1, window),
        "first": ring.first,
        "held": ring.held,
        "key_turns": None if ring.key_turns is None else in_place(ring.key_turns),
        "slot_turns": in_place(ring.slot_turns),
    }


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def expect(fits: bool, found: torch.Size) -> None:
    if not fits:
        raise HyflashError(f"shapes of a draft operation do not fit together; found {tuple(found)}.")


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    if num_bytes < 0:
        raise HyflashError("the kernels cannot keep a matrix of this shape.")
    raw = np.empty(num_bytes + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:num_bytes]
