"""The exceptions users can meet: `HyflashError` for faults of a run, `UserError` for mistakes a user can mend.

A message says what was found, what was expected and what to do; the CLI prints it on stderr and exits with 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HyflashError(Exception):
    """Anything hyflash raises on purpose."""


class UserError(HyflashError):
    """A mistake in the input that the user can mend; the message says how."""


class NonFiniteError(HyflashError):
    """The target (or a loss) produced NaN or infinity; the message names where."""


def reason(err: Exception) -> str:
    """The first line of what a library complains about, with the next one where the first only announces it."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(err).__name__} {text}".rstrip() if isinstance(err, LookupError) or not text else text


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known name closest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else ""
