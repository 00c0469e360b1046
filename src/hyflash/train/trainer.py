"""The trainer: from a recipe and captured answers to a drafter checkpoint with its card.

In: a recipe file and an output directory. Out: `best/` (the drafter of the best held-out acceptance, float16, ready
to serve), `step-*/` (to resume from) and `metrics.jsonl`. One process, one loop, no callbacks. On a CPU and with a
budget in steps, a run that was stopped and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from hyflash import checkpoint
from hyflash.core import LossTerms, TargetHooks, TrainBatch
from hyflash.data.anchors import to_device
from hyflash.data.answers import read_answers
from hyflash.data.capture import ExampleSource, LiveSource
from hyflash.data.disk import clear_disk_errors, new_directory, recover
from hyflash.data.joined import JoinedSource
from hyflash.data.shards import ShardReader
from hyflash.drafters.base import Drafter
from hyflash.errors import NonFiniteError, UserError
from hyflash.hub import Progress
from hyflash.targets.base import Target
from hyflash.train.card import make_card
from hyflash.train.evaluate import best_entry, calibrate, evaluate, pool
from hyflash.train.loader import BatchStream, hold_out, select_layers
from hyflash.train.optim import (
    Budget,
    freeze,
    group_names,
    learning_rate,
    make_optimizer,
    scale_and_clip,
    set_learning_rate,
)
from hyflash.train.progress import MetricsFile, Reporter
from hyflash.train.recipe import Precision, Recipe, load_recipe
from hyflash.train.state import RunState, load_state, save_state, step_dirs

BEST = "best"


def run(
    recipe_path: str | Path,
    *,
    out_dir: str | Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    quiet: bool = False,
    report: Progress | None = None,
) -> Path:
    """Train by a recipe file; returns the directory of the best drafter.

    Raises UserError for any mistake in recipe, data or directory, NonFiniteError when the loss or a gradient is not
    finite, and KeyboardInterrupt after saving when the user stops the run.
    """
    from hyflash.targets import choose

    recipe = load_recipe(recipe_path, overrides)
    chosen = choose.load(recipe.target.name, recipe.target.options(), report=report)
    return train(recipe, chosen.model, out_dir=out_dir, resume=resume, quiet=quiet, note=chosen.note)


def train(
    recipe: Recipe, target: Target, *, out_dir: str | Path, resume: bool = False, quiet: bool = False, note: str = ""
) -> Path:
    """Train with a loaded target; see `run`. `note` is said at the beginning."""
    torch.manual_seed(recipe.train.seed)
    drafter = make_drafter(recipe, target.hooks())
    text_only = drafter.trains_on_text and recipe.data.held_out == 0
    layers = ((), ()) if text_only else (drafter.target_layer_ids, drafter.target_kv_layers)
    source = open_source(recipe, target, *layers)
    with Reporter(quiet=quiet) as reporter:
        if note:
            reporter.note(note)
        trainer = Trainer(recipe, target, drafter=drafter, source=source, run_dir=Path(out_dir), reporter=reporter)
        trainer.begin(resume=resume)
        return trainer.loop()


def make_drafter(recipe: Recipe, hooks: TargetHooks) -> Drafter:
    """A fresh drafter of the recipe, or the one that `init` names, float32 on the target's device."""
    if recipe.init is None:
        drafter = recipe.drafter_class(recipe.config, hooks)
    else:
        drafter = checkpoint.load(f"{recipe.drafter}:{recipe.init}", hooks, options=recipe.options)
    freeze(drafter, recipe.train.only)
    if recipe.init is None and drafter.trains_on_text:
        raise UserError(f"{recipe.drafter} would learn over random weights; expected init, the checkpoint beneath it.")
    return drafter.to(hooks.info.device).float().train()


def open_source(
    recipe: Recipe, target: Target, taps: tuple[int, ...], kv_layers: tuple[int, ...] = ()
) -> ExampleSource:
    """The training examples, with the features, keys and values that the drafter reads. Raises UserError."""
    data = recipe.data
    if data.answers is not None:
        file = read_answers(data.answers)
        return LiveSource(
            target, file.answers, taps=taps, kv_layers=kv_layers, meta=file.meta, batch_tokens=data.batch_tokens
        )
    assert data.shards is not None
    if isinstance(data.shards, str):
        return _open_shards(data.shards, target, taps, kv_layers, verify=data.verify)
    parts = [(path, _open_shards(path, target, taps, kv_layers, verify=data.verify)) for path in data.shards]
    return JoinedSource(parts)


