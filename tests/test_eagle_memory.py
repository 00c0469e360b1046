"""EAGLE with a compact memory: the drafters' contract, what slots are, who sees them, checkpoints under them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import test_drafters as contract
from block_fakes import fake_batch
from drafting import (
    ask,
    assert_same_snapshot,
    assert_training_is_serving,
    drafts,
    filled,
    random_batch,
    stated,
    tiny_drafter,
)
from families import family_dir
from hyflash import checkpoint
from hyflash.core import TargetHooks
from hyflash.drafters.compaction import Compaction, Entries
from hyflash.drafters.eagle import DrafterImpl, EagleConfig
from hyflash.drafters.eagle_memory import PARTIAL, MemoryState, slot_means, visible
from hyflash.drafters.mirrors import with_mirrors
from hyflash.errors import HyflashError, UserError
from hyflash.targets import hf
from hyflash.train.optim import freeze
from test_eagle import LAYOUTS, hooks, tiny

MIRRORS = {f"midlayer.self_attn.slot_{part}_proj.weight" for part in "kv"}
MEMORIES: dict[str, dict[str, Any]] = {
    "slots": {"window": 5, "slot_ratio": 3},
    "sink-and-slots": {"window": 5, "sink": 2, "slot_ratio": 4},
    "sink": {"window": 5, "sink": 2},
    "slots-in-a-window-of-their-own-each": {"window": 6, "sink": 1, "slot_ratio": 3, "window_counts_slots": True},
}


def copied(drafter: DrafterImpl, **options: Any) -> DrafterImpl:
    """A drafter with the same weights and other options, its slots untrained."""
    other = tiny(**options)
    weights = drafter.state_dict()
    other.load_state_dict(with_mirrors(weights) if other.config.slot_ratio else weights)
    return other


# ----------------------------------------------------------------------------------------------- contract


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> hf.HFTarget:
    return hf.load(str(family_dir(tmp_path_factory.mktemp("target"), "llama")))


@pytest.fixture(params=MEMORIES)
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a memory, which `tiny_drafter` gives every eagle."""
    options: dict[str, Any] = MEMORIES[request.param]
    config = EagleConfig(num_draft_tokens=3, num_taps=2, **options)
    monkeypatch.setattr(EagleConfig, "tiny", lambda: config)
    return options


@pytest.mark.parametrize(
    "prove",
    [
        contract.test_commits_in_pieces_equal_one_commit,
        contract.test_an_empty_commit_changes_nothing,
        contract.test_propose_leaves_the_state_as_it_was,
        contract.test_a_batch_row_proposes_what_it_proposes_alone,
        contract.test_rows_that_were_not_committed_to_stay_as_they_were,
        contract.test_a_snapshot_is_a_copy_and_restores_to_the_bit_in_any_row,
        contract.test_a_reset_row_is_as_good_as_new,
        contract.test_every_committed_token_is_read_with_its_features,
    ],
)
def test_the_state_keeps_the_contract(prove: Callable[..., None], memory: dict[str, Any], target: hf.HFTarget) -> None:
    drafter = tiny_drafter("eagle", target.hooks())
    assert isinstance(drafter.new_state(1), MemoryState)
    prove(drafter, random_batch(drafter, contract.LENGTHS))


@pytest.mark.parametrize(
    "prove",
    [
        contract.test_cost_equals_the_bytes_a_state_holds,
        contract.test_drafter_state_grows_by_what_cost_says_from_1k_to_8k_tokens,
    ],
)
def test_costs_are_what_is_held(prove: Callable[..., None], memory: dict[str, Any], target: hf.HFTarget) -> None:
    prove(tiny_drafter("eagle", target.hooks()))


@pytest.mark.parametrize(
    "prove",
    [
        contract.test_ragged_requests_get_each_row_its_own_length,
        contract.test_broken_weights_end_a_proposal_and_are_counted,
        contract.test_the_training_forward_at_an_anchor_is_the_serving_proposal,
        contract.test_padding_and_later_tokens_do_not_reach_the_training_forward,
        contract.test_an_optimiser_step_lowers_the_loss_and_reaches_every_parameter,
    ],
)
def test_drafts_and_training_keep_the_contract(
    prove: Callable[..., None], memory: dict[str, Any], target: hf.HFTarget
) -> None:
    prove("eagle", target)


