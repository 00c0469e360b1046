"""From the options of a command to a loaded target and an engine; shared by `generate` and `chat`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyflash.cli.loading import load_target

if TYPE_CHECKING:
    from hyflash.api import LoadedTarget
    from hyflash.core import TargetOptions
    from hyflash.engine.decode import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A target with an engine for one request at a time, and what a user should know about the pair."""

    loaded: LoadedTarget
    engine: Engine
    target: str
    drafter: str
    warnings: list[str]


def open_session(
    target: str,
    drafter: str,
    *,
    options: Sequence[str],
    how: TargetOptions,
    length: str,
    num_draft_tokens: int | None,
    offload_below: int | None,
    exact: str,
    thinking: bool | None,
    quiet: bool,
) -> Session:
    """Load everything. Raises UserError."""
    from hyflash import api

    loaded = load_target(target, how, quiet=quiet)
    made = api.load_drafter(drafter, loaded, options=options)
    return Session(
        loaded=loaded,
        engine=api.make_engine(
            loaded,
            made,
            length=length,
            num_draft_tokens=num_draft_tokens,
            exact=exact,
            max_rows=1,
            offload_below=offload_below,
        ),
        target=target,
        drafter=drafter,
        warnings=[
            *api.drafter_warnings(drafter, loaded, thinking=thinking),
            *api.offload_warnings(made, offload_below),
        ],
    )


def plain_engine(session: Session, *, exact: str) -> Engine:
    """Plain decoding over the same target."""
    from hyflash import api

    return api.make_engine(session.loaded, None, exact=exact, max_rows=1)
