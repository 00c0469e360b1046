"""A report as one HTML page that needs nothing else: styles and plots stand in it, and there is no script.

In: a `Report` and the plots' SVG, one a panel. Out: text. Panels and tables fit a phone: panels go below each other, a
wide table scrolls in its own frame with its first column in place. Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from hyflash.bench.report.page import MARK, Block, Chart, Column, Heading, Listing, Paragraph, Report, Section, Table
from hyflash.bench.report.plots import DARK, LIGHT

_STYLE = """
:root { color-scheme: light dark; --fg: #1b1b1b; --bg: #ffffff; --soft: #f3f4f6; --line: #cfd3d8; --mute: #5a6068;
  --link: #0b5cad; %s }
@media (prefers-color-scheme: dark) { :root { --fg: #e8e8e8; --bg: #14161a; --soft: #1f2329; --line: #3b414a;
  --mute: #a3abb5; --link: #79b8ff; %s } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; color: var(--fg); background: var(--bg);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { margin-top: 2rem; font-size: 1.05rem; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; list-style: none; }
figure { margin: 1rem 0; }
figcaption, caption, summary { color: var(--mute); font-size: .9rem; text-align: left; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%%), 1fr)); gap: .5rem; }
.panels svg { width: 100%%; height: auto; max-width: 30rem; color: var(--fg); }
.frame { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
caption { padding-bottom: .3rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  white-space: nowrap; }
th { background: var(--soft); white-space: normal; vertical-align: bottom; }
th.text, td.text { text-align: left; }
td.text { white-space: normal; min-width: 8rem; max-width: 34rem; overflow-wrap: anywhere; }
tr > :first-child { position: sticky; left: 0; background: var(--bg); }
thead tr > :first-child { background: var(--soft); }
@media (max-width: 40rem) { td.text { min-width: 5rem; max-width: 9rem; } }
tr:target td { background: var(--soft); }
pre { overflow-x: auto; padding: .8rem; background: var(--soft); font-size: .8rem; white-space: pre-wrap; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<!-- {mark} -->
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p>{intro}</p>
<nav aria-label="Sections"><ul>
{links}
</ul></nav>
<main>
{sections}
</main>
</body>
</html>
"""


def render(report: Report, *, plots: Mapping[str, Sequence[str]]) -> str:
    """The page; `plots` holds the SVG of each panel by the name of its chart."""
    light, dark = (" ".join(f"--s{i}: {c};" for i, c in enumerate(colours)) for colours in (LIGHT, DARK))
    return _PAGE.format(
        mark=MARK,
        style=_STYLE % (light, dark),
        title=escape(report.title),
        intro=escape(report.intro),
        links="\n".join(f'<li><a href="#{escape(s.anchor)}">{escape(s.title)}</a></li>' for s in report.sections),
        sections="\n".join(_section(section, plots) for section in report.sections),
    )


def _section(section: Section, plots: Mapping[str, Sequence[str]]) -> str:
    blocks = "\n".join(_block(block, plots) for block in section.blocks)
    return f'<section id="{escape(section.anchor)}">\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>'


def _block(block: Block, plots: Mapping[str, Sequence[str]]) -> str:
    match block:
        case Heading(text):
            return f"<h3>{escape(text)}</h3>"
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Listing(lines):
            text = "\n".join(lines)
            return f"<pre><code>{escape(text)}</code></pre>"
        case Chart():
            panels = "\n".join(plots[block.name])
            caption = f"<figcaption>{escape(block.caption)}</figcaption>"
            return f'<figure>\n<div class="panels">\n{panels}\n</div>\n{caption}\n</figure>'
        case Table():
            return _folded(block) if block.is_detail else _table(block)


def _folded(block: Table) -> str:
    return f"<details>\n<summary>{escape(block.caption)}</summary>\n{_table(block)}\n</details>"


def _table(block: Table) -> str:
    head = "".join(f'<th scope="col"{_text(column)}>{escape(column.name)}</th>' for column in block.columns)
    body = []
    for i, row in enumerate(block.rows):
        anchor = f' id="{escape(block.anchors[i])}"' if block.anchors else ""
        cells = "".join(
            f"<td{_text(column)}>{_links(cell) if column.links else escape(cell)}</td>"
            for column, cell in zip(block.columns, row, strict=True)
        )
        body.append(f"<tr{anchor}>{cells}</tr>")
    caption = "" if block.is_detail else f"<caption>{escape(block.caption)}</caption>"
    rows = "\n".join(body)
    return (
        f'<div class="frame" tabindex="0" role="region" aria-label="{escape(block.caption)}"><table>{caption}\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _text(column: Column) -> str:
    return ' class="text"' if column.is_text else ""


def _links(cell: str) -> str:
    """Numbers of runs as links to their rows of the closing section."""
    return re.sub(r"\d+", r'<a href="#run-\g<0>">\g<0></a>', escape(cell))
