"""The long-context study, from prompts to tables: `python benchmarks/study.py benchmarks/study.toml --data DATA_DIR`.

In: a TOML file that names target, training budget and arms, and a folder of public data (see `recipes/long_prompts.py`
and `recipes/smol_prompts.py`). Out: under `--out` the prompts, the target's answers, captures, one run for each arm and
seed, results as JSON, and `report.md` with a plot. Stages run in order and each is left out where its result is there
already, so a run that was stopped goes on; `--only` runs one. It takes hours. A stage is a command of hyflash that can
be run by hand, and is printed before it runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyflash.metrics import counts_difference, counts_interval

ROOT = Path(__file__).resolve().parents[1]
HYFLASH = (
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'hyflash'; from hyflash.cli import main; sys.exit(main())",
)
"""The command, whether installed or not."""
Counts = list[tuple[int, int]]
"""(committed tokens, rounds) of each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A drafter of the study: one that is trained, or another one's checkpoint read by a training-free method."""

    name: str
    recipe: str = ""
    options: tuple[str, ...] = ()
    over: str = ""
    """METHOD:ARM, for training-free arms."""
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The TOML file, and where things are."""

    target: str
    contexts: tuple[int, ...]
    answer_tokens: int
    draft_tokens: int
    short_prompts: int
    long_prompts: int
    """Of each, how many are answered for training."""
    per_kind: int
    per_cell: int
    """Long prompts made for training, of each kind; for the test, of each kind and context."""
    training: tuple[str, ...]
    kv_layers: tuple[int, ...]
    arms: tuple[Arm, ...]
    base: str
    """The arm that others are compared with."""
    data: Path
    out: Path

    def trained(self) -> Iterable[tuple[Arm, int, Path]]:
        """Arms with a recipe, seed by seed, and the directory of the run."""
        return ((arm, seed, self.out / f"{arm.name}-{seed}") for arm in self.arms if arm.recipe for seed in arm.seeds)

    def drafters(self) -> dict[str, str]:
        """Arm and seed -> what names its drafter on the command line."""
        found = {f"{arm.name}-{seed}": str(run / "best") for arm, seed, run in self.trained()}
        for arm in self.arms:
            if arm.over:
                method, _, under = arm.over.partition(":")
                found |= {f"{arm.name}-{seed}": f"{method}:{found[f'{under}-{seed}']}" for seed in arm.seeds}
        return found


def read_plan(path: Path, data: Path, out: Path) -> Plan:
    """The plan of a TOML file."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    arms = tuple(Arm(**_frozen(arm)) for arm in table.pop("arm"))
    return Plan(**_frozen(table), arms=arms, data=data.resolve(), out=out.resolve())


def _frozen(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def run(*words: object) -> None:
    """A command in the project's folder; the study ends where one fails."""
    command = [str(word) for word in words]
    print("$", shlex.join(command), flush=True)
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"the stage stopped with {done.returncode}; run the same again to go on.")


def hyflash(*words: object) -> None:
    """A command of hyflash."""
    run(*HYFLASH, *words)


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
    recipe = next(arm.recipe for arm in plan.arms if arm.recipe)
    layers = ["--kv-layers", ",".join(map(str, plan.kv_layers))] if plan.kv_layers else []
    for name in ("short", "long"):
        hyflash(
            "data", "capture", plan.out / f"{name}-answers.jsonl", "--recipe", recipe, "-t", plan.target, *layers,
            "--out", plan.out / f"{name}-shards",
        )  # fmt: skip


def train(plan: Plan) -> None:
    """Every arm and seed, with the same data, budget and anchors."""
    shards = json.dumps([str(plan.out / "short-shards"), str(plan.out / "long-shards")])
    for arm, seed, out in plan.trained():
        if (out / "done").exists():
            continue
        options = [f"data.shards={shards}", f"target.name={plan.target}", f"train.seed={seed}"]
        overrides = [word for option in (*options, *plan.training, *arm.options) for word in ("-o", option)]
        hyflash("train", arm.recipe, "--out", out, *(["--resume"] if out.exists() else []), *overrides)
        (out / "done").touch()


