"""A pool of threads of the CPU kernels that belongs to no target."""

from __future__ import annotations

from hyflash.ops.kernels import Kernels


class Pool:
    """Lives as long as the `Kernels` made from it."""

    def __init__(self, num_threads: int) -> None:
        import hyflash_kernels

        self._lib = hyflash_kernels.library()
        self.address = self._lib.hk_pool_new(num_threads)

    def __del__(self) -> None:
        self._lib.hk_pool_free(self.address)


def new_kernels(weights: str = "float32", num_threads: int = 1) -> Kernels:
    """The calls on a pool of their own."""
    pool = Pool(num_threads)
    return Kernels(pool.address, pool, weights=weights)
