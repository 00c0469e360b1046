"""Shared by the kernel tests: weights as GGUF rows, their float64 values, quantised activations, single layers."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import gguf
import numpy as np
import pytest

FLOATS = ("F32", "F16", "BF16")
SMALL = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
SUPER = ("Q4_K", "Q5_K", "Q6_K")
QUANTISED = SMALL + SUPER
ALL = FLOATS + QUANTISED
TYPE = {name: int(gguf.GGMLQuantizationType[name]) for name in ALL}
BLOCK, BLOCK_BYTES = ({name: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][i] for name in ALL} for i in (0, 1))
SCALES = {
    "Q4_0": [0],
    "Q5_0": [0],
    "Q8_0": [0],
    "Q6_K": [208],
    "Q4_1": [0, 2],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
}
"""Byte offsets of the half-precision scales of a block."""


def library_or_skip() -> ctypes.CDLL:
    """The shared library; skips the test where it was not built."""
    reason = "make setup builds hyflash-kernels where it finds a C++ compiler"
    kernels = pytest.importorskip("hyflash_kernels", reason=reason)
    try:
        return kernels.library()
    except OSError as error:
        pytest.skip(f"{error} ({reason})")


@dataclass
class Weights:
    """A matrix as GGUF rows (n, bytes of a row), and its values (n, k) in float64."""

    type: str
    rows: np.ndarray
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


def dequantise(type_name: str, rows: np.ndarray) -> np.ndarray:
    """GGUF rows (n, bytes) -> float32 (n, k) by the gguf package."""
    dtype = {"F32": np.float32, "F16": np.float16}.get(type_name)
    if dtype is not None:
        return rows.view(dtype).astype(np.float32)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type_name])


def random_weights(type_name: str, n: int, k: int, seed: int = 0) -> Weights:
    """Random bits with finite scales around 0.02, of both signs."""
    rng = np.random.default_rng((seed, n, k, TYPE[type_name]))
    if type_name in FLOATS:
        values = rng.normal(0, 0.05, (n, k)).astype(np.float32)
        rows = values.view(np.uint8)
        if type_name == "F16":
            rows = values.astype(np.float16).view(np.uint8)
        if type_name == "BF16":
            rows = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
        return weights_of(type_name, np.ascontiguousarray(rows))
    blocks = rng.integers(0, 256, (n, k // BLOCK[type_name], BLOCK_BYTES[type_name]), dtype=np.uint8)
    for offset in SCALES[type_name]:
        set_scales(blocks, offset, rng.normal(0, 0.02, blocks.shape[:2]))
    return weights_of(type_name, blocks.reshape(n, -1))


def set_scales(blocks: np.ndarray, offset: int, scales: np.ndarray) -> None:
    """Write half-precision scales (n, blocks) into GGUF blocks (n, blocks, bytes)."""
    blocks[..., offset : offset + 2] = scales.astype("<f2")[..., None].view(np.uint8)


def weights_of(type_name: str, rows: np.ndarray) -> Weights:
    return Weights(type_name, rows, dequantise(type_name, rows).astype(np.float64))


def aligned(num_bytes: int) -> np.ndarray:
    """Bytes that start on a cache line."""
    raw = np.zeros(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes]


def pack(lib: ctypes.CDLL, weights: Weights) -> np.ndarray:
    n, k = weights.shape
    size = lib.hk_packed_size(TYPE[weights.type], n, k)
    assert size > 0
    packed = aligned(size)
    lib.hk_pack(TYPE[weights.type], n, k, weights.rows.ctypes.data, packed.ctypes.data)
    return packed


def linear(
    lib: ctypes.CDLL, pool: int, isa: str, weights: Weights, packed: np.ndarray, activations: np.ndarray
) -> np.ndarray:
    """float32 (rows, n) of float32 activations (rows, k)."""
    n, k = weights.shape
    x = np.ascontiguousarray(activations, np.float32)
    # Guards on both sides: what lies outside must stay as it was.
    y = np.full((len(x) + 2, n), -77.25, np.float32)
    status = lib.hk_linear(
        isa.encode(), pool, TYPE[weights.type], packed.ctypes.data, n, k, x.ctypes.data, len(x), y[1:].ctypes.data
    )
    assert status == 0
    assert (y[[0, -1]] == -77.25).all()
    return y[1:-1]


def quantised_activations(x: np.ndarray) -> np.ndarray:
    """What the kernels make of finite activations (rows, k): int8 times a scale per 32, as float64."""
    blocks = x.astype(np.float32).reshape(len(x), -1, 32)
    most = abs(blocks).max(-1, keepdims=True)
    some = most >= np.float32(1e-30)
    inverse = np.where(some, np.float32(127) / np.where(some, most, np.float32(1)), np.float32(0))
    scale = np.where(some, most / np.float32(127), np.float32(0))
    return (scale.astype(np.float64) * np.rint(blocks * inverse)).reshape(x.shape)


def activations(rows: int, k: int, seed: int = 0) -> np.ndarray:
    """Normal numbers of a size that differs from row to row, with a few outliers as real ones have."""
    rng = np.random.default_rng((seed, rows, k))
    x = rng.normal(0, 1, (rows, k)) * rng.choice([0.1, 1, 10], (rows, 1))
    x[rng.random((rows, k)) < 0.01] *= 20
    return x.astype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, except that one NaN is as good as another."""
    return a.shape == b.shape and bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))
