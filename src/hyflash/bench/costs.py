"""What a verify step of width q costs on this machine: c(q), measured once and kept in the user's cache.

In: a target. Out: a `CostTable`: seconds per width and c(q) = seconds(q) / seconds(1). Widths are timed in turns, so
that a slow moment of the machine hits all of them, and the fastest counts: other work only ever adds time.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hyflash.core import Rows
from hyflash.environment import hardware, kernels
from hyflash.errors import UserError
from hyflash.hub import cache_dir
from hyflash.targets.base import Target

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXT_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Best seconds of a forward by width, at one context length."""

    seconds: Mapping[int, float]
    context_tokens: int

    @property
    def relative(self) -> dict[int, float]:
        """c(q) by width; c(1) is 1."""
        return {width: sec / self.seconds[1] for width, sec in self.seconds.items()}


def measure(
    target: Target,
    *,
    widths: Sequence[int] = WIDTHS,
    context_tokens: int = CONTEXT_TOKENS,
    num_repeats: int = 7,
    max_sec: float = 2.0,
) -> CostTable:
    """Time forwards of each width after `context_tokens` tokens; stops repeating after `max_sec` (3 passes at least).

    Width 1 is always measured. Raises UserError for widths below 1.
    """
    if any(width < 1 for width in widths):
        raise UserError(f"widths are {list(widths)}; expected whole numbers of at least 1.")
    widest = max(widths, default=1)
    context = max(1, min(context_tokens, target.info.max_context - widest))
    ids = torch.arange(context + widest) % target.info.vocab_size
    order = sorted({1, *(width for width in widths if context + width <= target.info.max_context)})
    times: dict[int, list[float]] = {width: [] for width in order}
    seq = target.open()
    try:
        target.forward(Rows(tokens=ids[:context], seqs=(seq,), lengths=(context,), logits="none"))
        started = time.perf_counter()
        for repeat in range(-1, num_repeats):  # the first pass warms up
            for width in order:
                begin = time.perf_counter()
                target.forward(Rows(tokens=ids[context : context + width], seqs=(seq,), lengths=(width,), top=1))
                if repeat >= 0:
                    times[width].append(time.perf_counter() - begin)
                target.truncate(seq, context)
            if repeat >= 2 and time.perf_counter() - started > max_sec:
                break
    finally:
        target.close(seq)
    return CostTable(seconds={width: min(values) for width, values in times.items()}, context_tokens=context)


def measured(target: Target) -> CostTable:
    """The table of this machine, thread count and target from the cache, else measured now and cached."""
    path = _cache_path(target)
    try:
        stored = json.loads(path.read_text())
        seconds = {int(width): float(sec) for width, sec in stored["seconds"].items()}
        if 1 in seconds and all(sec > 0 for sec in seconds.values()):
            return CostTable(seconds=seconds, context_tokens=int(stored["context_tokens"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # never written, or damaged: measure again
    table = measure(target)
    _store(path, table)
    return table


def _cache_path(target: Target) -> Path:
    machine = hardware()
    key = [
        machine["cpu"],
        machine["num_cores"],
        torch.__version__,
        kernels(),
        target.describe(),
        target.info.fingerprint,
        target.exactness,
    ]
    return cache_dir() / "costs" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"


def _store(path: Path, table: CostTable) -> None:
    """Keep the table; a cache that cannot be written costs a second next time and is no reason to fail."""
    content = json.dumps(
        {"seconds": {str(k): v for k, v in table.seconds.items()}, "context_tokens": table.context_tokens}
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    except OSError:
        return
