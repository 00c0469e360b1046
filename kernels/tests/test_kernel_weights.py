"""Weights: unpacked and quantised to the bit as the gguf package does it, and refused where they cannot be packed."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

import kernel_cases as cases

WRITABLE = ("Q8_0", "Q4_0", "Q4_1")


def unpack(lib, type_name: str, rows: np.ndarray, k: int) -> np.ndarray:
    out = np.empty((len(rows), k), np.float32)
    ids, rows = np.arange(len(rows)), np.ascontiguousarray(rows)
    lib.hk_unpack_rows(cases.TYPE[type_name], k, rows.ctypes.data, ids.ctypes.data, len(ids), out.ctypes.data)
    return out


def quantise(lib, type_name: str, values: np.ndarray) -> np.ndarray:
    blocks = values.shape[1] // cases.BLOCK[type_name]
    out = np.empty((len(values), blocks * cases.BLOCK_BYTES[type_name]), np.uint8)
    for row, bits in zip(np.ascontiguousarray(values, np.float32), out, strict=True):
        assert lib.hk_quantize_row(cases.TYPE[type_name], values.shape[1], row.ctypes.data, bits.ctypes.data) == 0
    return out


def rows_to_quantise(k: int = 320) -> np.ndarray:
    rng = np.random.default_rng(3)
    rows = [rng.normal(0, size, k) for size in (1e-6, 0.02, 1, 300)]
    rows += [np.zeros(k), np.full(k, 0.5), np.full(k, -0.25), -abs(rng.normal(0, 1, k)), rng.integers(-8, 8, k)]
    rows.append(np.where(np.arange(k) % 2, 1.5, -1.5))  # ties between the largest magnitudes
    return np.stack(rows).astype(np.float32)


@pytest.mark.parametrize("type_name", cases.ALL)
def test_unpacked_rows_have_the_bits_of_gguf(lib, type_name):
    weights = cases.random_weights(type_name, 40, 768, seed=5)
    assert cases.same_bits(unpack(lib, type_name, weights.rows, 768), weights.values.astype(np.float32))


@pytest.mark.parametrize("type_name", cases.QUANTISED)
def test_unpacked_rows_have_the_bits_of_gguf_for_odd_scales(lib, type_name):
    blocks = cases.random_weights(type_name, 12, 768).rows.reshape(12, -1, cases.BLOCK_BYTES[type_name]).copy()
    odd = np.resize(np.array([0.0, -0.0, 6e-8, -6e-8, 65504, 1e-5]), blocks.shape[:2])
    for offset in cases.SCALES[type_name]:
        cases.set_scales(blocks, offset, odd)
    rows = blocks.reshape(12, -1)
    assert cases.same_bits(unpack(lib, type_name, rows, 768), cases.dequantise(type_name, rows))


@pytest.mark.parametrize("type_name", WRITABLE)
def test_quantised_rows_have_the_bits_of_gguf(lib, type_name):
    values = rows_to_quantise()
    want = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name])
    assert (quantise(lib, type_name, values) == want).all()


@pytest.mark.parametrize("type_name", cases.FLOATS)
def test_float_rows_round_as_numpy_does(lib, type_name):
    values = np.concatenate([rows_to_quantise(320), rows_to_quantise(320) * np.float32(1e-7)])
    want = {
        "F32": values.view(np.uint8),
        "F16": values.astype(np.float16).view(np.uint8),
        "BF16": gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16),
    }[type_name]
    assert (quantise(lib, type_name, values) == want).all()


@pytest.mark.parametrize("type_name", WRITABLE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_weight_that_is_not_finite_becomes_nan(lib, type_name, bad):
    values = rows_to_quantise(96)[:3].copy()
    want = unpack(lib, type_name, quantise(lib, type_name, values), 96)
    values[1, 40] = bad
    got = unpack(lib, type_name, quantise(lib, type_name, values), 96)
    assert np.isnan(got[1, 32:64]).all()
    got[1, 32:64] = want[1, 32:64]
    assert cases.same_bits(got, want)


@pytest.mark.parametrize("type_name", WRITABLE)
def test_denormal_weights_become_zero(lib, type_name):
    values = np.full((1, 32), 1e-40, np.float32)
    values[0, 3] = -3e-42
    assert (unpack(lib, type_name, quantise(lib, type_name, values), 32) == 0).all()


@pytest.mark.parametrize("type_name", sorted(set(cases.QUANTISED) - set(WRITABLE)))
def test_types_that_are_only_read_are_refused(lib, type_name):
    values = np.zeros(256, np.float32)
    assert lib.hk_quantize_row(cases.TYPE[type_name], 256, values.ctypes.data, values.ctypes.data) == 1


def test_sizes_that_cannot_be_packed_are_refused(lib):
    for name in cases.QUANTISED:
        block = cases.BLOCK[name]
        assert lib.hk_packed_size(cases.TYPE[name], 16, block) > 0
        assert lib.hk_packed_size(cases.TYPE[name], 16, block - 1) == -1
        assert lib.hk_packed_size(cases.TYPE[name], 16, block + block // 2) == -1
    for n, k in ((0, 32), (-1, 32), (16, 0), (16, -32)):
        assert lib.hk_packed_size(cases.TYPE["Q8_0"], n, k) == -1
    for unknown in (-1, 4, 5, 9, 10, 31, 99):
        assert lib.hk_packed_size(unknown, 16, 256) == -1


@pytest.mark.parametrize("type_name", cases.ALL)
def test_packing_adds_only_padding(lib, type_name):
    n, k = 32, 1024
    stored = n * k // cases.BLOCK[type_name] * cases.BLOCK_BYTES[type_name]
    assert stored <= lib.hk_packed_size(cases.TYPE[type_name], n, k) <= 1.03 * stored


def test_rows_may_lie_anywhere_in_memory(lib):
    weights = cases.random_weights("Q4_K", 5, 256)
    moved = np.zeros(weights.rows.size + 1, np.uint8)
    moved[1:] = weights.rows.ravel()
    want = cases.pack(lib, weights)
    got = cases.aligned(len(want))
    lib.hk_pack(cases.TYPE["Q4_K"], 5, 256, moved[1:].ctypes.data, got.ctypes.data)
    assert (got == want).all()
