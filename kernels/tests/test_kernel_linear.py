"""Linear layers: right against float64, and a row's bits the same whatever shares the call."""

from __future__ import annotations

import numpy as np
import pytest

import kernel_cases as cases


def shapes(type_name: str) -> list[tuple[int, int]]:
    """(n, k): outputs that are no multiple of 16, inputs that are no multiple of the block where that is allowed."""
    if type_name in cases.FLOATS:
        return [(1, 1), (17, 31), (16, 32), (37, 77), (5, 300)]
    return [(1, 256), (16, 512), (37, 768)] if type_name in cases.SUPER else [(1, 32), (16, 64), (37, 96), (20, 576)]


@pytest.mark.parametrize("type_name", cases.ALL)
def test_linear_matches_float64_with_the_same_quantised_activations(lib, isas, pool, type_name):
    for n, k in shapes(type_name):
        weights = cases.random_weights(type_name, n, k)
        packed = cases.pack(lib, weights)
        for rows in (1, 33):
            x = cases.activations(rows, k)
            seen = x.astype(np.float64) if type_name in cases.FLOATS else cases.quantised_activations(x)
            want = seen @ weights.values.T
            scale = (
                np.sqrt((want**2).mean(1, keepdims=True))
                if n > 1
                else np.linalg.norm(seen * weights.values, axis=1, keepdims=True)
            )
            for isa in isas:
                got = cases.linear(lib, pool(2), isa, weights, packed, x)
                assert (abs(got - want) <= 5e-6 * scale).all(), (isa, n, k, rows)


@pytest.mark.parametrize("type_name", cases.QUANTISED)
def test_quantised_activations_cost_no_more_than_half_a_step(lib, pool, type_name):
    weights = cases.random_weights(type_name, 37, 768)
    x = cases.activations(9, 768)
    got = cases.linear(lib, pool(1), "portable", weights, cases.pack(lib, weights), x)
    half_step = abs(x.reshape(9, -1, 32)).max(-1) / 254
    bound = half_step @ abs(weights.values).reshape(37, -1, 32).sum(-1).T
    error = abs(got - x.astype(np.float64) @ weights.values.T)
    assert (error <= 1.0001 * bound + 1e-6).all()
    assert np.sqrt((error**2).mean()) < 0.1 * bound.mean()  # errors are independent, so far below the bound


@pytest.mark.parametrize("type_name", cases.ALL)
def test_a_row_has_the_same_bits_at_every_width_thread_count_and_instruction_set(lib, isas, pool, type_name):
    weights = cases.random_weights(type_name, 37, 256)
    packed = cases.pack(lib, weights)
    x = cases.activations(64, 256)
    want = cases.linear(lib, pool(1), "portable", weights, packed, x)
    for isa in isas:
        for width in range(1, 65):
            got = cases.linear(lib, pool(1), isa, weights, packed, x[:width])
            assert cases.same_bits(got, want[:width]), (isa, width)
        for threads in (2, 4):
            for width in (1, 2, 3, 16, 17, 33, 64):
                got = cases.linear(lib, pool(threads), isa, weights, packed, x[64 - width :])
                assert cases.same_bits(got, want[64 - width :]), (isa, width, threads)