def accept(plan: Plan) -> None:
    """Acceptance on the test prompts, all arms over the same answers."""
    if (plan.out / "acceptance.json").exists():
        return
    named = [word for drafter in plan.drafters().values() for word in ("-d", drafter)]
    _to_file(
        plan.out / "acceptance.json",
        "bench", "-t", plan.target, *named, "--prompts", plan.out / "test.jsonl", "--acceptance-only",
        "-n", plan.answer_tokens, "--num-draft-tokens", plan.draft_tokens, "--json",
    )  # fmt: skip


def cost(plan: Plan) -> None:
    """Times of draft pass, commit and target after prompts of each context, first seeds only, one context a run."""
    drafters = plan.drafters()
    firsts = [drafters[f"{arm.name}-{arm.seeds[0]}"] for arm in plan.arms]
    for context in plan.contexts:
        path = plan.out / f"cost-{context}.json"
        if not path.exists():
            named = [word for drafter in firsts for word in ("-d", drafter)]
            size = context - plan.answer_tokens
            _to_file(
                path,
                "bench", "-t", plan.target, *named, "--prompts", "demo", "--limit", 1, "--context", size, "-n", 64,
                "--length", "fixed", "--num-draft-tokens", plan.draft_tokens, "--json",
            )  # fmt: skip


def recall(plan: Plan) -> None:
    """What the memories carry, first seeds only."""
    if not (plan.out / "recall.json").exists():
        drafters = plan.drafters()
        named = [word for arm in plan.arms for word in ("-d", drafters[f"{arm.name}-{arm.seeds[0]}"])]
        with (plan.out / "recall.json.part").open("w") as file:
            subprocess.run(
                [sys.executable, "benchmarks/recall.py", "-t", plan.target, *named, "--json"],
                cwd=ROOT,
                stdout=file,
                check=True,
            )
        (plan.out / "recall.json.part").rename(plan.out / "recall.json")


def _to_file(path: Path, *words: object) -> None:
    command = [*HYFLASH, *map(str, words)]
    print("$", shlex.join(command), ">", path, flush=True)
    part = path.with_suffix(".part")
    with part.open("w") as file:
        subprocess.run(command, cwd=ROOT, stdout=file, check=True)
    part.rename(path)


# --------------------------------------------------------------------------------------------- report


