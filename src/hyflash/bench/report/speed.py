"""The sections on speed and on contexts: timed runs one by one, and everything over the length of the prompt.

In: groups of bench runs. Out: sections, or None where no run has what they show. Speeds stand only where every answer
was equal to the plain one; the others have their forks listed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hyflash.bench.report.groups import Group, Rows
from hyflash.bench.report.lines import BenchRow
from hyflash.bench.report.page import (
    NONE,
    Block,
    Chart,
    Heading,
    Panel,
    Paragraph,
    Point,
    Section,
    Series,
    Table,
    count,
    interval,
    number,
    table,
)

_SPEED = (
    "Medians over prompts with 10 % and 90 % quantiles. The speed-up is against the same engine and target without a "
    "drafter, in turns in the same run; speeds of different runs cannot be compared. Draft and verify are mean "
    "milliseconds of a round: proposing and committing, and the forward of the target."
)
_CONTEXTS = (
    "Prompts stretched to a number of tokens. Tau has its 95 % bootstrap interval over prompts, the speed-up its 10 % "
    "and 90 % quantiles; a run with one prompt a domain has neither."
)
Value = Callable[[BenchRow], tuple[float | None, float | None, float | None]]
"""A row's value, and its interval where it has one."""


@dataclass(frozen=True, slots=True)
class _Curve:
    """What is drawn over the context."""

    name: str
    caption: str
    unit: str
    value: Value
    reference: float | None = None


_CURVES = (
    _Curve(
        "tau", "Acceptance length tau by context.", "tau (tokens per forward)", lambda r: (r.tau, *r.tau_bounds), 1.0
    ),
    _Curve(
        "speed", "Speed-up over plain decoding by context.", "speed-up", lambda r: (r.speedup, *r.speedup_bounds), 1.0
    ),
    _Curve(
        "bytes",
        "Most the drafter held for one request, by context.",
        "drafter (KiB)",
        lambda r: (r.measured_bytes / 1024, None, None),
    ),
)


def speed(groups: Sequence[Group]) -> Section | None:
    """Timed runs on prompts of natural length."""
    blocks: list[Block] = [Paragraph(_SPEED)]
    for index, group in enumerate((g for g in groups if g.is_timed and g.domains(stretched=False)), 1):
        domains = group.domains(stretched=False)
        blocks.append(Heading(group.title))
        panels = tuple(panel for domain, rows in domains.items() if (panel := _dots(domain, rows)))
        if panels:
            caption = "Speed-up over plain decoding, medians with 10 % and 90 % quantiles over prompts."
            blocks.append(Chart(name=f"speed-{index}", caption=caption, panels=panels))
        blocks.append(_table(domains, stretched=False))
        blocks += _forks(domains)
    return Section(anchor="speed", title="Speed", blocks=tuple(blocks)) if len(blocks) > 1 else None


def contexts(groups: Sequence[Group]) -> Section | None:
    """Runs on stretched prompts, timed or not."""
    blocks: list[Block] = [Paragraph(_CONTEXTS)]
    for index, group in enumerate((g for g in groups if g.domains(stretched=True)), 1):
        domains = group.domains(stretched=True)
        blocks.append(Heading(group.title))
        for curve in _CURVES:
            panels = tuple(_panel(curve, domain, rows, group) for domain, rows in domains.items())
            panels = tuple(panel for panel in panels if panel.series)
            if panels:
                blocks.append(Chart(name=f"contexts-{index}-{curve.name}", caption=curve.caption, panels=panels))
        blocks.append(_table(domains, stretched=True))
        blocks += _forks(domains)
    return Section(anchor="contexts", title="Contexts", blocks=tuple(blocks)) if len(blocks) > 1 else None


def _dots(domain: str, rows: Rows) -> Panel | None:
    shown = [(entry.label, row) for entry, row in rows if row.speedup is not None]
    points = tuple(Point(row.speedup or 0.0, i, *row.speedup_bounds) for i, (_, row) in enumerate(shown))
    if not points:
        return None
    return Panel(
        title=domain,
        x_label="speed-up (1 = plain decoding)",
        names=tuple(label for label, _ in shown),
        series=(Series(label="speed-up", points=points, style=0),),
        reference=1.0,
    )


def _panel(curve: _Curve, domain: str, rows: Rows, group: Group) -> Panel:
    labels = [entry.label for entry in group.entries]
    found: dict[str, list[Point]] = {}
    for entry, row in rows:
        middle, low, high = curve.value(row)
        if middle is not None and row.context is not None:
            found.setdefault(entry.label, []).append(Point(row.context, middle, low, high))
    return Panel(
        title=domain,
        x_label="context (tokens)",
        y_label=curve.unit,
        reference=curve.reference,
        x_ticks=tuple(sorted({p.x for points in found.values() for p in points})),
        series=tuple(
            Series(label=label, points=tuple(sorted(points, key=lambda p: p.x)), style=labels.index(label))
            for label, points in found.items()
        ),
    )


def _table(domains: dict[str, Rows], *, stretched: bool) -> Table:
    rows = [(domain, entry, row) for domain, found in domains.items() for entry, row in found]
    return table(
        "Speed, parts of a round, first token, and bytes of the drafter",
        ["<domain", "context", "<drafter", *(["tau [95 %]", "loop-free"] if stretched else []),
         "tokens/s [10 %, 90 %]", "plain tokens/s", "speed-up [10 %, 90 %]", "draft, ms", "verify, ms",
         "first token, s", "plain first token, s", "most held, bytes", "fixed state, bytes", "growing, bytes per token",
         "<equal to plain"],
        [
            (
                domain,
                NONE if row.context is None else count(row.context),
                entry.label,
                *((interval(row.tau, *row.tau_bounds), number(row.tau_loop_free)) if stretched else ()),
                *_cells(row),
            )
            for domain, entry, row in rows
        ],
    )  # fmt: skip


def _cells(row: BenchRow) -> tuple[str, ...]:
    return (
        interval(row.tokens_per_sec, *row.tokens_per_sec_bounds, "{:.1f}", "{:.1f}"),
        number(row.plain_tokens_per_sec, "{:.1f}"),
        interval(row.speedup, *row.speedup_bounds, "{:.2f}", "{:.2f}"),
        number(row.draft_ms_per_round, "{:.2f}"),
        number(row.verify_ms_per_round, "{:.2f}"),
        number(row.ttft_sec),
        number(row.plain_ttft_sec),
        count(row.measured_bytes),
        count(row.state_bytes),
        count(row.kv_bytes_per_token),
        {True: "yes", False: f"no: {len(row.forks)} of {row.num_prompts} differ", None: "not checked"}[row.exact],
    )


def _forks(domains: dict[str, Rows]) -> list[Block]:
    """Where answers left the plain ones; nothing where all were equal."""
    rows = [
        (entry.label, domain, fork.prompt_id, count(fork.index), f"{fork.margin:.2g}")
        for domain, found in domains.items()
        for entry, row in found
        for fork in row.forks
    ]
    columns = ["<drafter", "<domain", "<prompt", "token", "margin of the best two logits"]
    return [table("Answers that differ from plain decoding", columns, rows)] if rows else []
