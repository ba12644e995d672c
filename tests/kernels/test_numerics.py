"""The measures themselves."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import numerics as n

FP8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def test_relative_l2():
    assert n.relative_l2([3, 4.5], [3, 4]) == 0.1
    assert n.relative_l2([0, 0], [0, 0]) == 0 and n.relative_l2([1, 0], [0, 0]) == np.inf


def test_worst_tile_sees_a_small_tile_that_the_whole_hides():
    want = np.ones((4, 4))
    want[2:, 2:] = 1e-6
    got = want.copy()
    got[3, 3] = 0
    assert n.relative_l2(got, want) < 1e-6 and n.worst_tile(got, want, (2, 2)) == pytest.approx(0.5)


def test_cosine():
    assert (
        n.cosine([1, 0], [2, 0]) == 1
        and n.cosine([1, 0], [0, 5]) == 0
        and n.cosine([[1], [1]], [-2, -2]) == pytest.approx(-1)
    )
    assert np.isnan(n.cosine([0], [1]))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_neighbours_are_one_ulp_apart(x):
    x = np.float32(x)
    assert n.max_ulp(x, np.nextafter(x, np.float32(np.inf))) == 1
    assert n.max_ulp(x, x) == 0


@pytest.mark.parametrize("dtype", [*FP8, ml_dtypes.bfloat16, np.float16, np.float32])
def test_ulps_across_zero_and_to_nan(dtype):
    tiny = np.asarray(ml_dtypes.finfo(dtype).smallest_subnormal, dtype)
    assert n.max_ulp(tiny, -tiny) == 2 and n.max_ulp(0 * tiny, -0 * tiny) == 0
    nan = np.asarray(np.nan, dtype)
    assert n.max_ulp(nan, nan) == 0 and n.max_ulp(nan, tiny) == n.FAR


def test_ulps_of_two_types_are_refused():
    with pytest.raises(TypeError, match="float32 and float16"):
        n.max_ulp(np.float32(1), np.float16(1))


@pytest.mark.parametrize("dtype", FP8)
def test_spacing_is_the_step_to_the_next_code(dtype):
    codes = np.arange(127, dtype=np.uint8).view(dtype).astype(np.float64)  # the non-negative half, in order
    codes = codes[np.isfinite(codes)]
    np.testing.assert_array_equal(n.spacing(codes[:-1], dtype), np.diff(codes))


@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
def test_neighbouring_tiles_differ_in_magnitude(block):
    """Within two tiles in either direction, and across the diagonal, amax is at least 3 times apart."""
    x = n.tile_distinct((block[0] * 9, 128 * 9), block)
    amax = np.log2(np.abs(x).reshape(9, block[0], 9, 128).max((1, 3)))
    for di in range(-2, 3):
        for dj in range(-2, 3):
            if di or dj:
                here = amax[max(di, 0) : 9 + min(di, 0), max(dj, 0) : 9 + min(dj, 0)]
                there = amax[max(-di, 0) : 9 + min(-di, 0), max(-dj, 0) : 9 + min(-dj, 0)]
                assert (np.abs(here - there) > np.log2(3)).all()
    off_diagonal = ~np.eye(9, dtype=bool)
    assert (np.abs(amax - amax.T)[off_diagonal] > np.log2(3)).all()
