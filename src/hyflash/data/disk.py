"""Atomic files: a name on disk always holds a whole file, and a full disk is a clear error.

In: bytes or JSON values. Out: files that appear under their name only when complete.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hyflash.errors import UserError

_LEFT = re.compile(r"\.(.+)\.(tmp|old)\d+")
"""Names beside their own that `write_atomic` and `new_directory` use, and nobody's `.bashrc.old`."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def clear_disk_errors(path: Path, kept: str) -> Iterator[None]:
    """Turn write faults of the block into a UserError that names `path` and says what is `kept` intact."""
    try:
        yield
    except OSError as err:
        if err.errno in _FULL:
            raise UserError(
                f"{path}: no space left on the disk ({err.strerror}); {kept}. Free space and run again."
            ) from err
        raise UserError(f"{path}: cannot be written ({err.strerror or err}); {kept}.") from err
    except SafetensorError as err:  # safetensors' own writer reports a full disk this way
        raise UserError(f"{path}: cannot be written ({err}); {kept}. Free space and run again.") from err


def write_atomic(path: Path, content: bytes | memoryview) -> None:
    """Write a temporary file beside `path`, then rename it; on any fault `path` is as it was. Raises OSError."""
    temp = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        with temp.open("wb") as file:
            file.write(content)
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. Raises OSError."""
    write_atomic(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises UserError when it is missing, cut short or not an object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as err:
        raise UserError(f"{path}: no such file.") from err
    except (OSError, ValueError, RecursionError) as err:
        raise UserError(f"{path}: is not readable JSON ({err}); it is damaged or not ours.") from err
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def recover(parent: Path) -> None:
    """Clean up after a killed `write_atomic` or `new_directory` in `parent`; call it when no other run writes there."""
    left = [(path, match) for path in parent.iterdir() if (match := _LEFT.fullmatch(path.name))]
    for path, match in left:
        if match[2] == "old" and not (parent / match[1]).exists():  # killed between the two renames
            path.replace(parent / match[1])
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Give a temporary directory that becomes `path` when the block ends well; an old `path` is replaced whole.

    A kill while the block runs leaves the old directory untouched; what else it leaves, `recover` mends.
    """
    temp = path.with_name(f".{path.name}.tmp{os.getpid()}")
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    try:
        yield temp
        old = path.with_name(f".{path.name}.old{os.getpid()}")
        if path.exists():
            path.replace(old)
        temp.replace(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
