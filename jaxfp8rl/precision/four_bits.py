"""The product with a weight in four bits that does not learn: codes stay packed, and each pass decodes them.

It computes as vLLM's Marlin kernel: x times the decoded numbers, which are bfloat16 numbers exactly, summed
in float32, divided by NVFP4's divisor and rounded. (If the divisor is a power of two, to divide the numbers
first is the same.) The backward pass is dgrad alone, by the same numbers: nothing is kept but the packed
codes, and no transposed copy of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import four_bits
from pallas_kernels.four_bits import FourBits

HIGHEST = jax.lax.Precision.HIGHEST


def is_packed_leaf(leaf: object) -> bool:
    """Whether a leaf of a tree of weights is in four bits."""
    return isinstance(leaf, FourBits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def four_bit_linear(dtype: str, x: Array, weight: FourBits) -> Array:
    """x [..., K], in `dtype`, times `weight` [N, K] transposed -> [..., N] in `dtype`, which is bfloat16 or
    float32. The weight has no gradient."""
    return _product(dtype, x, weight, 1)


def _product(dtype: str, x: Array, weight: FourBits, over: int) -> Array:
    """x times the decoded weight, contracted along the weight's axis `over`, rounded once."""
    w = four_bits.decode(weight).astype(dtype)
    divisor = weight.global_scale
    y = jax.lax.dot_general(x.astype(dtype), w, (((x.ndim - 1,), (over,)), ((), ())),
                            precision=HIGHEST if dtype == "float32" else None,
                            preferred_element_type=jnp.float32 if divisor is not None else jnp.dtype(dtype))
    y = y if divisor is None else (y / divisor).astype(dtype)
    return jax.lax.optimization_barrier(y)  # no sum that follows is taken before the rounding: see linear.py


def _forward(dtype: str, x: Array, weight: FourBits) -> tuple[Array, tuple[FourBits, Array]]:
    return _product(dtype, x, weight, 1), (weight, jnp.zeros((), x.dtype))


def _backward(dtype: str, saved: tuple[FourBits, Array], dy: Array) -> tuple[Array, None]:
    weight, like = saved
    return _product(dtype, dy, weight, 0).astype(like.dtype), None


four_bit_linear.defvjp(_forward, _backward)
