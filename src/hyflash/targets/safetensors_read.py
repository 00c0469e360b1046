"""Where the tensors of a Hugging Face directory lie: safetensors headers, checked, without loading any library.

In: a directory with model.safetensors, or shards and their index. Out: a `Stored` for each tensor, so that matrices
can be read row by row or mapped. Raises UserError for files that are missing, cut off or contradict themselves.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hyflash.errors import UserError
from hyflash.ops.gguf_rows import BLOCKS
from hyflash.targets.decoder import Stored

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


def read_tensors(directory: Path) -> dict[str, Stored]:
    """All tensors by name. Other types than float ones keep the file's name for them. Raises UserError."""
    if (directory / SINGLE).is_file():
        return _file_tensors(directory / SINGLE)
    if not (directory / INDEX).is_file():
        raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}; the native target reads no other weights.")
    shards = read_json(directory / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{directory / INDEX} has no weight_map; the file is damaged. Copy it again.")
    out: dict[str, Stored] = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:
            raise UserError(f"{directory / INDEX} names {shard!r}; expected files beside it.")
        found = _file_tensors(directory / shard)
        out |= {name: tensor for name, tensor in found.items() if shards.get(name) == shard}
    if lacking := sorted(set(shards) - set(out)):
        raise UserError(
            f"{directory} lacks {len(lacking)} tensors of its index, {lacking[0]} among them; copy it again."
        )
    return out


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror or err}.") from err
    except (ValueError, RecursionError) as err:
        raise UserError(f"{path} is not valid JSON ({err}); the file is damaged. Copy it again.") from err
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}; expected a JSON object.")
    return value


def _file_tensors(path: Path) -> dict[str, Stored]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
            size = path.stat().st_size
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror or err}; copy the whole model again.") from err
    try:
        table = json.loads(header)
        table.pop("__metadata__", None)
        return {name: _place(path, 8 + length, size, **facts) for name, facts in table.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as err:
        raise UserError(f"{path} is cut off or damaged ({err}); copy it again.") from err


def _place(path: Path, base: int, size: int, *, dtype: str, shape: list[int], data_offsets: list[int]) -> Stored:
    """Where a tensor lies, once it is known to lie inside the file. Raises ValueError or TypeError."""
    begin, end = data_offsets
    if not all(type(x) is int and x >= 0 for x in (*shape, begin, end)) or base + end > size:
        raise ValueError(f"a tensor of shape {shape} at {begin} to {end} of {size - base} bytes")
    kind = _TYPES.get(dtype)
    if kind is None:
        return Stored(path=path, offset=0, type=str(dtype), shape=tuple(shape), row_bytes=0)
    item = BLOCKS[kind][1]
    if end - begin != math.prod(shape) * item:
        raise ValueError(f"a {dtype} tensor of shape {shape} in {end - begin} bytes")
    return Stored(
        path=path, offset=base + begin, type=kind, shape=tuple(shape), row_bytes=item * (shape[-1] if shape else 1)
    )
