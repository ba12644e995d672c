"""Scales for the queries, keys and values of FP8 attention: one for each layer. The scoring pass measures
them, and a publish sends them with the weights.

A tensor is divided by its scale before it is rounded to E4M3, and multiplied by it afterwards. The scale
moves the tensor into the range of E4M3, 2^-9 to 448. It adds no precision there, because E4M3 is a float. It
only has to keep the largest element from being cut off and small elements from being lost. So each scale is
the least power of two that leaves the largest element below 256. A multiplication by a power of two is
exact, wherever among its sums a kernel multiplies. Learner and engine therefore cannot differ because of a
scale. (NeMo RL takes amax / 448, and so does FP8-RL according to its paper.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

NAMES = ("q", "k", "v")
KvScales = dict[str, Array]  # a name of NAMES -> the scales of the layers, [L] float32
# The scales of a layer that was given none. An engine without scales has the same.
UNIT: dict[str, Any] = dict.fromkeys(NAMES, 1.0)
# The scaled largest element lies between 2^7 and 2^8, which leaves a factor of 1.75 to 3.5 below 448.
LARGEST = 7


def amax_of(q_BTHd: Array, k_BTKd: Array, v_BTKd: Array, live_BT: Array) -> KvScales:
    """The largest |element| of queries, keys and values over the `live` tokens: float32 scalars, 0 without
    live tokens. They have no gradient."""
    live = live_BT[..., None, None]
    arrays = map(jax.lax.stop_gradient, (q_BTHd, k_BTKd, v_BTKd))
    return {n: jnp.max(jnp.abs(x), where=live, initial=0.0).astype(jnp.float32)
            for n, x in zip(NAMES, arrays)}


def scales_from(amax: KvScales) -> KvScales:
    """2^(floor(log2 amax) - 7), which is positive and finite. If amax is not finite or below 2^-100, the
    scale is 1."""

    def one(a: Array) -> Array:
        _, exponent = jnp.frexp(a)  # a = m 2^exponent, 1/2 <= m < 1
        usable = jnp.isfinite(a) & (a >= 2.0**-100)
        return jnp.where(usable, jnp.ldexp(jnp.float32(1), jnp.where(usable, exponent - 1 - LARGEST, 0)), 1.0)

    return jax.tree.map(one, amax)


def finite(amax: Array) -> Array:
    """amax, with 0 in place of a number that is not finite. An amax of 0 has no effect."""
    return jnp.where(jnp.isfinite(amax), amax, 0)


def remember(before: KvScales | None, now: KvScales, decay: float) -> KvScales:
    """The largest element to expect: the larger of the one seen `now` and `decay` times the one expected
    `before`.

    Numbers that are not finite are left out, because they would never decay.
    """
    before = jax.tree.map(jnp.zeros_like, now) if before is None else before
    return jax.tree.map(lambda b, n: jnp.maximum(finite(n), decay * finite(b)), before, now)
