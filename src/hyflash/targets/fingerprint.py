"""A model's identity from its weight files: tensor names, shapes and sampled bytes, not their dtype in memory.

In: a model directory or GGUF file. Out: a hex string, equal for equal files and different for a fine-tuned relative.
Hub names have no local files; for them the name stands for the model. A GGUF file and the dense directory made from
it are two identities; a checkpoint's config may name both (`also`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hyflash.errors import UserError

SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 64


def weight_files(path: str | Path) -> list[Path]:
    """The files that hold a model's weights; none for a hub name."""
    path = Path(path)
    if path.is_file():
        return [path]
    return sorted(path.glob("*.safetensors")) if path.is_dir() else []


def fingerprint(path: str | Path) -> str:
    """First 16 hex digits of a sha256 over the tensors' table and evenly spaced samples of their bytes.

    Raises UserError for a file that is damaged.
    """
    digest = hashlib.sha256()
    files = weight_files(path)
    if not files:
        digest.update(str(path).encode())
    for file in files:
        table, start = _gguf_table(file) if Path(path).is_file() else _safetensors_table(file)
        digest.update(json.dumps(table, sort_keys=True).encode())
        size = file.stat().st_size - start
        with file.open("rb") as f:
            for i in range(NUM_SAMPLES):
                f.seek(start + (size - SAMPLE_BYTES) * i // max(NUM_SAMPLES - 1, 1) if size > SAMPLE_BYTES else start)
                digest.update(f.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _safetensors_table(file: Path) -> tuple[object, int]:
    """Names, types, shapes and places of the tensors, and where the first one begins."""
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        try:
            header = json.loads(f.read(length) if length <= file.stat().st_size else b"")
            header.pop("__metadata__", None)  # names the library version, not the model
        except (ValueError, AttributeError, TypeError, RecursionError) as err:
            raise UserError(
                f"{file} is no whole safetensors file; copy it again, or remove it where it is no part of the model."
            ) from err
        return header, f.tell()


def _gguf_table(file: Path) -> tuple[object, int]:
    """The same of a GGUF file; its keys (tokenizer, template, notes) are no part of it."""
    from hyflash.targets.gguf_read import GgufReader

    tensors = GgufReader(file).tensors
    start = min((tensor.offset for tensor in tensors.values() if tensor.offset), default=0)
    return {name: [t.type, t.shape, t.offset - start] for name, t in tensors.items()}, start
