"""Two bench objects side by side: first what was not equal about the runs, then what came out differently.

In: the JSON objects of two runs, or a file of them. Out: lines of text. Numbers of unequal runs are still shown,
but never without the list of differences above them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyflash.bench.report import lines
from hyflash.errors import UserError

_IGNORED = ("time_utc", "argv")
"""Provenance that differs between any two runs and changes no number."""


def last_object(path: Path) -> dict[str, Any]:
    """The last line of a results file. Raises UserError when it is no object of a bench run."""
    try:
        value = json.loads([line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][-1])
    except OSError as err:
        raise UserError(f"{path}: cannot be read ({err.strerror or err}); expected a file of `bench --out`.") from err
    except (ValueError, IndexError) as err:
        raise UserError(f"{path}: its last line is no JSON object; expected a file of `bench --out`.") from err
    if not isinstance(lines.recognise(value, str(path)), lines.Bench):
        raise UserError(f"{path}: its last line is of no run of drafters; expected a file of `bench --out`.")
    found: dict[str, Any] = value
    return found


def unequal(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What was not equal about two runs: target, settings, provenance; empty when they are comparable."""
    before, after = (
        dict(_flat({key: run.get(key) for key in ("target", "settings", "provenance")})) for run in (old, new)
    )
    return [
        f"{key} was {before.get(key)!r}, is {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key.rpartition(".")[2] not in _IGNORED
    ]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """How tau and speed of each drafter, domain and context that both runs have went from old to new."""
    before = {_key(row): row for row in old["results"]}
    out = []
    for row in new["results"]:
        was = before.get(_key(row))
        if was is None:
            continue
        line = f"{row['drafter']} {row['domain']} {row['context'] or ''}".rstrip()
        line += f": tau {was['tau']:.3f} -> {row['tau']:.3f}"
        if was["tokens_per_sec"] and row["tokens_per_sec"]:
            change = row["tokens_per_sec"] / was["tokens_per_sec"] - 1
            line += f", tok/s {was['tokens_per_sec']:.1f} -> {row['tokens_per_sec']:.1f} ({change:+.1%})"
        out.append(line)
    return out


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["drafter"], row["domain"], row["context"]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flat(one, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value
