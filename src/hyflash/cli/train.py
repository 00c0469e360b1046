"""`hyflash train`: a drafter from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyflash.cli import flags, report
from hyflash.cli.loading import progress


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (TOML).")],
    *,
    out: Annotated[Path, typer.Option(help="Directory of the run: checkpoints, metrics, the best drafter.")],
    option: Annotated[
        list[str] | None, typer.Option("-o", "--option", metavar="TABLE.KEY=VALUE", help="Override; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Train a drafter; Ctrl-C saves first, --resume goes on.

    \b
    Examples:
      hyflash train recipes/smol-hyflash.toml --out runs/first
      hyflash train recipes/smol-hyflash.toml --out runs/short -o train.max_sec=600
    """
    from hyflash.train.trainer import run

    with progress(quiet) as step:
        best = run(recipe, out_dir=out, overrides=option or (), resume=resume, quiet=quiet, report=step)
    if json:
        from hyflash.checkpoint import read_card

        report.print_json({"best": str(best), "card": read_card(best)})
    else:
        typer.echo(str(best))
