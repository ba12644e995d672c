"""fp8_dot_general by the Hopper kernels: what its program holds, and its numbers when the kernels are
simulated."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Jaxpr, JaxprEqn

from pallas_kernels import fp8_dot_general
from pallas_kernels.plgpu_compat import INTERPRET
from pallas_kernels.testing import assert_blockwise_close, tile_distinct

pytestmark = pytest.mark.usefixtures("quick_compile")

DTYPES = jnp.bfloat16, jnp.float16, jnp.float32
NK, KN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))
KERNEL = "mpmd_map"  # the primitive of a Mosaic GPU kernel
CASES = {  # name: the kernel's shape and the axes; lhs is [2, 128, 256]
    "[N, K]": ((384, 256), (((2,), (1,)), ((), ()))),
    "[K, N]": ((256, 384), (((2,), (0,)), ((), ()))),
    "a batch": ((2, 256, 384), (((2,), (1,)), ((0,), (0,)))),
}


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a program, however deep, but none that is part of a kernel."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != KERNEL:
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_holds_equations):
                if _holds_equations(value):
                    yield from equations(getattr(value, "jaxpr", value))


def _holds_equations(value) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def is_codes(x) -> bool:
    return jnp.issubdtype(x.aval.dtype, jnp.floating) and x.aval.dtype.itemsize == 1


def assert_only_kernels_multiply(jaxpr: Jaxpr, kernels: int, products: int) -> None:
    """The program has that many kernels, of which that many multiply codes by codes. It has no other product,
    and nowhere outside a kernel do codes become floats again."""
    program = [*equations(jaxpr)]
    found = [eqn for eqn in program if eqn.primitive.name == KERNEL]
    assert len(found) == kernels
    assert sum(sum(map(is_codes, eqn.invars)) == 2 for eqn in found) == products
    names = {eqn.primitive.name for eqn in program}
    assert not names & {"dot_general", "ragged_dot"}
    casts = [eqn for eqn in program if eqn.primitive.name == "convert_element_type"]
    assert not [eqn for eqn in casts if is_codes(eqn.invars[0])]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward_are_three_products_of_codes_by_the_kernel(name, dtype):
    shape, axes = CASES[name]
    args = jax.ShapeDtypeStruct((2, 128, 256), dtype), jax.ShapeDtypeStruct(shape, dtype)
    forward = lambda x, w: fp8_dot_general(x, w, axes, backend="pallas").astype(jnp.float32)
    both = jax.value_and_grad(lambda x, w: jnp.sum(forward(x, w)), (0, 1))
    assert_only_kernels_multiply(jax.make_jaxpr(forward)(*args).jaxpr, kernels=3, products=1)
    assert_only_kernels_multiply(jax.make_jaxpr(both)(*args).jaxpr, kernels=7, products=3)


@pytest.mark.parametrize("name", CASES)
def test_it_lowers_for_cuda(name):
    shape, axes = CASES[name]
    args = jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16), jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    both = jax.grad(
        lambda x, w: jnp.sum(fp8_dot_general(x, w, axes, backend="pallas").astype(jnp.float32)), (0, 1)
    )
    text = jax.jit(both).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "stablehlo.dot_general" not in text


@pytest.mark.parametrize("axes", [KN, pytest.param(NK, marks=pytest.mark.slow)])
def test_simulated_the_kernels_equal_the_reference(axes):
    x, w, dy = (tile_distinct(s, jnp.bfloat16, i) for i, s in enumerate(((24, 136), (136, 72), (24, 72))))
    w = w if axes == KN else w.T
    of = lambda **how: jax.vjp(
        lambda x, w: fp8_dot_general(x, w, axes, preferred_element_type=jnp.float32, **how), x, w
    )
    (y, pull), (want, pull_want) = of(backend="pallas", interpret=INTERPRET), of(backend="reference")
    assert_blockwise_close(y, want, rtol=1e-5, block=(16, 16))
    for a, b in zip(pull(dy.astype(jnp.float32)), pull_want(dy.astype(jnp.float32))):
        assert_blockwise_close(a, b, rtol=2.0**-7, block=(16, 16))
