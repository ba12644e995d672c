"""The scaled products against float64, and an emulated tensor core against both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blockwise_matmul import reference as matmul
from pallas_kernels.blockwise_matmul import xla
from pallas_kernels.numerics import cosine, relative_l2, tile_distinct
from pallas_kernels.quantize import reference as q
from pallas_kernels.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("quick_compile")

blockwise_matmul = jax.jit(matmul.blockwise_matmul, static_argnames="short_accumulator")
wgrad = jax.jit(matmul.wgrad, static_argnames="short_accumulator")
short_dot = jax.jit(matmul.short_dot)
quantize_rows = jax.jit(q.quantize_rows, static_argnames=("dtype", "power_of_two"))
quantize_tokens = jax.jit(q.quantize_tokens, static_argnames="dtype")
quantize_blocks = jax.jit(q.quantize_blocks, static_argnames="power_of_two")

T, N, K = 150, 200, 300  # none a multiple of 128
EPS = 2.0**-24


def float64(dequantize, codes, scale) -> np.ndarray:
    """Codes times scales: exact in float64."""
    ones = dequantize(jnp.ones(codes.shape, codes.dtype), scale)
    return np.asarray(codes).astype(np.float64) * np.asarray(ones, np.float64)


def rows64(codes, scale):
    return float64(q.dequantize_rows, codes, scale)


def blocks64(codes, scale):
    return float64(q.dequantize_blocks, codes, scale)


@pytest.fixture(scope="module")
def x():
    return tile_distinct((T, K), (1, 128), seed=1)


@pytest.fixture(scope="module")
def w():
    return tile_distinct((N, K), (128, 128), seed=2)


@pytest.fixture(scope="module")
def dy():
    return tile_distinct((T, N), (1, 128), seed=3)


def check(got, a: np.ndarray, b: np.ndarray, limit: float = 8 * EPS):
    """|got - a b| within `limit` of the sum of |products|, element by element."""
    assert (np.abs(np.asarray(got, np.float64) - a @ b) <= limit * (np.abs(a) @ np.abs(b))).all()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_fprop_equals_float64(x, w, power_of_two):
    a, b = quantize_rows(x, power_of_two=power_of_two), quantize_blocks(w, power_of_two=power_of_two)
    got = blockwise_matmul(*a, *b)
    assert got.shape == (T, N) and got.dtype == jnp.float32
    check(got, rows64(*a), blocks64(*b).T)


@pytest.mark.parametrize("shape", [(T, N, K), (1, 128, 256), (16, 384, 128)])
def test_the_product_of_fp8_dots_is_the_reference(shape):
    """On a GPU these dots sum as its tensor cores do; here in float32. Tokens may have several axes."""
    tokens, n, k = shape
    a = quantize_rows(tile_distinct((tokens, k), (1, 128), seed=1))
    b = quantize_blocks(tile_distinct((n, k), (128, 128), seed=2))
    got = jax.jit(xla.blockwise_matmul)(*a, *b)
    check(got, rows64(*a), blocks64(*b).T)
    folded = jax.jit(xla.blockwise_matmul)(*(x[None, :, None] for x in a), *b)
    assert_same_bits(folded[0, :, 0], got)


@pytest.mark.parametrize("dtype", [q.E4M3, q.E5M2])
def test_dgrad_takes_the_same_weight_bytes_transposed(dy, w, dtype):
    a, (codes, scale) = quantize_rows(dy, dtype), quantize_blocks(w)
    got = blockwise_matmul(*a, codes.T, scale.T)
    assert got.shape == (T, K)
    check(got, rows64(*a), blocks64(codes, scale))


@pytest.mark.parametrize("dtype", [q.E4M3, q.E5M2])
def test_wgrad_contracts_over_tokens(dy, x, dtype):
    a, b = quantize_tokens(dy, dtype), quantize_tokens(x)
    got = wgrad(*a, *b)
    assert got.shape == (N, K)
    check(got, rows64(*a), rows64(*b).T)


def test_all_three_passes_approximate_the_unquantised_products():
    """E4M3's error of a product of normal data is about 0.037 whatever the sizes: each operand brings
    0.026."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=s).astype(np.float32) for s in [(T, K), (N, K), (T, N)])
    weight = quantize_blocks(w)
    pairs = [
        (blockwise_matmul(*quantize_rows(x), *weight), x @ w.T),
        (blockwise_matmul(*quantize_rows(dy), weight[0].T, weight[1].T), dy @ w),
        (wgrad(*quantize_tokens(dy), *quantize_tokens(x)), dy.T @ x),
    ]
    for got, want in pairs:
        assert 0.03 < relative_l2(got, want) < 0.045 and cosine(got, want) > 0.999


