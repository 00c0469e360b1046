"""A model's identity from its weight files: tensor names, shapes and sampled bytes, not their dtype in memory.

In: a model directory. Out: a hex string, equal for equal files and different for a fine-tuned relative. Hub
names have no local files; for them the name stands for the model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 64


def fingerprint(path: str | Path) -> str:
    """First 16 hex digits of a sha256 over headers and evenly spaced samples of the safetensors files."""
    digest = hashlib.sha256()
    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    if not files:
        digest.update(str(path).encode())
    for file in files:
        with file.open("rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
            header.pop("__metadata__", None)  # names the library version, not the model
            digest.update(json.dumps(header, sort_keys=True).encode())
            start = f.tell()
            size = file.stat().st_size - start
            for i in range(NUM_SAMPLES):
                f.seek(start + (size - SAMPLE_BYTES) * i // max(NUM_SAMPLES - 1, 1) if size > SAMPLE_BYTES else start)
                digest.update(f.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
