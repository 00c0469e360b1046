"""The sections on what forwards and draft passes cost, and on perplexity: milliseconds over width and context.

In: runs. Out: sections, or None without such runs. Each cost measurement stands alone: between two of them the machine
itself may have changed, as their facts show.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyflash.bench.report.lines import CostRow, Costs, DraftPass, PassRow, Perplexity, Run
from hyflash.bench.report.page import (
    Block,
    Chart,
    Heading,
    Panel,
    Paragraph,
    Point,
    Section,
    Series,
    count,
    number,
    table,
)

_COSTS = (
    "A forward of a given width (rows: the anchor and the draft tokens) after a context. Medians, with the fastest "
    "beside; c(q) is the median over that of the narrowest width. No forward of this model can be faster than its "
    "floor on this machine, but for weights that stay in a cache."
)
_PASSES = "A proposal, the commit of its tokens, and both, on torch and on the CPU kernels in turns."
_PERPLEXITY = "One model file in our engine and in llama.cpp on the same tokens: do both compute the same?"


def costs(runs: Sequence[Run]) -> Section | None:
    """Cost measurements one by one."""
    blocks: list[Block] = [Paragraph(_COSTS)]
    for run in runs:
        if isinstance(run.line, Costs):
            blocks += _blocks(run, run.line)
    return Section(anchor="costs", title="Costs of a forward", blocks=tuple(blocks)) if len(blocks) > 1 else None


def passes(runs: Sequence[Run]) -> Section | None:
    """Measurements of draft passes."""
    blocks: list[Block] = [Paragraph(_PASSES)]
    for run in runs:
        if isinstance(run.line, DraftPass):
            blocks += _pass_blocks(run, run.line)
    return Section(anchor="draft-passes", title="Draft passes", blocks=tuple(blocks)) if len(blocks) > 1 else None


def perplexities(runs: Sequence[Run]) -> Section | None:
    """All comparisons of perplexity in one table."""
    found = [(run, run.line) for run in runs if isinstance(run.line, Perplexity)]
    if not found:
        return None
    rows = [
        (
            line.model,
            count(len(line.texts)),
            number(line.perplexity.ours, "{:.4f}"),
            number(line.perplexity.llama_cpp, "{:.4f}"),
            number(line.per_cent_apart),
            str(run.number),
        )
        for run, line in found
    ]
    columns = ["<model", "texts", "ours", "llama.cpp", "apart, %", "#runs"]
    blocks = (Paragraph(_PERPLEXITY), table("Perplexity", columns, rows))
    return Section(anchor="perplexity", title="Perplexity", blocks=blocks)


def _blocks(run: Run, line: Costs) -> list[Block]:
    labels = list(dict.fromkeys(_label(row) for row in line.results))
    contexts = list(dict.fromkeys(row.context for row in line.results))
    blocks: list[Block] = [
        Heading(f"{line.target}, {line.threads} threads (run {run.number})"),
        Paragraph(_facts(line)),
        Chart(
            name=f"costs-{run.number}-ms",
            caption="Milliseconds of a forward by width: medians, down to the fastest; dashed: the floor.",
            panels=tuple(_times(line, context, labels) for context in contexts),
        ),
        Chart(
            name=f"costs-{run.number}-relative",
            caption="c(q): the median over that of the narrowest width. Flat is best.",
            panels=tuple(_relative(line, context, labels) for context in contexts),
        ),
        table(
            "Forwards",
            ["context", "<engine", "<weights", "width", "median, ms", "fastest, ms", "floor, ms", "over floor", "c(q)",
             "ms per row"],
            [_cells(row) for row in line.results],
        ),
        table(
            "Engines, and how far they are from the first on the same rows",
            ["<engine", "<weights", "<version", "<build", "same best token", "logits apart"],
            [
                (e.engine, e.weights, e.version, e.build, f"{e.same_best_token} of {e.rows}", f"{e.logit_error:.2%}")
                for e in line.engines
            ],
            is_detail=True,
        ),
    ]  # fmt: skip
    if line.prefill:
        rates = [(p, p.tokens_per_sec_median, p.tokens_per_sec_best) for p in line.prefill]
        blocks.append(
            table(
                "Reading a prompt",
                ["<engine", "<weights", "prompt, tokens", "median, tokens/s", "best, tokens/s"],
                [(p.engine, p.weights, count(p.tokens), f"{mid:.0f}", f"{best:.0f}") for p, mid, best in rates],
            )
        )
    return blocks


def _facts(line: Costs) -> str:
    facts = [
        f"Memory {line.bandwidth_gb_per_sec:.1f} GB/s",
        f"int8 {number(line.int8_gmac_per_sec, '{:.0f}')} GMAC/s",
        f"float32 {number(line.float32_gmac_per_sec, '{:.0f}')} GMAC/s",
        f"round trip between two threads {number(line.pingpong_ns, '{:.0f}')} ns",
        f"instructions {line.isa or 'unknown, without CPU kernels'}",
        f"{line.num_repeats} repeats",
    ]
    return "; ".join(facts) + "."


def _label(row: CostRow) -> str:
    return f"{row.engine} {row.weights}"


def _cells(row: CostRow) -> tuple[str, ...]:
    ms = row.ms_median
    return (
        count(row.context),
        row.engine,
        row.weights,
        str(row.width),
        *(f"{value:.2f}" for value in (ms, row.ms_min, row.floor_ms, ms / row.floor_ms, row.c, ms / row.width)),
    )


def _times(line: Costs, context: int, labels: Sequence[str]) -> Panel:
    rows = [row for row in line.results if row.context == context]
    measured = [
        Series(
            label=label,
            points=tuple(Point(r.width, r.ms_median, r.ms_min, r.ms_median) for r in rows if _label(r) == label),
            style=style,
        )
        for style, label in enumerate(labels)
        if any(_label(row) == label for row in rows)
    ]
    floors: dict[tuple[Point, ...], list[int]] = {}
    for style, label in enumerate(labels):
        if floor := tuple(Point(r.width, r.floor_ms) for r in rows if _label(r) == label):
            floors.setdefault(floor, []).append(style)
    named = [
        Series(
            label="floor" if len(floors) == 1 else f"floor of {', '.join(labels[style] for style in styles)}",
            points=points,
            style=styles[0],
            is_reference=True,
        )
        for points, styles in floors.items()
    ]
    return Panel(
        title=f"after {count(context)} tokens",
        x_label="width (rows)",
        y_label="ms",
        x_ticks=tuple(sorted({row.width for row in rows})),
        series=(*measured, *named),
    )


def _relative(line: Costs, context: int, labels: Sequence[str]) -> Panel:
    rows = [row for row in line.results if row.context == context]
    return Panel(
        title=f"after {count(context)} tokens",
        x_label="width (rows)",
        y_label="c(q)",
        x_ticks=tuple(sorted({row.width for row in rows})),
        series=tuple(
            Series(
                label=label, points=tuple(Point(r.width, r.c) for r in rows if _label(r) == label), style=style
            )
            for style, label in enumerate(labels)
            if any(_label(row) == label for row in rows)
        ),
        reference=1.0,
    )  # fmt: skip


def _pass_blocks(run: Run, line: DraftPass) -> list[Block]:
    paths = list(dict.fromkeys(row.path for row in line.results))
    series = tuple(
        Series(
            label=path,
            points=tuple(
                Point(r.context, r.pass_ms_median, r.pass_ms_min, r.pass_ms_median)
                for r in line.results
                if r.path == path
            ),
            style=style,
        )
        for style, path in enumerate(paths)
    )
    contexts = tuple(sorted({row.context for row in line.results}))
    panel = Panel(title="one draft pass", x_label="context (tokens)", y_label="ms", x_ticks=contexts, series=series)
    rows = [(row.path, count(row.context), *_parts(row)) for row in line.results]
    columns = [f"{part}, {kind}" for part in ("propose", "commit", "pass") for kind in ("median", "fastest")]
    told = ", ".join(f"{key} {value}" for key, value in line.settings.items() if key not in ("json", "contexts"))
    return [
        Heading(f"{line.target} (run {run.number})"),
        Paragraph(f"Settings: {told}."),
        Chart(
            name=f"draft-pass-{run.number}",
            caption="Milliseconds of a proposal and its commit by context: medians, down to the fastest.",
            panels=(panel,),
        ),
        table("Draft passes, milliseconds", ["<path", "context", *columns], rows),
    ]


def _parts(row: PassRow) -> tuple[str, ...]:
    parts = (
        *(row.propose_ms_median, row.propose_ms_min),
        *(row.commit_ms_median, row.commit_ms_min),
        *(row.pass_ms_median, row.pass_ms_min),
    )
    return tuple(number(ms) for ms in parts)
