"""From result files to the files of a report, and those into a folder, all or none.

In: paths of result files, formats, a folder. Out: `report.md`, `report.html` and `plots/*.png`. The same input gives
the same bytes. A folder that holds an earlier report has it replaced; one that holds anything else is left alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import hyflash
from hyflash.bench.report import (
    acceptance,
    costs,
    exactness,
    groups,
    html,
    lengths,
    lines,
    markdown,
    plots,
    provenance,
    speed,
)
from hyflash.bench.report.lines import Run
from hyflash.bench.report.page import MARK, Report
from hyflash.errors import UserError

FORMATS = ("md", "png", "html")
PLOTS = "plots"
_MARK_WITHIN = 600
"""Bytes at a file's beginning where the mark stands."""


def gather(runs: Sequence[Run]) -> Report:
    """What the runs have to say, one section for each kind of result."""
    grouped = groups.group(runs)
    found = (
        acceptance.section(grouped),
        speed.speed(grouped),
        speed.contexts(grouped),
        costs.costs(runs),
        costs.passes(runs),
        lengths.section(runs),
        exactness.section(runs),
        costs.perplexities(runs),
        provenance.section(runs),
    )
    targets = list(dict.fromkeys(run.line.target for run in runs if run.line.target))
    return Report(
        title=f"Results on {targets[0]}" if len(targets) == 1 else "Results",
        intro=f"From {len(runs)} line{'s' * (len(runs) != 1)} of result files, by hyflash {hyflash.__version__}. "
        "Numbers are those of the lines; where each comes from stands at the end.",
        sections=tuple(section for section in found if section is not None),
    )


def render(paths: Sequence[Path], formats: Collection[str]) -> dict[str, bytes]:
    """The report's files by their path inside its folder. Raises UserError for input that is no result."""
    report = gather(lines.read(paths))
    charts = report.charts
    if charts and {"png", "html"} & set(formats):
        plots.check()
    files: dict[str, bytes] = {}
    if "md" in formats:
        files["report.md"] = markdown.render(report, plots=PLOTS if "png" in formats else None).encode()
    if "html" in formats:
        drawn = {chart.name: plots.svgs(chart) for chart in charts}
        files["report.html"] = html.render(report, plots=drawn).encode()
    if "png" in formats:
        files |= {f"{PLOTS}/{chart.name}.png": plots.png(chart) for chart in charts}
    if not files:
        raise UserError("these results have nothing to plot; ask for --format md or html.")
    return files


def check_folder(out: Path) -> None:
    """Find out before any work whether a report may go there. Raises UserError."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file; expected a folder for --out.")
    foreign = [path for path in _inside(out) if path.is_symlink() or not _is_ours(path)]
    if foreign:
        raise UserError(
            f"{out} holds {foreign[0].relative_to(out)}, which is no part of a report; give --out a new or an empty "
            "folder, or one with an earlier report, which is replaced."
        )


def write(files: Mapping[str, bytes], out: Path) -> list[Path]:
    """Put the files into `out` in place of an earlier report; nothing is changed there before all are written."""
    check_folder(out)
    fresh = not out.exists()
    home = out.parent if fresh else out
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".report-", dir=home) as temporary:
        new = Path(temporary) / "new"  # made by mkdir, so with the user's usual permissions
        for name, content in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(content)
        if fresh:
            new.rename(out)
        else:
            old = [path for path in _inside(out) if temporary not in map(str, path.parents)]
            for name in files:
                (out / name).parent.mkdir(exist_ok=True)
                (new / name).replace(out / name)
            for path in old:
                if str(path.relative_to(out)) not in files:
                    path.unlink()
            if (out / PLOTS).is_dir() and not any((out / PLOTS).iterdir()):
                (out / PLOTS).rmdir()
    return [out / name for name in files]


def _inside(folder: Path) -> list[Path]:
    """All files below it, and empty folders that are not the one of the plots."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file() or (path.is_dir() and path != folder / PLOTS and not any(path.iterdir()))
    )


def _is_ours(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK.encode() in file.read(_MARK_WITHIN)
