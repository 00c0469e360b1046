"""The long-context study, from prompts to tables: `python benchmarks/study.py benchmarks/study.toml --data DATA_DIR`.

In: a TOML file that names target, training budget and arms (`study_plan.py`), and a folder of public data (see
`recipes/long_prompts.py` and `recipes/smol_prompts.py`). Out: under `--out` prompts, the target's answers, captures,
a run of each arm and seed, results as JSON, `report.md` and a plot (`study_report.py`). Stages run in order, each left
out where its result is there already, so a study that was stopped goes on; `--only` runs one. Arms and seeds may be
added to the plan later; all are then measured again. It takes hours. A stage is a command of hyflash that can be run by
hand, and is printed before it runs.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from study_plan import COST_TOKENS, ROOT, Plan, keep_plan, read_plan
from study_report import report

from hyflash.data.disk import read_json, write_atomic
from hyflash.data.prompts import load_prompts
from hyflash.errors import HyflashError, UserError

HYFLASH = (
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'hyflash'; from hyflash.cli import main; sys.exit(main())",
)
"""The command, whether installed or not."""


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """A lock that commands inherit: after a kill of this script its command may be at work still. Raises UserError."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            raise UserError(
                f"{out}: a study, or a command that one has left, is at work there; wait or end it."
            ) from err
        os.set_inheritable(file.fileno(), True)
        yield


def run(*words: object, to: Path | None = None) -> None:
    """A command in the project's folder, its output in the file `to`, whole or not; the study ends where one fails."""
    command = [str(word) for word in words]
    print("$", shlex.join(command), *([] if to is None else [">", to]), flush=True)
    part = None if to is None else to.with_name(f"{to.name}.part")
    with nullcontext() if part is None else part.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, close_fds=False)
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the command has heard it too, and may have something to save
            code = process.wait() or 130
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        sys.exit(f"the stage stopped with {code}; run the same again to go on.")
    if part is not None and to is not None:
        part.rename(to)


def hyflash(*words: object, to: Path | None = None) -> None:
    """A command of hyflash."""
    run(*HYFLASH, *words, to=to)


def prompts(plan: Plan) -> None:
    """Short prompts for training, their answers, then long prompts for training and test."""
    short = plan.out / "short.jsonl"
    if not short.exists():
        run(sys.executable, "recipes/smol_prompts.py", plan.data, short)
    answers = plan.out / "short-answers.jsonl"
    if not (plan.out / "short.done").exists():
        hyflash(*_regenerate(plan, short, answers), "--limit", plan.short_prompts)
        (plan.out / "short.done").touch()
    if not (plan.out / "test.jsonl").exists():
        numbers = ["--room", plan.answer_tokens, "--per-kind", plan.per_kind, "--per-cell", plan.per_cell]
        words = [plan.data, answers, plan.out, "-t", plan.target, *numbers, "--contexts", *plan.contexts]
        run(sys.executable, "recipes/long_prompts.py", *words)


def answers(plan: Plan) -> None:
    """The target's answers to the long training prompts."""
    if not (plan.out / "long.done").exists():
        long = _regenerate(plan, plan.out / "train.jsonl", plan.out / "long-answers.jsonl")
        hyflash(*long, "--limit", plan.long_prompts)
        (plan.out / "long.done").touch()


def _regenerate(plan: Plan, source: Path, out: Path) -> list[object]:
    settings: list[object] = ["-t", plan.target, "-n", plan.answer_tokens, "--greedy-share", 0.7]
    return ["data", "regenerate", source, "--out", out, *settings]


def capture(plan: Plan) -> None:
    """Features, and the target's keys and values for the drafters that read them."""
    for name in ("short", "long"):
        hyflash(
            "data", "capture", plan.out / f"{name}-answers.jsonl", "--recipe", plan.capture, "-t", plan.target,
            "--out", plan.out / f"{name}-shards",
        )  # fmt: skip


