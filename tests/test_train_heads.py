"""Training drafters with heads: losses hear how far it is, confidences are calibrated with every best drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fake_training import FakeTarget, make_answers
from hyflash.core import LossTerms
from hyflash.data.shards import write_shards
from hyflash.train import trainer
from test_train_trainer import TAPS, go, interrupt_after, recipe, records, weights

SMALL = {"num_layers": 1, "num_draft_tokens": 3, "num_taps": 2, "correction_rank": 4}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards")
    write_shards(FakeTarget(), make_answers(40), path, taps=TAPS)
    return path


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_tell_the_share_of_the_budget_that_is_used(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    real, told = trainer.Trainer._forward, []

    def forward(self: trainer.Trainer, batch: Any, precision: str) -> LossTerms:
        told.append(batch.progress)
        return real(self, batch, precision)

    monkeypatch.setattr(trainer.Trainer, "_forward", forward)
    domino = {"name": "domino", **SMALL, "correction_width": 6}
    go(recipe(shards, domino, steps=4, accumulate=accumulate, held_out=0), tmp_path)
    assert told == [share for share in (0.0, 0.25, 0.5, 0.75) for _ in range(accumulate)]


def test_a_resumed_domino_goes_on_at_the_same_place_of_its_fade(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = recipe(shards, {"name": "domino", **SMALL, "correction_width": 6}, steps=6, held_out=0)
    go(r, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            go(r, tmp_path / "parts")
    go(r, tmp_path / "parts", resume=True)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all((whole[name] == parts[name]).all() for name in whole)


def test_the_best_dspark_is_calibrated_and_its_card_says_how_well(shards: Path, tmp_path: Path) -> None:
    dspark = {"name": "dspark", **SMALL, "target_layer_ids": [1, 4]}
    best = go(recipe(shards, dspark, steps=30, held_out=30, eval_every=30, eval_at_start=True), tmp_path)
    evaluations = records(tmp_path, "eval")
    chosen = max(evaluations, key=lambda e: float(e["tau"]))
    figures = chosen["calibration"]
    assert figures["calibration_rounds"] > 64
    assert {"ece_before", "ece_after", "ece_before@1", "ece_after@3"} <= figures.keys()
    card = json.loads((best / "card.json").read_text())
    assert card["evaluation"]["calibration"] == figures
    temperature = load_file(best / "model.safetensors")["confidence_temperature"]
    assert temperature.shape == (3,)
    assert (temperature != 1).any()
    assert "overlap" in " ".join(chosen)


def test_an_eagle_learns_a_head_of_its_own_over_the_counted_tokens(shards: Path, tmp_path: Path) -> None:
    eagle = {"name": "eagle", "num_draft_tokens": 3, "num_taps": 2, "own_head": True, "draft_vocab_size": 12}
    best = go(recipe(shards, eagle, steps=12, held_out=3, eval_every=12, eval_at_start=True), tmp_path)
    first, last = (float(record["loss"]) for record in records(tmp_path, "eval"))
    assert last < first
    tensors = load_file(best / "model.safetensors")
    assert tensors["lm_head.weight"].shape[0] == len(tensors["draft_ids"]) == 12
    assert tensors["draft_ids"].tolist() != list(range(12))