def test_a_saved_memory_loads_as_the_same(memory: dict[str, Any], target: hf.HFTarget, tmp_path: Path) -> None:
    contract.test_a_saved_drafter_loads_as_the_same_drafter("eagle", target, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 3, "slot_ratio": 4, "sink": 1, "qk_norm": True, "attention_bias": True},
        {"window": 5, "slot_ratio": 2, "own_head": True, "draft_vocab_size": 24},
        {"window": 5, "slot_ratio": 1},
        {"window": 1, "slot_ratio": 7, "norm_output": False},
        {"window": 4, "slot_ratio": 6, "window_counts_slots": True},
        {"window": 2, "sink": 30, "slot_ratio": 2},
    ],
    ids=str,
)
def test_training_is_serving_with_every_option(options: dict[str, Any]) -> None:
    assert_training_is_serving(tiny(**options))


# ---------------------------------------------------------------------------------------- what a slot is


@pytest.mark.parametrize("sink", [0, 1, 2, 5])
@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(17,), (1,) * 17, (4, 1, 0, 7, 5)], ids=str)
def test_a_slot_is_the_mean_of_its_pairs_however_they_come(sink: int, ratio: int, sizes: tuple[int, ...]) -> None:
    rule = Compaction(sink=sink, window=4, ratio=ratio)
    pairs = torch.randn(17, 6, generator=torch.Generator().manual_seed(0))
    got, start, rest = [], 0, torch.zeros(6)
    for size in sizes:
        means, rest = slot_means(rule, pairs[start : start + size], start, rest)
        start += size
        got.append(means)
        assert sum(map(len, got)) == rule.num_slots(start)
    want = []
    for last in rule.slot_positions(0, rule.num_slots(17)):
        tokens = [t for t in range(last - ratio + 1, last + 1) if t > 0]  # the first has no feature before it
        want.append(pairs[tokens].mean(0) if tokens else torch.zeros(6))
    torch.testing.assert_close(torch.cat(got), torch.stack(want))
    left = [t for t in range(sink + ratio * rule.num_slots(17), 17) if t > 0]
    torch.testing.assert_close(rest, pairs[left].sum(0) if left else torch.zeros(6))


def test_sums_wait_in_float32_whatever_the_weights_are() -> None:
    drafter = tiny(window=5, slot_ratio=3).to(torch.bfloat16)
    batch = random_batch(drafter, (20,))
    state = MemoryState.of(filled(drafter, batch, (19,), pieces=[4, 1, 7]))
    assert state.fixed[PARTIAL].dtype == torch.float32
    assert state.nbytes(0) == drafter.cost(19).total_bytes(19)
    assert len(drafts(ask(drafter, state, (0,), [5]))[0]) == 3


def test_untrained_slots_of_one_token_are_the_tokens() -> None:
    """So a drafter that gets them, and no more than copies, drafts as with the whole text."""
    whole = tiny()
    slots, batch = copied(whole, window=5, sink=2, slot_ratio=1), random_batch(whole, (40,))
    got, want = (ask(d, filled(d, batch, (39,), pieces=[7, 1, 9]), (0,), [5]) for d in (slots, whole))
    assert drafts(got) == drafts(want)
    torch.testing.assert_close(stated(got), stated(want), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{"window": 38, "slot_ratio": 4}, {"window": 10, "sink": 29, "slot_ratio": 4}])
