"""Totals over the sequences of packed rows, whose number is not static.

A sequence is a run of equal `segment_ids` within a row. A segmented scan computes its total, which every
token of the sequence receives. Shapes are static, there is no table of sequences, and the order of summation
is fixed (a scatter would use atomics on a GPU).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def segment_total(x: Array, segment_ids: Array, op: Callable[[Array, Array], Array] = jnp.add) -> Array:
    """The total of each token's segment: x [..., T], segment_ids [..., T] int -> [..., T] of x's dtype.

    op: an associative function, jnp.add, jnp.maximum or jnp.minimum. x may have leading axes that segment_ids
    lacks.
    """
    t = segment_ids.shape[-1]
    end = jnp.where(segment_ends(segment_ids), jnp.arange(t), t - 1)
    end = jax.lax.cummin(end, axis=end.ndim - 1, reverse=True)
    return jnp.take_along_axis(_running(x, segment_ids, op), jnp.broadcast_to(end, x.shape), -1)


def segment_ends(segment_ids: Array) -> Array:
    """True at the last token of each segment, live or not: [..., T] bool."""
    return jnp.concatenate([_starts(segment_ids)[..., 1:], jnp.ones_like(segment_ids[..., :1], bool)], -1)


def turns_of(mask: Array, segment_ids: Array) -> Array:
    """segment_ids [..., T] int32 of which each run of live tokens is a segment of its own, with what follows
    it."""
    before = jnp.concatenate([jnp.zeros_like(mask[..., :1]), mask[..., :-1]], -1)
    return jnp.cumsum((mask & ~before) | _starts(segment_ids), axis=-1, dtype=jnp.int32)


def first_live(mask: Array, segment_ids: Array) -> Array:
    """True at the first live token of each segment that has one: one token per sequence. Both [..., T]."""
    return mask & (_running(mask.astype(jnp.int32), segment_ids, jnp.add) == 1)


def sequence_mean(x: Array, mask: Array, segment_ids: Array) -> Array:
    """The mean of x over the live tokens of each token's sequence; [..., T] float32, 0 for a sequence without
    live tokens."""
    count = segment_total(mask.astype(jnp.int32), segment_ids)
    return _segment_sum(jnp.where(mask, x, 0.0), segment_ids) / jnp.maximum(count, 1)


@jax.custom_vjp
def _segment_sum(x: Array, segment_ids: Array) -> Array:
    return segment_total(x, segment_ids)


# A sum over segments is its own transpose. Autodiff would turn the gather in it into a scatter, whose order
# is not fixed on a GPU.
_segment_sum.defvjp(
    lambda x, segment_ids: (segment_total(x, segment_ids), segment_ids),
    lambda ids, g: (segment_total(g, ids), None)
)


def _starts(segment_ids: Array) -> Array:
    first = jnp.ones_like(segment_ids[..., :1], bool)
    return jnp.concatenate([first, segment_ids[..., 1:] != segment_ids[..., :-1]], -1)


def _running(x: Array, segment_ids: Array, op: Callable) -> Array:
    """The inclusive scan that restarts at each segment, by doubling (Hillis and Steele 1986): ceil(log2 T)
    rounds, each of which joins a token's total with that of as many tokens before it. `reached`: the total
    includes the segment's start, so nothing more may be joined. It is set for the first tokens of a row
    before a shift could wrap around to them.

    It is a loop and not lax.associative_scan, whose unrolled tree takes seconds to compile.
    """
    t = x.shape[-1]

    def join(n: Array, carry: tuple) -> tuple:
        total, reached = carry
        before, before_reached = (jnp.roll(a, 1 << n, axis=-1) for a in carry)
        return jnp.where(reached, total, op(before, total)), reached | before_reached

    start = (x, jnp.broadcast_to(_starts(segment_ids), x.shape))
    return jax.lax.fori_loop(0, (t - 1).bit_length(), join, start)[0]
