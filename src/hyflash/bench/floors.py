"""The floor under a forward's time: bytes over measured bandwidth, multiply-adds over measured rates.

In: a `Machine`, measured here, and the static `Work` of a forward. Out: seconds that no forward of that work can beat,
but for weights that stay in a cache from one forward to the next. Multiply-adds of matrices count at the rate of int8
dot products, whatever the weights; those of attention at the rate of float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hyflash import environment

if TYPE_CHECKING:
    import ctypes

READ_BYTES = 256 << 20
"""Far beyond any cache, so that reading is reading memory."""
_CACHED_BYTES = 16 << 10
_DOTS, _FMAS, _READS = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this machine does at best with so many threads; None where only the CPU kernels could tell."""

    num_threads: int
    isa: str | None
    bytes_per_sec: float
    int8_per_sec: float | None
    """Multiply-adds of int8 dot products."""
    float32_per_sec: float | None
    """Multiply-adds of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a model file holds, whoever runs it."""

    num_weights: int
    """In all matrices that a row meets: multiply-adds of one row, the head included."""
    windows: tuple[int, ...]
    """Sliding window of each layer in tokens, 0 for full attention."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    stored_type: str
    """What most weights are stored as, by GGUF's names."""
    stored_bytes: int
    """Of those matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a forward must do in one engine."""

    shape: Shape
    weight_bytes: int
    """Of all matrices, read once however many rows share the forward."""
    kv_bytes: float
    """Of one number in the cache."""

    def forward_bytes(self, context: int, width: int) -> float:
        """Bytes a forward of `width` rows after `context` tokens reads: weights, keys and values."""
        shape = self.shape
        tokens = sum(min(context, w or context) + width for w in shape.windows)
        return self.weight_bytes + 2 * tokens * shape.num_kv_heads * shape.head_dim * self.kv_bytes

    def attention_ops(self, context: int, width: int) -> int:
        """Multiply-adds of queries with keys and of weights with values."""
        ends = range(context + 1, context + width + 1)
        seen = sum(min(end, w or end) for w in self.shape.windows for end in ends)
        return 2 * seen * self.shape.num_heads * self.shape.head_dim


def floor_sec(machine: Machine, work: Work, *, context: int, width: int) -> float:
    """Least seconds of a forward of `width` rows after `context` tokens: the slower of its bytes and its arithmetic."""
    memory = work.forward_bytes(context, width) / machine.bytes_per_sec
    if machine.int8_per_sec is None or machine.float32_per_sec is None:
        return memory
    arithmetic = work.shape.num_weights * width / machine.int8_per_sec
    return max(memory, arithmetic + work.attention_ops(context, width) / machine.float32_per_sec)


def measure(num_threads: int, *, read_bytes: int = READ_BYTES, num_repeats: int = 7) -> Machine:
    """Best rates of several tries: other work on the machine only ever lowers them."""
    memory = np.ones(read_bytes, np.uint8)  # written, so that every page is its own
    library = _library()
    if library is None:
        return Machine(
            num_threads=num_threads,
            isa=None,
            bytes_per_sec=_read_by_torch(memory, num_threads, num_repeats),
            int8_per_sec=None,
            float32_per_sec=None,
        )

    def best(what: int, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
        rates = (library.hk_bench(None, num_threads, what, data.ctypes.data, len(data)) for _ in range(num_repeats))
        return max(float(rate) for rate in rates)

    cached = memory[:_CACHED_BYTES]
    return Machine(
        num_threads=num_threads,
        isa=library.hk_isa().decode(),
        bytes_per_sec=best(_READS, memory),
        int8_per_sec=best(_DOTS, cached),
        float32_per_sec=best(_FMAS, cached),
    )


def ping_pong_ns(num_threads: int, *, num_repeats: int = 5) -> float | None:
    """Least nanoseconds of a cache-line round trip between two threads; None with one thread or without kernels."""
    library = _library()
    if library is None or num_threads < 2:
        return None
    pool = library.hk_pool_new(num_threads)
    if not pool:
        return None
    try:
        return min(float(library.hk_pool_ping_pong(pool)) for _ in range(num_repeats))
    finally:
        library.hk_pool_free(pool)


def _library() -> ctypes.CDLL | None:
    if environment.kernels_missing():
        return None
    import hyflash_kernels

    library: ctypes.CDLL = hyflash_kernels.library()
    return library


def _read_by_torch(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], num_threads: int, num_repeats: int) -> float:
    """Bytes per second of a sum over all of it."""
    import time

    numbers, before = torch.from_numpy(memory).view(torch.int64), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    best = float("inf")
    try:
        for _ in range(num_repeats):
            begin = time.perf_counter()
            numbers.sum()
            best = min(best, time.perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
    return len(memory) / best
