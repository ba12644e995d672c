"""The product with a weight in four bits: by the decoded values, with dgrad alone, from packed codes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.precision.four_bits import four_bit_linear
from jaxfp8rl.precision.linear import linear
from jaxfp8rl.precision.records import Precision
from pallas_kernels import four_bits
from pallas_kernels.four_bits import GROUPS, FourBits
from pallas_kernels.numerics import relative_l2, tile_distinct

pytestmark = pytest.mark.usefixtures("quick_compile")
N, K = 48, 64
forms = pytest.mark.parametrize("form", GROUPS)
PLAIN = Precision.uniform(1)


def weight(form: str, divisor: float | None = None) -> FourBits:
    """Each tile of 16x16 with its own magnitude; divisor: NVFP4's, of another than a power of two."""
    packed = four_bits.quantize(jnp.asarray(tile_distinct((N, K), (16, 16), octaves=0.4)), form)
    if divisor is None or form != "nvfp4":
        return packed
    return packed._replace(global_scale=jnp.float32(divisor))


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@forms
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_product_and_dgrad_are_those_of_the_values(form, dtype):
    packed = weight(form, divisor=1234.5)
    w = np.asarray(four_bits.values(packed), np.float64)
    x, dy = numbers((2, 5, K), 0), numbers((2, 5, N), 1)
    x, dy = (np.asarray(jnp.asarray(a, dtype), np.float64) for a in (x, dy))
    y, pull = jax.vjp(lambda x: linear(x, packed, dataclasses.replace(PLAIN, compute_dtype=dtype), False),
                      jnp.asarray(x, dtype))
    (dx,) = pull(jnp.asarray(dy, dtype))
    assert y.dtype == dx.dtype == dtype
    bound = 1e-6 if dtype == "float32" else 2e-3  # rounded once: half a step is 2^-9 at most
    assert relative_l2(np.asarray(y), x @ w.T) < bound
    assert relative_l2(np.asarray(dx), dy @ w) < bound


def test_a_power_of_two_divides_before_or_after():
    """So an engine that makes BF16 weights of the quotients computes the same, to the bit."""
    packed, x = weight("nvfp4"), jnp.asarray(numbers((7, K), 0), jnp.bfloat16)
    before = jnp.asarray(four_bits.values(packed), jnp.bfloat16)
    want = (x.astype(jnp.float32) @ before.astype(jnp.float32).T).astype(jnp.bfloat16)
    np.testing.assert_array_equal(four_bit_linear("bfloat16", x, packed), want)


@forms
def test_nothing_is_kept_for_the_backward_pass_but_the_packed_codes(form):
    packed = weight(form)
    _, pull = jax.vjp(lambda x: four_bit_linear("bfloat16", x, packed), jnp.ones((9, K), jnp.bfloat16))
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size > 1]
    assert sorted(leaf.nbytes for leaf in kept) == sorted(leaf.nbytes for leaf in jax.tree.leaves(packed)
                                                          if leaf.size > 1)


def test_a_bias_is_added_to_the_rounded_product():
    packed, x, bias = weight("mxfp4"), jnp.asarray(numbers((3, K), 0), jnp.bfloat16), jnp.linspace(-3, 3, N)
    precision = dataclasses.replace(PLAIN, compute_dtype="bfloat16")
    want = linear(x, packed, precision, False) + bias.astype(jnp.bfloat16)
    np.testing.assert_array_equal(linear(x, packed, precision, False, bias=bias), want)
