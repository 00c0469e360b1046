"""A run resumes bit for bit, survives kills and full disks, stops on NaN, and keeps the best drafter."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fake_training import FakeConfig, FakeDrafter, FakeTarget, make_answers
from hyflash import checkpoint
from hyflash.core import LossTerms
from hyflash.data.disk import new_directory, recover
from hyflash.data.shards import write_shards
from hyflash.errors import NonFiniteError, UserError
from hyflash.train import trainer
from hyflash.train.recipe import Recipe, parse_recipe
from hyflash.train.state import step_dirs

TAPS = (0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards")
    write_shards(FakeTarget(), make_answers(14), path, taps=TAPS, shard_tokens=100, meta={"template": "chatml"})
    return path


def recipe(shards: Path | list[str] | None, drafter: dict[str, Any] | None = None, **options: Any) -> Recipe:
    """A small run; options go to [train], or to [data] where they belong there."""
    data: dict[str, Any] = {"held_out": 3, "batch_sequences": 2, "anchors_per_sequence": 4}
    data |= {"shards": str(shards) if isinstance(shards, Path) else shards} if shards else {}
    train: dict[str, Any] = {
        "steps": 6,
        "lr": 1e-2,
        "warmup_steps": 2,
        "precision": "float32",
        "eval_every": 100,
        "eval_at_start": False,
        "log_every": 2,
        "save_every": 100,
    }
    for key, value in options.items():
        (data if key in DATA_KEYS else train)[key] = value
    drafter = drafter or {"name": "hyflash", "num_layers": 1, "num_draft_tokens": 3, "num_taps": 2, "window": 4}
    return parse_recipe({"target": {"name": "fake"}, "drafter": drafter, "data": data, "train": train}, where="test")


DATA_KEYS = {"held_out", "batch_sequences", "anchors_per_sequence", "answers", "eval_shards", "loop_keep", "max_tokens"}


def go(r: Recipe, out: Path, *, resume: bool = False) -> Path:
    return trainer.train(r, FakeTarget(), out_dir=out, resume=resume, quiet=True)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(step_dirs(path)[-1] / "weights.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    timed = ("tokens_per_sec", "anchors_per_sec", "train_sec", "eta_sec")
    return [{k: v for k, v in r.items() if k not in timed} for r in lines if r["kind"] == kind]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C arrives in the middle of this step."""
    real = trainer.Trainer._forward
    sent: list[int] = []

    def forward(self: trainer.Trainer, batch: Any, precision: str) -> LossTerms:
        if self.state.step + 1 == step and not sent:
            sent.append(step)
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, batch, precision)

    monkeypatch.setattr(trainer.Trainer, "_forward", forward)


def test_more_draft_tokens_than_the_drafter_proposes_are_refused(shards: Path, tmp_path: Path) -> None:
    """A card that says 4 would promise what was measured with 3."""
    with pytest.raises(UserError, match=r"train.num_draft_tokens is 4; this drafter proposes at most 3"):
        go(recipe(shards, num_draft_tokens=4), tmp_path / "run")


@pytest.mark.parametrize(("stop", "accumulate"), [(10, 1), (7, 2)])
def test_twenty_steps_equal_a_stop_a_resume_and_the_rest_bit_for_bit(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int, accumulate: int
) -> None:
    drafter = {
        "name": "hyflash",
        "num_layers": 1,
        "num_draft_tokens": 3,
        "num_taps": 2,
        "window": 4,
        "memory_dropout": 0.5,
        "draft_vocab_size": 12,
        "correction": "gru",
    }
    r = recipe(shards, drafter, steps=20, accumulate=accumulate, log_every=5, eval_every=5, weight_decay=0.1)
    go(r, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, stop)
        with pytest.raises(KeyboardInterrupt):
            go(r, tmp_path / "parts")
    assert [p.name for p in step_dirs(tmp_path / "parts")] == [f"step-{stop:06d}"]
    go(r, tmp_path / "parts", resume=True)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    states = [torch.load(step_dirs(tmp_path / n)[-1] / "training.pt", weights_only=True) for n in ("whole", "parts")]
    moments = [s["optimizer"]["state"] for s in states]
    assert len(moments[0]) == len(list(trainer.make_drafter(r, FakeTarget().hooks()).parameters())) > 10
    for index, state in moments[0].items():
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert float(state["exp_avg_sq"].abs().sum()) >= 0
        assert all(torch.equal(state[k], moments[1][index][k]) for k in state)
    assert any(float(s["exp_avg_sq"].sum()) > 0 for s in moments[0].values())
    assert torch.equal(states[0]["rng"]["cpu"], states[1]["rng"]["cpu"])
    assert states[0]["optimizer"]["param_groups"] == states[1]["optimizer"]["param_groups"]
    assert records(tmp_path / "whole", "eval") == records(tmp_path / "parts", "eval")
    tail = records(tmp_path / "whole", "train")[-2:]
    assert [t["step"] for t in tail] == [15, 20]
    assert [t for t in records(tmp_path / "parts", "train") if t["step"] > 10] == tail


