"""What a report consists of, whatever it is written as: sections of paragraphs, tables, charts and listings.

In: strings as people read them, without markup. Out: frozen dataclasses that `markdown.py`, `html.py` and `plots.py`
render. A table cell that refers to runs holds their numbers (`1, 3`) in a column with `links`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MARK = "Written by hyflash report"
"""Stands near the beginning of every file of a report, which so can be told from others' files."""
NONE = "-"
"""Stands in a cell without a value."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    is_text: bool = False
    """Text stands left, numbers right."""
    links: bool = False
    """Cells are numbers of runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells row by row, one a column."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    anchors: tuple[str, ...] = ()
    """Of each row, where other tables lead; or none at all."""
    is_detail: bool = False
    """Of interest to few: a page may fold it."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value with its interval, where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points under one label; `style` picks colour, marker and line, and is the same for a label in all panels."""

    label: str
    points: tuple[Point, ...]
    style: int
    is_reference: bool = False
    """A line without markers that others are held against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes. With `names`, points lie on rows: y is the row from the top, x the value."""

    title: str
    x_label: str
    y_label: str = ""
    series: tuple[Series, ...]
    names: tuple[str, ...] = ()
    x_ticks: tuple[float, ...] = ()
    """Of a logarithmic x axis; none for a linear one."""
    limit: float | None = None
    """Highest y, where nothing can be above it."""
    reference: float | None = None
    """A value that others are held against, drawn as a thin line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Panels that belong together. `name` is its file name without the ending."""

    name: str
    caption: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class Heading:
    """Of a part of a section."""

    text: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Lines as they are, like commands."""

    lines: tuple[str, ...]


Block = Paragraph | Heading | Listing | Table | Chart


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One kind of result. `anchor` is its place in the page."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole."""

    title: str
    intro: str
    sections: tuple[Section, ...]

    @property
    def charts(self) -> list[Chart]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Chart)]


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    anchors: Sequence[str] = (),
    is_detail: bool = False,
) -> Table:
    """A table from a short notation of its columns: `<drafter` is text, `tau` a number, `#runs` numbers of runs.

    A column whose cells are all without a value is left out, which says as much.
    """
    made = [Column(c.lstrip("<#"), is_text=c.startswith("<"), links=c.startswith("#")) for c in columns]
    cells = [tuple(row) for row in rows]
    kept = [i for i in range(len(made)) if any(row[i] not in (NONE, "") for row in cells)]
    return Table(
        caption=caption,
        columns=tuple(made[i] for i in kept),
        rows=tuple(tuple(row[i] for i in kept) for row in cells),
        anchors=tuple(anchors),
        is_detail=is_detail,
    )


def number(value: float | None, form: str = "{:.3f}") -> str:
    """The value in this form, or the mark for none."""
    return NONE if value is None else form.format(value)


def interval(
    value: float | None, low: float | None, high: float | None, form: str = "{:.3f}", bounds: str = "{:.2f}"
) -> str:
    """A value and its interval: `1.862 [1.68, 2.08]`."""
    if value is None or low is None or high is None:
        return number(value, form)
    return f"{form.format(value)} [{bounds.format(low)}, {bounds.format(high)}]"


def count(value: int) -> str:
    """A whole number with thousands apart."""
    return f"{value:,}"


def numbers(values: Iterable[int]) -> str:
    """Whole numbers that occur, ascending, once each: `1, 2, 4`."""
    return ", ".join(map(str, sorted(set(values))))
