"""The reference quantiser: the oracle of the kernels has to be right by itself."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.quantize import reference as q

shapes = st.tuples(st.integers(1, 300), st.integers(1, 300))
seeds = st.integers(0, 2**32 - 1)


def tile_distinct(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Every 128x128 block at its own magnitude, so that a wrong scale index is an error near 1."""
    rng = np.random.default_rng(seed)
    blocks = np.exp2(rng.uniform(-20, 20, [-(-n // 128) for n in shape]))
    spread = np.kron(blocks, np.ones((128, 128)))[: shape[0], : shape[1]]
    return (rng.normal(size=shape) * spread).astype(np.float32)


def oracle(x: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Block by block in numpy with ml_dtypes' cast."""
    rows, cols = (-(-n // b) for n, b in zip(x.shape, block))
    codes, scales = np.zeros(x.shape, ml_dtypes.float8_e4m3fn), np.zeros((rows, cols), np.float32)
    for i in range(rows):
        for j in range(cols):
            at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = np.maximum(np.abs(x[at]).max(), np.float32(1e-10)) / np.float32(448)
            codes[at] = np.clip(x[at] / scales[i, j], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales


@pytest.mark.parametrize(("quantize", "block"), [(q.quantize_blocks, (128, 128)), (q.quantize_rows, (1, 128))])
@given(shapes, seeds)
def test_codes_and_scales_equal_the_oracle_bit_for_bit(quantize, block, shape, seed):
    x = tile_distinct(shape, seed)
    codes, scales = quantize(jnp.asarray(x))
    want_codes, want_scales = oracle(x, block)
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), want_codes.view(np.uint8))
    np.testing.assert_array_equal(scales, want_scales)


@given(shapes, seeds)
def test_round_trip_error_is_that_of_three_mantissa_bits(shape, seed):
    """A normal code is within 2^-4 of its value; a subnormal one within half its step, 2^-10 of 448 scales."""
    x = tile_distinct(shape, seed)
    codes, scales = q.quantize_blocks(jnp.asarray(x))
    back = np.asarray(q.dequantize_blocks(codes, scales))
    step = np.kron(np.asarray(scales), np.ones((128, 128)))[: shape[0], : shape[1]] * 2.0**-10
    assert (np.abs(back - x) <= np.maximum(np.abs(x) * 2.0**-4, step) * 1.001).all()


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-30, 1.0, 1e30, 3e38])
def test_scales_are_positive_and_codes_finite_for_finite_input(magnitude):
    x = jnp.full((130, 130), magnitude, jnp.float32)
    for codes, scales in (q.quantize_blocks(x), q.quantize_rows(x)):
        assert (np.asarray(scales) > 0).all() and np.isfinite(np.asarray(scales)).all()
        assert np.isfinite(np.asarray(codes, np.float32)).all()


def test_leading_axes_are_independent():
    x = np.stack([tile_distinct((130, 200), s) for s in range(3)])
    codes, scales = q.quantize_blocks(jnp.asarray(x))
    for i in range(3):
        one_codes, one_scales = q.quantize_blocks(jnp.asarray(x[i]))
        np.testing.assert_array_equal(np.asarray(codes[i]).view(np.uint8), np.asarray(one_codes).view(np.uint8))
        np.testing.assert_array_equal(scales[i], one_scales)
