"""Scales of the queries, keys and values of FP8 attention: one a layer, from what the scoring pass saw,
shipped with the weights.

A scale divides before the rounding to E4M3 and multiplies after it. It moves a tensor into E4M3's range, 2^-9
to 448, and as E4M3 is a float it adds no precision there: all it has to do is to keep the largest element
from being cut off and small ones from being lost. So ours are powers of two, the least that leave the largest
element below 256. Multiplying by one is exact, and it does not matter at which point of its sums a kernel
does it: learner and engine cannot differ by it. (NeMo RL, and FP8-RL by its paper, take amax / 448.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

NAMES = ("q", "k", "v")
KvScales = dict[str, Array]  # of NAMES, each [L] float32: the scales of the layers
UNIT: dict[str, Any] = dict.fromkeys(NAMES, 1.0)  # of one layer, where there are none: what an engine has that was given none
# the largest element is scaled to between 2^7 and 2^8, with a factor of 1.75 to 3.5 to spare below 448
LARGEST = 7


def amax_of(q_BTHd: Array, k_BTKd: Array, v_BTKd: Array, live_BT: Array) -> KvScales:
    """The largest |element| of each over the tokens that are `live`, scalars float32; 0 where there are
    none."""
    live = live_BT[..., None, None]
    arrays = map(jax.lax.stop_gradient, (q_BTHd, k_BTKd, v_BTKd))
    return {n: jnp.max(jnp.abs(x), where=live, initial=0.0).astype(jnp.float32)
            for n, x in zip(NAMES, arrays)}


def scales_from(amax: KvScales) -> KvScales:
    """2^(floor(log2 amax) - 7), which is positive and finite; 1 where amax is 0 or not finite, or too small
    for that."""

    def one(a: Array) -> Array:
        _, exponent = jnp.frexp(a)  # a = m 2^exponent, 1/2 <= m < 1
        usable = jnp.isfinite(a) & (a >= 2.0**-100)
        return jnp.where(usable, jnp.ldexp(jnp.float32(1), jnp.where(usable, exponent - 1 - LARGEST, 0)), 1.0)

    return jax.tree.map(one, amax)


def finite(amax: Array) -> Array:
    """0, which says nothing, in place of what is not finite."""
    return jnp.where(jnp.isfinite(amax), amax, 0)


def remember(before: KvScales | None, now: KvScales, decay: float) -> KvScales:
    """The largest element to expect: what was just seen, or what was seen before, `decay` a step, if that is
    more. One that is not finite says nothing, and would never be forgotten."""
    before = jax.tree.map(jnp.zeros_like, now) if before is None else before
    return jax.tree.map(lambda b, n: jnp.maximum(finite(n), decay * finite(b)), before, now)
