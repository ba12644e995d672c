"""The computation of `sm90.py` in jnp, on any device: a block of logits is computed, read and dropped.

z = x w^T / temperature in float32, with x w^T first rounded to `logits_dtype`, and then capped if there is a
`softcap`.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.logprob.softcap import soft_cap

NOWHERE = -1e30  # the logit of a word outside the support: its exp is 0, and differences are never NaN


def logits(x: Array, w: Array) -> Array:
    """x [..., K], w [N, K] of one dtype -> x w^T [..., N] float32."""
    return _dot(x, w, (x.ndim - 1,), (1,), jnp.float32)


def statistics(
    x: Array, w: Array, targets: Array, temperature: float, logits_dtype: jnp.dtype,
    support: Array | None = None, softcap: float | None = None,
) -> Array:
    """x [M, K], w [N, K], targets [M] int32 -> [4, M] float32: max z, sum exp(z - max), sum exp(z - max) (z -
    max), and z at the target, 0 if that is not one of the N words. support [M, S]: the words that all four
    run over, the target always included."""
    z = _logits(x, w, temperature, logits_dtype, softcap)[0]
    if support is not None:
        z = jnp.where(_members(support, targets, w.shape[0]), z, NOWHERE)
    highest = jnp.max(z, axis=1)
    below = z - highest[:, None]
    exponential = jnp.exp(below)
    words = w.shape[0]
    found = jnp.take_along_axis(z, jnp.clip(targets, 0, words - 1)[:, None], 1)[:, 0]
    at_target = jnp.where((targets >= 0) & (targets < words), found, 0.0)
    return jnp.stack([highest, jnp.sum(exponential, 1), jnp.sum(exponential * below, 1), at_target])


def d_logits(
    x: Array, w: Array, targets: Array, lse: Array, at_target: Array, constant: Array, slope: Array,
    temperature: float,
    logits_dtype: jnp.dtype, support: Array | None = None, softcap: float | None = None,
) -> Array:
    """[M, N] in the dtype of x: p (constant + slope log p), plus at_target at the target, all times the
    derivative of the soft cap, with log p = z - lse; lse, at_target, constant and slope are [M]. Words
    outside their row's `support`, if there is one, get 0."""
    z, of_cap = _logits(x, w, temperature, logits_dtype, softcap)
    logp = jnp.minimum(z - lse[:, None], 0.0)
    d = jnp.exp(logp) * (constant[:, None] + slope[:, None] * logp)
    if support is not None:
        d = jnp.where(_members(support, targets, w.shape[0]), d, 0.0)
    is_target = jnp.arange(w.shape[0]) == targets[:, None]
    d += jnp.where(is_target, at_target[:, None], 0.0)
    return (d if of_cap is None else d * of_cap).astype(x.dtype)


def d_x(dz: Array, w: Array) -> Array:
    """dz [M, N], w [N, K] -> dz w [M, K] float32."""
    return _dot(dz, w, (1,), (0,), jnp.float32)


def d_w(dz: Array, x: Array) -> Array:
    """dz [M, N], x [M, K] -> dz^T x [N, K], summed in float32, in the dtype of x."""
    return _dot(dz, x, (0,), (0,), x.dtype)


def _members(support: Array, targets: Array, words: int) -> Array:
    """[M, N] bool: the words in each row of support [M, S], and the target; ids outside the vocabulary are
    ignored."""
    ids = jnp.concatenate([support, targets[:, None]], 1)
    ids = jnp.where((ids >= 0) & (ids < words), ids, words)
    rows = jnp.arange(len(ids))[:, None]
    return jnp.zeros((len(ids), words), bool).at[rows, ids].set(True, mode="drop")


def _logits(x: Array, w: Array, temperature: float, logits_dtype: jnp.dtype,
            softcap: float | None) -> tuple[Array, Array | None]:
    """z [M, N], and the derivative of the soft cap, if there is one."""
    rounded = functools.partial(_rounded, dtype=logits_dtype)
    z, of_cap = rounded(logits(x, w)), None
    if softcap is not None:
        z, of_cap = soft_cap(z, softcap, rounded)
    return z / temperature, of_cap


def _rounded(z: Array, dtype: jnp.dtype) -> Array:
    """By `reduce_precision`: XLA may drop a pair of casts as excess precision."""
    to = jnp.finfo(dtype)
    return z if dtype == jnp.float32 else lax.reduce_precision(z, to.nexp, to.nmant)


def _dot(a: Array, b: Array, a_axes: tuple[int, ...], b_axes: tuple[int, ...], dtype: jnp.dtype) -> Array:
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None  # a GPU would multiply it as TF32
    return lax.dot_general(a, b, ((a_axes, b_axes), ((), ())), precision=exact, preferred_element_type=dtype)
