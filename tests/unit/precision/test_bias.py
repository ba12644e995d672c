"""Where a product gets its bias, and the gradient of that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.linear import linear
from jaxfp8rl.precision.records import Precision
from pallas_kernels.numerics import relative_l2

pytestmark = pytest.mark.usefixtures("quick_compile")
ERROR = {"bfloat16": 4e-3, "float32": 1e-6}  # of one rounding


def drawn(dtype: str) -> list[jax.Array]:
    """x, weight, bias, and a cotangent of the result."""
    rng = np.random.default_rng(0)
    shapes = (2, 5, 128), (128, 128), (128,), (2, 5, 128)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ERROR)
def test_a_bias_is_added_before_the_one_rounding_and_has_the_gradient_of_its_sum(dtype):
    *operands, dy = drawn(dtype)
    f = lambda x, w, b: linear(x, w, Precision.uniform(1, dtype), fp8=False, bias=b)
    both = rounding_exact_jit(lambda operands, dy: (f(*operands), jax.vjp(f, *operands)[1](dy)))
    y, gradients = both(operands, dy)
    x, w, b, g = (np.asarray(a, np.float64) for a in (*operands, dy))
    exact = x @ w.T + b
    assert y.dtype == dtype and relative_l2(y, exact) < ERROR[dtype]
    assert dtype == "float32" or (np.asarray(y) != exact.astype(y.dtype)).mean() < 1e-2
    for got, want in zip(gradients, (g @ w, np.einsum("btn,btk->nk", g, x), g.sum((0, 1))), strict=True):
        assert got.dtype == dtype and relative_l2(got, want) < ERROR[dtype]


def test_an_fp8_product_is_rounded_before_it_gets_its_bias():
    x, w, b, _ = drawn("bfloat16")
    run = lambda bias: rounding_exact_jit(
        lambda x, b: linear(x, w, Precision.uniform(1, "bfloat16"), fp8=True, bias=b))(x, bias)
    np.testing.assert_array_equal(run(b), run(None) + b)
