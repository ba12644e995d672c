"""fp8_dot_general by the Hopper kernels: the result and both gradients against the reference and against
float64, and what is compiled."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.precision.jit import rounding_exact_jit
from pallas_kernels import fp8_dot_general
from pallas_kernels.numerics import tile_distinct, worst_tile
from tests.kernels.test_dot_general_hopper import assert_only_kernels_multiply

pytestmark = pytest.mark.usefixtures("hopper")

TILE = (64, 64)
ROWS, BLOCKS = (1, 128), (128, 128)
NAMES = "y", "d lhs", "d rhs"


class Case(NamedTuple):
    """A product of lhs and rhs, and the same as an einsum of lhs, rhs and the result."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    axes: tuple
    letters: tuple[str, str, str]


CASES = {  # ragged along every axis but those of the first two, which are whole tiles
    "[N, K]": Case((512, 1536), (640, 1536), (((1,), (1,)), ((), ())), ("tk", "nk", "tn")),
    "[K, N]": Case((512, 1536), (1536, 640), (((1,), (0,)), ((), ())), ("tk", "kn", "tn")),
    "[N, K], ragged": Case((3, 67, 300), (200, 300), (((2,), (1,)), ((), ())), ("stk", "nk", "stn")),
    "[K, N], ragged": Case((3, 67, 300), (300, 200), (((2,), (0,)), ((), ())), ("stk", "kn", "stn")),
    "a batch of [N, K]": Case((2, 256, 384), (2, 320, 384), (((2,), (2,)), ((0,), (0,))),
                              ("btk", "bnk", "btn")),
    "a batch of [K, N]": Case((2, 256, 384), (2, 384, 320), (((2,), (1,)), ((0,), (0,))),
                              ("btk", "bkn", "btn")),
}


def made(shape: tuple[int, ...], block: tuple[int, int], dtype, seed: int, octaves: float) -> jax.Array:
    """Numbers whose blocks are at magnitudes of their own, `octaves` apart; of more than two axes the last
    two count, and those in front have other seeds."""
    count = int(np.prod(shape[:-2]))
    parts = [tile_distinct(shape[-2:], block, seed + i, octaves) for i in range(count)]
    return jnp.asarray(np.stack(parts).reshape(shape)).astype(dtype)


def data(case: Case, dtype, octaves: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """lhs, rhs, and the result's cotangent."""
    out = jax.eval_shape(functools.partial(jax.lax.dot_general, dimension_numbers=case.axes),
                         *(jax.ShapeDtypeStruct(shape, dtype) for shape in (case.lhs, case.rhs)))
    shapes = (case.lhs, ROWS), (case.rhs, BLOCKS), (out.shape, ROWS)
    lhs, rhs, dy = (made(shape, block, dtype, seed, octaves) for seed, (shape, block) in enumerate(shapes))
    return lhs, rhs, dy


def passes(case: Case, backend, lhs, rhs, dy) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(y, d lhs, d rhs)"""
    y, pull = jax.vjp(lambda lhs, rhs: fp8_dot_general(lhs, rhs, case.axes, backend=backend), lhs, rhs)
    return y, *pull(dy)


run = rounding_exact_jit(passes, static_argnums=(0, 1))


def in_float64(case: Case, lhs, rhs, dy) -> list[np.ndarray]:
    lhs, rhs, dy = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, dy))
    a, b, c = case.letters
    einsum = functools.partial(np.einsum, optimize=True)
    return [einsum(f"{a},{b}->{c}", lhs, rhs), einsum(f"{c},{b}->{a}", dy, rhs),
            einsum(f"{c},{a}->{b}", dy, lhs)]


def worst(got: jax.Array, want) -> float:
    """The largest relative error of any tile of any of the matrices."""
    matrices = (np.asarray(x).astype(np.float64).reshape(-1, *x.shape[-2:]) for x in (got, want))
    return max(worst_tile(g, w, TILE) for g, w in zip(*matrices))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", CASES)
def test_all_three_products_equal_the_reference_tile_by_tile(name, dtype):
    """Neighbouring blocks are a factor of 8 apart, so that a scale of another block would be an error over
    0.5. float32: the tensor cores' 14 bits; bfloat16: its rounding on top."""
    case = CASES[name]
    args = data(case, dtype, octaves=3.0)
    ours, theirs = run(case, "pallas", *args), run(case, "reference", *args)
    for which, got, want in zip(NAMES, ours, theirs):
        error = worst(got, want)
        print(f"{name} {jnp.dtype(dtype)} {which}: {error:.2e}")
        assert got.dtype == want.dtype == dtype and got.shape == want.shape
        assert error < (2e-3 if dtype == jnp.float32 else 4e-3), which


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", CASES)
def test_all_three_products_are_float64s_but_for_the_rounding_of_codes(name, dtype):
    """E4M3's rounding of two operands is an error of 0.037 in any tile. Magnitudes are half an octave apart:
    128 tokens at one scale stay in E4M3's range, and a scale of another row still is an error over 0.2."""
    case = CASES[name]
    args = data(case, dtype, octaves=0.5)
    for which, got, want in zip(NAMES, run(case, "pallas", *args), in_float64(case, *args)):
        error = worst(got, want)
        print(f"{name} {jnp.dtype(dtype)} {which}: {error:.4f}")
        assert error < 0.06, which


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", CASES)
def test_the_program_is_three_fp8_products_and_four_quantisers(name, dtype):
    case = CASES[name]
    args = data(case, dtype, octaves=0.5)
    program = jax.make_jaxpr(functools.partial(passes, case, "pallas"))(*args)
    assert_only_kernels_multiply(program.jaxpr, kernels=7, products=3)


@pytest.mark.parametrize("name", ["[N, K]", "[K, N]"])
def test_what_is_compiled_is_seven_kernels_and_no_product_by_xla(name):
    """By "auto", which is the kernels on this GPU."""
    case = CASES[name]
    args = data(case, jnp.bfloat16, octaves=0.5)
    text = jax.jit(functools.partial(passes, case, "auto")).lower(*args).compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 7
    assert " dot(" not in text and "__cublas" not in text
