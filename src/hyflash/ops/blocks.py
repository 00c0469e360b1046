"""Whole layers and whole draft passes on the CPU kernels: many operations of `ops/kernels.py` in one call.

In: parts packed once (`make_layer`, `make_block`). Out: what the operations give one after the other, bit for bit,
without the way back to Python between them, which took as long as they did.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyflash.core import EmbeddingTable
from hyflash.errors import HyflashError
from hyflash.ops.kernels import CORES, HEAD_STEP, Kernels, Matrix, Ring, RowHead, expect, in_place, ready, ring_fields

if TYPE_CHECKING:
    import hyflash_kernels as hk


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """A `layers.DraftLayer` packed, and what a memory adds to it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    norm: Tensor  # (D)
    eps: float
    q_norm: Tensor  # (K)
    k_norm: Tensor
    head_eps: float
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    mlp_norm: Tensor  # (D)
    mlp_eps: float
    gate: Matrix
    up: Matrix
    down: Matrix
    memory: MemoryRead | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRead:
    """How slots read a memory (H, K, K)."""

    width: int  # K
    queries: Matrix
    gates: Matrix
    out: Matrix
    norm: Tensor  # (K)
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """`LayerParts` as the kernels take them."""

    raw: hk.DraftLayer
    parts: LayerParts


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """A whole draft pass: from the anchor to draft tokens."""

    num_slots: int  # the anchor's included
    layers: Sequence[Layer]
    start: Sequence[Matrix]  # none: every slot begins as `mask`; one or two in a row else
    start_parts: int = 1
    start_eps: float = 0.0
    mask: Tensor | None = None  # (D)
    norm: Tensor | None = None  # (D)
    norm_eps: float = 0.0
    head: Matrix
    ids: Tensor  # (M,) int64, of the head's rows
    gru: tuple[Matrix, Matrix, Matrix, Matrix] | None = None
    gru_eps: float = 0.0
    table: EmbeddingTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`BlockParts` as the kernels take them."""

    raw: hk.DraftBlock
    parts: BlockParts
    keep: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """One row of a draft pass. `seen` has the ring and the memory of each layer."""

    anchor: int
    num_tokens: int
    before: Tensor | None  # (C, D) features before the anchor, for a start
    head: RowHead
    seen: Sequence[tuple[Ring, Tensor | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWrite:
    """How a memory (H, K, K) takes in features; `core` is a name of `ops.memory.MEMORY_CORES`."""

    core: str
    keys: Matrix
    values: Matrix
    decay: Matrix
    strength: Matrix | None  # only of gla and delta
    a_log: Tensor  # (H)
    dt_bias: Tensor  # (H)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, K, K)."""
        heads = self.decay.num_outputs
        width = self.keys.num_outputs // heads
        return heads, width, width


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeLayer:
    """What a layer keeps of committed features."""

    num_kv_heads: int
    head_dim: int
    k: Matrix
    v: Matrix
    k_norm: Tensor  # (K)
    eps: float
    memory: MemoryWrite | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeParts:
    """A whole commit: features (T, C, D), fused and normed, to what each layer keeps."""

    fuse: Matrix
    parts: int  # C
    tap_norm: Tensor | None  # (C * D)
    norm: Tensor  # (D)
    eps: float
    layers: Sequence[TakeLayer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """`TakeParts` as the kernels take them."""

    raw: hk.DraftTake
    parts: TakeParts
    keep: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a layer keeps one row's tokens: `data` (window, 2, G, K) from `first` on, round and round."""

    data: Tensor
    first: int
    turns: Tensor | None  # (tokens.., K): keys are turned by it
    memory: Tensor | None  # (H, K, K)


def make_layer(kernels: Kernels, parts: LayerParts) -> Layer:
    """A whole layer, for `run_layer`. Its norms must be float32 and stay where they are."""
    memory = parts.memory
    size = parts.q.num_inputs
    expect(parts.q.num_outputs == parts.o.num_inputs == parts.num_heads * parts.head_dim, parts.norm.shape)
    expect(parts.k.num_outputs == parts.v.num_outputs == parts.num_kv_heads * parts.head_dim, parts.norm.shape)
    inputs = [parts.q, parts.k, parts.v, parts.gate, parts.up] + ([memory.queries, memory.gates] if memory else [])
    outputs = [parts.o, parts.down] + ([memory.out] if memory else [])
    fits = all(m.num_inputs == size for m in inputs) and all(m.num_outputs == size for m in outputs)
    expect(fits, parts.norm.shape)
    expect(parts.norm.numel() == parts.mlp_norm.numel() == size, parts.norm.shape)
    expect(parts.q_norm.numel() == parts.k_norm.numel() == parts.head_dim, parts.q_norm.shape)
    expect(parts.head_dim % HEAD_STEP == 0 and parts.num_heads % parts.num_kv_heads == 0, parts.q_norm.shape)
    raw = kernels.hk.DraftLayer(
        num_heads=parts.num_heads,
        num_kv_heads=parts.num_kv_heads,
        head_dim=parts.head_dim,
        causal=int(parts.causal),
        norm=in_place(parts.norm),
        q_norm=in_place(parts.q_norm),
        k_norm=in_place(parts.k_norm),
        mlp_norm=in_place(parts.mlp_norm),
        eps=parts.eps,
        head_eps=parts.head_eps,
        mlp_eps=parts.mlp_eps,
        **{name: getattr(parts, name).pointer for name in ("q", "k", "v", "o", "gate", "up", "down")},
    )
    if memory is not None:
        width = memory.queries.num_outputs
        expect(width == memory.gates.num_outputs == memory.out.num_inputs, memory.norm.shape)
        expect(width % memory.width == 0 and memory.width % HEAD_STEP == 0, memory.norm.shape)
        expect(memory.norm.numel() == memory.width, memory.norm.shape)
        raw.memory_heads, raw.memory_width = width // memory.width, memory.width
        raw.memory_norm, raw.memory_eps = in_place(memory.norm), memory.eps
        raw.memory_q, raw.memory_gate = memory.queries.pointer, memory.gates.pointer
        raw.memory_out = memory.out.pointer
    return Layer(raw=raw, parts=parts)


def run_layer(
    kernels: Kernels, layer: Layer, x: Tensor, rings: Sequence[Ring], memories: Sequence[Tensor | None], first: int = 0
) -> Tensor:
    """Slots x (B, S, D) -> (B, S - first, D): the layer for the slots from `first` on.

    `rings` and `memories` (H, K, K) are what each row's slots may see. The same as `dense`, `attend`,
    `memory_read` and `mlp` one after the other, without the way back to Python between them.
    """
    x, parts = ready(x), layer.parts
    B, S, D = x.shape
    expect(parts.q.num_inputs == D and len(rings) == len(memories) == B and 0 <= first < S, x.shape)
    out = torch.empty(B, S - first, D)
    seen = zip(rings, memories, strict=True)
    rows = (kernels.hk.DraftRow * B)(*[_row(kernels, layer, ring, memory, S) for ring, memory in seen])
    kernels.check(
        kernels.lib.hk_draft_layer_run(
            kernels.pool, ctypes.byref(layer.raw), x.data_ptr(), B, S, first, rows, out.data_ptr()
        )
    )
    return out


def _row(kernels: Kernels, layer: Layer, ring: Ring, memory: Tensor | None, num_slots: int) -> hk.DraftRow:
    parts = layer.parts
    fields = ring_fields(ring, num_slots, parts.num_kv_heads, parts.head_dim)
    if parts.memory is not None:
        width = parts.memory.width
        if memory is None:
            raise HyflashError("this layer reads a memory, and a row has none.")
        expect(memory.shape == (layer.raw.memory_heads, width, width), memory.shape)
        fields["memory"] = in_place(memory)
    row: hk.DraftRow = kernels.hk.DraftRow(**fields)
    return row


def make_block(kernels: Kernels, parts: BlockParts) -> Block:
    """A whole draft pass, for `run_block`. Norms and mask must be float32 and stay where they are."""
    dim, num_slots = parts.head.num_inputs, parts.num_slots
    expect(bool(parts.layers) and all(x.parts.q.num_inputs == dim for x in parts.layers), parts.ids.shape)
    expect(num_slots > 1 and parts.head.num_outputs == len(parts.ids), parts.ids.shape)
    for vector in (parts.norm, parts.mask):
        expect(vector is None or vector.shape == (dim,), parts.ids.shape)
    sizes = [size for matrix in parts.start for size in (matrix.num_inputs, matrix.num_outputs)]
    if parts.start:
        expect(len(parts.start) <= 2 and sizes[1:-1] == sizes[1:-1][::-1], parts.ids.shape)
        expect(sizes[0] == parts.start_parts * dim and sizes[-1] == (num_slots - 1) * dim, parts.ids.shape)
    elif parts.mask is None:
        raise HyflashError("a block begins with a start or a mask; found neither.")
    chain = kernels.chain_of(parts.head, parts.ids)
    chain.embedding_type, chain.embedding = kernels.hk.TYPES[parts.table.kind], parts.table.address
    chain.embedding_scale = parts.table.scale
    if parts.gru is not None:
        chain.gru_in, chain.gru_own, chain.down, chain.up = (part.pointer for part in parts.gru)
        chain.eps = parts.gru_eps
    layers = (ctypes.c_void_p * len(parts.layers))(*[ctypes.addressof(layer.raw) for layer in parts.layers])
    ones = torch.ones(parts.start_parts * dim)
    raw = kernels.hk.DraftBlock(
        dim=dim,
        num_slots=num_slots,
        start_parts=parts.start_parts,
        start_eps=parts.start_eps,
        start_norm=ones.data_ptr(),
        mask=None if parts.mask is None else in_place(parts.mask),
        layers=ctypes.addressof(layers),
        num_layers=len(parts.layers),
        norm=None if parts.norm is None else in_place(parts.norm),
        norm_eps=parts.norm_eps,
        chain=ctypes.addressof(chain),
    )
    for i, matrix in enumerate(parts.start):
        raw.start[i] = matrix.pointer
    return Block(raw=raw, parts=parts, keep=(chain, layers, ones))


def run_block(kernels: Kernels, block: Block, rows: Sequence[BlockRow]) -> tuple[Tensor, Tensor, list[int]]:
    """Draft tokens (B, L) int64, their probabilities (B, L) and how many there are of each row, L the most asked.

    The same as slot inputs, `run_layer`, the last norm and `draft` one after the other. Tokens are zero past the
    last one; there are fewer than asked where the next is not finite.
    """
    parts = block.parts
    most = max(row.num_tokens for row in rows)
    tokens, shares = torch.zeros(len(rows), most, dtype=torch.int64), torch.zeros(len(rows), most)
    raws = (kernels.hk.BlockRow * len(rows))()
    for b, (raw, row) in enumerate(zip(raws, rows, strict=True)):
        expect(1 <= row.num_tokens < parts.num_slots and len(row.seen) == len(parts.layers), tokens.shape)
        if parts.start:
            if row.before is None:
                raise HyflashError("this block starts from features, and a row has none.")
            expect(row.before.numel() == parts.start[0].num_inputs - parts.head.num_inputs, row.before.shape)
            raw.before = in_place(row.before)
        raw.anchor, raw.num = row.anchor, row.num_tokens
        for name, value in kernels.more_fields(row.head, parts.head.num_inputs).items():
            setattr(raw, name, value)
        raw.tokens, raw.shares = tokens.data_ptr() + 8 * b * most, shares.data_ptr() + 4 * b * most
    seen = [_row(kernels, x, *row.seen[i], parts.num_slots) for i, x in enumerate(parts.layers) for row in rows]
    states = (kernels.hk.DraftRow * len(seen))(*seen)
    kernels.check(kernels.lib.hk_draft_block_run(kernels.pool, ctypes.byref(block.raw), raws, len(rows), states))
    found = [int(raw.found) for raw in raws]
    for b, n in enumerate(found):
        if n < rows[b].num_tokens:
            tokens[b, n:], shares[b, n:] = 0, 0.0
    return tokens, shares, found


def make_take(kernels: Kernels, parts: TakeParts) -> Take:
    """A whole commit, for `run_take`. Norms, decays and biases must be float32 and stay where they are."""
    dim = parts.fuse.num_outputs
    expect(parts.norm.shape == (dim,) and parts.fuse.num_inputs == parts.parts * dim, parts.norm.shape)
    expect(parts.tap_norm is None or parts.tap_norm.numel() == parts.fuse.num_inputs, parts.norm.shape)
    layers = (kernels.hk.TakeLayer * len(parts.layers))(*[_take_layer(kernels, layer, dim) for layer in parts.layers])
    raw = kernels.hk.DraftTake(
        fuse=parts.fuse.pointer,
        tap_norm=None if parts.tap_norm is None else in_place(parts.tap_norm),
        norm=in_place(parts.norm),
        parts=parts.parts,
        eps=parts.eps,
        layers=ctypes.addressof(layers),
        num_layers=len(layers),
    )
    return Take(raw=raw, parts=parts, keep=(layers,))


def _take_layer(kernels: Kernels, layer: TakeLayer, dim: int) -> hk.TakeLayer:
    memory, shape = layer.memory, layer.k_norm.shape
    expect(layer.k.num_inputs == layer.v.num_inputs == dim and shape == (layer.head_dim,), shape)
    expect(layer.k.num_outputs == layer.v.num_outputs == layer.num_kv_heads * layer.head_dim, shape)
    expect(layer.head_dim % HEAD_STEP == 0, shape)
    raw: hk.TakeLayer = kernels.hk.TakeLayer(
        k=layer.k.pointer,
        v=layer.v.pointer,
        k_norm=in_place(layer.k_norm),
        eps=layer.eps,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
    )
    if memory is not None:
        (heads, width, _), strength = memory.shape, memory.strength
        expect(memory.keys.num_outputs == memory.values.num_outputs == heads * width, memory.a_log.shape)
        expect(memory.a_log.shape == memory.dt_bias.shape == (heads,) and width % HEAD_STEP == 0, memory.a_log.shape)
        expect((strength is None) == (memory.core in ("mean", "mamba2")), memory.a_log.shape)
        expect(strength is None or strength.num_outputs == heads, memory.a_log.shape)
        raw.memory_k, raw.memory_v = memory.keys.pointer, memory.values.pointer
        raw.decay, raw.strength = memory.decay.pointer, None if strength is None else strength.pointer
        raw.a_log, raw.dt_bias = in_place(memory.a_log), in_place(memory.dt_bias)
        raw.core, raw.memory_heads, raw.memory_width = CORES[memory.core], heads, width
    return raw


def run_take(kernels: Kernels, take: Take, features: Tensor, counts: Sequence[int], places: Sequence[Place]) -> None:
    """Features (all tokens, C, D), row after row with `counts` of them, into `places`, layer after layer.

    The same as `dense`, `ring_append` and `memory_write` one after the other.
    """
    features, parts = ready(features), take.parts
    expect(features.shape == (sum(counts), parts.parts, parts.fuse.num_outputs), features.shape)
    expect(min(counts) > 0 and len(places) == len(counts) * len(parts.layers), features.shape)
    raws = (kernels.hk.TakePlace * len(places))()
    for i, (raw, place) in enumerate(zip(raws, places, strict=True)):
        layer, count = parts.layers[i // len(counts)], counts[i % len(counts)]
        window, memory = place.data.shape[0], layer.memory
        expect(place.data.shape[1:] == (2, layer.num_kv_heads, layer.head_dim) and window > 0, place.data.shape)
        expect(0 <= place.first < window, place.data.shape)
        raw.ring, raw.window, raw.place = in_place(place.data), window, place.first
        if place.turns is not None:
            expect(place.turns.shape == (count, layer.head_dim) and count <= window - place.first, place.turns.shape)
            raw.turns = in_place(place.turns)
        if memory is not None:
            if place.memory is None:
                raise HyflashError("this layer writes to a memory, and a row has none.")
            expect(place.memory.shape == memory.shape, place.memory.shape)
            raw.memory = in_place(place.memory)
    lengths = (ctypes.c_int64 * len(counts))(*counts)
    kernels.check(
        kernels.lib.hk_draft_take_run(
            kernels.pool, ctypes.byref(take.raw), features.data_ptr(), lengths, len(counts), raws
        )
    )