def _open_shards(
    directory: str, target: Target, taps: tuple[int, ...], kv_layers: tuple[int, ...], *, verify: bool
) -> ExampleSource:
    reader = ShardReader(directory, verify=verify)
    if reader.info.target_fingerprint != target.info.fingerprint:
        raise UserError(
            f"{directory}: captured from target {reader.info.target_name!r} with fingerprint "
            f"{reader.info.target_fingerprint}, but {target.info.name!r} has {target.info.fingerprint}; "
            "train with that target, or capture again."
        )
    return select_layers(reader, taps, kv_layers)


class Trainer:
    """One run. `begin` prepares or resumes it, `loop` trains to the end of the budget."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        *,
        drafter: Drafter,
        source: ExampleSource,
        run_dir: Path,
        reporter: Reporter,
    ) -> None:
        self.recipe, self.options = recipe, recipe.train
        if self.options.num_draft_tokens > drafter.max_draft_tokens:
            raise UserError(
                f"train.num_draft_tokens is {self.options.num_draft_tokens}; this drafter proposes at most "
                f"{drafter.max_draft_tokens}."
            )
        self.target, self.drafter, self.source = target, drafter, source
        self.run_dir, self.reporter = run_dir, reporter
        self.budget = Budget(steps=self.options.steps, max_sec=self.options.max_sec)
        self.optimizer = make_optimizer(drafter, self.options)
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        self.metrics = MetricsFile(run_dir / "metrics.jsonl")
        self.train_ids, self.eval_source, self.eval_ids = self._split()
        self.stream = BatchStream(
            source, self.train_ids, recipe.data, seed=self.options.seed, features=not drafter.trains_on_text
        )
        self.state = RunState(
            recipe=recipe.tables,
            target_fingerprint=target.info.fingerprint,
            data_hash=source.info.data_hash,
            precision="" if self.options.precision == "auto" else self.options.precision,
            groups=group_names(drafter),
        )
        self.last_evaluation: dict[str, Any] | None = None

    def _split(self) -> tuple[list[str], ExampleSource, list[str]]:
        data = self.recipe.data
        if data.eval_shards is None:
            ids, held = hold_out(self.source.ids, data.held_out, seed=0)
            return ids, self.source, held
        info = self.source.info
        other = _open_shards(data.eval_shards, self.target, info.taps, info.kv_layers, verify=data.verify)
        _, held = hold_out(other.ids, data.held_out, seed=0)
        banned = set(other.ids)
        return [i for i in self.source.ids if i not in banned], other, held

    # ------------------------------------------------------------------------------------- beginning

    def begin(self, *, resume: bool) -> None:
        """Start fresh or go on from the newest checkpoint. Raises UserError."""
        with clear_disk_errors(self.run_dir, "nothing was written"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            recover(self.run_dir)
        found = step_dirs(self.run_dir)
        if found and not resume:
            raise UserError(
                f"{self.run_dir}: holds a run with checkpoint {found[-1].name}; resume it (--resume) "
                "or choose another directory."
            )
        if found:
            self.state = load_state(found[-1], self.state, drafter=self.drafter, optimizer=self.optimizer)
            self.stream.seek(self.state.epoch, self.state.index)
            self.metrics.rewind(self.state.step)
            evaluations = [r for r in self.metrics.read() if r["kind"] == "eval"]
            self.last_evaluation = evaluations[-1] if evaluations else None
            self.reporter.note(f"resumed from {found[-1].name}")
            return
        self.metrics.rewind(None)
        if self.recipe.init is None:
            self._prepare_drafter()
        if self.drafter.counts_labels:
            self.drafter.set_label_counts(self._label_counts())
        if not self.state.precision:
            self.state.precision = self._faster_precision()
        if self.options.eval_at_start:
            self._evaluate()

    def _prepare_drafter(self) -> None:
        """Draft vocabulary from label counts and the closed-form start, where the drafter's options ask for them."""
        wanted = self.drafter.config.model_dump()
        size = int(wanted.get("draft_vocab_size", 0))
        if size > 0:
            counts = self._label_counts()
            ids = counts.sort(descending=True, stable=True).indices[:size].sort().values
            self.drafter.set_draft_vocab(ids.to(self.target.info.device))
            share = float(counts[ids].sum()) / max(1, int(counts.sum()))
            self.reporter.note(f"draft vocabulary: {size} tokens cover {share:.2%} of the labels")
        if wanted.get("start", "none") != "none":
            began = time.perf_counter()
            batches = [to_device(b, self.target.info.device) for b in self.stream.first(self.options.start_tokens)]
            with torch.no_grad():
                figures = self.drafter.start(batches)
            text = "  ".join(f"{k} {v:,.4g}" for k, v in figures.items())
            self.reporter.note(f"closed-form start: {text}  ({time.perf_counter() - began:.1f} s)")
            self.metrics.append({"kind": "start", "step": 0, **figures})

    def _label_counts(self) -> Tensor:
        return self.source.label_counts(self.train_ids, self.target.info.vocab_size)

    def _faster_precision(self) -> Precision:
        """Time forward and backward both ways on the first batch; bfloat16 must be 5 % faster and finite."""
        batch = to_device(self.stream.next(), self.target.info.device)
        self.stream.seek(0, 0)
        times: dict[Precision, float] = {}
        with torch.random.fork_rng(devices=[]):
            for precision in ("float32", "bfloat16"):
                for attempt in range(3):  # the first only warms up
                    began = time.perf_counter()
                    terms = self._forward(batch, precision)
                    if terms.numerator.requires_grad:
                        terms.numerator.backward()  # type: ignore[no-untyped-call]
                    elapsed = time.perf_counter() - began
                    times[precision] = elapsed if attempt < 2 else min(times[precision], elapsed)
                    if precision == "bfloat16" and not bool(torch.isfinite(terms.numerator)):
                        times[precision] = math.inf
        self.optimizer.zero_grad(set_to_none=True)
        choice: Precision = "bfloat16" if times["bfloat16"] < 0.95 * times["float32"] else "float32"
        self.reporter.note(
            f"precision: {choice} (float32 {times['float32'] * 1e3:.0f} ms, bfloat16 {times['bfloat16'] * 1e3:.0f} ms)"
        )
        self.metrics.append(
            {"kind": "precision", "step": 0, "choice": choice, **{f"{k}_sec": t for k, t in times.items()}}
        )
        return choice

    # ------------------------------------------------------------------------------------------ loop

    def loop(self) -> Path:
        """Train until the budget is used; returns the directory of the best drafter."""
        window: list[dict[str, Any]] = []
        with _stop_on_interrupt() as stop:
            while self._progress() < 1.0:
                window.append(self._step())
                step = self.state.step
                ended = self._progress() >= 1.0
                if step % self.options.log_every == 0 or ended:
                    self._log(window)
                    window = []
                if step % self.options.eval_every == 0 or ended:
                    self._evaluate()
                if step % self.options.save_every == 0 or ended or stop:
                    path = self._save()
                    if stop and not ended:
                        self.reporter.note(f"stopped; resume goes on from {path.name}")
                        raise KeyboardInterrupt
        best = self.run_dir / BEST
        if not self.eval_ids or not best.exists():
            self._export()
        return best

    def _progress(self) -> float:
        return self.budget.progress(self.state.step, self.state.train_sec)

    def _forward(self, batch: TrainBatch, precision: str) -> LossTerms:
        device = self.target.info.device.split(":")[0]
        autocast: AbstractContextManager[Any] = nullcontext()
        if precision == "bfloat16":
            autocast = torch.autocast(device, torch.bfloat16)
        with autocast:
            return self.drafter.loss(self.drafter(batch), batch)

    def _step(self) -> dict[str, Any]:
        """One optimiser step over `accumulate` batches; returns sums for the log."""
        began, state, progress = time.perf_counter(), self.state, self._progress()
        rate = learning_rate(self.options, step=state.step, progress=progress)
        set_learning_rate(self.optimizer, rate)
        terms: list[LossTerms] = []
        ids: list[str] = []
        num_tokens = num_anchors = 0
        for _ in range(self.options.accumulate):
            batch = replace(to_device(self.stream.next(), self.target.info.device), progress=progress)
            ids += batch.ids
            terms.append(self._forward(batch, state.precision))
            if not bool(torch.isfinite(terms[-1].numerator)):
                self._fail("loss", batch.ids)
            if terms[-1].numerator.requires_grad:
                terms[-1].numerator.backward()  # type: ignore[no-untyped-call]
            num_tokens += int(batch.lengths.sum())
            num_anchors += int(batch.anchor_mask.sum())
        denominator = sum(float(t.denominator) for t in terms)
        norm = 0.0
        if denominator > 0:  # no anchor in any of the batches: nothing to learn from
            norm = scale_and_clip(self.parameters, denominator=denominator, clip_norm=self.options.clip_norm)
            if not math.isfinite(norm):
                self._fail("gradient", tuple(ids))
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.num_tokens += num_tokens
        state.num_anchors += num_anchors
        state.epoch, state.index = self.stream.epoch, self.stream.index
        seconds = time.perf_counter() - began
        state.train_sec += seconds
        return {
            "numerator": sum(float(t.numerator.detach()) for t in terms),
            "denominator": denominator,
            "metrics": [t.metrics for t in terms],
            "grad_norm": norm,
            "lr": rate,
            "seconds": seconds,
            "num_tokens": num_tokens,
            "num_anchors": num_anchors,
        }

    def _fail(self, what: Literal["loss", "gradient"], ids: tuple[str, ...]) -> None:
        found = step_dirs(self.run_dir)
        good = f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
        raise NonFiniteError(
            f"{what} is not finite at step {self.state.step + 1}, examples {', '.join(ids)}; {good}. "
            "Lower train.lr, set train.precision=float32, or remove these examples."
        )

    def _log(self, window: list[dict[str, Any]]) -> None:
        state = self.state
        seconds = sum(w["seconds"] for w in window)
        denominator = sum(w["denominator"] for w in window)
        progress = self._progress()
        record = {
            "kind": "train",
            "step": state.step,
            "loss": sum(w["numerator"] for w in window) / denominator if denominator else 0.0,
            **pool([m for w in window for m in w["metrics"]]),
            "grad_norm": max(w["grad_norm"] for w in window),
            "lr": window[-1]["lr"],
            "epoch": state.epoch,
            "num_tokens": state.num_tokens,
            "num_anchors": state.num_anchors,
            "tokens_per_sec": sum(w["num_tokens"] for w in window) / seconds,
            "anchors_per_sec": sum(w["num_anchors"] for w in window) / seconds,
            "train_sec": state.train_sec,
            "eta_sec": state.train_sec * (1 - progress) / progress,
        }
        self.metrics.append(record)
        self.reporter.step(record, progress=progress)

    def _evaluate(self) -> None:
        """Measure on the held-out examples and export the drafter when it is the best so far."""
        if not self.eval_ids:
            return
        examples = self.eval_source.fetch(self.eval_ids)
        length = self.options.num_draft_tokens or self.drafter.max_draft_tokens
        record = evaluate(self.drafter, examples, self.recipe.data, num_draft_tokens=length)
        record = {"kind": "eval", "step": self.state.step, "train_sec": self.state.train_sec, **record}
        log = [self.state.best, record] if self.state.best else [record]
        is_best = best_entry(log) is record
        self.reporter.evaluation(record, best=is_best)
        if is_best:
            if self.drafter.calibrates:
                record["calibration"] = calibrate(self.drafter, examples, num_draft_tokens=length)
                self.reporter.calibration(record["calibration"])
            self.state.best = record
        self.metrics.append(record)
        self.last_evaluation = record
        if is_best:
            self._export()

    def _card(self) -> dict[str, Any]:
        return make_card(
            self.recipe,
            drafter=self.drafter,
            target=self.target.info,
            data=self.source.info,
            data_meta=self.source.meta,
            state=self.state,
            evaluation=self.last_evaluation,
        )

    def _save(self) -> Path:
        return save_state(
            self.run_dir,
            self.state,
            drafter=self.drafter,
            optimizer=self.optimizer,
            card=self._card(),
            keep=self.options.keep,
        )

    def _export(self) -> None:
        """Write the drafter as it is now to `best/`, in half the bytes and ready to serve."""
        path = self.run_dir / BEST
        with clear_disk_errors(path, "the checkpoints are intact"), new_directory(path) as temp:
            checkpoint.save(self.drafter, temp, card=self._card(), dtype="fp16")


@contextmanager
def _stop_on_interrupt() -> Iterator[list[int]]:
    """A list that fills at the first Ctrl-C, so that a step is never cut in half; the second one stops at once."""
    stop: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append(number)

    try:
        old = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread: whoever owns it decides
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, old)