def test_promotion_equals_the_product_of_dequantised_operands_up_to_float32_rounding(x, w):
    """What a linear layer without kernels computes: both sum the same products, in another order."""
    a, b = quantize_rows(x), quantize_blocks(w)
    promoted = blockwise_matmul(*a, *b)
    dequantised = jnp.dot(q.dequantize_rows(*a), q.dequantize_blocks(*b).T, precision="highest")
    bound = 8 * EPS * (np.abs(rows64(*a)) @ np.abs(blocks64(*b)).T)
    assert (np.abs(np.asarray(promoted, np.float64) - np.asarray(dequantised, np.float64)) <= bound).all()


def test_a_scale_from_the_wrong_block_is_an_error_over_one_half(x, w):
    (a, sa), (b, sb) = quantize_rows(x), quantize_blocks(w)
    right = blockwise_matmul(a, sa, b, sb)
    shifted = [(jnp.roll(sa, 1, axis), sb)
               for axis in (0, 1)] + [(sa, jnp.roll(sb, 1, axis)) for axis in (0, 1)]
    for wrong in shifted:
        assert relative_l2(blockwise_matmul(a, wrong[0], b, wrong[1]), right) > 0.5


def test_padding_adds_nothing(x, w):
    """A width of 300 and the same with zeros up to 384 are one product, bit for bit."""
    padded = [np.pad(m, [(0, 0), (0, 384 - K)]) for m in (x, w)]
    got = blockwise_matmul(*quantize_rows(x), *quantize_blocks(w))
    assert_same_bits(got, blockwise_matmul(*quantize_rows(padded[0]), *quantize_blocks(padded[1])))


def normal_codes(contraction: int, positive: bool = False):
    rng = np.random.default_rng(contraction)
    made = (rng.normal(size=(n, contraction)).astype(np.float32) for n in (24, 40))
    return [quantize_rows(np.abs(m) if positive else m) for m in made]


def short_error(contraction: int, positive: bool = False) -> float:
    a, b = (codes for codes, _ in normal_codes(contraction, positive))
    return relative_l2(short_dot(a, b), np.asarray(a, np.float64) @ np.asarray(b, np.float64).T)


@pytest.mark.slow
def test_a_short_accumulator_drifts_with_the_contraction_and_promotion_stops_it():
    """The figures in `short_dot`'s docstring."""
    assert 1e-4 < short_error(128) < 1.5e-4 and 1e-3 < short_error(4096) < 2e-3
    assert 5e-4 < short_error(128, positive=True) < 1e-3 and 0.05 < short_error(4096, positive=True) < 0.1
    a, b = normal_codes(4096)
    want = rows64(*a) @ rows64(*b).T
    assert relative_l2(wgrad(*a, *b), want) < 5e-7
    assert 1e-4 < relative_l2(wgrad(*a, *b, short_accumulator=True), want) < 1.6e-4


def test_short_accumulation_is_exact_while_everything_fits_in_14_bits():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-7, 8, (9, 128)).astype(np.float32) for _ in "ab")  # sums are whole and under 2^13
    np.testing.assert_array_equal(short_dot(jnp.asarray(a, q.E4M3), jnp.asarray(b, q.E4M3)), a @ b.T)


def test_short_accumulation_cuts_what_lies_14_bits_below():
    """256 * 256 beside 1: under 2^16 the least bit kept is 2^3, so ones vanish and an 8 stays."""
    row = np.zeros((1, 32), np.float32)
    row[0, :4] = 256, 1, 1, 8
    ones = np.array([[256, 1, 1, 1] + [0] * 28], np.float32)
    assert short_dot(jnp.asarray(row, q.E4M3), jnp.asarray(ones, q.E4M3)).item() == 2**16 + 8
    assert short_dot(jnp.asarray(-row, q.E4M3), jnp.asarray(ones, q.E4M3)).item() == -(2**16) - 8


@pytest.mark.parametrize("short", [False, True])
def test_it_lowers_for_cuda(short):
    def linear(x, w):
        return blockwise_matmul(*quantize_rows(x), *quantize_blocks(w), short_accumulator=short)

    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in [(T, K), (N, K)]]
    assert "while" in jax.jit(linear).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