def test_a_finished_run_resumes_to_nothing(shards: Path, tmp_path: Path) -> None:
    best = go(recipe(shards), tmp_path)
    before = weights(tmp_path)
    assert go(recipe(shards), tmp_path, resume=True) == best
    assert equal(before, weights(tmp_path))


def test_a_used_directory_needs_resume_and_a_fresh_one_does_not_mind_it(shards: Path, tmp_path: Path) -> None:
    go(recipe(shards), tmp_path / "a")
    with pytest.raises(UserError, match=r"holds a run with checkpoint step-000006; resume it"):
        go(recipe(shards), tmp_path / "a")
    go(recipe(shards), tmp_path / "b", resume=True)
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_accumulating_eight_batches_of_one_equals_one_batch_of_eight(tmp_path: Path) -> None:
    data = tmp_path / "shards"
    write_shards(FakeTarget(), make_answers(8, longest=9), data, taps=TAPS)
    one = {"name": "dflash", "num_layers": 1, "num_draft_tokens": 3, "num_taps": 2}
    # SGD would show it at once; under Adam a wrong weighting shows from the second step on.
    for name, options in (
        ("wide", {"batch_sequences": 8, "accumulate": 1}),
        ("deep", {"batch_sequences": 1, "accumulate": 8}),
    ):
        go(recipe(data, one, held_out=0, steps=4, **options), tmp_path / name)
    a, b = weights(tmp_path / "wide"), weights(tmp_path / "deep")
    assert max(float((a[k] - b[k]).abs().max()) for k in a) < 2e-5
    losses = [[t["loss"] for t in records(tmp_path / n, "train")] for n in ("wide", "deep")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_live_capture_and_shards_train_the_same_drafter(tmp_path: Path) -> None:
    answers = make_answers(9)
    rows = [{"id": a.id, "prompt_ids": a.prompt_ids, "answer_ids": a.answer_ids, "domain": a.domain} for a in answers]
    (tmp_path / "answers.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    write_shards(FakeTarget(), answers, tmp_path / "shards", taps=TAPS)
    go(recipe(tmp_path / "shards"), tmp_path / "a")
    go(recipe(None, answers=str(tmp_path / "answers.jsonl")), tmp_path / "b")
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_two_captures_train_what_one_of_all_their_answers_trains(tmp_path: Path) -> None:
    answers = make_answers(9)
    for name, part in (("all", answers), ("short", answers[:4]), ("long", answers[4:])):
        write_shards(FakeTarget(), part, tmp_path / name, taps=TAPS)
    go(recipe(tmp_path / "all"), tmp_path / "a")
    go(recipe([str(tmp_path / "long"), str(tmp_path / "short")]), tmp_path / "b")
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_evaluating_and_saving_do_not_change_training(shards: Path, tmp_path: Path) -> None:
    go(recipe(shards), tmp_path / "a")
    go(recipe(shards, eval_every=1, save_every=2, eval_at_start=True, keep=1), tmp_path / "b")
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert [p.name for p in step_dirs(tmp_path / "b")] == ["step-000006"]
    assert [e["step"] for e in records(tmp_path / "b", "eval")] == [0, 1, 2, 3, 4, 5, 6]


def test_auto_precision_logs_its_choice_and_changes_nothing_else(shards: Path, tmp_path: Path) -> None:
    go(recipe(shards, precision="auto"), tmp_path / "auto")
    (choice,) = records(tmp_path / "auto", "precision")
    assert choice["choice"] in ("float32", "bfloat16")
    go(recipe(shards, precision=choice["choice"]), tmp_path / "explicit")
    assert equal(weights(tmp_path / "auto"), weights(tmp_path / "explicit"))


def test_a_budget_in_seconds_ends(shards: Path, tmp_path: Path) -> None:
    go(recipe(shards, steps=0, max_sec=0.2), tmp_path)
    state = json.loads((step_dirs(tmp_path)[-1] / "state.json").read_text())
    assert state["train_sec"] >= 0.2
    assert state["step"] > 1


def test_training_learns_and_real_acceptance_follows(tmp_path: Path) -> None:
    """Overfit four texts: what teacher forcing promises, real rounds must keep (labels shifted by one would not)."""
    answers = make_answers(4, longest=20)
    write_shards(FakeTarget(), answers, tmp_path / "train", taps=TAPS)
    copies = [replace(a, id=f"copy-{a.id}") for a in answers]
    write_shards(FakeTarget(), copies, tmp_path / "eval", taps=TAPS)
    r = recipe(
        tmp_path / "train",
        {"name": "dflash", "num_layers": 1, "num_draft_tokens": 3, "num_taps": 2, "intermediate_size": 64},
        steps=250,
        eval_shards=str(tmp_path / "eval"),
        held_out=9,
        batch_sequences=4,
        anchors_per_sequence=0,
        loop_keep=1.0,
        eval_every=125,
        log_every=50,
    )
    best = go(r, tmp_path / "run")
    losses = [t["loss"] for t in records(tmp_path / "run", "train")]
    assert losses[-1] < 0.2 * losses[0]
    last = records(tmp_path / "run", "eval")[-1]
    assert last["teacher_forced_acc@1"] >= 0.99
    served = last["tau"]
    possible = sum(len(a.answer_ids) for a in answers) / sum(-(-len(a.answer_ids) // 4) for a in answers)
    assert served >= 0.95 * possible
    assert set(last["tau_by_domain"]) == {"x", "y", "z"}
    card = json.loads((best / "card.json").read_text())
    assert card["tau"] == max(e["tau"] for e in records(tmp_path / "run", "eval"))
    assert card["target"]["fingerprint"] == "fake-1"
    assert card["training"]["steps"] in (125, 250)
    assert card["recipe"]["train"]["steps"] == 250
    assert card["data"]["num_examples"] == 4
    assert card["provenance"]["versions"]["torch"]


def test_an_exported_drafter_loads_and_proposes_as_trained(shards: Path, tmp_path: Path) -> None:
    best = go(recipe(shards), tmp_path)
    loaded = checkpoint.load(str(best), FakeTarget().hooks())
    trained = weights(tmp_path)
    for name, value in loaded.state_dict().items():
        assert torch.allclose(value.float(), trained[name].float(), atol=1e-3), name


class Odd(FakeDrafter):
    """A drafter that goes wrong in the way `fault` says from its fourth batch on."""

    fault = ""
    seen = 0

    def loss(self, out: Any, batch: Any) -> LossTerms:
        terms = super().loss(out, batch)
        self.seen += 1
        if self.seen > 3 and self.fault == "loss":
            return replace(terms, numerator=terms.numerator * float("nan"))
        if self.seen > 3 and self.fault == "gradient":
            return replace(terms, numerator=terms.numerator + (self.norm.bias * 0).sum().sqrt())
        return terms


@pytest.fixture
def fake_drafter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[FakeDrafter]]:
    """Train a FakeDrafter: no acceptance (it cannot serve), no export."""

    def install(**config: Any) -> list[FakeDrafter]:
        made: list[FakeDrafter] = []

        def make(_recipe: Recipe, hooks: Any) -> FakeDrafter:
            made.append(Odd(FakeConfig(**config), hooks))
            return made[-1]

        monkeypatch.setattr(trainer, "make_drafter", make)
        monkeypatch.setattr(checkpoint, "save", lambda *_a, **_k: None)
        return made

    return install


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_value_that_is_not_finite_stops_with_step_examples_and_checkpoint(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_drafter: Any, fault: str
) -> None:
    fake_drafter()
    monkeypatch.setattr(Odd, "fault", fault)
    with pytest.raises(
        NonFiniteError, match=rf"{fault} is not finite at step 4, examples a0\d\d, a0\d\d; .*step-000003"
    ):
        go(recipe(shards, held_out=0, save_every=3), tmp_path)
    assert all(torch.isfinite(v).all() for v in weights(tmp_path).values())


def test_start_and_draft_vocabulary_are_set_once_before_the_first_step(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_drafter: Any
) -> None:
    made = fake_drafter(start="ridge", draft_vocab_size=5)
    r = recipe(shards, held_out=0, steps=4)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            go(r, tmp_path)
    labels = [t for a in make_answers(14) for t in a.answer_ids]
    assert sum(made[0].started) == len(labels), "every supervised position"
    counts = torch.bincount(torch.tensor(labels), minlength=32)
    assert len(made[0].vocab) == 5
    assert min(counts[made[0].vocab]) >= max(counts[i] for i in range(32) if i not in made[0].vocab)
    go(r, tmp_path, resume=True)
    assert (made[1].started, made[1].vocab) == ([], [])


def test_batches_without_any_anchor_move_nothing(tmp_path: Path, fake_drafter: Any) -> None:
    answers = [replace(a, answer_ids=(5, 6) * 30) for a in make_answers(2)]
    write_shards(FakeTarget(), answers, tmp_path / "s", taps=(1, 3))
    made = fake_drafter()
    go(recipe(tmp_path / "s", held_out=0, steps=2, loop_keep=0.0), tmp_path / "run")
    fresh = Odd(FakeConfig(), FakeTarget().hooks())
    assert made[0].ridge.weight.shape == fresh.ridge.weight.shape
    assert records(tmp_path / "run", "train")[-1]["loss"] == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.5}, r"train.lr was 0.01, is 0.5"),
        ({"batch_sequences": 3}, r"data.batch_sequences was 2, is 3"),
        ({"steps": 7}, r"train.steps was 6, is 7"),
    ],
)
def test_a_resume_with_another_recipe_names_what_changed(
    shards: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    go(recipe(shards), tmp_path)
    with pytest.raises(UserError, match=message):
        go(recipe(shards, **change), tmp_path, resume=True)


def test_a_resume_with_other_parameters_or_data_names_them(shards: Path, tmp_path: Path) -> None:
    go(recipe(shards), tmp_path)
    path = step_dirs(tmp_path)[-1] / "state.json"
    state = json.loads(path.read_text())
    moved = state["groups"]["decay"].pop(0)
    path.write_text(json.dumps(state | {"data_hash": "other"}))
    with pytest.raises(UserError, match=rf"data_hash was other, is .*parameter \(decay: {moved}\) is new"):
        go(recipe(shards), tmp_path, resume=True)
    path.write_text(json.dumps({**state, "surprise": 1}))
    with pytest.raises(UserError, match="another version"):
        go(recipe(shards), tmp_path, resume=True)


def test_shards_of_another_target_are_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="captured from target 'fake' with fingerprint fake-1, but 'fake' has other"):
        trainer.train(recipe(shards), FakeTarget(fingerprint="other"), out_dir=tmp_path, quiet=True)


