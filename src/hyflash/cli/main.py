"""The `hyflash` command: gathers the commands and turns every expected failure into one sentence and an exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import hyflash
from hyflash.cli import bench, calibrate, chat, data, generate, inspect, report_command, train
from hyflash.errors import HyflashError

# typer brings its own click or uses the separate package, by version; the base of BadParameter is right in both.
_UsageError = typer.BadParameter.__bases__[0]

_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
"""How torch says it, on different devices."""

app = typer.Typer(
    name="hyflash",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("pull")(inspect.pull)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("calibrate")(calibrate.calibrate)
app.command("bench")(bench.bench)
app.command("report")(report_command.report)
app.command("drafters")(inspect.drafters)
app.command("doctor")(inspect.doctor)
app.command("env")(inspect.env)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Language models answer faster on your own machine, token for token the same.

    \b
    Examples:
      hyflash pull smollm2-135m
      hyflash generate --compare "Why is the sky blue?"
      hyflash chat
      hyflash doctor -d ./my-drafter
      hyflash bench -d lookup -d ./my-drafter --prompts demo
    """
    if version:
        typer.echo(f"hyflash {hyflash.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 done, 1 a mistake or fault with a sentence, 130 Ctrl-C."""
    calm_libraries()
    _mend_streams()
    try:
        with _tidy_when_terminated(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = app(args=None if argv is None else list(argv), standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted.")
        return 130
    except typer.Exit as stop:
        return stop.exit_code
    except SystemExit as stop:  # typer's own way out when the reader goes away, and ours at SIGTERM
        return stop.code if isinstance(stop.code, int) else 1
    except BrokenPipeError:
        # The reader went away (`| head`): nothing more to say, and the interpreter must not flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as err:
        sentence = explain(err)
        if sentence is None:
            raise
        _say(f"error: {sentence}")
        return 1


def calm_libraries() -> None:
    """Keep transformers' progress bars and notes off stderr, unless the user wants them. Before it is imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")


def _mend_streams() -> None:
    """Streams that the caller closed (`<&-`) are None in Python; and no text may fail for stdout's encoding."""
    nothing = Path(os.devnull)
    sys.stdin = sys.stdin or nothing.open(encoding="utf-8")
    sys.stdout = sys.stdout or nothing.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or nothing.open("w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def _tidy_when_terminated() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that temporary files go and child processes end."""

    def leave(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    try:
        old = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: whoever owns it decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def explain(err: BaseException) -> str | None:
    """One sentence for a failure we expect to meet, or None for a fault of ours (which keeps its traceback)."""
    if isinstance(err, _UsageError):
        return _usage(err)
    if isinstance(err, HyflashError):
        return str(err)
    if isinstance(err, OSError):
        if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return "the disk is full; free some space and run it again (finished work was kept)."
        return f"{err.filename}: {err.strerror}." if err.filename and err.strerror else f"{err}."
    if isinstance(err, (json.JSONDecodeError, UnicodeDecodeError)):
        return f"a file is not valid JSON or UTF-8: {err}."
    if isinstance(err, MemoryError) or any(words in str(err) for words in _NO_MEMORY):
        return "out of memory; use a smaller batch, context or model."
    if type(err).__name__ == "SafetensorError":  # named, not imported: safetensors is loaded only where needed
        return f"a weight file is damaged or cut off: {err}."
    return None


def _usage(err: Any) -> str:
    """A mistake on the command line itself, with the command whose help explains it."""
    where = err.ctx.command_path if err.ctx is not None else "hyflash"
    message = " ".join(str(err.format_message()).split()).rstrip(".")
    return f"{message} (see `{where} --help`)."


def _show_warning(message: Warning | str, *_where: Any, **_how: Any) -> None:
    _say(f"warning: {message}")


def _say(sentence: str) -> None:
    typer.echo(sentence, err=True)
