"""FOLD: its limits are DFlash to the bit, distant tokens stand at one distance, and `hyflash calibrate` chooses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafting import (
    ask,
    assert_same_snapshot,
    commit_spans,
    drafts,
    filled,
    random_batch,
    stated,
    tiny_drafter,
)
from families import family_dir
from helpers import tiny_target_dir
from hyflash import api, checkpoint
from hyflash.bench import calibrate
from hyflash.cli import main
from hyflash.core import TrainBatch
from hyflash.data.prompts import Prompt
from hyflash.drafters import fold
from hyflash.drafters.base import Drafter, State
from hyflash.engine.replay import Recording, measure
from hyflash.errors import UserError
from hyflash.metrics import summarize
from hyflash.ops.attention import FarContext, block_attention
from hyflash.ops.rope import rope_tables, rotate
from hyflash.targets import hf

torch.set_num_threads(1)
LENGTHS, UPTO = (1, 23, 40), (0, 22, 39)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> hf.HFTarget:
    return hf.load(str(family_dir(tmp_path_factory.mktemp("target"), "llama")))


def pair(target: hf.HFTarget, *, full: dict[str, Any], folded: dict[str, Any]) -> tuple[Drafter, fold.DrafterImpl]:
    """A DFlash, and a FOLD of the same weights."""
    one = tiny_drafter("dflash", target.hooks(), **full)
    two = tiny_drafter("fold", target.hooks(), **{**full, "window": 0, **folded})
    assert isinstance(two, fold.DrafterImpl)
    two.load_state_dict(one.state_dict())
    return one, two


def batch_of(drafter: Drafter) -> TrainBatch:
    return random_batch(drafter, LENGTHS)


def proposed(drafter: Drafter, batch: TrainBatch, upto: tuple[int, ...] = UPTO) -> tuple[Any, Any, State]:
    state = filled(drafter, batch, upto, pieces=[5, 1, 7])
    got = ask(drafter, state, range(3), [int(batch.tokens[b, n]) for b, n in enumerate(upto)])
    return drafts(got), stated(got), state


# ------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("full", "folded"),
    [
        ({}, {"fold_window": 0, "kappa": 1.0, "far_weight": 1.0}),
        ({}, {"fold_window": 0}),
        ({"window": 8}, {"fold_window": 8, "far_weight": 0.0}),
        ({"window": 8}, {"fold_window": 8, "far_weight": 0.0, "kappa": 3.0}),
        ({"draft_vocab_size": 32, "correction": "gru", "start": "ridge"}, {"fold_window": 0, "kappa": 1.0}),
    ],
)
def test_the_limits_are_dflash_and_its_window_to_the_bit(
    target: hf.HFTarget, full: dict[str, Any], folded: dict[str, Any]
) -> None:
    one, two = pair(target, full=full, folded=folded)
    batch = batch_of(one)
    for want, got in zip(proposed(one, batch), proposed(two, batch), strict=True):
        if isinstance(want, State):
            assert isinstance(got, State)
            for row in range(3):
                assert_same_snapshot(got.snapshot(row), want.snapshot(row))
        else:
            assert got == want
    assert two.cost(300) == one.cost(300)
    assert two.max_positions == one.max_positions


def test_a_context_within_the_window_is_dflash_to_the_bit(target: hf.HFTarget) -> None:
    one, two = pair(target, full={}, folded={"fold_window": 39, "kappa": 2.5, "far_weight": 0.2})
    batch = batch_of(one)
    assert proposed(two, batch)[:2] == proposed(one, batch)[:2]


def test_one_token_beyond_the_window_is_far(target: hf.HFTarget) -> None:
    one, two = pair(target, full={}, folded={"fold_window": 38})
    batch = batch_of(one)
    assert proposed(two, batch)[1][2] != proposed(one, batch)[1][2]


def test_a_vanishing_weight_comes_to_the_window(target: hf.HFTarget) -> None:
    one, two = pair(target, full={"window": 8}, folded={"fold_window": 8, "far_weight": 1e-30})
    batch = batch_of(one)
    (want, sure, _), (got, near, _) = proposed(one, batch), proposed(two, batch)
    assert got == want
    for a, b in zip(sure, near, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize("change", [{"kappa": 5.0}, {"far_weight": 0.01}, {"fold_window": 4}])
def test_every_option_changes_what_is_drafted_from_a_long_text(target: hf.HFTarget, change: dict[str, Any]) -> None:
    _, one = pair(target, full={}, folded={"fold_window": 8, "kappa": 1.0})
    _, two = pair(target, full={}, folded={"fold_window": 8, "kappa": 1.0, **change})
    batch = batch_of(one)
    assert proposed(two, batch)[1] != proposed(one, batch)[1]


# --------------------------------------------------------------------------------- what far means


def test_the_order_of_distant_tokens_does_not_matter_that_of_near_ones_does(target: hf.HFTarget) -> None:
    _, two = pair(target, full={}, folded={"fold_window": 8})
    batch = batch_of(two)

    def sure(order: torch.Tensor) -> list[float]:
        mixed = replace(batch, features=batch.features.clone())
        mixed.features[2] = batch.features[2, order]
        return list(proposed(two, mixed)[1][2])

    plain = torch.arange(40)
    distant = torch.cat((torch.randperm(31, generator=torch.Generator().manual_seed(0)), plain[31:]))
    near = torch.cat((plain[:31], plain[31:39].flip(0), plain[39:]))
    assert sure(distant) == pytest.approx(sure(plain), abs=1e-5)
    assert sure(near) != pytest.approx(sure(plain), abs=1e-5)


def test_the_default_sharpness_grows_with_what_is_far(target: hf.HFTarget) -> None:
    _, two = pair(target, full={}, folded={"fold_window": 8})
    assert two._sharpness(1) == two._sharpness(8) == 1.0
    assert two._sharpness(64) == pytest.approx(math.log(64) / math.log(8))
    _, narrow = pair(target, full={}, folded={"fold_window": 1})
    assert math.isfinite(narrow._sharpness(1000))


@pytest.mark.parametrize("causal", [False, True])
def test_far_attention_is_two_attentions_merged_by_log_sum_exp(causal: bool) -> None:
    random_ = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random_)

    rows, slots, heads, groups, dim, near, far, kappa, weight = 2, 3, 4, 2, 8, 5, 6, 1.7, 0.3
    q, queries = draw(rows, 1, slots, heads, dim), draw(rows, 1, slots, heads, dim)
    k, v, far_k, far_v = (draw(rows, n, groups, dim) for n in (near, near, far, far))
    block_k, block_v = (draw(rows, 1, slots, groups, dim) for _ in range(2))
    mask, far_mask = torch.ones(rows, 1, 1, near, dtype=torch.bool), torch.ones(rows, 1, far, dtype=torch.bool)
    mask[1, ..., :2], far_mask[1] = False, False  # the second row has nothing far
    context = FarContext(
        keys=far_k,
        values=far_v,
        mask=far_mask,
        cos=q,
        sin=q,  # tables are the layer's affair
        sharpness=torch.full((rows, 1), kappa),
        log_weight=math.log(weight),
    )
    got = block_attention(q, k, v, block_k, block_v, mask, causal=causal, far=(queries, context))
    alone = block_attention(q, k, v, block_k, block_v, mask, causal=causal)
    torch.testing.assert_close(got[1], alone[1])
    for slot in range(slots):
        for head in range(heads):
            group, stop = head // (heads // groups), slot + 1 if causal else slots
            keys = torch.cat((k[0, :, group], block_k[0, 0, :stop, group]))
            values = torch.cat((v[0, :, group], block_v[0, 0, :stop, group]))
            here = keys @ q[0, 0, slot, head] / dim**0.5
            there = kappa * (far_k[0, :, group] @ queries[0, 0, slot, head]) / dim**0.5
            sums = here.logsumexp(0), there.logsumexp(0) + math.log(weight)
            share = torch.softmax(torch.stack(sums), 0)
            want = share[0] * (here.softmax(0) @ values) + share[1] * (there.softmax(0) @ far_v[0, :, group])
            torch.testing.assert_close(got[0, 0, slot, head * dim : (head + 1) * dim], want)


def test_a_layer_with_its_own_window_keeps_it_and_only_full_ones_are_folded(target: hf.HFTarget) -> None:
    options = {"num_layers": 2, "window": 6, "full_layers": (1,)}
    one = tiny_drafter("dflash", target.hooks(), **options)
    two = tiny_drafter("fold", target.hooks(), **options, fold_window=39)
    two.load_state_dict(one.state_dict())
    batch = batch_of(one)
    assert proposed(two, batch)[:2] == proposed(one, batch)[:2], "nothing is far yet"
    short = tiny_drafter("fold", target.hooks(), **options, fold_window=8)
    short.load_state_dict(one.state_dict())
    assert proposed(short, batch)[1][2] != proposed(one, batch)[1][2]
    assert short.cost(300).state_bytes == one.cost(300).state_bytes > 0
    assert short.max_positions is None


def test_it_serves_beyond_the_positions_of_its_checkpoint(target: hf.HFTarget) -> None:
    one, two = pair(target, full={"max_positions": 20}, folded={"fold_window": 8})
    batch = batch_of(one)
    assert [len(row) for row in proposed(one, batch)[0]] == [3, 0, 0]
    assert [len(row) for row in proposed(two, batch)[0]] == [3, 3, 3]


def test_keys_of_a_text_never_turn_again_so_its_bytes_stay_when_it_grows(target: hf.HFTarget) -> None:
    _, two = pair(target, full={}, folded={"fold_window": 8})
    batch = batch_of(two)
    state = filled(two, batch, (0, 0, 20))
    before = state.snapshot(2)["stores"][0]
    commit_spans(two, state, batch, {2: (20, 39)}, {2: 2})
    assert torch.equal(state.snapshot(2)["stores"][0][:20], before)


def test_the_window_is_rotated_as_a_shorter_text_would_be(target: hf.HFTarget) -> None:
    _, two = pair(target, full={}, folded={"fold_window": 8})
    batch = batch_of(two)
    state = filled(two, batch, UPTO)
    store = state.stores[0]  # type: ignore[attr-defined]
    view = store.view([2], [39])
    cos, sin = rope_tables(torch.arange(8), dim=two.config.head_dim, theta=two.config.rope_theta)
    assert torch.equal(view.keys[0], rotate(store.data[2][31:39, 0], cos, sin))
    assert view.anchors.tolist() == [8]


# ---------------------------------------------------------------------------------------- loading


def test_any_dflash_checkpoint_loads_with_options_of_its_own(target: hf.HFTarget, tmp_path: Path) -> None:
    one = tiny_drafter("dflash", target.hooks(), draft_vocab_size=32)
    checkpoint.save(one, tmp_path / "dflash", dtype="fp32")
    loaded = checkpoint.load(f"fold:{tmp_path / 'dflash'}", target.hooks(), options={"kappa": 2.0, "fold_window": 8})
    assert isinstance(loaded, fold.DrafterImpl)
    assert (loaded.config.kappa, loaded.config.fold_window, loaded.config.far_weight) == (2.0, 8, 1.0)
    assert_same_snapshot(dict(loaded.state_dict()), dict(one.state_dict()))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 8}, "nothing far is left to fold"),
        ({"fold_window": 0, "kappa": 2.0}, "nothing is far"),
        ({"fold_window": 0, "far_weight": 0.5}, "nothing is far"),
        ({"kappa": -1.0}, "kappa"),
        ({"far_weight": -0.1}, "far_weight"),
        ({"far_weight": math.nan}, "far_weight"),
        ({"fold_window": -1}, "fold_window"),
    ],
)
def test_options_without_meaning_are_refused(target: hf.HFTarget, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny_drafter("fold", target.hooks(), **options)


# -------------------------------------------------------------------------------------- calibrate


def recordings_of(drafter: Drafter, *lengths: int) -> list[Recording]:
    batch = random_batch(drafter, lengths)
    return [
        Recording(
            prompt_ids=tuple(batch.tokens[b, : n - 8].tolist()),
            answer_ids=tuple(batch.tokens[b, n - 8 : n].tolist()),
            features=batch.features[b, :n],
            taps=drafter.target_layer_ids,
        )
        for b, n in enumerate(lengths)
    ]


def test_the_search_finds_the_best_pair_and_tries_nothing_twice(
    target: hf.HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = tiny_drafter("fold", target.hooks(), fold_window=8)
    worth = {(4, 2.0): 3.0, (4, 1.0): 2.5, (8, 2.0): 1.0, (8, 1.0): 2.0}
    tried = []

    def trial(_d: Drafter, _r: object, options: dict[str, Any], _n: int) -> calibrate.Trial:
        tried.append(tuple(options.values()))
        tau = worth.get(tried[-1], 1.5)
        return calibrate.Trial(options=options, tau=tau, num_rounds=1, rounds=((int(100 * tau),),))

    monkeypatch.setattr(calibrate, "_trial", trial)
    grid = {"fold_window": (8, 4), "kappa": (1.0, 2.0)}
    found = calibrate.search(drafter, [], grid, num_draft_tokens=3)
    assert found.best.options == {"fold_window": 4, "kappa": 2.0}
    assert len(set(tried)) == len(tried) == len(found.trials)
    assert found.trials[0].options == {"fold_window": 8, "kappa": 0.0}, "the given setting comes first"
    assert found.idle == ()


def test_of_equals_the_given_setting_stays_and_what_changed_nothing_is_named(target: hf.HFTarget) -> None:
    drafter = tiny_drafter("fold", target.hooks(), fold_window=64)
    grid = {"far_weight": (0.1, 1.0), "kappa": (1.0, 2.0)}
    found = calibrate.search(drafter, recordings_of(drafter, 30, 40), grid, num_draft_tokens=3)
    assert found.best.options == {"far_weight": 1.0, "kappa": 0.0}
    assert found.idle == ("far_weight", "kappa"), "no text is longer than the window"


def test_combinations_that_a_drafter_refuses_are_passed_over(target: hf.HFTarget) -> None:
    drafter = tiny_drafter("fold", target.hooks(), fold_window=8, kappa=2.0)
    found = calibrate.search(drafter, recordings_of(drafter, 30), {"fold_window": (0, 4)}, num_draft_tokens=3)
    assert [trial.options for trial in found.trials] == [{"fold_window": 8}, {"fold_window": 4}]


def test_a_trial_is_the_acceptance_of_a_drafter_built_with_these_options(target: hf.HFTarget) -> None:
    drafter = tiny_drafter("fold", target.hooks(), fold_window=8)
    recordings = recordings_of(drafter, 30, 40)
    found = calibrate.search(drafter, recordings, {"fold_window": (4,)}, num_draft_tokens=3)
    other = tiny_drafter("fold", target.hooks(), fold_window=4)
    assert found.trials[1].tau == summarize(measure(other, recordings, 3)).tau


def test_no_prompt_both_chooses_and_reports() -> None:
    prompts = {
        name: [Prompt(id=f"{name}{i}", messages=({"role": "user", "content": "x"},), domain=name) for i in range(n)]
        for name, n in (("a", 5), ("b", 1), ("c", 2))
    }
    tuning, held = calibrate.split(prompts, 0)
    assert {name: len(found) for name, found in tuning.items()} == {"a": 3, "b": 1, "c": 1}
    assert {name: len(found) for name, found in held.items()} == {"a": 2, "c": 1}
    ids = [p.id for half in (tuning, held) for found in half.values() for p in found]
    assert len(set(ids)) == len(ids) == 8
    assert calibrate.split(prompts, 0) == (tuning, held)
    assert any(calibrate.split(prompts, seed) != (tuning, held) for seed in range(1, 5))
    with pytest.raises(UserError, match="found 1 prompt; expected at least 2"):
        calibrate.split({"b": prompts["b"]}, 0)


def test_values_to_try_are_checked_before_anything_runs(target: hf.HFTarget) -> None:
    drafter = tiny_drafter("fold", target.hooks())
    assert calibrate.grid_of(drafter, {"kappa": (1.0,)})["kappa"] == (1.0,)
    assert list(calibrate.grid_of(drafter, {})) == ["fold_window", "far_weight", "kappa"]
    read = calibrate.grid_of(drafter, {"fold_window": (4.0, "8")})["fold_window"]
    assert [(type(value), value) for value in read] == [(int, 4), (int, 8)], "reports and cards have what is tried"
    with pytest.raises(UserError, match="num_layers cannot be calibrated"):
        calibrate.grid_of(drafter, {"num_layers": (1,)})
    with pytest.raises(UserError, match="kappa is -1"):
        calibrate.grid_of(drafter, {"kappa": (1.0, -1)})
    with pytest.raises(UserError, match="no value to try"):
        calibrate.grid_of(drafter, {"kappa": ()})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A target, a DFlash checkpoint for it and a prompt file."""
    root = tmp_path_factory.mktemp("calibrate")
    where = str(tiny_target_dir(root))
    model = hf.load(where)
    checkpoint.save(tiny_drafter("dflash", model.hooks()), root / "dflash", dtype="fp32", card={"tau": 1.5})
    (root / "talk.jsonl").write_text("".join(json.dumps({"prompt": f"say {i} {'ab' * i}"}) + "\n" for i in range(4)))
    return where, str(root / "dflash"), str(root / "talk.jsonl")


