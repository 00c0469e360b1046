"""Typed, frozen options: the base of every drafter config and recipe table.

In: a mapping (from TOML, JSON or `-o key=value`). Out: a validated object. Unknown keys are refused with
the nearest known name; a field's description is its help text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from hyflash.errors import UserError, nearest


class Options(BaseModel):
    """Frozen options; unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, where: str) -> Self:
        """Validate `values`; `where` names their origin in error messages. Raises UserError."""
        for key in values:
            if key not in cls.model_fields:
                known = ", ".join(sorted(cls.model_fields))
                raise UserError(f"{where}: unknown option {key!r}.{nearest(key, cls.model_fields)} Known: {known}.")
        try:
            parsed = cls.model_validate(dict(values))
        except ValidationError as err:
            first = err.errors()[0]
            name = ".".join(str(part) for part in first["loc"]) or "options"
            if first["type"] == "missing":
                raise UserError(f"{where}: {name} is missing; it has no default.") from err
            raise UserError(f"{where}: {name} is {first['input']!r}: {first['msg']}.") from err
        for name, value in parsed:
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, int) and abs(part) >= 2**63:  # no tensor has such a size
                    raise UserError(f"{where}: {name} is {part:.3g}; expected a number below 2**63.")
        return parsed

    @classmethod
    def describe(cls) -> list[dict[str, Any]]:
        """Name, type, default and help of each field, for `hyflash drafters --json`."""
        return [
            {
                "name": name,
                "type": str(info.annotation).removeprefix("<class '").removesuffix("'>"),
                "default": info.get_default(call_default_factory=True) if not info.is_required() else None,
                "help": info.description or "",
            }
            for name, info in cls.model_fields.items()
        ]


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split `key=value`; the value is read as JSON where it is JSON, else kept as text. Raises UserError."""
    key, sep, raw = text.partition("=")
    if not sep or not key.strip():
        raise UserError(f"option {text!r} is not of the form key=value.")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = raw
    return key.strip(), value


def apply_overrides(tables: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return `tables` with dotted overrides (`train.steps=200`) laid over them. Raises UserError."""
    out: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tables.items()}
    for assignment in assignments:
        key, value = parse_assignment(assignment)
        *path, last = key.split(".")
        node = out
        for part in path:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise UserError(f"option {assignment!r}: {part!r} is a value, not a table.")
            node = child
        node[last] = value
    return out
