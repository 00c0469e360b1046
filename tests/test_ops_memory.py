"""Recurrent memory cores: chunked = token by token, padding is a no-op, states stay finite and bounded."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyflash.ops import memory, memory_naive
from hyflash.ops.memory import MEMORY_CORES, MemoryCore

CORES = list(MEMORY_CORES.values())
LENGTHS = [0, 1, 7, 63, 64, 65, 200]
each_core = pytest.mark.parametrize("core", CORES, ids=lambda core: core.name)
H, K, V = 2, 5, 3


def inputs(batch: int, tokens: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    made = {
        "k": F.normalize(normal(batch, tokens, H, K), dim=-1),
        "v": normal(batch, tokens, H, V),
        "beta": normal(batch, tokens, H).sigmoid(),
        "g": -F.softplus(normal(batch, tokens, H) - 2),
        "state": normal(batch, H, K, V),
    }
    return {name: x.to(dtype) for name, x in made.items()}


def queries(batch: int, anchors: int, reads: int = 3) -> Tensor:
    rng = torch.Generator().manual_seed(9)
    return F.normalize(torch.randn(batch, anchors, reads, H, K, generator=rng, dtype=torch.float64), dim=-1)


def at_anchors(fn, core: MemoryCore, x: dict[str, Tensor], q: Tensor, anchors: Tensor, lengths=None) -> Tensor:
    rest = {name: t for name, t in x.items() if name != "state"}
    return fn(core, q=q, **rest, initial_state=x["state"], anchors=anchors, lengths=lengths)


def gradients(out: Tensor, wrt: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    found = torch.autograd.grad((out * weights).sum(), wrt, allow_unused=True, materialize_grads=True)
    return list(found)


def assert_close(a: Tensor, b: Tensor, tol: float = 1e-10) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@each_core
@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunked_write_is_the_recurrence_with_its_gradients(core: MemoryCore, tokens: int) -> None:
    x = {name: t.requires_grad_() for name, t in inputs(2, tokens).items()}
    lengths = torch.tensor([tokens, tokens // 2])
    results = []
    for module in (memory, memory_naive):
        out = module.write(core, **x, lengths=lengths)
        results.append([out, *gradients(out, list(x.values()))])
    for fast, slow in zip(*results, strict=True):
        assert_close(fast, slow)


@each_core
@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunked_anchor_reads_are_the_recurrence_with_their_gradients(core: MemoryCore, tokens: int) -> None:
    x = {name: t.requires_grad_() for name, t in inputs(2, tokens).items()}
    middle = [tokens // 3, tokens // 2, max(tokens - 1, 0), min(tokens, 64)]
    anchors = torch.tensor([[0, tokens, *middle, tokens], [tokens, 0, 0, *middle]])
    q = queries(2, anchors.shape[1]).requires_grad_()
    results = []
    for module in (memory, memory_naive):
        out = at_anchors(module.read_at_anchors, core, x, q, anchors, torch.tensor([tokens, max(tokens - 5, 0)]))
        results.append([out, *gradients(out, [q, *x.values()])])
    for fast, slow in zip(*results, strict=True):
        assert_close(fast, slow)


@each_core
def test_anchor_read_is_a_read_of_the_state_written_so_far(core: MemoryCore) -> None:
    x = inputs(1, 130)
    anchors = torch.tensor([[130, 0, 64, 63, 65, 128, 1]])
    q = queries(1, anchors.shape[1])
    out = at_anchors(memory.read_at_anchors, core, x, q, anchors)
    for i, a in enumerate(anchors[0].tolist()):
        prefix = {n: t if n == "state" else t[:, :a] for n, t in x.items()}
        assert_close(out[:, i], memory.read(q[:, i], memory.write(core, **prefix)))


@each_core
def test_writing_in_pieces_is_one_write(core: MemoryCore) -> None:
    x = inputs(2, 200)
    whole = memory.write(core, **x)
    for pieces in ([200], [0, 1, 63, 0, 64, 65, 7], [1] * 200):
        state, start = x["state"], 0
        for size in pieces:
            part = {n: x[n][:, start : start + size] for n in ("k", "v", "beta", "g")}
            state, start = memory.write(core, **part, state=state), start + size
        assert_close(state, whole)


@each_core
def test_write_leaves_its_state_as_it_was_even_without_tokens(core: MemoryCore) -> None:
    for tokens in (0, 3):
        x = inputs(1, tokens, dtype=torch.float32)
        before = x["state"].clone()
        memory.write(core, **x).add_(1.0)
        memory_naive.write(core, **x).add_(1.0)
        assert torch.equal(x["state"], before)


@each_core
def test_padding_does_nothing_whatever_it_holds(core: MemoryCore) -> None:
    x = inputs(3, 70)
    lengths = torch.tensor([70, 13, 0])
    for name in ("k", "v", "beta", "g"):
        for row, length in enumerate(lengths.tolist()):
            x[name][row, length:] = math.nan
    anchors = torch.tensor([[0, 70, 65], [13, 70, 5], [0, 70, 1]])
    q = queries(3, 3)
    state = memory.write(core, **x, lengths=lengths)
    reads = at_anchors(memory.read_at_anchors, core, x, q, anchors, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = {n: t[row : row + 1] if n == "state" else t[row : row + 1, :length] for n, t in x.items()}
        assert_close(state[row : row + 1], memory.write(core, **alone))
        kept = anchors[row : row + 1].clamp(max=length)
        assert_close(reads[row : row + 1], at_anchors(memory.read_at_anchors, core, alone, q[row : row + 1], kept))
    assert torch.equal(state[2], x["state"][2])


@each_core
@pytest.mark.parametrize("decay", [0.0, -50.0, "mixed"])
def test_extreme_decays_stay_finite_forward_and_backward(core: MemoryCore, decay: float | str) -> None:
    x = inputs(1, 150, dtype=torch.float32)
    x["g"] = torch.full_like(x["g"], decay) if isinstance(decay, float) else torch.zeros_like(x["g"])
    if decay == "mixed":
        x["g"][:, ::9] = -50.0
    x = {name: t.requires_grad_() for name, t in x.items()}
    q, anchors = queries(1, 4).float(), torch.tensor([[0, 10, 128, 150]])
    for out in (memory.write(core, **x), at_anchors(memory.read_at_anchors, core, x, q, anchors)):
        assert out.isfinite().all()
        assert all(grad.isfinite().all() for grad in gradients(out, list(x.values())))
    torch.testing.assert_close(memory.write(core, **x), memory_naive.write(core, **x), rtol=1e-4, atol=1e-4)


def test_delta_state_stays_bounded_over_20k_tokens_without_decay() -> None:
    rng = torch.Generator().manual_seed(1)
    state = memory.empty_state(batch=1, heads=1, key_dim=16, value_dim=16)
    peak = 0.0
    for _ in range(10):
        k = F.normalize(torch.randn(1, 2000, 1, 16, generator=rng), dim=-1)
        v = F.normalize(torch.randn(1, 2000, 1, 16, generator=rng), dim=-1)
        beta = torch.rand(1, 2000, 1, generator=rng)
        state = memory.write(MEMORY_CORES["delta"], k=k, v=v, beta=beta, g=torch.zeros(1, 2000, 1), state=state)
        peak = max(peak, state.norm().item())
    assert 0.5 < peak < 16


def test_delta_write_replaces_what_its_key_held_and_gla_adds_to_it() -> None:
    k = F.one_hot(torch.tensor([[1, 1]]), 4).float()[:, :, None]  # (1, 2, 1, 4)
    v = torch.tensor([[[[3.0, 0.0]], [[0.0, 5.0]]]])
    gate, state = torch.ones(1, 2, 1), memory.empty_state(batch=1, heads=1, key_dim=4, value_dim=2)
    held = {
        name: memory.write(core, k=k, v=v, beta=gate, g=0 * gate, state=state)[0, 0, 1].tolist()
        for name, core in MEMORY_CORES.items()
    }
    assert held == {"delta": [0, 5], "gla": [3, 5], "mamba2": [3, 5], "mean": [0, 0]}


def test_mean_core_is_an_exponential_moving_average() -> None:
    x = inputs(1, 40)
    x["k"] = F.one_hot(torch.zeros(1, 40, H, dtype=torch.int64), K).double()
    average = x["state"][:, :, 0]
    for t in range(40):
        keep = x["g"][:, t].exp()[..., None]
        average = keep * average + (1 - keep) * x["v"][:, t]
    assert_close(memory.write(MEMORY_CORES["mean"], **x)[:, :, 0], average)


@each_core
def test_gates_give_decays_at_most_one_and_cores_their_strength(core: MemoryCore) -> None:
    strength, decay = torch.randn(2, 5, H), torch.randn(2, 5, H)
    beta, g = memory.gates(core, strength=strength, decay=decay, a_log=torch.zeros(H), dt_bias=torch.ones(H))
    assert (g <= 0).all()
    assert beta.shape == g.shape == decay.shape
    want = {"beta": strength.sigmoid(), "dt": -g, "decay": torch.ones_like(g)}[core.strength]
    torch.testing.assert_close(beta, want)


@each_core
def test_low_precision_inputs_and_autocast_still_compute_in_float32(core: MemoryCore) -> None:
    low = {name: t.bfloat16() for name, t in inputs(1, 70).items()}
    q, anchors = queries(1, 2).bfloat16(), torch.tensor([[5, 70]])
    full = {name: t.float() for name, t in low.items()}
    with torch.autocast("cpu", torch.bfloat16):
        state = memory.write(core, **low)
        reads = at_anchors(memory.read_at_anchors, core, low, q, anchors)
        one = memory.read(q[:, 1], state)
    assert state.dtype == reads.dtype == one.dtype == torch.float32
    assert torch.equal(state, memory.write(core, **full))
    assert torch.equal(reads, at_anchors(memory.read_at_anchors, core, full, q.float(), anchors))


def test_no_anchors_and_no_rows_give_empty_reads() -> None:
    x = inputs(2, 10)
    q = queries(2, 0)
    for core in CORES:
        reads = at_anchors(memory.read_at_anchors, core, x, q, torch.zeros(2, 0, dtype=torch.int64))
        assert reads.shape == (2, 0, 3, H, V)
    none = inputs(0, 10)
    anchors = torch.zeros(0, 2, dtype=torch.int64)
    for core in CORES:
        assert at_anchors(memory.read_at_anchors, core, none, queries(0, 2), anchors).shape == (0, 2, 3, H, V)
        assert memory.write(core, **none).shape == (0, H, K, V)
