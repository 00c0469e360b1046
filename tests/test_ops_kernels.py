"""Each draft operation on the CPU kernels against its torch counterpart: sizes, edges, quantised weights, threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyflash.core import EmbeddingTable
from hyflash.drafters.base import pick_tokens
from hyflash.drafters.context import ContextShape, ContextStore, GrowingStore, RingStore
from hyflash.drafters.vocab import ServingHead
from hyflash.errors import HyflashError, UserError
from hyflash.layers import MLP, GRUCorrection, RMSNorm, rms
from hyflash.ops import memory
from hyflash.ops.attention import block_attention, context_mask
from hyflash.ops.blocks import (
    LayerParts,
    MemoryRead,
    MemoryWrite,
    TakeLayer,
    TakeParts,
    make_layer,
    make_take,
    run_layer,
    run_take,
)
from hyflash.ops.kernels import WEIGHTS, Chain, Kernels, Matrix, Ring, RowHead
from hyflash.ops.rope import rope_tables, rotate
from kernel_pool import new_kernels
from native_models import needs_kernels
from toys import toy_info

pytestmark = needs_kernels
EPS = 1e-6
ROUNDING = {"float32": 1e-5, "bfloat16": 5e-3, "q8_0": 2e-2, "q4_1": 0.12, "q4_0": 0.15}


@pytest.fixture(autouse=True)
def seeded() -> Any:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        yield


def assert_near(got: Tensor, want: Tensor, relative: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert float((got - want).norm()) <= relative * float(want.norm()) + 1e-7


# ------------------------------------------------------------------------------------------- matrices


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("size", "outputs"), [(64, (48, 5)), (40, (17,)), (96, (1, 33, 16))])
def test_dense_is_a_norm_and_linear_layers(weights: str, size: int, outputs: tuple[int, ...]) -> None:
    kernels, norm = new_kernels(weights), RMSNorm(size, EPS)
    norm.weight.add_(0.3 * torch.randn(size))
    linears = [nn.Linear(size, n, bias=i == 0) for i, n in enumerate(outputs)]
    matrices = [kernels.pack(linear) for linear in linears]
    for rows in (1, 2, 3, 8, 16, 33):
        x = 3 * torch.randn(rows, size)
        for inputs, options in ((x, {}), (norm(x), {"norm": norm.weight, "eps": EPS})):
            for got, linear in zip(kernels.dense(x, matrices, **options), linears, strict=True):
                # Few outputs may nearly cancel, so the error is held against the size of the factors.
                size_of_it = inputs.norm() * linear.weight.norm() / size**0.5
                assert float((got - linear(inputs)).norm()) <= ROUNDING[weights] * float(size_of_it)


def test_inputs_that_fill_no_blocks_keep_float32_weights() -> None:
    kernels, linear = new_kernels("q4_0"), nn.Linear(40, 9)
    x = torch.randn(4, 40)
    assert_near(kernels.dense(x, [kernels.pack(linear)])[0], linear(x))


def test_dense_norms_equal_parts_one_by_one() -> None:
    kernels, linear = new_kernels(), nn.Linear(96, 20, bias=False)
    scale, x = torch.randn(3, 32), torch.randn(2, 5, 96) * 7
    want = linear((rms(x.view(2, 5, 3, 32), EPS) * scale).flatten(-2))
    assert_near(kernels.dense(x, [kernels.pack(linear)], norm=scale, parts=3, eps=EPS)[0], want)


def test_dense_of_no_rows_is_empty_and_of_zeros_the_bias() -> None:
    kernels, linear = new_kernels("q8_0"), nn.Linear(32, 7)
    matrix = kernels.pack(linear)
    assert kernels.dense(torch.zeros(0, 32), [matrix])[0].shape == (0, 7)
    assert torch.equal(kernels.dense(torch.zeros(2, 32), [matrix])[0], linear.bias.expand(2, 7))


def test_inputs_of_other_types_and_strides_are_taken_as_they_are_meant() -> None:
    kernels, linear = new_kernels(), nn.Linear(32, 8)
    matrix, x = kernels.pack(linear), torch.randn(32, 6)
    assert_near(kernels.dense(x.T, [matrix])[0], linear(x.T))
    assert_near(kernels.dense(x.T.double(), [matrix])[0], linear(x.T))
    assert_near(kernels.dense(x.T.bfloat16(), [matrix])[0], linear(x.T.bfloat16().float()))


def test_packed_weights_are_copies() -> None:
    kernels, linear = new_kernels(), nn.Linear(32, 8)
    matrix, x = kernels.pack(linear), torch.randn(1, 32)
    before = kernels.dense(x, [matrix])[0]
    linear.weight.zero_()
    linear.bias.zero_()
    assert torch.equal(kernels.dense(x, [matrix])[0], before)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("size", "inner"), [(32, 64), (40, 56), (64, 96)])
def test_mlp_adds_swiglu_of_the_norm(weights: str, size: int, inner: int) -> None:
    kernels, norm, layer = new_kernels(weights), RMSNorm(size, EPS), MLP(size, inner)
    parts = [kernels.pack(part) for part in (layer.gate_proj, layer.up_proj, layer.down_proj)]
    for rows in (1, 8, 33):
        x = torch.randn(rows, size)
        assert_near(kernels.mlp(x, norm.weight, EPS, *parts), x + layer(norm(x)), ROUNDING[weights])
    assert kernels.mlp(torch.zeros(0, size), norm.weight, EPS, *parts).shape == (0, size)


# ------------------------------------------------------------------------------------------ attention

SLOTS, DIM = 5, 32


def shape_of(groups: int) -> ContextShape:
    return ContextShape(
        num_kv_heads=groups, head_dim=DIM, rope_theta=1e4, dtype=torch.float32, device=torch.device("cpu")
    )


def new_store(groups: int, window: int) -> ContextStore:
    return RingStore(shape_of(groups), 1, window) if window else GrowingStore(shape_of(groups), 1)


def wanted_attention(
    store: ContextStore, length: int, block: tuple[Tensor, Tensor, Tensor], norms: tuple[RMSNorm, RMSNorm], causal: bool
) -> Tensor:
    view, (q, k, v), (q_norm, k_norm) = store.view([0], [length]), block, norms
    anchors, slots = view.anchors[:, None], torch.arange(SLOTS)
    cos, sin = rope_tables(anchors[..., None] + slots, dim=DIM, theta=1e4)
    first = SLOTS - len(q)
    mask = context_mask(view.positions, anchors, window=None, num_slots=SLOTS, counts_slots=False)
    queries = rotate(q_norm(q)[None, None], cos[:, :, first:], sin[:, :, first:])
    keys = rotate(k_norm(k)[None, None], cos, sin)
    return block_attention(queries, view.keys, view.values, keys, v[None, None], mask, causal=causal)[0, 0]


def put(kernels: Kernels, store: ContextStore, at: int, keys: Tensor, values: Tensor, norm: Tensor) -> None:
    """Append keys, not yet normed, and values (T, G, K) of row 0 at positions from `at` on."""
    place = store.place(0, at, len(keys), None)
    if place.turns is not None:
        store.append([0], [at], [len(keys)], (rms(keys, EPS) * norm)[None], values[None])
        return
    window = len(place.data)
    skipped = max(0, len(keys) - window)
    ring_place = (place.first + skipped) % window
    kernels.ring_append(keys[skipped:], values[skipped:], norm, EPS, place.data, ring_place)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    ("window", "length"),
    [(8, 0), (8, 3), (8, 8), (8, 9), (8, 21), (70, 140), (300, 290), (300, 301), (0, 0), (0, 5), (0, 251), (0, 600)],
)
def test_a_block_attends_to_its_ring_and_to_itself(
    window: int, length: int, heads: tuple[int, int], causal: bool
) -> None:
    kernels, (num_heads, groups) = new_kernels(num_threads=2), heads
    norms = RMSNorm(DIM, EPS), RMSNorm(DIM, EPS)
    for norm in norms:
        norm.weight.add_(0.5 * torch.randn(DIM))
    store, torch_store = new_store(groups, window), new_store(groups, window)
    keys, values = torch.randn(length, groups, DIM), torch.randn(length, groups, DIM)
    for at in range(0, length, 97):
        piece = slice(at, min(at + 97, length))
        put(kernels, store, at, keys[piece], values[piece], norms[1].weight)
        torch_store.append([0], [at], [len(keys[piece])], norms[1](keys[piece])[None], values[piece][None])
    assert_near(store.save(0, length), torch_store.save(0, length))
    k, v = torch.randn(SLOTS, groups, DIM), torch.randn(SLOTS, groups, DIM)
    for num_queries in (SLOTS, SLOTS - 1, 1):
        q = torch.randn(num_queries, num_heads, DIM)
        got = kernels.attend(
            q, k, v, store.ring(0, length, SLOTS),
            q_norm=norms[0].weight, k_norm=norms[1].weight, eps=EPS, causal=causal,
        )  # fmt: skip
        assert_near(got, wanted_attention(torch_store, length, (q, k, v), norms, causal))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 30])
def test_a_ring_keeps_the_last_tokens_of_a_commit_longer_than_itself(count: int) -> None:
    kernels, one, other = new_kernels(), new_store(2, 8), new_store(2, 8)
    keys, values, scale = torch.randn(count, 2, DIM), torch.randn(count, 2, DIM), torch.rand(DIM)
    put(kernels, one, 5, keys, values, scale)
    other.append([0], [5], [count], (rms(keys, EPS) * scale)[None], values[None])
    assert_near(one.save(0, 0), other.save(0, 0))


def test_a_value_that_is_not_finite_stays_behind_the_causal_mask() -> None:
    kernels, ring = new_kernels(), new_store(1, 8).ring(0, 0, SLOTS)
    q, k, v = (torch.randn(SLOTS, 1, DIM) for _ in range(3))
    v[3] = torch.nan
    scale = torch.ones(DIM)
    out = kernels.attend(q, k, v, ring, q_norm=scale, k_norm=scale, eps=EPS, causal=True)
    assert out.isfinite().all(1).tolist() == [True, True, True, False, False]


# --------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("core", memory.MEMORY_CORES)
@pytest.mark.parametrize(("heads", "width"), [(1, 16), (3, 32), (2, 64)])
def test_memory_writes_and_reads_as_its_recurrence(core: str, heads: int, width: int) -> None:
    kernels, kind = new_kernels(num_threads=2), memory.MEMORY_CORES[core]
    a_log, dt_bias = torch.randn(heads) - 3, torch.randn(heads)
    state = memory.empty_state(batch=1, heads=heads, key_dim=width, value_dim=width)
    own, norm = state[0].clone(), RMSNorm(width, EPS)
    norm.weight.add_(0.3 * torch.randn(width))
    for count in (0, 1, 5, 130):
        k, v = torch.randn(count, heads * width), torch.randn(count, heads * width)
        decay, strength = 2 * torch.randn(count, heads), 2 * torch.randn(count, heads)
        gate = strength if kind.strength == "beta" else None
        kernels.memory_write(core, own, k=k, v=v, strength=gate, decay=decay, a_log=a_log, dt_bias=dt_bias)
        beta, g = memory.gates(kind, strength=strength[None], decay=decay[None], a_log=a_log, dt_bias=dt_bias)
        by_head = (1, count, heads, width)
        state = memory.write(
            kind, k=F.normalize(k.view(by_head), dim=-1), v=v.view(by_head), beta=beta, g=g, state=state
        )
        assert_near(own, state[0], 1e-4)
        for slots in (1, 8):
            q, gates = torch.randn(slots, heads * width), torch.randn(slots, heads * width)
            found = memory.read(F.normalize(q.view(1, slots, heads, width), dim=-1), state)
            want = norm(found)[0].flatten(-2) * F.silu(gates)
            assert_near(kernels.memory_read(own, q, gates, norm.weight, EPS), want, 1e-4)


def test_a_zero_key_writes_nothing_and_a_zero_query_reads_zero() -> None:
    kernels, state, heads = new_kernels(), torch.randn(2, 16, 16), torch.zeros(2)
    before, zeros, never = state.clone(), torch.zeros(1, 32), torch.full((1, 2), -50.0)
    kernels.memory_write(
        "delta", state, k=zeros, v=torch.randn(1, 32), strength=never + 50, decay=never, a_log=heads, dt_bias=heads
    )
    assert_near(state, before)
    assert not kernels.memory_read(state, zeros, torch.ones(1, 32), torch.ones(16), EPS).any()


# ---------------------------------------------------------------------------------------- draft chain


class Draft:
    """A head of some rows, a table of embeddings, and a GRU correction: torch's answer and the kernels'."""

    def __init__(self, *, dim: int = 48, static: int = 40, more: int = 9, bias: bool = False) -> None:
        vocab = static + more + 11
        ids = torch.randperm(vocab)[: static + more]
        self.ids, self.num_static, self.anchor = ids, static, 3
        self.weight = torch.randn(static + more, dim)
        self.bias = torch.randn(static + more) if bias else None
        self.embedding = np.ascontiguousarray(torch.randn(vocab, dim).numpy())
        self.gru = GRUCorrection(dim, width=24, rank=20, eps=EPS)
        self.gru.up.weight.normal_()

    def wanted(self, hidden: Tensor, *, corrected: bool) -> tuple[list[int], Tensor]:
        eye = torch.eye(4)
        hooks: Any = replace(toy_hooks(), head=lambda h: h, head_rows=lambda i: eye[i])
        allowed = torch.ones(1, len(self.ids), dtype=torch.bool)
        head = ServingHead(hooks=hooks, ids=self.ids, parts=((self.weight, self.bias),), allowed=allowed)
        anchors = torch.tensor([self.anchor])
        logits = head.logits(hidden[None])
        if corrected:
            logits, _ = head.chain(anchors, len(hidden), head.corrected(hidden[None], self.gru, self.embed))
        columns, (length,), probs, _ = pick_tokens(logits, (len(hidden),))
        return head.token_ids(columns)[0, :length].tolist(), probs[0, :length]

    def embed(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self.embedding)[ids] * 1.5

    def head(self, kernels: Kernels) -> RowHead:
        n = self.num_static
        bias = self.bias if self.bias is None else self.bias[:n]
        return RowHead(
            static=kernels.pack_rows(self.weight[:n], bias),
            ids=self.ids[:n],
            rows=self.weight,
            more=torch.arange(n, len(self.ids)),
            more_bias=None if self.bias is None else self.bias[n:],
            more_ids=self.ids[n:],
        )

    def chain(self, kernels: Kernels) -> Chain:
        gru, pack = self.gru.gru, kernels.pack_rows
        parts = (pack(gru.weight_ih_l0), pack(gru.weight_hh_l0), kernels.pack(self.gru.down), kernels.pack(self.gru.up))
        table = EmbeddingTable(kind="F32", address=self.embedding.ctypes.data, scale=1.5)
        return Chain(anchor=self.anchor, parts=parts, eps=EPS, table=table)

    def check(self, hidden: Tensor, *, corrected: bool, num_threads: int = 1) -> list[int]:
        kernels = new_kernels(num_threads=num_threads)
        chain = self.chain(kernels) if corrected else None
        tokens, shares = kernels.draft(hidden, self.head(kernels), chain=chain)
        wanted, probs = self.wanted(hidden, corrected=corrected)
        assert tokens.tolist() == wanted
        assert_near(shares, probs, 1e-4)
        return wanted


def toy_hooks() -> Any:
    from hyflash.core import TargetHooks

    eye = torch.eye(4)
    return TargetHooks(info=toy_info(4), embed=lambda i: eye[i], head=lambda h: h, head_rows=lambda i: eye[i])


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"more": 0}, {"static": 1, "more": 30}, {"dim": 64, "static": 333}]
)
def test_draft_tokens_follow_from_one_another(options: dict[str, Any], num_threads: int, corrected: bool) -> None:
    draft = Draft(**options)
    for num in (1, 2, 7):
        hidden = torch.randn(num, draft.weight.shape[1])
        assert len(draft.check(hidden, corrected=corrected, num_threads=num_threads)) == num


def test_no_hidden_states_give_no_tokens() -> None:
    draft, kernels = Draft(), new_kernels()
    tokens, shares = kernels.draft(torch.zeros(0, 48), draft.head(kernels), chain=draft.chain(kernels))
    assert (tokens.shape, shares.shape) == ((0,), (0,))


@pytest.mark.parametrize("twins", [(2, 7), (2, 43), (41, 45)])
def test_among_equal_logits_the_first_column_wins(twins: tuple[int, int]) -> None:
    draft = Draft()
    first, second = twins
    draft.weight[second] = draft.weight[first]
    hidden = 5 * draft.weight[first][None]
    assert draft.check(hidden, corrected=False) == [int(draft.ids[first])]


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_tokens_end_before_a_state_that_is_not_finite(at: int, corrected: bool) -> None:
    for bad in (torch.nan, torch.inf):
        draft, hidden = Draft(), torch.randn(5, 48)
        hidden[at, 7] = bad
        assert len(draft.check(hidden, corrected=corrected, num_threads=2)) == at


# --------------------------------------------------------------------------------- threads and faults


def everything(kernels: Kernels) -> list[Tensor]:
    """Each operation once, with the same inputs whatever the kernels."""
    torch.manual_seed(1)
    size, x, scale = 64, torch.randn(7, 64), torch.rand(64)
    square = [kernels.pack(nn.Linear(size, size)) for _ in range(3)]
    out = [*kernels.dense(x, square[:2], norm=scale, eps=EPS), kernels.mlp(x, scale, EPS, *square)]
    store = new_store(3, 70)
    put(kernels, store, 0, torch.randn(90, 3, DIM), torch.randn(90, 3, DIM), torch.ones(DIM))
    q, k, v = torch.randn(SLOTS, 9, DIM), torch.randn(SLOTS, 3, DIM), torch.randn(SLOTS, 3, DIM)
    ones = torch.ones(DIM)
    out.append(kernels.attend(q, k, v, store.ring(0, 90, SLOTS), q_norm=ones, k_norm=ones, eps=EPS, causal=False))
    state, heads = torch.randn(3, 32, 32), torch.randn(3)
    k, v = torch.randn(11, 96), torch.randn(11, 96)
    gates = torch.randn(11, 3)
    kernels.memory_write("delta", state, k=k, v=v, strength=gates, decay=gates, a_log=heads, dt_bias=heads)
    out += [store.save(0, 90), state, kernels.memory_read(state, k, v, torch.ones(32), EPS)]
    draft = Draft(dim=64)
    for chain in (None, draft.chain(kernels)):
        tokens, shares = kernels.draft(x, draft.head(kernels), chain=chain)
        out += [tokens.float(), shares]
    return out


@pytest.mark.parametrize("weights", ["float32", "q8_0", "q4_0"])
def test_bits_do_not_depend_on_the_number_of_threads(weights: str) -> None:
    one = everything(new_kernels(weights, 1))
    for num_threads in (2, 3, 5):
        for got, want in zip(everything(new_kernels(weights, num_threads)), one, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("weights", ["float32", "q8_0"])
def test_a_row_has_the_same_bits_beside_others(weights: str) -> None:
    kernels, scale, x = new_kernels(weights, 2), torch.rand(64), torch.randn(33, 64)
    square = [kernels.pack(nn.Linear(64, 64)) for _ in range(3)]
    operations: list[Callable[[Tensor], Tensor]] = [
        lambda x: kernels.dense(x, square[:1], norm=scale, eps=EPS)[0],
        lambda x: kernels.mlp(x, scale, EPS, *square),
    ]
    for operation in operations:
        together = operation(x)
        for rows in (slice(0, 1), slice(4, 9), slice(32, 33)):
            assert torch.equal(operation(x[rows]), together[rows])


# --------------------------------------------------------------------------------------- whole layers


def layer_parts(kernels: Kernels, *, heads: int, groups: int, size: int, memory: bool, causal: bool) -> LayerParts:
    def weights(inputs: int, outputs: int) -> Matrix:
        return kernels.pack(nn.Linear(inputs, outputs))

    read = MemoryRead(
        width=16,
        queries=weights(size, 48),
        gates=weights(size, 48),
        out=weights(48, size),
        norm=torch.rand(16),
        eps=EPS,
    )
    return LayerParts(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=DIM,
        causal=causal,
        norm=torch.rand(size),
        eps=EPS,
        q_norm=torch.rand(DIM),
        k_norm=torch.rand(DIM),
        head_eps=EPS,
        q=weights(size, heads * DIM),
        k=weights(size, groups * DIM),
        v=weights(size, groups * DIM),
        o=weights(heads * DIM, size),
        mlp_norm=torch.rand(size),
        mlp_eps=EPS,
        gate=weights(size, 72),
        up=weights(size, 72),
        down=weights(72, size),
        memory=read if memory else None,
    )


def layer_in_steps(
    kernels: Kernels, parts: LayerParts, x: Tensor, ring: Ring, memory: Tensor | None, first: int
) -> Tensor:
    """The operations of a layer one after the other, for one row (S, D)."""
    inputs = [parts.q, parts.k, parts.v] + ([parts.memory.queries, parts.memory.gates] if parts.memory else [])
    q, k, v, *reads = kernels.dense(x, inputs, norm=parts.norm, eps=parts.eps)
    q, k, v = (t.view(len(x), -1, parts.head_dim) for t in (q, k, v))
    mixed = kernels.attend(
        q[first:], k, v, ring, q_norm=parts.q_norm, k_norm=parts.k_norm, eps=parts.head_eps, causal=parts.causal
    )
    x = x[first:] + kernels.dense(mixed, [parts.o])[0]
    if parts.memory is not None and memory is not None:
        found = kernels.memory_read(memory, reads[0][first:], reads[1][first:], parts.memory.norm, parts.memory.eps)
        x = x + kernels.dense(found, [parts.memory.out])[0]
    return kernels.mlp(x, parts.mlp_norm, parts.mlp_eps, parts.gate, parts.up, parts.down)


@pytest.mark.parametrize("weights", ["float32", "q8_0"])
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize(("heads", "groups", "causal"), [(2, 2, False), (6, 2, True), (3, 1, False)])
def test_a_layer_in_one_call_has_the_bits_of_its_operations_in_turn(
    weights: str, memory: bool, heads: int, groups: int, causal: bool
) -> None:
    kernels, size = new_kernels(weights, 2), 64
    parts = layer_parts(kernels, heads=heads, groups=groups, size=size, memory=memory, causal=causal)
    layer = make_layer(kernels, parts)
    stores = [new_store(groups, 8), new_store(groups, 8), new_store(groups, 0)]
    lengths = (0, 21, 300)
    for store, length in zip(stores, lengths, strict=True):
        keys, values = torch.randn(length, groups, DIM), torch.randn(length, groups, DIM)
        put(kernels, store, 0, keys, values, parts.k_norm)
    rings = [store.ring(0, length, SLOTS) for store, length in zip(stores, lengths, strict=True)]
    states = [torch.randn(3, 16, 16) if memory else None for _ in stores]
    x = torch.randn(3, SLOTS, size)
    for first in (0, 1, SLOTS - 1):
        together = run_layer(kernels, layer, x, rings, states, first)
        for b, (ring, state) in enumerate(zip(rings, states, strict=True)):
            want = layer_in_steps(kernels, parts, x[b], ring, state, first)
            assert torch.equal(together[b], want)
            assert torch.equal(run_layer(kernels, layer, x[b : b + 1], [ring], [state], first)[0], want)


def test_layers_that_do_not_fit_together_are_refused() -> None:
    kernels = new_kernels()
    parts = layer_parts(kernels, heads=2, groups=2, size=64, memory=True, causal=False)
    layer, ring, state = make_layer(kernels, parts), new_store(2, 8).ring(0, 0, SLOTS), torch.zeros(3, 16, 16)
    wrong: list[dict[str, Any]] = [
        {"o": packed(kernels, 32, 64)},
        {"v": packed(kernels, 64, 32)},
        {"down": packed(kernels, 72, 48)},
        {"q_norm": torch.ones(16)},
        {"mlp_norm": torch.ones(63)},
        {"memory": replace(parts.memory, width=32)},  # type: ignore[type-var]
    ]
    for change in wrong:
        with pytest.raises(HyflashError):
            make_layer(kernels, replace(parts, **change))
    x = torch.zeros(1, SLOTS, 64)
    for call in (
        lambda: run_layer(kernels, layer, x[:, :, :32], [ring], [state]),
        lambda: run_layer(kernels, layer, x, [ring], [None]),
        lambda: run_layer(kernels, layer, x, [ring], [state[:2]]),
        lambda: run_layer(kernels, layer, x, [ring, ring], [state, state]),
        lambda: run_layer(kernels, layer, x, [ring], [state], SLOTS),
        lambda: run_layer(kernels, layer, x, [new_store(1, 8).ring(0, 0, SLOTS)], [state]),
    ):
        with pytest.raises(HyflashError):
            call()


def take_parts(kernels: Kernels, core: str, *, size: int = 64, taps: int = 3, tap_norm: bool = True) -> TakeParts:
    """Two layers of 2 KV heads, with memories of 3 heads of 16 unless `core` is empty."""

    def layer() -> TakeLayer:
        write = None
        if core:
            gated = memory.MEMORY_CORES[core].strength == "beta"
            write = MemoryWrite(
                core=core,
                keys=packed(kernels, size, 48),
                values=packed(kernels, size, 48),
                decay=packed(kernels, size, 3),
                strength=packed(kernels, size, 3) if gated else None,
                a_log=torch.randn(3) - 3,
                dt_bias=torch.randn(3),
            )
        return TakeLayer(
            num_kv_heads=2,
            head_dim=DIM,
            k=packed(kernels, size, 2 * DIM),
            v=packed(kernels, size, 2 * DIM),
            k_norm=torch.rand(DIM),
            eps=EPS,
            memory=write,
        )

    return TakeParts(
        fuse=packed(kernels, taps * size, size),
        parts=taps,
        tap_norm=torch.rand(taps * size) if tap_norm else None,
        norm=torch.rand(size),
        eps=EPS,
        layers=[layer(), layer()],
    )


def take_in_steps(
    kernels: Kernels, parts: TakeParts, features: Tensor, stores: list[ContextStore], at: int, states: list[Tensor]
) -> None:
    """The commit of one row, operation after operation."""
    (x,) = kernels.dense(features.flatten(1), [parts.fuse], norm=parts.tap_norm, parts=parts.parts, eps=parts.eps)
    for layer, store, state in zip(parts.layers, stores, states, strict=True):
        keys, values = kernels.dense(x, [layer.k, layer.v], norm=parts.norm, eps=parts.eps)
        shape = (len(x), 2, DIM)
        put(kernels, store, at, keys.view(shape), values.view(shape), layer.k_norm)
        if layer.memory is None:
            continue
        writes = [layer.memory.keys, layer.memory.values, layer.memory.decay]
        writes += [] if layer.memory.strength is None else [layer.memory.strength]
        k, v, decay, *strength = kernels.dense(x, writes, norm=parts.norm, eps=parts.eps)
        kernels.memory_write(
            layer.memory.core, state, k=k, v=v, strength=strength[0] if strength else None, decay=decay,
            a_log=layer.memory.a_log, dt_bias=layer.memory.dt_bias,
        )  # fmt: skip


@pytest.mark.parametrize("weights", ["float32", "q8_0"])
@pytest.mark.parametrize("core", ["", *memory.MEMORY_CORES])
@pytest.mark.parametrize("window", [0, 8, 40])
def test_a_commit_in_one_call_has_the_bits_of_its_operations_in_turn(weights: str, core: str, window: int) -> None:
    kernels = new_kernels(weights, 2)
    parts = take_parts(kernels, core, tap_norm=window != 8)
    take, counts, begins = make_take(kernels, parts), (1, 9, 33), (0, 5, 17)
    stores = [[new_store(2, window), new_store(2, window)] for _ in counts]
    slow = [[new_store(2, window), new_store(2, window)] for _ in counts]
    for own in (*stores, *slow):
        for store in own:
            torch.manual_seed(2)
            put(kernels, store, 0, torch.randn(17, 2, DIM), torch.randn(17, 2, DIM), torch.ones(DIM))
    states = [[torch.randn(3, 16, 16) if core else torch.empty(0) for _ in parts.layers] for _ in counts]
    slow_states = [[state.clone() for state in own] for own in states]
    features = [torch.randn(n, 3, 64) for n in counts]
    places = [
        stores[b][i].place(0, begins[b], n, states[b][i] if core else None)
        for i in range(2)
        for b, n in enumerate(counts)
    ]
    run_take(kernels, take, torch.cat(features), counts, places)
    for b, n in enumerate(counts):
        take_in_steps(kernels, parts, features[b], slow[b], begins[b], slow_states[b])
        for i in range(2):
            got, want = (own[b][i].save(0, begins[b] + n) for own in (stores, slow))
            assert_near(got, want)  # growing stores are turned by torch where it goes in steps
            assert window == 0 or torch.equal(got, want)
            assert torch.equal(states[b][i], slow_states[b][i])


def test_a_commit_that_does_not_fit_is_refused() -> None:
    kernels = new_kernels()
    parts = take_parts(kernels, "delta")
    take, store, state, features = (
        make_take(kernels, parts),
        new_store(2, 8),
        torch.zeros(3, 16, 16),
        torch.zeros(2, 3, 64),
    )
    first, growing = parts.layers[0], new_store(2, 0).place(0, 0, 2, state)
    assert first.memory is not None
    wrong: list[dict[str, Any]] = [
        {"parts": 2},
        {"norm": torch.ones(63)},
        {"tap_norm": torch.ones(64)},
        {"layers": [replace(first, k=packed(kernels, 32, 2 * DIM))]},
        {"layers": [replace(first, v=packed(kernels, 64, DIM))]},
        {"layers": [replace(first, k_norm=torch.ones(DIM + 1))]},
        {"layers": [replace(first, memory=replace(first.memory, strength=None))]},
        {"layers": [replace(first, memory=replace(first.memory, core="mean"))]},
        {"layers": [replace(first, memory=replace(first.memory, values=packed(kernels, 64, 32)))]},
        {"layers": [replace(first, memory=replace(first.memory, a_log=torch.ones(2)))]},
    ]
    for change in wrong:
        with pytest.raises(HyflashError):
            make_take(kernels, replace(parts, **change))
    place = store.place(0, 0, 2, state)
    for call in (
        lambda: run_take(kernels, take, features, [1], [place, place]),
        lambda: run_take(kernels, take, features, [2], [place]),
        lambda: run_take(kernels, take, features, [2, 0], [place] * 4),
        lambda: run_take(kernels, take, features[..., :32], [2], [place, place]),
        lambda: run_take(kernels, take, features, [2], [replace(place, memory=None)] * 2),
        lambda: run_take(kernels, take, features, [2], [replace(place, memory=state[:2])] * 2),
        lambda: run_take(kernels, take, features, [2], [replace(place, first=8)] * 2),
        lambda: run_take(kernels, take, features, [2], [replace(place, data=place.data[:, :, :1])] * 2),
        lambda: run_take(kernels, take, features, [2], [replace(growing, turns=growing.turns[:1])] * 2),  # type: ignore[index]
        lambda: run_take(kernels, take, features, [2], [replace(growing, first=255)] * 2),
    ):
        with pytest.raises(HyflashError):
            call()


def packed(kernels: Kernels, size: int, outputs: int) -> Matrix:
    return kernels.pack(nn.Linear(size, outputs))


def test_shapes_that_do_not_fit_are_refused() -> None:
    kernels, x, scale = new_kernels(), torch.randn(2, 32), torch.ones(32)
    square, wide = packed(kernels, 32, 32), packed(kernels, 32, 64)
    ring = new_store(1, 8).ring(0, 0, 2)
    q = torch.randn(2, 1, DIM)
    state, two = torch.zeros(2, 16, 16), torch.zeros(2)

    def attend(q: Tensor, k: Tensor, ring: Ring) -> Tensor:
        return kernels.attend(q, k, k, ring, q_norm=scale, k_norm=scale, eps=EPS, causal=False)

    def write(core: str, state: Tensor, strength: Tensor | None) -> None:
        rows = torch.zeros(1, 2)
        kernels.memory_write(core, state, k=x[:1], v=x[:1], strength=strength, decay=rows, a_log=two, dt_bias=two)

    draft = Draft(dim=32)
    head = draft.head(kernels)
    faults: list[Callable[[], Any]] = [
        lambda: kernels.dense(x, [square, packed(kernels, 16, 8)]),
        lambda: kernels.dense(x, [square], norm=torch.ones(16)),
        lambda: kernels.dense(x, [square], norm=scale, parts=3),
        lambda: kernels.mlp(x, scale, EPS, square, wide, square),
        lambda: attend(torch.randn(3, 1, DIM), q, ring),
        lambda: attend(q[..., :24], q[..., :24], ring),
        lambda: attend(q, torch.randn(2, 2, DIM), ring),
        lambda: attend(q, q, replace(ring, held=9)),
        lambda: attend(q, q, replace(ring, slot_turns=ring.slot_turns[:1])),
        lambda: attend(q, q, replace(ring, data=ring.data.double())),
        lambda: attend(q, q, replace(ring, data=ring.data.transpose(0, 1).contiguous().transpose(0, 1))),
        lambda: kernels.ring_append(torch.randn(9, 1, DIM), torch.randn(9, 1, DIM), scale, EPS, ring.data, 0),
        lambda: kernels.ring_append(q, q, scale, EPS, ring.data, 8),
        lambda: write("delta", state, None),
        lambda: write("delta", state.bfloat16(), torch.zeros(1, 2)),
        lambda: write("mean", torch.zeros(2, 8, 8), None),
        lambda: kernels.memory_read(state, x, x[:1], torch.ones(16), EPS),
        lambda: kernels.draft(torch.zeros(1, 16), head),
        lambda: kernels.draft(x, replace(head, ids=head.ids[1:])),
        lambda: kernels.draft(x, replace(head, more=head.more[1:])),
        lambda: kernels.draft(x, replace(head, rows=head.rows.T)),
        lambda: kernels.draft(x, replace(head, more_ids=head.more_ids.int())),
    ]
    for fault in faults:
        with pytest.raises(HyflashError):
            fault()
    assert not state.any()


def test_unknown_weights_are_named() -> None:
    with pytest.raises(UserError, match=r"'q8'; expected q8_0 or .* Did you mean 'q8_0'"):
        new_kernels("q8")
