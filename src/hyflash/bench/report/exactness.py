"""The section on exactness: how many texts were compared with plain decoding, and every one that differed.

In: runs of the exactness sweeps. Out: a section, or None without such runs. Counts add up over runs; forks stand one by
one, since a single one breaks the promise.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyflash.bench.report.lines import Exactness, Run, SweepRow
from hyflash.bench.report.page import Block, Paragraph, Section, count, numbers, table

_INTRO = (
    "Texts decoded with drafters, token for token against plain decoding, at several widths (rows of a verify forward) "
    "and batches, greedy and sampled. A recheck computes a near tie again alone; a fork is a text that differs."
)
Rows = list[tuple[Run, SweepRow]]


def section(runs: Sequence[Run]) -> Section | None:
    """By model and by drafter."""
    rows = [(run, row) for run in runs if isinstance(run.line, Exactness) for row in run.line.results]
    if not rows:
        return None
    num_texts, num_forks = sum(row.num_texts for _, row in rows), sum(len(row.forks) for _, row in rows)
    verdict = "all are identical to plain decoding" if not num_forks else f"{count(num_forks)} differ"
    told = f"{count(len(rows))} settings, {count(num_texts)} texts, {count(_tokens(rows))} tokens: {verdict}."
    blocks: list[Block] = [Paragraph(_INTRO), Paragraph(told)]
    columns = ["settings", "texts", "tokens", "rechecks", "forks", "<widths", "<batches"]
    by_model: dict[str, Rows] = {}
    by_drafter: dict[tuple[str, str], Rows] = {}
    for run, row in rows:
        model = _model(run, row)
        by_model.setdefault(model, []).append((run, row))
        by_drafter.setdefault((model, row.drafter), []).append((run, row))
    blocks += [
        table(
            "By model", ["<model", *columns, "#runs"], [(model, *_cells(found)) for model, found in by_model.items()]
        ),
        table(
            "By model and drafter",
            ["<model", "<drafter", *columns, "#runs"],
            [(*key, *_cells(found)) for key, found in by_drafter.items()],
            is_detail=True,
        ),
    ]
    forks = [
        (
            _model(run, row),
            row.drafter,
            str(row.width),
            str(row.batch),
            str(fork.prompt),
            str(fork.index),
            str(run.number),
        )
        for run, row in rows
        for fork in row.forks
    ]
    if forks:
        columns = ["<model", "<drafter", "width", "batch", "prompt", "token", "#runs"]
        blocks.append(table("Texts that differ", columns, forks))
    return Section(anchor="exactness", title="Exactness", blocks=tuple(blocks))


def _model(run: Run, row: SweepRow) -> str:
    if row.family is not None:
        return f"tiny {row.family}"
    assert isinstance(run.line, Exactness)
    return run.line.target or "unknown"


def _cells(rows: Rows) -> tuple[str, ...]:
    return (
        count(len(rows)),
        count(sum(row.num_texts for _, row in rows)),
        count(_tokens(rows)),
        count(sum(row.num_rechecks for _, row in rows)),
        count(sum(len(row.forks) for _, row in rows)),
        numbers(row.width for _, row in rows),
        numbers(row.batch for _, row in rows),
        numbers(run.number for run, _ in rows),
    )


def _tokens(rows: Rows) -> int:
    return sum(row.num_tokens for _, row in rows)