def test_a_text_that_fits_is_remembered_whole(options: dict[str, int]) -> None:
    whole = tiny()
    fits, batch = copied(whole, **options), random_batch(whole, (40,))
    got, want = (ask(d, filled(d, batch, (38,)), (0,), [5]) for d in (fits, whole))
    assert drafts(got) == drafts(want)
    torch.testing.assert_close(stated(got), stated(want), atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------------------------------ who sees what


@pytest.mark.parametrize("name", MEMORIES)
def test_every_step_sees_each_committed_token_but_the_first_once(name: str) -> None:
    config = EagleConfig(num_draft_tokens=3, **MEMORIES[name])
    rule, anchors = config.rule, torch.arange(40)[None]
    assert rule is not None
    slots = rule.slot_positions(0, rule.num_slots(43))  # as in training, where later tokens are there too
    known = Entries(
        positions=torch.tensor([[*range(43), *slots]]), is_slot=torch.tensor([False] * 43 + [True] * len(slots))
    )
    mask = visible(rule, known, anchors, 3, counts_slots=config.window_counts_slots)
    assert mask.shape == (1, 40, 3 if config.window_counts_slots else 1, 43 + len(slots))
    for anchor, rows in enumerate(mask[0].tolist()):
        for step, row in enumerate(rows):
            query = anchor + step
            seen = []
            for position, is_slot, yes in zip(known.positions[0].tolist(), known.is_slot.tolist(), row, strict=True):
                if yes:
                    seen += range(position - rule.ratio + 1, position + 1) if is_slot else [position]
            near = [t for t in range(1, anchor) if rule.ratio or t < rule.sink or t > query - rule.window]
            assert sorted(t for t in seen if t) == near
            tokens = [t for t, yes in zip(range(43), row, strict=False) if yes and t >= rule.sink]
            assert len(tokens) <= rule.ring
            if not config.window_counts_slots:
                assert set(range(max(1, anchor - config.window), anchor)) <= {*tokens, *range(rule.sink)}


def test_old_text_reaches_a_draft_through_its_slot_and_without_slots_no_more() -> None:
    for options, reached in (({"slot_ratio": 4}, True), ({}, False)):
        drafter = tiny(window=6, sink=2, **options)
        batch = random_batch(drafter, (40,))
        want = stated(ask(drafter, filled(drafter, batch, (39,)), (0,), [5]))
        for at in (1, 2, 9, 20, 35):
            tokens = batch.tokens.clone()
            tokens[0, at] += 1
            got = stated(ask(drafter, filled(drafter, replace(batch, tokens=tokens), (39,)), (0,), [5]))
            assert (got != want) == (reached or at < 2 or at > 32)


def test_drafts_end_where_positions_do() -> None:
    for options in ({"slot_ratio": 3}, {"sink": 2}):
        drafter = tiny(window=5, max_positions=12, **options)
        assert drafter.max_positions == 12
        batch = random_batch(drafter, (14,))
        for length, want in ((8, 3), (9, 2), (11, 0), (13, 0)):
            assert len(drafts(ask(drafter, filled(drafter, batch, (length,)), (0,), [5]))[0]) == want


@pytest.mark.parametrize("ratio", [1, 3, 8])
def test_a_text_takes_the_ratios_part_of_its_bytes(ratio: int) -> None:
    drafter, whole = tiny(window=5, sink=2, slot_ratio=ratio), tiny()
    assert drafter.cost(0).kv_bytes_per_token == -(-whole.cost(0).kv_bytes_per_token // ratio)
    batch = random_batch(drafter, (500,))
    saved = filled(drafter, batch, (500,)).snapshot(0)
    held = saved["memory"]["fixed"].nbytes + saved["memory"]["slots"].nbytes
    held += sum(tensor.nbytes for tensor in saved["fixed"].values())
    counted = drafter.cost(500).total_bytes(500)
    assert counted - 4 * whole.cost(0).kv_bytes_per_token <= held <= counted


def test_slots_cost_flops_where_they_are_made_and_read() -> None:
    none, some = (tiny(window=5, slot_ratio=ratio).cost(4000) for ratio in (0, 4))
    config = tiny().config
    shared = 2 * 2 * 2 * config.hidden_size * config.num_kv_heads * config.head_dim
    assert some.commit_flops_per_token - none.commit_flops_per_token == shared // 4
    read = 4 * config.num_heads * config.head_dim * ((4000 - 5) // 4)
    assert some.propose_flops - none.propose_flops == 3 * read


@pytest.mark.parametrize("options", [{"sink": 4}, {"slot_ratio": 4}])
def test_a_memory_without_a_window_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match="without a window; expected a window above 0"):
        tiny(**options)


def test_a_state_without_slots_is_refused() -> None:
    slots, plain = tiny(window=5, slot_ratio=3), tiny(window=5)
    batch = random_batch(plain, (9,))
    with pytest.raises(HyflashError, match="state with slots"):
        ask(slots, filled(plain, batch, (8,)), (0,), [5])


# --------------------------------------------------------------------------------- checkpoints and training

ON_TOP = {"window": 8, "sink": 2, "slot_ratio": 4}


def on_top(path: Path, target: TargetHooks, **options: int) -> DrafterImpl:
    drafter = checkpoint.load(f"eagle:{path}", target, options=options)
    assert isinstance(drafter, DrafterImpl)
    return drafter


def assert_mirrors_are_copies(weights: dict[str, Tensor]) -> None:
    mirrors = [name for name in weights if ".slot_" in name]
    assert set(mirrors) >= MIRRORS
    assert all(torch.equal(weights[name], weights[name.replace("slot_", "")]) for name in mirrors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_checkpoint_gets_slots_on_top(layout: str, tmp_path: Path) -> None:
    """Only what its config leaves open may be given: one that was trained with a window keeps that."""
    path, _ = LAYOUTS[layout](tmp_path / "theirs")
    options = ON_TOP
    if layout == "speculators":
        with pytest.raises(UserError, match="says what window must be"):
            on_top(path, hooks(), **ON_TOP)
        options = {"sink": 2, "slot_ratio": 4}
    plain, drafter = checkpoint.load(str(path), hooks()), on_top(path, hooks(), **options)
    assert_mirrors_are_copies(dict(drafter.state_dict()))
    own = {name: tensor for name, tensor in drafter.state_dict().items() if ".slot_" not in name}
    assert_same_snapshot(own, dict(plain.state_dict()))
    batch = fake_batch(drafter, lengths=(40,))
    assert num_drafted(drafter, batch) == drafter.max_draft_tokens
    checkpoint.refill(drafter)
    checkpoint.save(drafter, tmp_path / "ours", dtype="fp32")
    loaded = checkpoint.load(str(tmp_path / "ours"), hooks())
    assert loaded.config == drafter.config
    assert_same_snapshot(dict(loaded.state_dict()), dict(drafter.state_dict()))


def num_drafted(drafter: DrafterImpl, batch: Any) -> int:
    (draft,) = drafts(ask(drafter, filled(drafter, batch, (39,)), (0,), [5]))
    return len(draft)


def test_a_checkpoint_of_ours_gets_slots_once(tmp_path: Path) -> None:
    checkpoint.save(tiny(attention_bias=True), tmp_path / "plain", dtype="fp32")
    drafter = on_top(tmp_path / "plain", hooks(), **ON_TOP)
    assert_mirrors_are_copies(dict(drafter.state_dict()))
    assert "midlayer.self_attn.slot_k_proj.bias" in drafter.state_dict()
    checkpoint.save(drafter, tmp_path / "slots", dtype="fp32")
    for name, value in (("slot_ratio", 8), ("window", 9), ("sink", 0)):
        with pytest.raises(UserError, match=f"says what {name} must be"):
            on_top(tmp_path / "slots", hooks(), **{name: value})
    with pytest.raises(UserError, match="says what num_draft_tokens must be"):
        on_top(tmp_path / "plain", hooks(), num_draft_tokens=9)


def test_a_checkpoint_that_lost_a_mirror_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tiny(window=5, slot_ratio=3), tmp_path, dtype="fp32")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: w for name, w in weights.items() if "slot_v" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"missing tensors: .*slot_v_proj"):
        checkpoint.load(str(tmp_path), hooks())


def test_mirrors_learn_alone() -> None:
    drafter = copied(tiny(), window=5, slot_ratio=3).train()
    freeze(drafter, ["midlayer.self_attn.slot_*"])
    batch = random_batch(drafter, (40, 33), num_anchors=8)
    optimiser = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=1e-2)
    before, losses = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}, []
    for _ in range(5):
        terms = drafter.loss(drafter(batch), batch)
        losses.append(terms.numerator / terms.denominator)
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    assert losses[-1] < losses[0]
    changed = {name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == MIRRORS
