"""Products over the keys that a query sees, and over the queries that see a key, in which masked values never
enter.

A masked probability is 0, but 0 times NaN or infinity is NaN, so one such value in a packed row would reach
every other sequence of it. Sums therefore run over finite values only. A sum is NaN as a whole if it should
include a value that is not finite. The derivatives are products of the same kind.

Letters: B rows, T queries, S keys, K KV heads, G query heads per KV head, d. mask [B, T, S] bool: the keys
that each query sees.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array


def scores(q: Array, k: Array, mask: Array, **product) -> Array:
    """q [B, T, K, G, d], k [B, S, K, d] -> q k^T [B, K, G, T, S], 0 for masked keys. `product`: options of
    `jnp.einsum`."""
    return _scores(tuple(product.items()), q, k, mask)


def weighted_sum(p: Array, v: Array, mask: Array, **product) -> Array:
    """p [B, K, G, T, S], v [B, S, K, d] -> p v [B, K, G, T, d], summed over the keys that are seen."""
    return _weighted_sum(tuple(product.items()), p, v, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(product: tuple, q: Array, k: Array, mask: Array) -> Array:
    made = jnp.einsum("btkgd,bskd->bkgts", q, k, **dict(product))
    return jnp.where(mask[:, None, None], made, 0)


def _scores_bwd(product: tuple, saved: tuple, ds: Array):
    q, k, mask = saved
    dq = jnp.einsum("bkgtd->btkgd", _weighted_sum(product, ds, k, mask))
    return dq.astype(q.dtype), _sum_over_queries(product, ds, q, mask).astype(k.dtype), None


_scores.defvjp(lambda product, q, k, mask: (_scores(product, q, k, mask), (q, k, mask)), _scores_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sum(product: tuple, p: Array, v: Array, mask: Array) -> Array:
    p = jnp.where(mask[:, None, None], p, 0)
    made = jnp.einsum("bkgts,bskd->bkgtd", p, finite(v), **dict(product))
    bad = jnp.any(mask[:, None] & jnp.einsum("bsk->bks", _not_finite(v))[:, :, None], -1)  # [B, K, T]
    return jnp.where(bad[:, :, None, :, None], jnp.nan, made)


def _weighted_sum_bwd(product: tuple, saved: tuple, do: Array):
    p, v, mask = saved
    do = jnp.einsum("bkgtd->btkgd", do)
    dp: Array = _scores(product, do, v, mask)
    dv = _sum_over_queries(product, p, do, mask)
    return dp.astype(p.dtype), dv.astype(v.dtype), None


_weighted_sum.defvjp(lambda product, p, v, mask: (_weighted_sum(product, p, v, mask), (p, v, mask)),
                     _weighted_sum_bwd)


def _sum_over_queries(product: tuple, p: Array, x: Array, mask: Array) -> Array:
    """p [B, K, G, T, S], x [B, T, K, G, d] -> p^T x [B, S, K, d], summed over the queries that see a key."""
    p = jnp.where(mask[:, None, None], p, 0)
    made = jnp.einsum("bkgts,btkgd->bskd", p, finite(x), **dict(product))
    bad = jnp.any(mask[:, None] & jnp.einsum("btk->bkt", _not_finite(x).any(-1))[..., None], -2)  # [B, K, S]
    return jnp.where(jnp.einsum("bks->bsk", bad)[..., None], jnp.nan, made)


def finite(x: Array) -> Array:
    """x with 0 in place of NaN and infinities."""
    return jnp.where(jnp.isfinite(x), x, 0)


def _not_finite(x: Array) -> Array:
    return ~jnp.isfinite(x).all(-1)