def calibrated(tiny: tuple[str, str, str], out: Path, *more: str, drafter: str = "") -> int:
    where, folder, prompts = tiny
    spec = drafter or f"fold:{folder}"
    shared = ["--prompts", prompts, "--out", str(out), "-t", where, "-n", "12", "-q", "--num-draft-tokens", "3"]
    return main(["calibrate", spec, *shared, *more])


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that stand for those of a good drafter; a random one is never right."""

    def trial(_d: Drafter, _r: object, options: dict[str, Any], _n: int) -> calibrate.Trial:
        tau = 1 + 1 / options["fold_window"] + options["far_weight"]
        return calibrate.Trial(options=options, tau=tau, num_rounds=9, rounds=((int(100 * tau),),))

    monkeypatch.setattr(calibrate, "_trial", trial)


GRID = ["--try", "fold_window=4,8", "--try", "kappa=1", "--try", "far_weight=0,1"]


def test_calibrate_writes_a_drafter_that_serves_with_what_it_chose(
    tiny: tuple[str, str, str], worth: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrated(tiny, tmp_path / "fold", *GRID, "--context", "60", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["options"] == {"fold_window": 4, "far_weight": 1, "kappa": 0.0}
    assert "kappa changed no round" in table["warnings"][0]
    assert table["report"]["num_prompts"] == 2
    loaded = checkpoint.load(str(tmp_path / "fold"), hf.load(tiny[0]).hooks())
    assert isinstance(loaded, fold.DrafterImpl)
    assert {name: getattr(loaded.config, name) for name in table["options"]} == table["options"]
    card = checkpoint.read_card(tmp_path / "fold")
    assert card["tau"] == 1.5, "how the weights were trained stays"
    assert (card["drafter"], card["calibration"]["options"]) == ("fold", table["options"])
    assert calibrated(tiny, tmp_path / "again", *GRID, "--context", "60", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["trials"] == table["trials"], "the same seed chooses the same"
    assert main(["generate", "-t", tiny[0], "-d", str(tmp_path / "fold"), "-n", "4", "-q", "x"]) == 0


def test_calibrate_shows_a_table(
    tiny: tuple[str, str, str], worth: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrated(tiny, tmp_path / "fold", *GRID, "--context", "60") == 0
    out = capsys.readouterr().out
    assert "chosen" in out
    assert "fold_window" in out
    assert "on 2 other answers: tau" in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--try", "kappa"], "not of the form KEY=V1,V2"),
        (["--try", "kappa=x"], "not of the form KEY=V1,V2"),
        (["--try", "kappa=1", "--try", "kappa=2"], "twice"),
        (["--try", "window=4"], "cannot be calibrated"),
        (["--limit", "1"], "expected at least 2"),
        (["--context", "250"], "Give shorter prompts"),
        (["--max-tokens", "256"], "Give a smaller --max-tokens"),
        (["--num-draft-tokens", "9"], "at most 3"),
    ],
)
def test_calibrate_says_what_is_wrong_and_writes_nothing(
    tiny: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert calibrated(tiny, tmp_path / "fold", *more) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "fold").exists()


@pytest.mark.parametrize(
    ("accepted", "said"), [(0, "not one draft was accepted"), (1, "may be too short to use what they set")]
)
def test_calibrate_says_why_there_is_nothing_to_choose_by(
    tiny: tuple[str, str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    accepted: int,
    said: str,
) -> None:
    def trial(_d: Drafter, _r: object, options: dict[str, Any], _n: int) -> calibrate.Trial:
        return calibrate.Trial(options=options, tau=1.0, num_rounds=9, rounds=((accepted,),))

    monkeypatch.setattr(calibrate, "_trial", trial)
    assert calibrated(tiny, tmp_path / "fold") == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "fold").exists()


@pytest.mark.parametrize(
    ("drafter", "said"),
    [("lookup", "nothing to calibrate"), ("lookup+ngram", "takes one drafter"), ("none", "unknown drafter")],
)
def test_calibrate_refuses_drafters_without_anything_to_choose(
    tiny: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], drafter: str, said: str
) -> None:
    assert calibrated(tiny, tmp_path / "out", drafter=drafter) == 1
    assert said in capsys.readouterr().err


def test_calibrate_overwrites_nothing(
    tiny: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fold").mkdir()
    (tmp_path / "fold" / "notes").write_text("mine")
    for out in (tmp_path / "fold", tmp_path / "fold" / "notes"):
        assert calibrated(tiny, out) == 1
        assert "not an empty directory" in capsys.readouterr().err
    assert (tmp_path / "fold" / "notes").read_text() == "mine"


def test_a_confidence_head_is_fitted_to_the_same_rounds(
    tiny: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = hf.load(tiny[0])
    checkpoint.save(tiny_drafter("dspark", model.hooks(), confidence_head=True), tmp_path / "dspark", dtype="fp32")
    assert calibrated(tiny, tmp_path / "out", "--json", drafter=str(tmp_path / "dspark")) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["confidence"]["calibration_rounds"] > 0
    assert table["options"] == {}
    assert checkpoint.load(str(tmp_path / "out"), model.hooks()).calibrates


# ------------------------------------------------------------------------------- on the command line


def test_options_go_with_a_method_over_a_checkpoint_and_not_with_a_checkpoint_alone(
    tiny: tuple[str, str, str],
) -> None:
    loaded = api.load_target(tiny[0])
    made = api.load_drafter(f"fold:{tiny[1]}", loaded, options=["kappa=3", "fold_window=16"])
    assert isinstance(made, fold.DrafterImpl)
    assert (made.config.kappa, made.config.fold_window) == (3.0, 16)
    with pytest.raises(UserError, match="a checkpoint has its own"):
        api.load_drafter(tiny[1], loaded, options=["window=4"])
    with pytest.raises(UserError, match="leave out what its own config has"):
        api.load_drafter(f"fold:{tiny[1]}", loaded, options=["num_layers=2"])
    with pytest.raises(UserError, match="several"):
        api.load_drafter(f"fold:{tiny[1]}+lookup", loaded, options=["kappa=3"])
