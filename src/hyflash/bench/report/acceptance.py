"""The section on acceptance: tau of each drafter and domain with its interval, outside of loops, and by position.

In: groups of bench runs. Out: a section, or None without prompts of natural length (stretched ones are in `contexts`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hyflash.bench.report.groups import Group, Rows
from hyflash.bench.report.lines import Bench, BenchRow
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
    numbers,
    table,
)
from hyflash.metrics import mean_over_domains

MIN_JUDGED = 20
"""A rate of fewer drafts than this is noise and left out of the chart."""
MOST_LINES = 6
"""Lines that can be told apart in one panel."""
_INTRO = (
    "Acceptance length tau is committed tokens per target forward, bonus token included, pooled over rounds, with its "
    "95 % bootstrap interval over prompts. Loop-free leaves out rounds that start inside a loop, where all that copies "
    "is right. The rate at position i is the share of the drafts at i that were accepted, of those whose "
    "forerunners were."
)


def section(groups: Sequence[Group]) -> Section | None:
    """All groups, one after the other."""
    blocks: list[Block] = [Paragraph(_INTRO)]
    for index, group in enumerate((g for g in groups if g.domains(stretched=False)), 1):
        blocks += _blocks(group, f"acceptance-{index}")
    return Section(anchor="acceptance", title="Acceptance", blocks=tuple(blocks)) if len(blocks) > 1 else None


def _blocks(group: Group, name: str) -> list[Block]:
    domains = group.domains(stretched=False)
    blocks: list[Block] = [
        Heading(group.title),
        Chart(
            name=name,
            caption="Acceptance length tau by drafter and domain. Bars: 95 % bootstrap intervals over prompts.",
            panels=tuple(_dots(domain, rows) for domain, rows in domains.items()),
        ),
        _taus(group, domains),
    ]
    if differences := _differences(group):
        blocks.append(differences)
    if by_position := _positions(domains):
        blocks.append(
            Chart(
                name=f"{name}-positions",
                caption="Acceptance rate by draft position, given that all drafts before it were accepted. Positions "
                f"judged fewer than {MIN_JUDGED} times are left out.",
                panels=by_position,
            )
        )
    blocks.append(_details(domains))
    if not group.is_timed:
        blocks.append(_memory(group))
    return blocks


def _dots(domain: str, rows: Rows) -> Panel:
    taus = [Point(row.tau, i, *row.tau_bounds) for i, (_, row) in enumerate(rows)]
    free = [Point(row.tau_loop_free, i) for i, (_, row) in enumerate(rows) if row.tau_loop_free is not None]
    return Panel(
        title=domain,
        x_label="tau (tokens per target forward)",
        names=tuple(entry.label for entry, _ in rows),
        series=(
            Series(label="tau", points=tuple(taus), style=0),
            Series(label="tau, loop-free", points=tuple(free), style=1),
        ),
        reference=1.0,
    )


def _taus(group: Group, domains: dict[str, Rows]) -> Table:
    by_entry = [
        (entry, [next((row for e, row in rows if e is entry), None) for rows in domains.values()])
        for entry in group.entries
    ]
    columns = ["<drafter"]
    for domain in domains:
        columns += [f"{domain}: tau [95 %]", f"{domain}: loop-free"]
    columns += ["mean tau", "mean loop-free", "#runs"]
    return table(
        "Tau by domain; the mean counts every domain alike",
        columns,
        [(e.label, *(cell for row in rows for cell in _cells(row)), *_means(rows), numbers(e.runs))
         for e, rows in by_entry if any(rows)],
    )  # fmt: skip


def _cells(row: BenchRow | None) -> tuple[str, str]:
    if row is None:
        return NONE, NONE
    return interval(row.tau, *row.tau_bounds), number(row.tau_loop_free)


def _means(rows: Sequence[BenchRow | None]) -> tuple[str, str]:
    """Means over domains, where there are several and the drafter was measured on all of them."""
    taus = [row.tau for row in rows if row is not None]
    free = [row.tau_loop_free for row in rows if row is not None and row.tau_loop_free is not None]
    whole = len(rows) > 1
    return (
        number(mean_over_domains(taus)) if whole and len(taus) == len(rows) else NONE,
        number(mean_over_domains(free)) if whole and len(free) == len(rows) else NONE,
    )


def _differences(group: Group) -> Table | None:
    """Paired differences as the runs hold them."""
    places = group.places(stretched=False)
    found: dict[tuple[str, str], dict[str, str]] = {}
    runs: dict[tuple[str, str], list[int]] = {}
    for run in group.runs:
        assert isinstance(run.line, Bench)
        prompts = {row.domain: row.prompts_sha256 for row in run.line.results if row.context is None}
        for one in run.line.differences:
            if one.context is None and one.domain in prompts:
                pair = group.label(run.number, one.drafter), group.label(run.number, one.against)
                cell = interval(one.tau_difference, *one.interval, "{:+.3f}", "{:+.2f}")
                found.setdefault(pair, {})[places[one.domain, prompts[one.domain]]] = cell
                runs.setdefault(pair, []).append(run.number)
    if not found:
        return None
    return table(
        "Paired differences of tau [95 %]",
        ["<drafter", "<against", *places.values(), "#runs"],
        [
            (*pair, *(cells.get(label, NONE) for label in places.values()), numbers(runs[pair]))
            for pair, cells in found.items()
        ],
    )


def _positions(domains: dict[str, Rows]) -> tuple[Panel, ...]:
    """Lines of drafters by domain, or of domains by drafter where the drafters are too many for one panel."""
    triples = [
        (entry.label, domain, [Point(i, rate) for i, (rate, judged) in enumerate(_judged(row), 1) if judged])
        for domain, rows in domains.items()
        for entry, row in rows
    ]
    drafters = list(dict.fromkeys(drafter for drafter, _, _ in triples))
    if len(drafters) > MOST_LINES:
        triples = [(domain, drafter, points) for drafter, domain, points in triples]
    lines = list(dict.fromkeys(line for line, _, _ in triples))
    titles = dict.fromkeys(title for _, title, points in triples if points)
    return tuple(
        Panel(
            title=title,
            x_label="draft position",
            y_label="acceptance rate",
            limit=1.0,
            series=tuple(
                Series(label=line, points=tuple(points), style=lines.index(line))
                for line, of, points in triples
                if of == title and points
            ),
        )
        for title in titles
    )


def _judged(row: BenchRow) -> list[tuple[float, bool]]:
    """Rate by position, and whether it was judged often enough."""
    pairs = zip(row.acceptance_by_position, row.num_judged_by_position, strict=True)
    return [(rate, judged >= MIN_JUDGED) for rate, judged in pairs]


def _details(domains: dict[str, Rows]) -> Table:
    rows = [(domain, entry, row) for domain, found in domains.items() for entry, row in found]
    most = max(len(row.acceptance_by_position) for _, _, row in rows)
    return table(
        "Rounds, and acceptance rate by position (how many were judged)",
        ["<domain", "<drafter", "prompts", "tokens", "rounds", "in loops", "tau, mean of requests",
         *(f"position {i + 1}" for i in range(most))],
        [
            (domain, entry.label, count(row.num_prompts), count(row.num_tokens), count(row.num_rounds),
             f"{row.loop_share:.1%}", number(row.tau_mean_of_requests), *_by_position(row, most))
            for domain, entry, row in rows
        ],
        is_detail=True,
    )  # fmt: skip


def _by_position(row: BenchRow, most: int) -> list[str]:
    pairs = zip(row.acceptance_by_position, row.num_judged_by_position, strict=True)
    cells = [f"{rate:.3f} ({count(judged)})" for rate, judged in pairs]
    return cells + [NONE] * (most - len(cells))


def _memory(group: Group) -> Table:
    return table(
        "Memory of the drafters",
        ["<drafter", "fixed state, bytes", "growing, bytes per token", "most held by a request, bytes"],
        [
            (
                entry.label,
                count(max(row.state_bytes for row in entry.rows.values())),
                count(max(row.kv_bytes_per_token for row in entry.rows.values())),
                count(max(row.measured_bytes for row in entry.rows.values())),
            )
            for entry in group.entries
        ],
    )
