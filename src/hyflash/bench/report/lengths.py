"""The section on length policies: what they reach on replayed texts, against the best fixed draft length.

In: runs of `length_policies.py`. Out: a section, or None without such runs. Each run has a table of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyflash.bench.report.lines import LengthPolicies, LengthTrace, Run
from hyflash.bench.report.page import Block, Heading, Paragraph, Section, number, table

_INTRO = (
    "Tokens per second against the fixed draft length that is best on the whole trace, in per cent; `phases` is what "
    "knowing the best length of each phase of a trace would bring. Times are of rounds as they were measured, by width."
)


def section(runs: Sequence[Run]) -> Section | None:
    """One table a run."""
    found = [(run, run.line) for run in runs if isinstance(run.line, LengthPolicies)]
    if not found:
        return None
    blocks: list[Block] = [Paragraph(_INTRO)]
    for run, line in found:
        names = list(dict.fromkeys(name for row in line.results for name in row.policies))
        told = ", ".join(f"{key} {value}" for key, value in line.settings.items() if key not in ("json", "target"))
        blocks += [
            Heading(f"{line.target} (run {run.number})"),
            Paragraph(f"Settings: {told}."),
            table(
                "Length policies, per cent",
                ["<trace", "best", "tokens/s", "phases", *names],
                [_cells(row, names) for row in line.results],
            ),
        ]
    return Section(anchor="lengths", title="Draft lengths", blocks=tuple(blocks))


def _cells(row: LengthTrace, names: Sequence[str]) -> tuple[str, ...]:
    shares = [row.policies[name].over_best_fixed if name in row.policies else None for name in names]
    return (
        row.trace,
        str(row.best_fixed),
        number(max(row.fixed_tokens_per_sec), "{:.1f}"),
        *(_per_cent(share) for share in (row.best_of_phases_over_best_fixed, *shares)),
    )


def _per_cent(share: float | None) -> str:
    return number(None if share is None else 100 * share - 100, "{:+.1f}")
