"""Charts drawn with matplotlib: a PNG a chart, and an SVG a panel for pages that adapt to their reader.

In: `Chart`s. Out: bytes, the same for the same chart: no dates, no random ids. Series differ in colour, marker and line
alike; the colours are Okabe and Ito's, which stay apart for colour-blind eyes, darkened (lightened) where they were too
faint on white (on black). In the SVG colours are CSS variables, so the page decides between the two.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from hyflash.bench.report.page import MARK, Chart, Panel, Point, Series
from hyflash.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT = ("#0072b2", "#d55e00", "#00805e", "#b0508c", "#a06a00", "#2b8cc4")
DARK = ("#4aa8e8", "#f08040", "#22c498", "#e39ac7", "#f0b429", "#9ad6f7")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
_INK, _FAINT, _PAPER = "#1b1b1c", "#c9ccd1", "#ffffff"
_WIDTH, _HEIGHT, _ROW = 4.4, 3.1, 0.42
"""Inches of a panel, and of a row of names."""
_COLUMNS = 3
_LABEL_CHARS = 58
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.parse_math": False,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 3.2,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "figure.constrained_layout.w_pad": 0.1,
    "svg.fonttype": "none",
    "path.simplify": False,
}


def check() -> None:
    """Raises UserError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as err:
        raise UserError(
            "plots need the package `matplotlib`; run: pip install 'hyflash[report]', or ask for --format md alone."
        ) from err


def png(chart: Chart) -> bytes:
    """The chart's panels side by side, up to three in a row."""
    with _drawing() as new:
        figure = _figure(new, chart.panels, columns=_COLUMNS, scale=_scale(chart.panels))
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=150, facecolor=_PAPER, metadata={"Software": MARK})
        return out.getvalue()


def svgs(chart: Chart) -> list[str]:
    """An SVG element a panel, for use inside of a page; `--s0` ... are the colours of series, `color` that of text."""
    scale = _scale(chart.panels)
    return [_svg(panel, f"{chart.name}-{i}", scale) for i, panel in enumerate(chart.panels)]


