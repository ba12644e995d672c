"""Attention of single queries in the order of sums of the Hopper kernel, in plain jnp.

Tiles of 64 keys under a running maximum, cut into chunks at multiples of 256 keys of a sequence; chunks
joined JOINED at a time. Exponentials are rounded as in the kernel. What differs from it: products are summed
by XLA, in float32 where the tensor cores truncate sums of E4M3; and chunks are joined from the sequence's
first on, where the kernel begins with the first that a window reaches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.decode_attention.deal import CHUNK, KEYS
from pallas_kernels.decode_attention.sm90_join import F32, JOINED, LOWEST
from pallas_kernels.rows import by_rows

LOG2E = math.log2(math.e)


def attention(q: Array, k: Array, v: Array, lengths: Array, slots: Callable[[Any, Array], Array], where: Any,
              k_scale: Array, v_scale: Array, scale: float, starts: Array | None = None) -> Array:
    """q [N, H, d] -> o [N, H, d] in q's dtype, 0 where the length is 0. k, v [S, K, d]: keys and values in
    slots.

    A query sees the keys [start, length) of its sequence, lengths and starts [N] int32. slots(where,
    positions [n, KEYS]) -> the slots [n, KEYS] of the keys at these positions, of n queries whose part of
    `where` that is. k_scale, v_scale [K] float32. Every bit of a row of o depends on that query and the keys
    that it sees alone."""
    starts = jnp.zeros_like(lengths) if starts is None else starts

    def rows(q: Array, lengths: Array, starts: Array, where: Any) -> Array:
        R, (_, K, d) = len(q), k.shape
        queries = q.astype(F32).reshape(R, K, -1, d)
        factor = (k_scale * F32(scale * LOG2E))[:, None, None]
        product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
        tiles, first = -(-jnp.max(lengths) // KEYS), jnp.min(starts) // KEYS

        def step(tile: Array, state: tuple) -> tuple:
            o, maximum, total = state
            positions = jnp.broadcast_to(tile * KEYS + jnp.arange(KEYS), (R, KEYS))
            seen = (positions < lengths[:, None]) & (positions >= starts[:, None])
            at = slots(where, positions)
            keys, values = (jnp.where(seen[..., None, None], x.at[at].get(mode="clip").astype(F32), 0)
                            for x in (k, v))
            scores = product("rkgd,rskd->rkgs", queries, keys) * factor
            scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
            highest = jnp.maximum(maximum, scores.max(-1, keepdims=True))
            alpha, p = jnp.exp2(maximum - highest), jnp.exp2(scores - highest)
            rounded = p.astype(jnp.float16 if v.dtype.itemsize == 1 else v.dtype).astype(F32)
            o = o * alpha + product("rkgs,rskd->rkgd", rounded, values)
            return o, highest, total * alpha + p.sum(-1, keepdims=True)

        def nothing() -> tuple:
            one = jnp.zeros((*queries.shape[:3], 1), F32)
            return jnp.zeros_like(queries), one + LOWEST, one

        def chunk(number: Array) -> tuple[Array, Array]:
            begin, end = (jnp.clip(n * CHUNK, first, tiles) for n in (number, number + 1))
            o, maximum, total = lax.fori_loop(begin, end, step, nothing())
            some = total > 0
            return jnp.where(some, o * (1 / jnp.where(some, total, 1)), 0), jnp.where(
                some, maximum + jnp.log2(jnp.where(some, total, 1)), -jnp.inf)

        def join(i: Array, state: tuple) -> tuple:
            parts, sums = lax.map(chunk, i * JOINED + jnp.arange(JOINED))
            o, maximum, total = state
            highest = jnp.maximum(maximum, sums.max(0))
            alpha = jnp.exp2(maximum - highest)
            o, total = o * alpha, total * alpha
            for y, x in zip(parts, sums):
                weight = jnp.exp2(x - highest)
                o, total = o + y * weight, total + weight
            return o, highest, total

        o, _, total = lax.fori_loop(first // (CHUNK * JOINED), -(-tiles // (CHUNK * JOINED)), join, nothing())
        some = total > 0
        inverse = jnp.where(some, v_scale[:, None, None] / jnp.where(some, total, 1), 0)
        return (o * inverse).reshape(q.shape).astype(q.dtype)

    return by_rows(rows, q, lengths, starts, where)
