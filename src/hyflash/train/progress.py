"""What a run shows and logs: a bar on a terminal, plain lines elsewhere, and metrics.jsonl in the run's directory.

In: records (flat dicts). Out: lines on stderr and in the file, which a resumed run continues without repeating a step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from hyflash.data.disk import clear_disk_errors, write_atomic


class MetricsFile:
    """`metrics.jsonl`: one record a line; `rewind` drops what lies behind the step a run resumes from."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line. Raises UserError on a full disk."""
        with clear_disk_errors(self.path, "the checkpoints are intact"), self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def rewind(self, step: int | None) -> None:
        """Keep records up to `step`; None empties the file. A line cut short by a kill is dropped."""
        kept = [] if step is None else [r for r in self.read() if r["step"] <= step]
        text = "".join(json.dumps(r) + "\n" for r in kept)
        with clear_disk_errors(self.path, "the checkpoints are intact"):
            write_atomic(self.path, text.encode())

    def read(self) -> list[dict[str, Any]]:
        """All whole records, in order."""
        records = []
        for line in self.path.read_bytes().split(b"\n") if self.path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.keys() >= {"kind", "step"}:
                records.append(record)
        return records


class Reporter:
    """Progress on stderr. `quiet` shows nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._tau: float | None = None
        if not quiet and sys.stderr.isatty():
            columns = (TextColumn("step {task.fields[step]}"), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=False)
            self._task = self._bar.add_task("starting", total=1.0, step=0)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """One line of text."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif not self._quiet:
            print(text, file=sys.stderr, flush=True)  # noqa: T201

    def step(self, record: Mapping[str, Any], *, progress: float) -> None:
        """A training record: loss, rates, ETA."""
        text = (
            f"loss {record['loss']:.3f}  {record['tokens_per_sec']:,.0f} tokens/s  "
            f"{record['anchors_per_sec']:,.0f} anchors/s  tau {'-' if self._tau is None else f'{self._tau:.3f}'}  "
            f"ETA {clock(record['eta_sec'])}"
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=progress, description=text, step=record["step"])
        else:
            self.note(f"step {record['step']} ({progress:.0%})  {text}")

    def evaluation(self, record: Mapping[str, Any], *, best: bool) -> None:
        """An evaluation record."""
        self._tau = record["tau"]
        domains = "  ".join(f"{d} {t:.3f}" for d, t in record["tau_by_domain"].items())
        loss = "-" if record["loss"] is None else f"{record['loss']:.3f}"
        mark = "  (best)" if best else ""
        self.note(f"step {record['step']}: held out: tau {record['tau']:.3f}  loss {loss}  {domains}{mark}")

    def calibration(self, figures: Mapping[str, Any]) -> None:
        """What calibrating the drafter's confidence changed."""
        self.note(
            f"confidence calibrated: expected error {figures['ece_before']:.1%} -> {figures['ece_after']:.1%} "
            f"({figures['calibration_rounds']:.0f} rounds)"
        )


def clock(seconds: float) -> str:
    """h:mm:ss"""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