def _svg(panel: Panel, name: str, scale: tuple[float, float]) -> str:
    with _drawing(salt=name) as new:
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure = _figure(new, [panel], columns=1, scale=scale)
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :].rstrip()
    text = re.sub(r'\b(id=")', rf"\g<1>{name}-", text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    for i, colour in enumerate(LIGHT):
        text = text.replace(colour, f"var(--s{i})")
    for colour, variable in ((_INK, "currentColor"), (_FAINT, "var(--line)"), (_PAPER, "var(--bg)")):
        text = text.replace(colour, variable)
    label = escape(", ".join([panel.title, *(series.label for series in panel.series)]))
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


@contextmanager
def _drawing(salt: str = "") -> Iterator[type[Figure]]:
    """Matplotlib's figures under our style alone, whatever the user's settings; no window, no global figure."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, "svg.hashsalt": salt})
        yield Figure


def _scale(panels: Sequence[Panel]) -> tuple[float, float]:
    """Lowest and highest value of all panels: one scale, so that they can be compared."""
    values = [v for panel in panels for s in panel.series for p in s.points for v in _values(p, panel)]
    values += [panel.reference for panel in panels if panel.reference is not None]
    return min(values, default=0.0), max(values, default=1.0)


def _values(point: Point, panel: Panel) -> list[float]:
    return [v for v in (point.x if panel.names else point.y, point.low, point.high) if v is not None]


def _figure(new: type[Figure], panels: Sequence[Panel], *, columns: int, scale: tuple[float, float]) -> Figure:
    """Panels in rows; one legend below them all."""
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    rows = max(len(panel.names) for panel in panels)
    legend = _legend(panels)
    height = max(_HEIGHT, 0.9 + _ROW * rows) if rows else _HEIGHT
    per_line = 1 if columns == 1 else columns
    legend_lines = -(-len(legend) // per_line)
    figure = new(figsize=(_WIDTH * columns, height * lines + 0.2 * legend_lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax, panel in zip(axes, panels, strict=False):
        (_dots if panel.names else _curves)(ax, panel, scale)
        ax.set_title(_shortened(panel.title, 46), loc="left")
        ax.set_xlabel(panel.x_label)
        ax.set_ylabel(panel.y_label)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    if legend:
        handles = [_handle(series, has_rows=rows > 0) for series in legend]
        figure.legend(handles=handles, loc="outside lower left", ncols=per_line)
    return figure


def _legend(panels: Sequence[Panel]) -> list[Series]:
    """Each label once; none for a single one, which the axis names already."""
    found = {series.label: series for panel in panels for series in panel.series if series.points}
    single_rows = len(found) == 1 and panels[0].names
    return [] if single_rows else list(found.values())


def _look(series: Series) -> dict[str, Any]:
    colour = LIGHT[series.style % len(LIGHT)]
    if series.is_reference:
        return {"color": colour, "linestyle": (0, (2, 2)), "linewidth": 1.2, "alpha": 0.9}
    return {
        "color": colour,
        "marker": _MARKERS[series.style % len(_MARKERS)],
        "linestyle": _LINES[series.style % len(_LINES)],
    }


def _handle(series: Series, *, has_rows: bool) -> Any:
    from matplotlib.lines import Line2D

    look = {**_look(series), **({"linestyle": "none"} if has_rows else {})}
    if has_rows and series.style:
        look["markerfacecolor"] = "none"
    return Line2D([], [], label=_shortened(series.label, _LABEL_CHARS), **look)


def _curves(ax: Axes, panel: Panel, scale: tuple[float, float]) -> None:
    for series in panel.series:
        xs, ys = [p.x for p in series.points], [p.y for p in series.points]
        look = _look(series)
        ax.plot(xs, ys, **look)
        if any(_has_interval(p) for p in series.points):
            ax.errorbar(xs, ys, yerr=_errors(series.points), fmt="none", ecolor=look["color"], elinewidth=1, capsize=3)
    if panel.reference is not None:
        ax.axhline(panel.reference, color=_INK, linewidth=0.8)
    if panel.x_ticks and panel.x_ticks[0] > 0:
        from matplotlib.ticker import NullLocator

        ax.set_xscale("log", base=2)
        ticks = _apart(panel.x_ticks)
        ax.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlim(panel.x_ticks[0] / 1.25, panel.x_ticks[-1] * 1.25)
    else:
        from matplotlib.ticker import MaxNLocator

        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(0, 1.06 * (panel.limit or scale[1] or 1.0))


def _dots(ax: Axes, panel: Panel, scale: tuple[float, float]) -> None:
    """Points on rows, each below its name, which so has the whole width."""
    for series in panel.series:
        look = {**_look(series), "linestyle": "none"}
        if series.style:
            look["markerfacecolor"] = "none"
        xs, ys = [p.x for p in series.points], [p.y for p in series.points]
        bars = [(p.low, p.high, p.y) for p in series.points if p.low is not None and p.high is not None]
        for low, high, y in bars:
            ax.plot([low, high], [y, y], color=look["color"], linewidth=1.4, marker="|", markersize=6)
        ax.plot(xs, ys, **look)
    paper = {"facecolor": _PAPER, "edgecolor": "none", "pad": 1.0}  # lines do not run through a name
    for y, name in enumerate(panel.names):
        text = _shortened(name, _LABEL_CHARS)
        ax.text(0.0, y - 0.4, text, transform=ax.get_yaxis_transform(), fontsize=8, va="center", bbox=paper)
    if panel.reference is not None:
        ax.axvline(panel.reference, color=_INK, linewidth=0.8)
    room = 0.05 * (scale[1] - scale[0] or 1.0)
    ax.set_xlim(scale[0] - room, scale[1] + room)
    ax.set_ylim(len(panel.names) - 0.6, -0.75)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)


def _has_interval(point: Point) -> bool:
    return point.low is not None and point.high is not None


def _apart(ticks: Sequence[float]) -> list[float]:
    """Ticks of a logarithmic axis without those whose labels would touch the one before."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or tick >= 1.3 * kept[-1]:
            kept.append(tick)
    return kept


def _errors(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Lengths of the bars below and above."""
    return (
        [max(0.0, p.y - p.low) if p.low is not None else 0.0 for p in points],
        [max(0.0, p.high - p.y) if p.high is not None else 0.0 for p in points],
    )


def _shortened(text: str, most: int) -> str:
    """Without its middle where it is too long: names differ at their ends."""
    if len(text) <= most:
        return text
    head = (most - 1) // 3
    return f"{text[:head]}…{text[-(most - 1 - head) :]}"