def report(plan: Plan) -> None:
    """Tables of all that was measured, in Markdown, and a plot of tau by context."""
    found = json.loads((plan.out / "acceptance.json").read_text())
    counts = by_arm(found["results"], {path: name for name, path in plan.drafters().items()}, plan)
    parts = [tau_table(plan, counts), difference_table(plan, counts), kind_table(plan, counts), cost_table(plan)]
    (plan.out / "report.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    plot(plan, counts)
    print(plan.out / "report.md")


Cells = dict[str, dict[tuple[str, int], Counts]]
"""Arm -> (kind, context) -> counts of all seeds, one seed after the other."""


def by_arm(rows: Sequence[dict[str, Any]], names: dict[str, str], plan: Plan) -> Cells:
    """Counts by arm, kind and context from the rows of a bench run over `KIND-CONTEXT` domains."""
    cells: Cells = {arm.name: {} for arm in plan.arms}
    for row in rows:
        kind, _, context = row["domain"].rpartition("-")
        arm = names[row["drafter"]].rpartition("-")[0]
        pairs = list(zip(row["committed_by_prompt"], row["rounds_by_prompt"], strict=True))
        cells[arm].setdefault((kind, int(context)), []).extend(pairs)
    return cells


def at_context(cells: dict[tuple[str, int], Counts], context: int) -> Counts:
    """Counts of all kinds at one context, kinds in order of their names."""
    return [pair for key in sorted(cells) if key[1] == context for pair in cells[key]]


def tau_table(plan: Plan, counts: Cells) -> str:
    """Tau by arm and context with intervals over prompts."""
    lines = [_header("tau", plan.contexts)]
    for arm in plan.arms:
        cells = [_said(counts_interval(at_context(counts[arm.name], c))) for c in plan.contexts]
        lines.append(f"| {arm.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def difference_table(plan: Plan, counts: Cells) -> str:
    """Tau of each arm minus that of the base arm on the same prompts; first seeds where the numbers of seeds differ."""
    lines = [_header(f"tau minus {plan.base}", plan.contexts)]
    for arm in plan.arms:
        if arm.name != plan.base:
            pairs = ((at_context(counts[arm.name], c), at_context(counts[plan.base], c)) for c in plan.contexts)
            cells = [_said(counts_difference(*_alike(a, b)), sign=True) for a, b in pairs]
            lines.append(f"| {arm.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kind_table(plan: Plan, counts: Cells) -> str:
    """Tau by arm and kind of task, all contexts together."""
    kinds = sorted({kind for cells in counts.values() for kind, _ in cells})
    lines = [_header("tau by kind", kinds)]
    for arm in plan.arms:
        pools = [[pair for key, own in counts[arm.name].items() if key[0] == kind for pair in own] for kind in kinds]
        lines.append(f"| {arm.name} | {' | '.join(f'{_pooled(pool):.2f}' for pool in pools)} |")
    return "\n".join(lines)


def cost_table(plan: Plan) -> str:
    """Milliseconds of proposal, commit and target, and bytes held, by context."""
    names = {path: name for name, path in plan.drafters().items()}
    lines = []
    for context in plan.contexts:
        path = plan.out / f"cost-{context}.json"
        if not path.exists():
            return ""
        for row in json.loads(path.read_text())["results"]:
            if row["draft_ms_per_round"] is not None:
                propose = row["draft_ms_per_round"] - row["commit_ms_per_round"]
                lines.append(
                    f"| {names[row['drafter']].rpartition('-')[0]} | {context} | {propose:.2f} | "
                    f"{row['commit_ms_per_round']:.2f} | {row['verify_ms_per_round']:.2f} | {row['measured_bytes']:,} |"
                )
    head = "| arm | context | proposal, ms | commit, ms | target, ms | drafter bytes |\n|---|---|---|---|---|---|"
    return "\n".join([head, *sorted(set(lines))])


def plot(plan: Plan, counts: Cells) -> None:
    """Tau by context, one line an arm."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for arm in plan.arms:
        axes.plot(
            plan.contexts, [_pooled(at_context(counts[arm.name], c)) for c in plan.contexts], "o-", label=arm.name
        )
    axes.set(xscale="log", xlabel="context, tokens", ylabel="tokens committed per round", xticks=plan.contexts)
    axes.set_xticklabels([str(c) for c in plan.contexts])
    axes.legend(fontsize="small")
    figure.savefig(plan.out / "tau.png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def _alike(left: Counts, right: Counts) -> tuple[Counts, Counts]:
    """Both cut to the seeds that both have."""
    size = min(len(left), len(right))
    return left[:size], right[:size]


def _pooled(pool: Counts) -> float:
    rounds = sum(rounds for _, rounds in pool)
    return sum(tokens for tokens, _ in pool) / rounds if rounds else 0.0


def _said(interval: Any, *, sign: bool = False) -> str:
    form = "+.3f" if sign else ".3f"
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def _header(what: str, columns: Sequence[object]) -> str:
    return f"| {what} | {' | '.join(map(str, columns))} |\n|{'---|' * (1 + len(columns))}"


STAGES: dict[str, Callable[[Plan], None]] = {
    stage.__name__: stage for stage in (prompts, answers, capture, train, accept, cost, recall, report)
}


def main() -> None:
    """Run the stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of public data")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--only", choices=list(STAGES), help="run one stage")
    options = parser.parse_args()
    plan = read_plan(options.plan, options.data, options.out)
    plan.out.mkdir(parents=True, exist_ok=True)
    for name, stage in STAGES.items():
        if options.only in (None, name):
            stage(plan)


if __name__ == "__main__":
    main()
