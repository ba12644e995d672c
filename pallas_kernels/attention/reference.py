"""Packed causal attention in plain jnp, float32: the reference for the kernels, at any cost. It materialises
scores of [H, N, N]."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention import masked
from pallas_kernels.attention.segments import first_and_last


def attention_and_lse(q: Array, k: Array, v: Array, seen: Array, scale: float,
                      fp8: bool = False) -> tuple[Array, Array]:
    """q [B, T, H, d], k and v [B, T, K, d], seen [B, T, T] as from `visible` -> o [B, T, H, d] in q's dtype,
    lse [B, H, T] float32.

    Scores, probabilities and sums are float32 (float64 for float64 operands). Padding gets o = 0 and lse =
    +inf. `fp8`: exponentials of scores minus their maximum, times 2^8, are rounded to E4M3 in the product
    with the values.
    """
    (B, T, H, d), K = q.shape, k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    mask = seen[:, None, None]
    some = mask.any(-1, keepdims=True)
    q5, k, v = q.astype(wide).reshape(B, T, K, H // K, d), k.astype(wide), v.astype(wide)
    exact = dict(precision=jax.lax.Precision.HIGHEST)
    scores = jnp.where(mask, masked.scores(q5, k, seen, **exact) * scale, -jnp.inf)
    lse = jax.nn.logsumexp(jnp.where(some, scores, 0), axis=-1, keepdims=True)
    p = jnp.where(mask, jnp.exp(scores - lse), 0)
    o = masked.weighted_sum(_in_e4m3(p) if fp8 else p, v, seen, **exact)
    return o.transpose(0, 3, 1, 2,
                       4).reshape(q.shape).astype(q.dtype), jnp.where(some, lse, jnp.inf).reshape(B, H, T)


def _in_e4m3(p: Array) -> Array:
    """p, exponentials over their sum, with the exponentials times 2^8 rounded to E4M3. The derivative is that
    of p."""
    largest = jnp.maximum(p.max(-1, keepdims=True), jnp.finfo(p.dtype).tiny)
    x = p / largest * 2.0**8
    # arithmetic instead of a cast, which XLA might drop
    x = jnp.where(x < 2.0**-6, jnp.round(x * 2.0**9) * 2.0**-9, jax.lax.reduce_precision(x, 8, 3))
    return p + jax.lax.stop_gradient(x * 2.0**-8 * largest - p)


def visible(segment_ids: Array, window: int | Array | None = None) -> Array:
    """segment_ids [B, T] -> bool [B, T, T]: the keys (last axis) that each query sees, itself and those
    before it in its segment, at most `window` of them."""
    return visible_from(first_and_last(segment_ids, window)[0], segment_ids.shape)


def visible_from(first: Array, shape: tuple[int, ...], ends: Array | None = None) -> Array:
    """`visible` from the first key that each token sees, or from the ends, [N] as in Tables, for ids of
    `shape` [T] or [B, T]."""
    B, T = (1, *shape)[-2:]
    if ends is not None:
        ends = ends[: B * T].reshape(B, T) - T * jnp.arange(B)[:, None]
        key, query = jnp.arange(T), jnp.arange(T)[:, None]
        return (key <= query) & (query < ends[:, None])
    first = first[: B * T].reshape(B, T) - T * jnp.arange(B)[:, None]
    key, query = jnp.arange(T), jnp.arange(T)[:, None]
    return (first[:, :, None] <= key) & (key <= query)