def train(plan: Plan) -> None:
    """Every arm and seed, with the same data, budget and anchors."""
    for arm, seed, out in plan.trained():
        if (out / "done").exists():
            continue
        overrides = [word for option in plan.overrides(arm, seed) for word in ("-o", option)]
        hyflash("train", arm.recipe, "--out", out, *(["--resume"] if out.exists() else []), *overrides)
        (out / "done").touch()


def tune(plan: Plan) -> None:
    """Options of the training-free arms, chosen on long prompts that no arm was trained on."""
    path = plan.out / "tune.jsonl"
    if not path.exists():
        with (plan.out / "long-answers.jsonl").open(encoding="utf-8") as file:
            trained = {json.loads(line)["id"] for line in file}
        others = [p for p in load_prompts([str(plan.out / "train.jsonl")]).prompts if p.id not in trained]
        rows = [{"messages": list(p.messages), "domain": p.domain} for p in others[: plan.tune_prompts]]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    for arm in plan.arms:
        for seed in arm.seeds:
            out, done = plan.out / f"{arm.name}-{seed}", plan.out / f"{arm.name}-{seed}.tuned"
            if arm.over and not done.exists():
                hyflash(
                    "calibrate", plan.untuned(arm, seed), "--out", out, "-t", plan.target, "--prompts", path,
                    "-n", plan.answer_tokens, "--num-draft-tokens", plan.draft_tokens,
                )  # fmt: skip
                done.touch()


def accept(plan: Plan) -> None:
    """Acceptance on the test prompts, all arms over the same answers."""
    path, named = plan.out / "acceptance.json", list(plan.drafters().values())
    if not _measured(path, named):
        hyflash(
            "bench", "-t", plan.target, *_each(named), "--prompts", plan.out / "test.jsonl", "--acceptance-only",
            "-n", plan.answer_tokens, "--num-draft-tokens", plan.draft_tokens, "--json", to=path,
        )  # fmt: skip


def cost(plan: Plan) -> None:
    """Times of draft pass, commit and target after prompts of each context, first seeds only, one context a run."""
    named = plan.first_drafters()
    for context in plan.contexts:
        path, size = plan.out / f"cost-{context}.json", context - plan.answer_tokens
        if not _measured(path, named):
            hyflash(
                "bench", "-t", plan.target, *_each(named), "--prompts", "demo", "--limit", 1, "--context", size,
                "-n", COST_TOKENS, "--length", "fixed", "--num-draft-tokens", plan.draft_tokens, "--json", to=path,
            )  # fmt: skip


def recall(plan: Plan) -> None:
    """What the memories carry, first seeds only."""
    path, named = plan.out / "recall.json", plan.first_drafters()
    if not _measured(path, named):
        run(sys.executable, "benchmarks/recall.py", "-t", plan.target, *_each(named), "--json", to=path)


def _each(drafters: Sequence[str]) -> list[str]:
    return [word for drafter in drafters for word in ("-d", drafter)]


def _measured(path: Path, drafters: Sequence[str]) -> bool:
    """Whether the results in a file, where there is one, are of all these drafters."""
    found = read_json(path) if path.exists() else {}
    return set(drafters) <= {row["drafter"] for row in found.get("results") or found.get("rows") or ()}


STAGES: dict[str, Callable[[Plan], None]] = {
    stage.__name__: stage for stage in (prompts, answers, capture, train, tune, accept, cost, recall, report)
}


def main() -> None:
    """Run the stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of public data")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--only", choices=list(STAGES), help="run one stage")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        plan = read_plan(options.plan, options.data, options.out)
        plan.out.mkdir(parents=True, exist_ok=True)
        with alone(plan.out):
            keep_plan(plan)
            for name, stage in STAGES.items():
                if options.only in (None, name):
                    stage(plan)
    except (HyflashError, OSError) as err:
        sys.exit(f"error: {err}")


def _terminated(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
