"""Forwards of several engines timed in turns in one run, so that a slow moment of the machine hits all of them.

In: engines with the same model (`peers/base.py`) and the machine's rates. Out: plain dicts for JSON: one result an
engine, context and width. A visit to an engine begins with a forward that is not timed, which brings its weights into
the caches and its threads back to work, as in decoding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hyflash.bench import floors
from hyflash.bench.peers.base import Engine

WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 2048, 8192)
_REST_SEC = 0.02
"""Threads of some engines go on spinning for a while after their work; the next one waits for that to end."""

Progress = Callable[[int, int, str], None]


def _silent(done: int, total: int, what: str) -> None:
    pass


def forwards(
    engines: Sequence[Engine],
    machine: floors.Machine,
    *,
    context: int,
    widths: Sequence[int],
    vocab_size: int,
    num_repeats: int,
    progress: Progress = _silent,
) -> list[dict[str, Any]]:
    """Time forwards of each width after `context` tokens in every engine, in turns.

    One result a engine and width: engine, weights, context, width, ms_median, ms_min, floor_ms, and c, the median over
    that of the narrowest width.
    """
    ids = _tokens(context + max(widths), vocab_size)
    times: dict[tuple[int, int], list[float]] = {(e, w): [] for e in range(len(engines)) for w in widths}
    total = len(engines) * (num_repeats + 1)
    for index, engine in enumerate(engines):
        progress(index, total, f"{engine.name}: context {context}")
        engine.thread.submit(engine.start, ids[:context]).result()
    for repeat in range(num_repeats):
        for index, engine in enumerate(engines):
            progress(len(engines) * (repeat + 1) + index, total, f"{engine.name}: context {context}")
            time.sleep(_REST_SEC)
            order = widths if repeat % 2 == 0 else widths[::-1]
            for width, seconds in engine.thread.submit(_visit, engine, ids[context:], order).result().items():
                times[index, width].append(seconds)
    return [
        {
            "engine": engine.name,
            "weights": engine.weights,
            "context": context,
            "width": width,
            "ms_median": 1e3 * statistics.median(times[index, width]),
            "ms_min": 1e3 * min(times[index, width]),
            "floor_ms": 1e3 * floors.floor_sec(machine, engine.work, context=context, width=width),
            "c": statistics.median(times[index, width]) / statistics.median(times[index, min(widths)]),
        }
        for index, engine in enumerate(engines)
        for width in widths
    ]


def prefill(
    engines: Sequence[Engine],
    *,
    num_tokens: int,
    vocab_size: int,
    num_repeats: int,
    progress: Progress = _silent,
) -> list[dict[str, Any]]:
    """Tokens per second of reading a prompt of `num_tokens`, in turns: one result an engine, median and best."""
    ids = _tokens(num_tokens, vocab_size)
    times: list[list[float]] = [[] for _ in engines]
    for repeat in range(num_repeats):
        for index, engine in enumerate(engines):
            progress(repeat * len(engines) + index, num_repeats * len(engines), f"{engine.name}: prompt")
            time.sleep(_REST_SEC)
            times[index].append(engine.thread.submit(_seconds, engine.start, ids).result())
    return [
        {
            "engine": engine.name,
            "weights": engine.weights,
            "tokens": num_tokens,
            "tokens_per_sec_median": num_tokens / statistics.median(seconds),
            "tokens_per_sec_best": num_tokens / min(seconds),
        }
        for engine, seconds in zip(engines, times, strict=True)
    ]


def agreement(engines: Sequence[Engine], *, context: int, width: int, vocab_size: int) -> list[dict[str, Any]]:
    """Do the engines compute the same model? Against the first: rows with the same best token, and how far logits are.

    `logit_error` is the rms of the difference over the standard deviation of the first engine's logits.
    """
    ids = _tokens(context + width, vocab_size)

    def logits_of(engine: Engine) -> NDArray[np.float64]:
        engine.start(ids[:context])
        engine.verify(ids[context:])
        out = engine.logits().astype(np.float64)
        engine.rewind()
        return out

    logits = [engine.thread.submit(logits_of, engine).result() for engine in engines]
    first = logits[0]
    return [
        {
            "engine": engine.name,
            "rows": width,
            "same_best_token": int((other.argmax(1) == first.argmax(1)).sum()),
            "logit_error": float(np.sqrt(np.mean((other - first) ** 2)) / (first.std() or 1.0)),
        }
        for engine, other in zip(engines, logits, strict=True)
    ]


def _visit(engine: Engine, ids: Sequence[int], widths: Sequence[int]) -> dict[int, float]:
    """Seconds of one `verify` of each width; the rows are forgotten after each. The first is done twice."""
    times = {}
    for width in (widths[0], *widths):  # of the first width, the second time counts
        times[width] = _seconds(engine.verify, ids[:width])
        engine.rewind()
    return times


def _seconds(call: Callable[[Sequence[int]], None], ids: Sequence[int]) -> float:
    begin = time.perf_counter()
    call(ids)
    return time.perf_counter() - begin


def _tokens(count: int, vocab_size: int) -> list[int]:
    """Token ids that stand for a text: what they say does not change the time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()
