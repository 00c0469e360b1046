"""HyFlash: windowed DFlash at the start, one memory for training and serving, bytes that do not grow."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from block_fakes import ask, commit_prefix, commit_rows, fake_batch, fake_hooks
from drafting import num_drafted
from hyflash.core import TrainBatch
from hyflash.drafters import dflash
from hyflash.drafters.block_config import DFlashConfig
from hyflash.drafters.hyflash import DrafterImpl, HyFlashConfig
from hyflash.errors import UserError

CORES = ["none", "mean", "gla", "delta", "mamba2"]
SMALL: dict[str, Any] = {"num_layers": 2, "num_draft_tokens": 3, "num_taps": 2, "window": 6}


def build(**options: Any) -> DrafterImpl:
    """Random weights everywhere, so that the memory speaks."""
    torch.manual_seed(0)
    drafter = DrafterImpl(HyFlashConfig(**{**SMALL, **options}), fake_hooks())
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return drafter.eval()


def served(drafter: dflash.DrafterImpl, batch: TrainBatch, anchor: int, pieces: int = 1) -> torch.Tensor:
    state = drafter.new_state(len(batch.tokens))
    at = [min(anchor, int(n) - 1) for n in batch.lengths]
    commit_prefix(drafter, state, batch, at, pieces=pieces)
    return drafter.block_hidden(state, ask(batch.tokens[torch.arange(len(at)), at]))


def at_anchors(batch: TrainBatch, anchors: list[int]) -> TrainBatch:
    where = torch.tensor([anchors] * len(batch.tokens))
    mask = torch.ones_like(where, dtype=torch.bool)
    return replace(batch, anchors=where, anchor_mask=mask, weights=mask.float())


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("lengths", [(150,), (150, 4, 70)])
def test_training_forward_is_the_serving_proposal(core: str, window: int, lengths: tuple[int, ...]) -> None:
    drafter = build(memory_core=core, window=window, memory_heads=3, memory_dim=4)
    batch = fake_batch(drafter, lengths=lengths, pad=5)
    for anchor, pieces in ((0, 1), (1, 1), (64, 3), (149, 1), (149, 7)):
        at = torch.clamp(batch.lengths - 1, max=anchor)
        out = drafter(replace(batch, anchors=at[:, None], anchor_mask=batch.anchor_mask[:, :1]))
        torch.testing.assert_close(served(drafter, batch, anchor, pieces), out.hidden[:, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("core", CORES)
def test_a_new_hyflash_is_a_windowed_dflash(core: str) -> None:
    torch.manual_seed(3)
    plain = dflash.DrafterImpl(DFlashConfig(**SMALL), fake_hooks())
    drafter = DrafterImpl(HyFlashConfig(**SMALL, memory_core=core, memory_dropout=0, random_window=0), fake_hooks())
    missing, unexpected = drafter.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(".memory." in name for name in missing)
    assert bool(missing) is (core != "none")
    batch = fake_batch(drafter, lengths=(40, 13))
    assert torch.equal(drafter(batch).hidden, plain(batch).hidden)
    assert torch.equal(served(drafter.eval(), batch, 39), served(plain.eval(), batch, 39))


def test_long_window_without_memory_is_full_dflash() -> None:
    torch.manual_seed(3)
    plain = dflash.DrafterImpl(DFlashConfig(**{**SMALL, "window": 0}), fake_hooks()).eval()
    drafter = DrafterImpl(HyFlashConfig(**{**SMALL, "window": 50}, memory_core="none"), fake_hooks()).eval()
    drafter.load_state_dict(plain.state_dict())
    batch = fake_batch(drafter, lengths=(50, 13))
    torch.testing.assert_close(drafter(batch).hidden, plain(batch).hidden, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(served(drafter, batch, 49), served(plain, batch, 49), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("core", CORES)
def test_tokens_older_than_the_window_count_only_through_the_memory(core: str) -> None:
    drafter = build(memory_core=core, max_half_life=64.0)
    batch = at_anchors(fake_batch(drafter, lengths=(40,)), [30, 39])
    features = batch.features.clone()
    features[:, :20] = torch.randn_like(features[:, :20])
    changed = replace(batch, features=features)
    same = torch.equal(drafter(batch).hidden, drafter(changed).hidden)
    assert same is (core == "none")
    assert torch.equal(served(drafter, batch, 39), served(drafter, changed, 39)) is (core == "none")


@pytest.mark.parametrize("core", CORES)
def test_nothing_at_or_after_the_anchor_reaches_the_block(core: str) -> None:
    drafter = build(memory_core=core)
    batch = at_anchors(fake_batch(drafter, lengths=(80,)), [9, 65, 70])
    features, tokens = batch.features.clone(), batch.tokens.clone()
    features[:, 65:] = torch.randn_like(features[:, 65:])
    tokens[:, 66:] = 1
    before, after = drafter(batch).hidden, drafter(replace(batch, features=features, tokens=tokens)).hidden
    torch.testing.assert_close(before[:, :2], after[:, :2], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(before[:, 2], after[:, 2])


@pytest.mark.parametrize("core", CORES)
def test_padding_does_not_change_loss(core: str) -> None:
    drafter = build(memory_core=core)
    batch = fake_batch(drafter, lengths=(70, 9))
    terms = drafter.loss(drafter(batch), batch)
    pad = torch.nn.functional.pad
    wide = fake_batch(drafter, lengths=(70, 9, 0), pad=60)
    wide = replace(
        wide,
        tokens=pad(batch.tokens, (0, 60, 0, 1)),
        features=pad(batch.features, (0, 0, 0, 0, 0, 60, 0, 1)),
        anchors=pad(batch.anchors, (0, 0, 0, 1)),
    )
    padded = drafter.loss(drafter(wide), wide)
    torch.testing.assert_close(padded.numerator, terms.numerator, atol=1e-5, rtol=1e-6)
    padded.numerator.backward()
    grads = {name: p.grad for name, p in drafter.named_parameters()}
    assert all(g is not None and bool(g.isfinite().all()) for g in grads.values())
    assert all(g is not None and bool(g.any()) for g in grads.values())  # no weight is idle


@pytest.mark.parametrize("core", CORES)
def test_state_bytes_do_not_depend_on_the_context(core: str) -> None:
    drafter = build(memory_core=core, window=32, start="ridge", draft_vocab_size=8)
    batch = fake_batch(drafter, lengths=(8192,), anchors=1)
    state = drafter.new_state(1)
    done = 0
    for stop in (0, 512, 1024, 8192):
        commit_rows(drafter, state, batch, [(done, stop)]) if stop else None
        done = stop
        cost = drafter.cost(stop)
        assert state.nbytes(0) == cost.total_bytes(stop) == cost.state_bytes
        assert cost.kv_bytes_per_token == 0
    memory = 0 if core == "none" else 2 * 2 * 8 * 8 * 4
    assert state.nbytes(0) == 2 * 32 * 2 * 2 * 8 * 4 + memory + 2 * 32 * 4 + 4 * (61 - 8)


@pytest.mark.parametrize("core", CORES)
def test_propose_leaves_state_alone_and_snapshots_are_exact(core: str) -> None:
    drafter = build(memory_core=core, correction="gru", correction_width=8, draft_vocab_size=20)
    batch = fake_batch(drafter, lengths=(80, 30))
    state = drafter.new_state(2)
    commit_prefix(drafter, state, batch, [70, 20], pieces=5)

    def tensors() -> list[torch.Tensor]:
        saved = [state.snapshot(row) for row in range(2)]
        return [t for s in saved for t in (*s["stores"], *s["fixed"].values())]

    before, request = tensors(), ask(batch.tokens[[0, 1], [70, 20]])
    first = drafter.propose(state, request)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(), strict=True))
    saved = state.snapshot(0)
    commit_rows(drafter, state, batch, [(70, 80), (20, 20)])
    state.restore(0, saved)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(), strict=True))
    assert drafter.propose(state, request) == first
    state.reset(0)
    assert all(not t.any() for t in state.snapshot(0)["fixed"].values())


@pytest.mark.parametrize("core", CORES)
def test_ragged_rounds_give_what_one_prefill_gives(core: str) -> None:
    drafter = build(memory_core=core)
    batch = fake_batch(drafter, lengths=(90, 90, 90))
    rolling = drafter.new_state(3)
    at = [40, 1, 0]
    commit_prefix(drafter, rolling, batch, at)
    random = torch.Generator().manual_seed(5)
    for _ in range(12):
        step = torch.randint(0, 5, (3,), generator=random).tolist()
        commit_rows(drafter, rolling, batch, [(a, a + s) for a, s in zip(at, step, strict=True)])
        at = [a + s for a, s in zip(at, step, strict=True)]
        fresh = drafter.new_state(3)
        commit_prefix(drafter, fresh, batch, at)
        request = ask(batch.tokens[torch.arange(3), at])
        torch.testing.assert_close(
            drafter.block_hidden(rolling, request), drafter.block_hidden(fresh, request), atol=1e-5, rtol=1e-5
        )


def test_half_lives_are_geometric_at_the_start() -> None:
    drafter = DrafterImpl(HyFlashConfig(**SMALL, memory_heads=5), fake_hooks())
    memory = drafter._memories()[0]
    _, _, beta, g = memory.writes(torch.randn(1, 3, 32))
    torch.testing.assert_close(
        -math.log(2.0) / g[0, 0].double(),
        torch.tensor([32.0, 215.269, 1448.155, 9741.985, 65536.0]).double(),
        rtol=1e-3,
        atol=0,
    )
    assert bool(((beta > 0) & (beta < 1)).all())
    single = DrafterImpl(HyFlashConfig(**SMALL, memory_heads=1), fake_hooks())._memories()[0]
    assert float(single.A_log.detach().exp()) == pytest.approx(math.log(2.0) / 32)


def test_training_drops_memory_and_shrinks_windows_for_whole_sequences_and_evaluation_does_not() -> None:
    drafter = build(memory_dropout=0.5, random_window=0)
    batch = at_anchors(fake_batch(drafter, lengths=(40,) * 8), [30, 39])
    whole = drafter(batch).hidden
    assert torch.equal(whole, drafter(batch).hidden)
    without = build(memory_core="none", random_window=0)
    without.load_state_dict({n: t for n, t in drafter.state_dict().items() if ".memory." not in n})
    silent = without(batch).hidden
    torch.manual_seed(0)
    trained = drafter.train()(batch).hidden
    kinds = [
        "whole" if torch.equal(t, w) else "silent" if torch.allclose(t, s, atol=1e-6) else "?"
        for t, w, s in zip(trained, whole, silent, strict=True)
    ]
    assert set(kinds) == {"whole", "silent"}

    drafter = build(memory_dropout=0, random_window=1.0, window=30, memory_core="none")
    whole = drafter(batch).hidden
    drafter.train()
    torch.manual_seed(1)
    first = drafter(batch).hidden
    torch.manual_seed(1)
    assert torch.equal(first, drafter(batch).hidden)
    assert not torch.allclose(first, whole)


def test_bfloat16_autocast_keeps_the_memory_in_float32() -> None:
    drafter = build(start="ridge")
    batch = fake_batch(drafter, lengths=(70, 9))
    exact = drafter(batch).hidden
    with torch.autocast("cpu", torch.bfloat16):
        rough = drafter(batch)
        terms = drafter.loss(rough, batch)
    terms.numerator.backward()
    scale = float(exact.square().mean().detach().sqrt())
    assert float((rough.hidden - exact).abs().mean().detach()) < 0.05 * scale
    state = drafter.new_state(1)
    assert state.fixed["memory.0"].dtype == torch.float32


def test_half_precision_weights_keep_the_memory_in_float32() -> None:
    drafter = build(draft_vocab_size=20).bfloat16()
    batch = fake_batch(drafter, lengths=(30,))
    state = drafter.new_state(1)
    commit_prefix(drafter, state, batch, [29], pieces=3)
    assert num_drafted(drafter.propose(state, ask(batch.tokens[:, 29]))) == [3]
    assert state.fixed["memory.0"].dtype == torch.float32
    assert state.nbytes(0) == drafter.cost(29).state_bytes
    torch.testing.assert_close(served(drafter, batch, 29).float(), served(build(), batch, 29), atol=0.3, rtol=0.1)


def test_half_lives_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(UserError, match="expected at most max_half_life 4"):
        build(min_half_life=9.0, max_half_life=4.0)


def test_tiny_config_builds() -> None:
    drafter = DrafterImpl(HyFlashConfig.tiny(), fake_hooks())
    assert drafter.max_positions is None
    assert drafter.config.memory_heads == 2
    assert drafter.config.memory_dim == 8
