"""The doctor flags every way in which a drafter can misfit its target while the text stays right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import tiny_target_dir
from hyflash import checkpoint, doctor
from hyflash.cli import main
from hyflash.core import Result, TrainBatch
from hyflash.doctor import Diagnosis, diagnose, examine, odd_scales, probe_answers
from hyflash.drafters.base import Drafter
from hyflash.drafters.dflash import DFlashConfig
from hyflash.drafters.dflash import DrafterImpl as DFlash
from hyflash.drafters.eagle import DrafterImpl as Eagle
from hyflash.drafters.eagle import EagleConfig
from hyflash.engine.replay import measure, record
from hyflash.errors import UserError
from hyflash.metrics import summarize
from hyflash.targets import hf
from hyflash.targets.hf import HFTarget
from hyflash.text import Tokenizer

NUM_DRAFTS = 3
STEPS = 120


@pytest.fixture(scope="module", autouse=True)
def short_probe() -> Iterator[None]:
    """Fewer tokens: the tiny target's answers are all alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "PROBE_TOKENS", 24)
        yield


class Pair:
    """A tiny target, its probe answers, and a drafter that learned exactly these."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.target: HFTarget = hf.load(str(path))
        self.tokenizer = Tokenizer.from_dir(path)
        self.answers = probe_answers(self.target, self.tokenizer)
        config = DFlashConfig(num_layers=1, num_draft_tokens=NUM_DRAFTS, target_layer_ids=(1, 3))
        torch.manual_seed(0)
        self.drafter = DFlash(config, self.target.hooks())
        train(self.drafter, self.target, self.answers)
        taps = self.drafter.target_layer_ids
        recordings = [record(self.target, taps, a.prompt_ids, a.token_ids) for a in self.answers]
        self.tau = summarize(measure(self.drafter, recordings, NUM_DRAFTS)).tau

    @property
    def card(self) -> dict[str, Any]:
        """The card an honest trainer would write."""
        info = self.target.info
        return {
            "target": {"name": info.name, "fingerprint": info.fingerprint},
            "target_layer_ids": list(self.drafter.target_layer_ids),
            "tau": self.tau,
        }

    def changed(self, **update: Any) -> Drafter:
        """The trained weights under other options."""
        other = DFlash(self.drafter.config.model_copy(update=update), self.target.hooks())
        other.load_state_dict(self.drafter.state_dict())
        return other.eval()

    def look(self, drafter: Drafter, card: dict[str, Any]) -> Diagnosis:
        """Diagnose a drafter with a card."""
        found = Diagnosis(target="tiny", drafter="mine")
        diagnose(found, drafter, self.target, card=card, answers=self.answers)
        return found


def train(drafter: Drafter, target: HFTarget, answers: list[Result]) -> None:
    """Overfit the answers with plain AdamW."""
    batch = batch_of(drafter, target, answers)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    drafter.train()
    for _ in range(STEPS):
        terms = drafter.loss(drafter(batch), batch)
        optimizer.zero_grad()
        (terms.numerator / terms.denominator).backward()
        optimizer.step()
    drafter.eval()


def batch_of(drafter: Drafter, target: HFTarget, answers: list[Result]) -> TrainBatch:
    texts = [(*a.prompt_ids, *a.token_ids) for a in answers]
    most = max(map(len, texts))
    taps = drafter.target_layer_ids
    B, D = len(texts), target.info.hidden_size
    tokens = torch.zeros(B, most, dtype=torch.long)
    features = torch.zeros(B, most, len(taps), D)
    loss_mask = torch.zeros(B, most, dtype=torch.bool)
    num_anchors = min(len(a.token_ids) for a in answers) - 1
    anchors = torch.zeros(B, num_anchors, dtype=torch.long)
    for b, (answer, text) in enumerate(zip(answers, texts, strict=True)):
        tokens[b, : len(text)] = torch.tensor(text)
        got = record(target, taps, answer.prompt_ids, answer.token_ids).features
        assert got is not None
        features[b, : len(text)] = got
        loss_mask[b, len(answer.prompt_ids) : len(text)] = True
        anchors[b] = torch.arange(num_anchors) + len(answer.prompt_ids) - 1
    return TrainBatch(
        tokens=tokens,
        features=features,
        lengths=torch.tensor([len(t) for t in texts]),
        loss_mask=loss_mask,
        anchors=anchors,
        anchor_mask=torch.ones_like(anchors, dtype=torch.bool),
        weights=torch.ones(B, num_anchors),
    )


@pytest.fixture(scope="module")
def pair(short_probe: None, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Trained once for the module."""
    return Pair(tiny_target_dir(tmp_path_factory.mktemp("doctor"), num_layers=6, seed=3))


