"""Loading a target from the command line: progress of what takes long, and the line on the backend.

In: what `-t` names and `TargetOptions`. Out: `api.LoadedTarget`; all that is said goes to stderr.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hyflash import hub
from hyflash.cli import report

if TYPE_CHECKING:
    from hyflash.api import LoadedTarget
    from hyflash.core import TargetOptions

_PHASES = {
    "unpack": "unpacking",
    "check": "checking",
    "convert": "converting to dense weights (once, ~15 s)",
    "pack": "packing weights (once)",
}
_LONG_PACK_BYTES = 1 << 26
"""Fewer bytes are packed before anybody wonders."""


def load_target(spec: str, how: TargetOptions, *, quiet: bool) -> LoadedTarget:
    """Resolve and load a target and its tokenizer. Raises UserError."""
    from hyflash import api

    with progress(quiet) as step:
        loaded = api.load_target(spec, how, report=step)
    fallback(loaded.note, quiet=quiet)
    return loaded


def fallback(note: str, *, quiet: bool) -> None:
    """The line that says why the torch target serves, where there is one."""
    if note:
        report.say(f"note: {note}", quiet=quiet)


@contextmanager
def progress(quiet: bool) -> Iterator[hub.Progress]:
    """Progress on stderr: a bar on a terminal, a line per phase elsewhere, nothing where nothing takes long."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    seen: set[str] = set()
    bar = Progress(console=console, transient=True, disable=quiet or not console.is_terminal)
    task = bar.add_task("", total=None)

    def step(what: str, done: int, total: int) -> None:
        if what == "pack" and total < _LONG_PACK_BYTES:
            return
        if what not in seen:
            seen.add(what)
            if not console.is_terminal:
                report.say(f"{_PHASES[what]} …", quiet=quiet)
        bar.start()
        bar.update(task, description=_PHASES[what], completed=done, total=total)
        if done >= total:  # what follows may have a display of its own
            bar.stop()

    try:
        yield step
    finally:
        bar.stop()


@contextmanager
def counting(quiet: bool, what: str) -> Iterator[Callable[[int, int | None, str], None]]:
    """A bar on stderr while it is a terminal; called with (done, in all or None, what runs now)."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def step(done: int, total: int | None, now: str) -> None:
            bar.update(task, completed=done, total=total, description=now)

        yield step
