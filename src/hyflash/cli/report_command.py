"""`hyflash report`: result files as tables, plots and one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyflash.cli import flags
from hyflash.cli import report as show
from hyflash.errors import UserError, nearest


def report(
    files: Annotated[list[Path], typer.Argument(help="Result files, JSON or JSONL.", show_default=False)],
    *,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the report: new, empty, or with an earlier report, which is replaced."),
    ],
    format: Annotated[
        str, typer.Option(metavar="md,png,html", help="What to write; md alone needs no matplotlib.")
    ] = "md,png,html",
    json: flags.Json = False,
) -> None:
    """Turn results of `bench` and of the benchmark scripts into tables, plots and one HTML page.

    Files and lines are merged, one section for each kind of result.

    \b
    Examples:
      hyflash report results.jsonl --out report
      hyflash report benchmarks/results/*.jsonl --out report
      hyflash report results.jsonl --out report --format md
    """
    from hyflash.bench.report import make

    formats = list(dict.fromkeys(part.strip() for part in format.split(",")))
    for one in formats:
        if one not in make.FORMATS:
            raise UserError(
                f"format {one!r} is none; expected some of {','.join(make.FORMATS)}.{nearest(one, make.FORMATS)}"
            )
    make.check_folder(out)
    written = make.write(make.render(files, formats), out)
    if json:
        show.print_json({"files": [str(path) for path in written]})
    else:
        for path in written:
            typer.echo(str(path))
