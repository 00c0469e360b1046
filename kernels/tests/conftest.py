"""The library for tests that need it; where it was not built they are skipped and say so."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

import kernel_cases


@pytest.fixture(scope="session")
def lib() -> ctypes.CDLL:
    return kernel_cases.library_or_skip()


@pytest.fixture(scope="session")
def isas(lib: ctypes.CDLL) -> list[str]:
    """Every instruction set that runs here, the portable one first."""
    return [isa for isa in ("portable", "neon", "avx2", "avxvnni", "avx512", "amx") if lib.hk_isa_runs(isa.encode())]


@pytest.fixture(scope="session")
def pool(lib: ctypes.CDLL) -> Iterator[Callable[[int], int]]:
    """pool(threads): a thread pool of that size, one for all tests."""
    pools: dict[int, int] = {}

    def get(threads: int) -> int:
        if threads not in pools:
            pools[threads] = lib.hk_pool_new(threads)
        return pools[threads]

    yield get
    for handle in pools.values():
        lib.hk_pool_free(handle)
