"""Recipes refuse what they do not know; schedules, groups and orders are what they say."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_training import VOCAB, FakeConfig, FakeDrafter, FakeTarget, make_answers
from hyflash.data.capture import LiveSource
from hyflash.errors import UserError
from hyflash.train.evaluate import best_entry, pool
from hyflash.train.loader import BatchStream, epoch_batches, hold_out, select_layers
from hyflash.train.optim import Budget, group_names, learning_rate, make_optimizer, scale_and_clip, set_learning_rate
from hyflash.train.progress import MetricsFile, clock
from hyflash.train.recipe import DataTable, TrainTable, changes, load_recipe, parse_recipe

TABLES: dict[str, Any] = {
    "target": {"name": "fake"},
    "drafter": {"name": "dflash", "num_layers": 1},
    "data": {"shards": "there"},
    "train": {"steps": 5},
}
RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))


def with_value(table: str, key: str, value: Any) -> dict[str, Any]:
    return {**TABLES, table: {**TABLES[table], key: value}}


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipes_are_valid(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.drafter_class.trainable


def test_shipped_recipes_are_there() -> None:
    assert {p.stem for p in RECIPES} >= {"smol-hyflash", "smol-dflash", "smol-window", "tiny-test"}


def test_overrides_are_laid_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[target]\nname="t"\n[drafter]\nname="dflash"\n[data]\nshards="s"\n[train]\nsteps=7\n')
    recipe = load_recipe(path, ["train.steps=9", "drafter.num_layers=3", "data.shards=elsewhere"])
    assert recipe.train.steps == 9
    assert recipe.config.model_dump()["num_layers"] == 3
    assert recipe.data.shards == "elsewhere"
    assert recipe.tables["train"] == {"steps": 9}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (with_value("train", "stepz", 1), r"unknown option 'stepz'. Did you mean 'steps'"),
        (with_value("data", "shard", 1), r"unknown option 'shard'. Did you mean 'shards'"),
        (with_value("target", "nam", 1), r"unknown option 'nam'. Did you mean 'name'"),
        (with_value("drafter", "num_layer", 1), r"unknown option 'num_layer'. Did you mean 'num_layers'"),
        (with_value("drafter", "name", "dflsh"), r"unknown drafter 'dflsh'. Did you mean 'dflash'"),
        (with_value("drafter", "name", None), r"name is None"),
        (with_value("train", "max_sec", 9.0), r"exactly one of steps and max_sec, found steps and max_sec"),
        (with_value("train", "steps", 0), r"exactly one of steps and max_sec, found none"),
        (with_value("train", "lr", -1.0), r"lr is -1.0"),
        (with_value("train", "lr", float("inf")), r"lr is inf"),
        (with_value("train", "lr", float("nan")), r"lr is nan"),
        (with_value("train", "seed", 2**64), r"seed is"),
        (with_value("target", "num_threads", 10**9), r"num_threads is 1000000000"),
        (with_value("train", "precision", "fp8"), r"precision is 'fp8'"),
        ({**TABLES, "data": {"shards": "s", "eval_shards": "e", "held_out": 0}}, r"eval_shards is given, and held_out"),
        (with_value("data", "batch_tokens", 64), r"batch_tokens is for live capture"),
        ({**TABLES, "data": {"answers": "a", "verify": False}}, r"verify is for the checksums of shards"),
        (with_value("data", "answers", "a.jsonl"), r"exactly one of shards and answers"),
        ({**TABLES, "trian": {}}, r"unknown table 'trian'. Did you mean 'train'"),
        ({**TABLES, "steps": 7}, r"unknown table 'steps'. Did you mean 'train.steps'"),
        ({**TABLES, "train": 7}, r"'train' is a value; expected a table"),
        ({**TABLES, "drafter": {"name": "lookup"}}, r"'lookup' is training-free"),
        ({**TABLES, "target": {}}, r"name is missing"),
    ],
)
def test_mistakes_are_named(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_recipe(tables, where="r.toml")


def test_files_that_are_no_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(UserError, match="not valid TOML"):
        load_recipe(tmp_path / "bad.toml")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(UserError, match="not valid TOML"):
        load_recipe(tmp_path / "deep.toml")
    (tmp_path / "good.toml").write_text("")
    with pytest.raises(UserError, match="steps is '1111"):
        load_recipe(tmp_path / "good.toml", ["target.name=x", "train.steps=" + "1" * 5000])


def test_changes_name_key_and_both_values() -> None:
    assert changes(TABLES, TABLES) == []
    assert changes(TABLES, with_value("train", "steps", 6)) == ["train.steps was 5, is 6"]
    assert changes(TABLES, with_value("train", "lr", 0.1)) == ["train.lr was 'not given', is 0.1"]


def test_the_rate_warms_up_and_ends_at_its_final_share() -> None:
    options = TrainTable(steps=100, lr=1.0, warmup_steps=9, final_lr_ratio=0.1)
    rates = [learning_rate(options, step=s, progress=s / 100) for s in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(TrainTable(warmup_steps=0, lr=2.0), step=0, progress=0) == 2.0


def test_budgets_by_steps_and_by_seconds() -> None:
    assert Budget(steps=10, max_sec=0).progress(5, 1e9) == 0.5
    assert Budget(steps=0, max_sec=20).progress(10**6, 5) == 0.25
    assert Budget(steps=0, max_sec=20).progress(1, 21) == 1.0


def test_groups_keep_decay_off_vectors_and_slow_the_start() -> None:
    drafter = FakeDrafter(FakeConfig(), FakeTarget().hooks())
    drafter.extra = torch.nn.ParameterDict({"A_log": torch.zeros(2, 2), "weight": torch.zeros(2, 2)})
    assert group_names(drafter) == {
        "plain": ["norm.weight", "norm.bias", "extra.A_log"],
        "start.decay": ["ridge.weight"],
        "start.plain": ["ridge.bias"],
        "decay": ["extra.weight"],
    }
    optimizer = make_optimizer(drafter, TrainTable(steps=1, weight_decay=0.5, start_lr_scale=0.25))
    set_learning_rate(optimizer, 2.0)
    found = {g["name"]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups}
    assert found == {"plain": (2.0, 0), "start.decay": (0.5, 0.5), "start.plain": (0.5, 0), "decay": (2.0, 0.5)}


def test_gradients_are_divided_once_and_clipped() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([30.0, 40.0])
    assert scale_and_clip([p], denominator=10.0, clip_norm=100.0) == pytest.approx(5.0)
    assert p.grad.tolist() == pytest.approx([3.0, 4.0])
    assert scale_and_clip([p], denominator=1.0, clip_norm=1.0) == pytest.approx(5.0)
    assert p.grad.norm().item() == pytest.approx(1.0, abs=1e-5)
    p.grad = torch.tensor([math.inf, 1.0])
    assert not math.isfinite(scale_and_clip([p], denominator=1.0, clip_norm=1.0))


def test_an_epoch_gives_each_example_once_in_batches_of_near_lengths() -> None:
    ids = [f"e{i}" for i in range(203)]
    lengths = [(i * 37) % 100 for i in range(203)]
    batches = epoch_batches(ids, lengths, batch_sequences=4, seed=0, epoch=0)
    assert Counter(i for b in batches for i in b) == Counter(ids)
    assert all(1 <= len(b) <= 4 for b in batches)
    by_id = dict(zip(ids, lengths, strict=True))
    spread = sum(max(by_id[i] for i in b) - min(by_id[i] for i in b) for b in batches) / len(batches)
    assert spread < 12, "random batches of 4 would spread over 60"
    same = epoch_batches(ids, lengths, batch_sequences=4, seed=0, epoch=0)
    assert batches == same
    assert epoch_batches(ids, lengths, batch_sequences=4, seed=0, epoch=1) != batches
    assert epoch_batches(["x"], [3], batch_sequences=4, seed=0, epoch=0) == [["x"]]


def test_the_stream_goes_on_from_any_place() -> None:
    source = LiveSource(FakeTarget(), make_answers(7), taps=(1,))
    options = DataTable(batch_sequences=2, anchors_per_sequence=3)
    stream = BatchStream(source, source.ids, options, seed=5)
    places, batches = [], []
    for _ in range(10):
        places.append((stream.epoch, stream.index))
        batches.append(stream.next())
    assert places[3:6] == [(0, 3), (0, 4), (1, 1)], "the end of an epoch and the start of the next are one place"
    for place, batch in zip(places, batches, strict=True):
        other = BatchStream(source, source.ids, options, seed=5)
        other.seek(*place)
        again = other.next()
        assert again.ids == batch.ids
        assert torch.equal(again.anchors, batch.anchors)
    with pytest.raises(UserError, match="no example is left"):
        BatchStream(source, [], options, seed=5)


def test_first_batches_take_every_position_up_to_a_budget() -> None:
    source = LiveSource(FakeTarget(), make_answers(30), taps=(1,))
    stream = BatchStream(source, source.ids, DataTable(batch_sequences=2, anchors_per_sequence=1), seed=5)
    some = stream.first(60)
    assert sum(int(b.lengths.sum()) for b in some[:-1]) < 60 <= sum(int(b.lengths.sum()) for b in some)
    everything = stream.first(10**9)
    labels = source.info.num_label_tokens
    assert sum(int(b.anchor_mask.sum()) for b in everything) == labels
    assert (stream.epoch, stream.index) == (0, 0)


def test_held_out_examples_are_stable_and_disjoint() -> None:
    ids = [f"e{i}" for i in range(50)]
    train, held = hold_out(ids, 7, seed=1)
    assert len(held) == 7
    assert set(train) | set(held) == set(ids)
    assert not set(train) & set(held)
    assert hold_out(list(reversed(ids)), 7, seed=1)[1] == list(reversed(held))
    assert hold_out(ids, 0, seed=1) == (ids, [])
    assert hold_out(ids, 99, seed=1) == ([], ids)


def test_a_drafter_may_read_some_of_the_captured_taps_in_its_own_order() -> None:
    wide = LiveSource(FakeTarget(), make_answers(3), taps=(0, 1, 3))
    narrow = LiveSource(FakeTarget(), make_answers(3), taps=(3, 0))
    chosen = select_layers(wide, (3, 0))
    assert chosen.info.taps == (3, 0)
    for a, b in zip(chosen.fetch(chosen.ids), narrow.fetch(narrow.ids), strict=True):
        assert torch.equal(a.features, b.features)
    assert select_layers(wide, (0, 1, 3)) is wide
    assert torch.equal(chosen.label_counts(chosen.ids, VOCAB), wide.label_counts(wide.ids, VOCAB))
    with pytest.raises(UserError, match=r"taps \[0, 1, 3\], the drafter reads \[3, 2\]: \[2\] are missing"):
        select_layers(wide, (3, 2))


def test_the_best_checkpoint_is_the_earliest_of_the_highest_acceptance() -> None:
    log = [
        {"step": i, "tau": tau, "loss": 3.0 - i / 10} for i, tau in enumerate((3.28, 3.34, 3.34, 3.24, 3.18), start=1)
    ]
    best = best_entry(log)
    assert best is not None
    assert best["step"] == 2
    assert best_entry(log[:1]) is log[0]
    assert best_entry([]) is None


def test_metrics_are_pooled_by_sums() -> None:
    assert pool([{"a": (1, 2), "b": (0, 0)}, {"a": (5, 6)}]) == {"a": 6 / 8}
    assert pool([]) == {}


def test_the_metrics_file_rewinds_and_survives_a_cut_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.read() == []
    for step in (1, 2, 3):
        file.append({"kind": "train", "step": step})
    with file.path.open("a") as f:
        f.write('3\n{"kind": "train"}\n{"kind": "tra')
    file.rewind(2)
    assert [r["step"] for r in file.read()] == [1, 2]
    file.rewind(None)
    assert file.path.read_text() == ""


def test_the_clock_reads_like_a_clock() -> None:
    assert [clock(s) for s in (0, 59.6, 3661)] == ["0:00:00", "0:01:00", "1:01:01"]
