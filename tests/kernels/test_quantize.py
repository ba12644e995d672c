"""The reference quantiser: the oracle of the kernels has to be right by itself."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import testing
from pallas_kernels.numerics import spacing, tile_distinct, worst_tile
from pallas_kernels.quantize import reference as q

pytestmark = pytest.mark.usefixtures("quick_compile")

SHAPES = [(1, 1), (3, 130), (130, 64), (128, 256), (200, 300)]  # few: each is compiled
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
ROWS, BLOCKS = (1, 128), (128, 128)
QUANTISERS = {
    "rows": (q.quantize_rows, ROWS, E4M3, False),
    "rows-e5m2": (functools.partial(q.quantize_rows, dtype=E5M2), ROWS, E5M2, False),
    "rows-pow2": (functools.partial(q.quantize_rows, power_of_two=True), ROWS, E4M3, True),
    "rows-e5m2-pow2": (functools.partial(q.quantize_rows, dtype=E5M2, power_of_two=True), ROWS, E5M2, True),
    "blocks": (q.quantize_blocks, BLOCKS, E4M3, False),
    "blocks-pow2": (functools.partial(q.quantize_blocks, power_of_two=True), BLOCKS, E4M3, True),
}
COMPILED = {name: jax.jit(case[0]) for name, case in QUANTISERS.items()}
quantisers = pytest.mark.parametrize("name", QUANTISERS)
shapes, seeds = st.sampled_from(SHAPES), testing.seeds()


def spread(scale, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    return np.kron(np.asarray(scale, np.float64), np.ones(block))[: shape[0], : shape[1]]


def wild(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Every 1x128 group at its own magnitude from 1e-30 to 1e30, within it 8 decades; some groups and
    elements zero."""
    rng = np.random.default_rng(seed)
    groups = 10.0 ** rng.uniform(-30, 30, (shape[0], -(-shape[1] // 128))) * (rng.random((shape[0], 1)) > 0.1)
    within = 10.0 ** rng.uniform(-8, 0, shape) * rng.choice([-1, 0, 1], shape, p=[0.45, 0.1, 0.45])
    return (np.kron(groups, np.ones(128))[:, : shape[1]] * within).astype(np.float32)


def oracle(x: np.ndarray, block: tuple[int, int], dtype, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """Block by block in numpy, whose float32 division is correctly rounded, with ml_dtypes' cast."""
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    rows, cols = (-(-n // b) for n, b in zip(x.shape, block))
    codes, scales = np.zeros(x.shape, dtype), np.zeros((rows, cols), np.float32)
    for i in range(rows):
        for j in range(cols):
            at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            amax = np.maximum(np.abs(x[at]).max(), np.float32(1e-10))
            if power_of_two:  # the least 2^k with 2^k * MAX >= amax, in float64, where the product is exact
                k = math.frexp(float(amax) / float(largest))[1] - 1
                scales[i, j] = 2.0 ** (k + (2.0**k * float(largest) < float(amax)))
            else:
                scales[i, j] = amax / largest
            codes[at] = np.clip(x[at] / scales[i, j], -largest, largest).astype(dtype)
    return codes, scales


@quantisers
@given(shapes, seeds)
def test_codes_and_scales_equal_the_oracle_bit_for_bit(name, shape, seed):
    _, block, dtype, power_of_two = QUANTISERS[name]
    x = wild(shape, seed)
    codes, scales = COMPILED[name](x)
    want_codes, want_scales = oracle(x, block, dtype, power_of_two)
    testing.assert_same_bits((codes, scales), (want_codes, want_scales))


@quantisers
@given(seed=seeds, dtype=st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_finite_in_finite_out_and_within_half_a_step(name, seed, dtype):
    _, block, fp8, power_of_two = QUANTISERS[name]
    x = jnp.asarray(wild((64, 256), seed)).astype(dtype)
    codes, scale = (np.asarray(a) for a in COMPILED[name](x))
    assert (scale > 0).all() and np.isfinite(scale).all() and np.isfinite(codes.astype(np.float32)).all()
    wide = spread(scale, block, x.shape)
    exact = np.asarray(x, np.float64) / wide
    half_step = spacing(exact, fp8) / 2 + 2.0**-23 * np.abs(exact)  # the quotient is rounded to float32 first
    assert (np.abs(codes.astype(np.float64) - exact) <= half_step).all()
    if power_of_two:
        assert (np.frexp(scale)[0] == 0.5).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_all_256_codes_survive_the_round_trip(dtype):
    """A row of codes that holds the largest has scale 1. NaN and infinity are codes to read, never to
    write."""
    every = np.arange(256, dtype=np.uint8).view(dtype)
    np.testing.assert_array_equal(q.read_codes(jnp.asarray(every)), every.astype(np.float32))
    finite = every[np.isfinite(every)]
    assert len(finite) == {E4M3: 254, E5M2: 248}[dtype]
    row = np.full((2, 128), ml_dtypes.finfo(dtype).max, dtype)
    row.reshape(-1)[: len(finite) // 2], row[1, : len(finite) // 2] = finite[::2], finite[1::2]
    codes, scale = q.quantize_rows(row.astype(np.float32), dtype)
    testing.assert_same_bits((codes, scale), (row, np.ones((2, 1), np.float32)))


@quantisers
@given(magnitude=testing.magnitudes(), sign=st.sampled_from([1, -1]))
def test_constant_blocks(name, magnitude, sign):
    """Zeros and subnormals have the floor's scale and codes of zero; elsewhere the largest code stands for
    the amax."""
    _, _, fp8, power_of_two = QUANTISERS[name]
    codes, scale = (np.asarray(a, np.float64)
                    for a in COMPILED[name](np.full((200, 300), sign * magnitude, np.float32)))
    largest = float(ml_dtypes.finfo(fp8).max)
    floor = max(magnitude, 1e-10)
    assert (scale >= floor / largest * (1 - 2**-23)).all() and (
        scale <= floor / largest * (2 if power_of_two else 1 + 2**-23)
    ).all()
    assert (codes == 0).all() if magnitude < 1e-20 else (magnitude < 1e-10
                                                         or (sign * codes >= largest / 2).all())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@quantisers
def test_a_block_that_is_not_finite_is_seen_in_its_scale(name, bad):
    x = tile_distinct((200, 300), BLOCKS)
    x[130, 200] = bad
    codes, scale = COMPILED[name](x)
    expected = np.ones(scale.shape, bool)
    expected[130 // QUANTISERS[name][1][0], 1] = False
    np.testing.assert_array_equal(np.isfinite(scale), expected)
    assert np.isnan(np.asarray(codes, np.float32)[130, 200])


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_a_power_of_two_scale_is_the_least_that_holds_amax(dtype, largest):
    """Also when amax is the largest code times a power of two, and a float32 neighbour of that, where
    logarithms err."""
    exact = np.float32(largest) * np.exp2(np.arange(-40, 100, dtype=np.float32))
    amax = np.stack([np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(np.inf))])
    _, scale = q.quantize_rows(np.repeat(amax[..., None], 128, -1), dtype, power_of_two=True)
    power = np.exp2(np.arange(-40.0, 100.0))
    np.testing.assert_array_equal(scale[..., 0], np.stack([power, power, 2 * power]))


@given(seeds)
def test_division_is_correctly_rounded(seed):
    """Also when the compiler multiplies by a float64 reciprocal instead, as `divide` says."""
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(2**23, 2**24, 4096).astype(np.float32) for _ in "xy")
    y[:8], x[:8] = 2**24 - 1 - np.arange(8), 2**23 + 1 + np.arange(8)
    np.testing.assert_array_equal(jax.jit(q.divide)(x, y), x / y)
    np.testing.assert_array_equal((x.astype(np.float64) * (1 / y.astype(np.float64))).astype(np.float32),
                                  x / y)


@pytest.mark.parametrize("tokens", [1, 100, 128, 200])
def test_tokens_are_the_rows_of_the_transpose(tokens):
    x = wild((tokens, 70), 0)
    codes, scale = jax.jit(functools.partial(q.quantize_tokens, dtype=E5M2))(x)
    want_codes, want_scale = oracle(np.ascontiguousarray(x.T), ROWS, E5M2, False)
    assert codes.shape == (70, tokens) and scale.shape == (70, -(-tokens // 128))
    testing.assert_same_bits((codes, scale), (want_codes, want_scale))


@pytest.mark.parametrize("quantize", [q.quantize_rows, q.quantize_blocks, q.quantize_tokens])
def test_leading_axes_are_independent(quantize):
    x = np.stack([wild((130, 200), s) for s in range(3)])
    compiled = jax.jit(quantize)
    stacked = compiled(x)
    for i in range(3):
        testing.assert_same_bits(tuple(all_[i] for all_ in stacked), compiled(x[i]))


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_the_amax_floor_is_the_engines_where_it_fuses(fmt):
    x = np.array([[2.0**-8] * 128 + [2.0**-10] * 128], np.float32)
    _, scale = q.quantize_rows(x, fmt, amax_floor=q.FUSED_AMAX_FLOOR)
    np.testing.assert_array_equal(scale,
                                  np.float32([[2.0**-8, 2.0**-9]]) / np.float32(ml_dtypes.finfo(fmt).max))


@pytest.mark.parametrize(("name", "dequantize"),
                         [("rows", q.dequantize_rows), ("blocks", q.dequantize_blocks)])
def test_a_scale_from_the_wrong_block_is_an_error_over_one_half(name, dequantize):
    block = QUANTISERS[name][1]
    x = tile_distinct((block[0] * 4, 512), block)
    codes, scale = COMPILED[name](x)
    dequantize = jax.jit(dequantize)
    assert worst_tile(dequantize(codes, scale), x, block) < 0.04
    scale = np.asarray(scale)
    wrong = [np.roll(scale, 1, 0), np.roll(scale, 1, 1), scale.T, scale[::-1, ::-1]]
    for i, j in [((0, 0), (0, 1)), ((1, 2), (2, 2)), ((3, 3), (2, 1))]:  # two exchanged, the rest right
        wrong.append(scale.copy())
        wrong[-1][i], wrong[-1][j] = scale[j], scale[i]
    for permuted in wrong:
        assert worst_tile(dequantize(codes, permuted), x, block) > 0.5


@quantisers
def test_it_lowers_for_cuda(name):
    shape = jax.ShapeDtypeStruct((256, 300), jnp.bfloat16)
    assert "f8E" in COMPILED[name].trace(shape).lower(lowering_platforms=("cuda",)).as_text()
