"""Weights as GGUF keeps them: rows of blocks.

In: names of types. Out: how many weights and bytes their blocks have, and float rows in that form (ggml's rounding).
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "BF16": (1, 2),
}
"""Weights and bytes of a block of each type, by GGUF's names."""


def row_bytes(kind: str, num_inputs: int) -> int:
    """Bytes of a row of `num_inputs` weights that fill whole blocks."""
    weights, size = BLOCKS[kind]
    return num_inputs // weights * size


def quantize(weight: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """Rows of GGUF blocks (N, bytes) of a float matrix (N, K), rounded as ggml rounds them. K fills whole blocks."""
    import hyflash_kernels as hk

    lib, number, num_inputs = hk.library(), hk.TYPES[kind], weight.shape[1]
    weight = np.ascontiguousarray(weight)
    out = np.empty((len(weight), row_bytes(kind, num_inputs)), np.uint8)
    source, target = weight.ctypes.data, out.ctypes.data
    for index in range(len(weight)):
        row, to = source + index * 4 * num_inputs, target + index * out.shape[1]
        if lib.hk_quantize_row(number, num_inputs, ctypes.c_void_p(row), ctypes.c_void_p(to)):
            raise ValueError(f"the kernels do not quantise to {kind}")
    return out
