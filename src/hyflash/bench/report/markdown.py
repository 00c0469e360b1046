"""A report as one Markdown file, for GitHub's dialect.

In: a `Report`, and the folder its plots lie in, if there are any. Out: text. Whatever Markdown or HTML could take for
markup is escaped, so that a name looks as it was given.
"""

from __future__ import annotations

import re

from hyflash.bench.report.page import MARK, Block, Chart, Heading, Listing, Paragraph, Report, Table

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~&$])")


def render(report: Report, *, plots: str | None) -> str:
    """The file's text."""
    out = [f"<!-- {MARK} -->", f"# {_escaped(report.title)}", _escaped(report.intro)]
    for section in report.sections:
        out.append(f"## {_escaped(section.title)}")
        out += [text for block in section.blocks if (text := _block(block, plots))]
    return "\n\n".join(out) + "\n"


def _block(block: Block, plots: str | None) -> str:
    match block:
        case Heading(text):
            return f"### {_escaped(text)}"
        case Paragraph(text):
            return _escaped(text)
        case Listing(lines):
            text = "\n".join(lines)
            fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
            return f"{fence}sh\n{text}\n{fence}"
        case Chart():
            caption = _escaped(block.caption)
            return f"![{caption}]({plots}/{block.name}.png)\n\n*{caption}*" if plots else ""
        case Table():
            return _table(block)


def _table(block: Table) -> str:
    head = "| " + " | ".join(_escaped(column.name) for column in block.columns) + " |"
    rule = "|" + "|".join("---" if column.is_text else "---:" for column in block.columns) + "|"
    rows = ["| " + " | ".join(map(_escaped, row)) + " |" for row in block.rows]
    return "\n".join([f"**{_escaped(block.caption)}**", "", head, rule, *rows])


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))
