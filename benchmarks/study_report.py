"""The long-context study's results as tables and a plot.

In: a `Plan` whose folder has `acceptance.json`, and `cost-*.json` and `recall.json` as far as they are there. Out:
`report.md` and `tau.png`. Where an arm has several seeds, a prompt's tokens and rounds are summed over them: intervals
are over prompts, which seeds do not multiply.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from study_plan import Plan

from hyflash.data.disk import read_json, write_atomic
from hyflash.errors import UserError
from hyflash.metrics import Interval, counts_difference, counts_interval

Counts = list[tuple[int, int]]
"""(committed tokens, rounds) of each prompt."""
Cells = dict[str, dict[int, dict[tuple[str, int], Counts]]]
"""Arm -> seed -> (kind, context) -> counts."""


def report(plan: Plan) -> None:
    """Tables of all that was measured, in Markdown, and a plot of tau by context. Raises UserError without results."""
    path = plan.out / "acceptance.json"
    if not path.exists():
        raise UserError(f"{path}: is not there; run the stages before the report.")
    rows = read_json(path)["results"]
    counts, free = by_arm(rows, plan), by_arm(rows, plan, prefix="loop_free_")
    parts = [
        tau_table(plan, counts),
        difference_table(plan, counts),
        tau_table(plan, free, "tau outside loops"),
        kind_table(plan, counts),
        position_table(plan, rows),
        cost_table(plan),
        recall_table(plan),
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    write_atomic(plan.out / "report.md", text.encode())
    plot(plan, counts)
    print(plan.out / "report.md")


def by_arm(rows: Sequence[Mapping[str, Any]], plan: Plan, *, prefix: str = "") -> Cells:
    """Counts, of the fields with this prefix, from the rows of a bench run over `KIND-CONTEXT` domains.

    Drafters that the plan lacks are left out. Raises UserError where one of the plan's is missing.
    """
    names = {path: name for name, path in plan.drafters().items()}
    cells: Cells = {}
    for row in rows:
        if row["drafter"] in names:
            kind, _, context = row["domain"].rpartition("-")
            arm, _, seed = names[row["drafter"]].rpartition("-")
            pairs = list(zip(row[f"{prefix}committed_by_prompt"], row[f"{prefix}rounds_by_prompt"], strict=True))
            cells.setdefault(arm, {}).setdefault(int(seed), {})[kind, int(context)] = pairs
    missing = [f"{arm.name}-{seed}" for arm in plan.arms for seed in arm.seeds if seed not in cells.get(arm.name, {})]
    if missing:
        raise UserError(f"{plan.out / 'acceptance.json'}: lacks {', '.join(missing)}; run the stage accept.")
    return cells


def pooled(
    seeds: Mapping[int, Mapping[tuple[str, int], Counts]], chosen: Collection[int]
) -> dict[tuple[str, int], Counts]:
    """Counts of each prompt summed over the chosen seeds."""
    own = [seeds[seed] for seed in sorted(chosen)]
    return {
        key: [(sum(n for n, _ in of), sum(r for _, r in of)) for of in zip(*(one[key] for one in own), strict=True)]
        for key in own[0]
    }


def picked(cells: Mapping[tuple[str, int], Counts], *, kind: str | None = None, context: int | None = None) -> Counts:
    """Counts of the cells of a kind or a context, cells in order of their names."""
    return [
        pair for key in sorted(cells) if kind in (None, key[0]) and context in (None, key[1]) for pair in cells[key]
    ]


def tau_table(plan: Plan, counts: Cells, title: str = "tau") -> str:
    """Tau by arm and context with intervals over prompts."""
    lines = [_header(title, plan.contexts)]
    for arm in plan.arms:
        own = pooled(counts[arm.name], arm.seeds)
        found = [picked(own, context=c) for c in plan.contexts]
        lines.append(f"| {arm.name} | {' | '.join(_said(counts_interval(one)) if one else '-' for one in found)} |")
    return "\n".join(lines)


def difference_table(plan: Plan, counts: Cells) -> str:
    """Tau of each arm minus that of the base arm, on the same prompts and over the seeds that both have."""
    base = next(arm for arm in plan.arms if arm.name == plan.base)
    lines = [_header(f"tau minus {plan.base}", plan.contexts)]
    for arm in plan.arms:
        common = set(arm.seeds) & set(base.seeds)
        if arm is base or not common:
            continue
        left, right = pooled(counts[arm.name], common), pooled(counts[plan.base], common)
        cells = []
        for context in plan.contexts:
            a, b = (picked(one, context=context) for one in (left, right))
            cells.append(_said(counts_difference(a, b), sign=True) if a else "-")
        lines.append(f"| {arm.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kind_table(plan: Plan, counts: Cells) -> str:
    """Tau by arm and kind of task, all contexts together."""
    found = {arm.name: pooled(counts[arm.name], arm.seeds) for arm in plan.arms}
    kinds = sorted({kind for cells in found.values() for kind, _ in cells})
    lines = [_header("tau by kind", kinds)]
    for name, own in found.items():
        taus = [_tau(picked(own, kind=kind)) for kind in kinds]
        lines.append(f"| {name} | {' | '.join(f'{tau:.2f}' for tau in taus)} |")
    return "\n".join(lines)


def position_table(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> str:
    """Share of drafts accepted at each position where all before were, by arm, all cells and seeds together."""
    names = {path: name.rpartition("-")[0] for name, path in plan.drafters().items()}
    positions = range(plan.draft_tokens)
    kept = {arm.name: [0.0] * plan.draft_tokens for arm in plan.arms}
    judged = {arm.name: [0] * plan.draft_tokens for arm in plan.arms}
    for row in rows:
        if arm := names.get(row["drafter"]):
            rates = zip(positions, row["acceptance_by_position"], row["num_judged_by_position"], strict=False)
            for i, rate, count in rates:  # as far as any draft was judged
                kept[arm][i] += rate * count
                judged[arm][i] += count
    lines = [_header("accepted at position", [i + 1 for i in positions])]
    for arm, own in kept.items():
        shares = [f"{n / of:.3f}" if of else "-" for n, of in zip(own, judged[arm], strict=True)]
        lines.append(f"| {arm} | {' | '.join(shares)} |")
    return "\n".join(lines)


def cost_table(plan: Plan) -> str:
    """Milliseconds of proposal, commit and target, and bytes held, by arm, context and domain of the prompts."""
    arms = dict(zip(plan.first_drafters(), plan.arms, strict=True))
    lines = [_header("arm", ("context", "prompts", "proposal, ms", "commit, ms", "target, ms", "drafter bytes"))]
    found = {c: read_json(path)["results"] for c in plan.contexts if (path := plan.out / f"cost-{c}.json").exists()}
    for drafter, arm in arms.items():
        for context, rows in found.items():
            for row in rows:
                if row["drafter"] == drafter and row["draft_ms_per_round"] is not None:
                    commit, verify = row["commit_ms_per_round"], row["verify_ms_per_round"]
                    times = f"{row['draft_ms_per_round'] - commit:.2f} | {commit:.2f} | {verify:.2f}"
                    lines.append(f"| {arm.name} | {context} | {row['domain']} | {times} | {row['measured_bytes']:,} |")
    return "\n".join(lines) if len(lines) > 1 else ""


def recall_table(plan: Plan) -> str:
    """Share of a fact's first tokens that are drafted, by distance, and without the fact in the text."""
    path = plan.out / "recall.json"
    if not path.exists():
        return ""
    shares = {(r["drafter"], r["distance"], r["told"]): r["first"]["mean"] for r in read_json(path)["rows"]}
    distances = sorted({distance for _, distance, _ in shares})
    lines = [_header("fact recalled / without it", distances)]
    for drafter, arm in zip(plan.first_drafters(), plan.arms, strict=True):
        if (drafter, distances[0], True) in shares:
            cells = [f"{shares[drafter, d, True]:.2f} / {shares[drafter, d, False]:.2f}" for d in distances]
            lines.append(f"| {arm.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(plan: Plan, counts: Cells) -> None:
    """Tau by context, one line an arm. Raises UserError without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError as err:
        raise UserError("the plot needs matplotlib: pip install 'hyflash[report]'; the tables are written.") from err
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for arm in plan.arms:
        own = pooled(counts[arm.name], arm.seeds)
        taus = [_tau(picked(own, context=c)) for c in plan.contexts]
        axes.plot(plan.contexts, taus, "o-", label=arm.name)
    axes.set(xscale="log", xlabel="context, tokens", ylabel="tokens committed per round", xticks=plan.contexts)
    axes.set_xticklabels([str(c) for c in plan.contexts])
    axes.legend(fontsize="small")
    figure.savefig(plan.out / "tau.png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def _tau(pool: Counts) -> float:
    """NaN, which tables show and plots leave out, where nothing was measured."""
    rounds = sum(rounds for _, rounds in pool)
    return sum(tokens for tokens, _ in pool) / rounds if rounds else float("nan")


def _said(interval: Interval, *, sign: bool = False) -> str:
    form = "+.3f" if sign else ".3f"
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def _header(what: str, columns: Sequence[object]) -> str:
    return f"| {what} | {' | '.join(map(str, columns))} |\n|{'---|' * (1 + len(columns))}"
