"""A fused multiply-add for XLA, which otherwise fuses a product and a sum at its discretion, and for a CPU
that simulates a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def fused_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 numbers, rounded once to float32; results below 2^-126 are subnormal if the
    machine supports that, otherwise 0.

    The product is exact in float64, but the sum is not. Rounded to float64 and then to float32, it would be
    off by an ulp if the first rounding produced a tie. The first rounding is therefore to odd, which never
    does (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using
    rounding to odd", 2008).
    """
    with jax.enable_x64(True):
        a, b, c = (lax.convert_element_type(x, jnp.float64) for x in (a, b, c))
        total = _odd_sum(a * b, c)
        # instead of the cast's own rounding, which XLA may drop together with another cast
        rounded = lax.reduce_precision(total, 8, 23)
        return lax.convert_element_type(jnp.where(jnp.abs(total) < 2.0**-126, total, rounded), jnp.float32)


def _odd_sum(x: Array, y: Array) -> Array:
    """x + y rounded to odd in float64: the exact sum if it is representable, otherwise the neighbour whose
    last bit is 1."""
    total = x + y
    of_y = total - x
    # exact (Knuth's TwoSum); NaN for a total that is not finite, so that neither comparison below holds
    lost = (x - (total - of_y)) + (y - of_y)
    bits = lax.bitcast_convert_type(total, jnp.int64)
    outwards = (lost > 0) == (total > 0)
    moved = jnp.where(outwards, bits + 1, bits - 1)
    to_odd = ((lost > 0) | (lost < 0)) & (bits & 1 == 0)
    return lax.bitcast_convert_type(jnp.where(to_odd, moved, bits), jnp.float64)