@pytest.mark.parametrize("type_name", cases.ALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_shows_it_and_touches_no_other(lib, isas, pool, type_name, bad):
    weights = cases.random_weights(type_name, 20, 256)
    packed = cases.pack(lib, weights)
    x = cases.activations(9, 256)
    want = cases.linear(lib, pool(1), "portable", weights, packed, x)
    x[4, 100] = bad
    others = np.arange(9) != 4
    for isa in isas:
        got = cases.linear(lib, pool(2), isa, weights, packed, x)
        assert cases.same_bits(got[others], want[others]), isa
        seen = weights.values[:, 100] != 0 if type_name in cases.FLOATS else np.full(20, True)
        assert not np.isfinite(got[4][seen]).any(), isa


@pytest.mark.parametrize("type_name", cases.ALL)
def test_extreme_activations_keep_their_precision(lib, isas, pool, type_name):
    weights = cases.random_weights(type_name, 37, 256)
    packed = cases.pack(lib, weights)
    base = cases.activations(1, 256)
    sizes = [1e4, 1e-8, 1e30, 0.0]
    x = np.concatenate([base * np.float32(size) for size in sizes])
    seen = x.astype(np.float64) if type_name in cases.FLOATS else cases.quantised_activations(x)
    want = seen @ weights.values.T
    for isa in isas:
        got = cases.linear(lib, pool(1), isa, weights, packed, x)
        rms = np.sqrt((want**2).mean(1, keepdims=True))
        assert (abs(got - want) <= 5e-6 * rms).all(), isa
        assert (got[3] == 0).all(), isa


@pytest.mark.parametrize("type_name", cases.QUANTISED)
def test_activations_too_small_for_a_scale_are_zero(lib, isas, pool, type_name):
    weights = cases.random_weights(type_name, 16, 256)
    packed = cases.pack(lib, weights)
    x = np.full((2, 256), 1e-31, np.float32)
    x[1] = np.float32(1e-45)
    for isa in isas:
        assert (cases.linear(lib, pool(1), isa, weights, packed, x) == 0).all()


@pytest.mark.parametrize("type_name", cases.QUANTISED)
def test_zero_and_denormal_scales_are_exact(lib, isas, pool, type_name):
    n, k = 18, 512
    blocks = cases.random_weights(type_name, n, k).rows.reshape(n, -1, cases.BLOCK_BYTES[type_name]).copy()
    denormal = np.float16(5.96e-8) * np.random.default_rng(1).integers(-9, 9, blocks.shape[:2])
    denormal[0] = 0
    for offset in cases.SCALES[type_name]:
        cases.set_scales(blocks, offset, denormal)
    weights = cases.weights_of(type_name, blocks.reshape(n, -1))
    packed = cases.pack(lib, weights)
    x = cases.activations(5, k)
    want = cases.quantised_activations(x) @ weights.values.T
    for isa in isas:
        got = cases.linear(lib, pool(1), isa, weights, packed, x)
        assert (got[:, 0] == 0).all(), isa
        assert (abs(got - want) <= 5e-6 * np.sqrt((want**2).mean())).all(), isa


@pytest.mark.parametrize("type_name", cases.QUANTISED)
@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_weight_scale_that_is_not_finite_touches_its_output_alone(lib, isas, pool, type_name, scale):
    good = cases.random_weights(type_name, 18, 512)
    want = cases.linear(lib, pool(1), "portable", good, cases.pack(lib, good), cases.activations(5, 512))
    blocks = good.rows.reshape(18, -1, cases.BLOCK_BYTES[type_name]).copy()
    cases.set_scales(blocks[7:8, 1:2], cases.SCALES[type_name][0], np.full((1, 1), scale))
    bad = cases.Weights(type_name, blocks.reshape(18, -1), good.values)
    others = np.arange(18) != 7
    for isa in isas:
        got = cases.linear(lib, pool(1), isa, bad, cases.pack(lib, bad), cases.activations(5, 512))
        assert cases.same_bits(np.ascontiguousarray(got[:, others]), np.ascontiguousarray(want[:, others])), isa
        assert not np.isfinite(got[:, 7]).any(), isa


def test_no_rows_are_no_work(lib, pool):
    weights = cases.random_weights("Q8_0", 16, 32)
    packed = cases.pack(lib, weights)
    assert cases.linear(lib, pool(2), "portable", weights, packed, np.zeros((0, 32))).shape == (0, 16)


def test_an_unknown_instruction_set_or_type_is_refused(lib, pool):
    buffer = cases.aligned(4096)
    at = buffer.ctypes.data
    assert lib.hk_linear(b"mmx", pool(1), cases.TYPE["Q8_0"], at, 1, 32, at, 1, at) == 1
    assert lib.hk_linear(b"portable", pool(1), 99, at, 1, 32, at, 1, at) == 1
    assert lib.hk_linear(b"portable", pool(1), cases.TYPE["Q8_0"], at, 1, 31, at, 1, at) == 1