def status(found: Diagnosis, name: str) -> str:
    return next(check.status for check in found.checks if check.name == name)


# -------------------------------------------------------------------------------------------- healthy


def test_drafter_that_fits_is_healthy(pair: Pair) -> None:
    assert pair.tau > 1.5  # else the cases below prove nothing
    found = pair.look(pair.drafter, pair.card)
    assert found.healthy, found.checks
    assert found.likely_cause is None
    assert found.probe is not None
    assert found.probe.tau == pytest.approx(pair.tau)
    assert found.expected_tau == pytest.approx(pair.tau)


def test_same_drafter_without_card_is_healthy_with_a_warning(pair: Pair) -> None:
    found = pair.look(pair.drafter, {})
    assert found.healthy, found.checks
    assert status(found, "card") == "warn"


# --------------------------------------------------------------------------------------------- misfits


def test_random_weights_are_flagged(pair: Pair) -> None:
    torch.manual_seed(1)
    found = pair.look(DFlash(pair.drafter.config, pair.target.hooks()).eval(), pair.card)
    assert not found.healthy
    assert status(found, "probe") == "fail"
    assert "never trained" in str(found.likely_cause)


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("has_card", [True, False], ids=["card", "no card"])
def test_taps_shifted_by_one_layer_are_named(pair: Pair, shift: int, has_card: bool) -> None:
    moved = tuple(tap + shift for tap in pair.drafter.target_layer_ids)
    found = pair.look(pair.changed(target_layer_ids=moved), pair.card if has_card else {})
    assert not found.healthy
    assert "wrong taps" in str(found.likely_cause)
    assert str(list(pair.drafter.target_layer_ids)) in str(found.likely_cause)


def test_other_rotary_base_is_named(pair: Pair) -> None:
    theta = pair.target.info.rope_theta
    found = pair.look(pair.changed(rope_theta=2 * theta), pair.card)
    assert status(found, "rope") in ("warn", "fail")
    assert not found.healthy
    assert "rotary base" in str(found.likely_cause)


def test_a_drafter_without_slots_is_held_to_its_card_as_well(pair: Pair) -> None:
    config = EagleConfig(num_draft_tokens=2, loss="ce", rope_theta=3.0)
    found = pair.look(Eagle(config, pair.target.hooks()).eval(), {**pair.card, "target_layer_ids": [0, 2]})
    assert status(found, "card taps") == "fail"
    assert status(found, "rope") == "warn"
    assert "mask" not in {check.name for check in found.checks}


def test_wrong_mask_token_is_named(pair: Pair) -> None:
    right = pair.drafter.config.mask_token_id
    found = pair.look(pair.changed(mask_token_id=100), pair.card)
    assert not found.healthy
    assert f"wrong mask token: {right} fits" in str(found.likely_cause)


def test_broken_scales_are_named(pair: Pair) -> None:
    broken = pair.changed()
    with torch.no_grad():
        for name, weight in broken.named_parameters():
            if "down_proj" in name or "o_proj" in name:
                weight[::2] *= 1000.0  # every other channel lost its scale
    assert odd_scales(broken)
    found = pair.look(broken, pair.card)
    assert not found.healthy
    assert "odd scales" in str(found.likely_cause)


def test_drafter_of_another_model_with_same_shapes_is_named(pair: Pair) -> None:
    card = pair.card
    card["target"] = {"name": "other-model", "fingerprint": "0123456789abcdef"}
    found = pair.look(pair.drafter, card)
    assert not found.healthy
    assert "other-model" in str(found.likely_cause)


def test_weights_with_nan_are_named(pair: Pair) -> None:
    broken = pair.changed()
    with torch.no_grad():
        next(broken.parameters()).view(-1)[0] = float("nan")
    with pytest.warns(UserWarning, match="non-finite"):
        found = pair.look(broken, pair.card)
    assert status(found, "weights") == "fail"
    assert found.likely_cause == "damaged weights"