def test_a_state_of_other_things_is_named(shards: Path, tmp_path: Path) -> None:
    go(recipe(shards, save_every=3), tmp_path)
    path = step_dirs(tmp_path)[-1] / "state.json"
    state = json.loads(path.read_text())
    for key in ("recipe", "groups", "step"):
        path.write_text(json.dumps({**state, key: None}))
        with pytest.raises(UserError, match="step-000006: is damaged"):
            go(recipe(shards, save_every=3), tmp_path, resume=True)


@pytest.mark.parametrize("name", ["weights.safetensors", "training.pt", "state.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_still_works(shards: Path, tmp_path: Path, name: str) -> None:
    go(recipe(shards, save_every=3), tmp_path)
    good, bad = step_dirs(tmp_path)
    path = bad / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match="step-000006"):
        go(recipe(shards, save_every=3), tmp_path, resume=True)
    shutil.rmtree(bad)
    assert good.name == "step-000003"
    go(recipe(shards, save_every=3), tmp_path, resume=True)
    assert [p.name for p in step_dirs(tmp_path)] == ["step-000003", "step-000006"]


@pytest.mark.parametrize("failing", ["weights.safetensors", "training.pt"])
def test_a_full_disk_leaves_the_checkpoint_before_it_intact(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    go(recipe(shards, steps=3), tmp_path / "good")
    size = step_dirs(tmp_path / "good")[-1].joinpath(failing).stat().st_size
    (tmp_path / "run").mkdir()
    real = trainer.save_state
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def save(*args: Any, **options: Any) -> Path:
        if args[1].step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - 100, hard))
        return real(*args, **options)

    monkeypatch.setattr(trainer, "save_state", save)
    try:
        with pytest.raises(UserError, match=r"step-000006: no space left.*the checkpoints before it are intact"):
            go(recipe(shards, save_every=3), tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert sorted(p.name for p in (tmp_path / "run").glob("*step*")) == ["step-000003"]
    monkeypatch.undo()
    go(recipe(shards, save_every=3), tmp_path / "run", resume=True)


def test_a_full_disk_while_exporting_is_one_clear_sentence(shards: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(UserError, match=r"best: cannot be written .*; the checkpoints are intact"):
            go(recipe(shards, eval_at_start=True), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert not list(tmp_path.glob("*best*"))


def test_training_goes_on_from_a_checkpoint_that_init_names(shards: Path, tmp_path: Path) -> None:
    windowed = {"name": "dflash", "num_layers": 1, "num_draft_tokens": 3, "num_taps": 2, "draft_vocab_size": 9}
    best = go(recipe(shards, windowed), tmp_path / "first")
    old = load_file(best / "model.safetensors")
    r = recipe(shards, {"name": "hyflash", "init": str(best)}, steps=1, lr=1e-9)
    upgraded = go(r, tmp_path / "second")
    new = load_file(upgraded / "model.safetensors")
    assert new.keys() > old.keys(), "the memory is new"
    assert all(torch.allclose(new[k].float(), old[k].float(), atol=1e-3) for k in old)
    assert json.loads((upgraded / "card.json").read_text())["init"] == str(best)


def test_what_a_kill_left_is_cleaned_up(tmp_path: Path) -> None:
    for name in (".step-000002.tmp7", ".best.old7", ".gone.old7", "best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / ".metrics.jsonl.tmp7").write_text("x")
    recover(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "gone"]
    for name in (".bashrc.old", ".notes.tmpl"):  # a run may stand in somebody's home
        (tmp_path / name).write_text(name)
    recover(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".bashrc.old", ".notes.tmpl", "best", "gone"]
    for name in (".bashrc.old", ".notes.tmpl"):
        (tmp_path / name).unlink()
    assert (tmp_path / "best" / "file").read_text() == "best"

    def fail_half_way() -> None:
        with new_directory(tmp_path / "best") as temp:
            (temp / "file").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert (tmp_path / "best" / "file").read_text() == "best"
    with new_directory(tmp_path / "best") as temp:
        (temp / "other").write_text("whole")
    assert [p.name for p in (tmp_path / "best").iterdir()] == ["other"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "gone"]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from fake_training import FakeTarget
from hyflash.train import state, trainer
import test_train_trainer as tests

real, calls = torch.save, []

def save(value, path):
    calls.append(path)
    real(value, path)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

torch.save = save
tests.go(tests.recipe(Path(sys.argv[2]), save_every=2), Path(sys.argv[3]))
"""


def test_kill_9_during_a_save_leaves_the_previous_checkpoint_loadable(shards: Path, tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", KILLED, here, str(shards), str(tmp_path / "run")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [p.name for p in step_dirs(tmp_path / "run")] == ["step-000002"]
    go(recipe(shards, save_every=2), tmp_path / "run", resume=True)
    go(recipe(shards, save_every=2), tmp_path / "whole")
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert not [p for p in (tmp_path / "run").iterdir() if "tmp" in p.name], "leftovers are swept up"


def test_progress_lines_and_evaluations_go_to_stderr(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.train(recipe(shards, eval_every=3), FakeTarget(), out_dir=tmp_path)
    out, err = capsys.readouterr()
    assert out == ""
    assert "step 6 (100%)  loss " in err
    assert "tokens/s" in err
    assert "ETA 0:00:00" in err
    assert err.count("held out: tau ") == 2