def test_acceptance_of_exactly_one_is_always_flagged(pair: Pair) -> None:
    blind = pair.changed()
    with torch.no_grad():
        for weight in blind.parameters():
            weight.zero_()
    found = pair.look(blind, {})
    assert "exactly 1.000" in next(c.message for c in found.checks if c.name == "probe")
    assert not found.healthy
    assert found.likely_cause


def test_card_with_a_better_tau_than_the_probe_is_a_failure(pair: Pair) -> None:
    found = pair.look(pair.drafter, {**pair.card, "tau": 1 + 3 * (pair.tau - 1)})
    assert status(found, "probe") == "fail"
    assert not found.healthy


def test_zero_mask_embedding_is_flagged(pair: Pair) -> None:
    drafter = pair.changed(mask_token_id=5)
    table = pair.target.model.get_input_embeddings().weight  # type: ignore[operator]
    saved = table[5].clone()
    try:
        table[5] = 0
        assert status(pair.look(drafter, {}), "mask") == "fail"
    finally:
        table[5] = saved


# ------------------------------------------------------------------------------------- through a spec


def test_lookup_needs_no_card_and_is_healthy(pair: Pair) -> None:
    (found,) = examine(pair.target, pair.tokenizer, "lookup", name="tiny")
    assert found.healthy, found.checks
    assert found.drafter == "lookup"


def test_recycling_is_probed_on_the_target_itself(pair: Pair) -> None:
    first, second = examine(pair.target, pair.tokenizer, "lookup+recycle", name="tiny")
    assert second.healthy, second.checks
    assert first.probe is not None
    assert second.probe is not None
    assert second.probe.num_tokens == first.probe.num_tokens, "the same answers"


def test_each_part_of_a_composition_is_examined(pair: Pair, tmp_path: Path) -> None:
    checkpoint.save(pair.drafter, tmp_path / "mine", card=pair.card, dtype="fp32")
    parts = examine(pair.target, pair.tokenizer, f"lookup+{tmp_path / 'mine'}", name="tiny")
    assert [part.drafter for part in parts] == ["lookup", str(tmp_path / "mine")]
    assert all(part.healthy for part in parts), [part.checks for part in parts]


def test_memory_is_reported_as_far_as_the_target_goes(pair: Pair) -> None:
    (found,) = examine(pair.target, pair.tokenizer, "lookup", name="tiny")
    assert [one.context for one in found.memory] == [1000, 8000, 32_000, 128_000]
    for one in found.memory:
        assert (one.measured_bytes is None) == (one.context > min(8000, pair.target.info.max_context))
    assert found.as_dict()["memory"][0]["computed_bytes"] == found.memory[0].computed_bytes > 0


def test_checkpoint_that_does_not_load_is_a_finding_not_a_crash(pair: Pair, tmp_path: Path) -> None:
    checkpoint.save(pair.drafter, tmp_path / "mine", card=pair.card, dtype="fp32")
    weights = tmp_path / "mine" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    (found,) = examine(pair.target, pair.tokenizer, str(tmp_path / "mine"), name="tiny")
    assert not found.healthy
    assert "does not load" in str(found.likely_cause)


def test_command_exits_with_1_and_a_json_object_when_not_healthy(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(pair.drafter, tmp_path / "good", card=pair.card, dtype="fp32")
    shifted = tuple(tap + 1 for tap in pair.drafter.target_layer_ids)
    checkpoint.save(pair.changed(target_layer_ids=shifted), tmp_path / "bad", card=pair.card, dtype="fp32")
    assert main(["doctor", "-t", str(pair.path), "-d", str(tmp_path / "good"), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["healthy"] is True
    assert got["parts"][0]["probe"]["tau"] > 1
    assert main(["doctor", "-t", str(pair.path), "-d", str(tmp_path / "bad")]) == 1
    assert "likely cause: wrong taps" in capsys.readouterr().out


def test_context_too_short_for_the_probe_is_said(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.workloads, "read", lambda sources, limit: {})
    with pytest.raises(UserError, match="too short"):
        probe_answers(pair.target, pair.tokenizer)
