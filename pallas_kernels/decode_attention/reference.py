"""Attention of one query per sequence over a paged cache, in plain jnp: the reference for the kernel, and the
implementation elsewhere."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.lax import Precision


def attention_and_lse(
    q: Array, k_pages: Array, v_pages: Array, block_table: Array, lengths: Array, k_scale: Array,
    v_scale: Array, scale: float, starts: Array | None = None
) -> tuple[Array, Array]:
    """As `api.attention_and_lse`, of the keys from `starts` [B] on. All pages of the table are gathered, and
    all arithmetic is float32 or wider."""
    B, H, d = q.shape
    _, page, K, _ = k_pages.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    slots = jnp.arange(block_table.shape[1] * page)
    seen = slots < lengths[:, None]  # [B, S]
    if starts is not None:
        seen &= slots >= starts[:, None]
    table = jnp.where(seen.reshape(*block_table.shape, page).any(-1), block_table, 0)

    def read(pages: Array, scales: Array) -> Array:
        x = pages[table].reshape(B, -1, K, d).astype(wide) * scales[:, None].astype(wide)
        return jnp.where(seen[:, :, None, None], x, 0)

    k, v = read(k_pages, k_scale), read(v_pages, v_scale)
    grouped = q.reshape(B, K, H // K, d).astype(wide)
    scores = jnp.einsum("bkgd,bskd->bkgs", grouped, k, precision=Precision.HIGHEST) * scale
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    some = (lengths > 0)[:, None, None, None]
    exps = jnp.where(some, jnp.exp(scores - jnp.where(some, scores.max(-1, keepdims=True), 0)), 0)
    total = exps.sum(-1, keepdims=True)
    o = jnp.einsum("bkgs,bskd->bkgd", exps, v, precision=Precision.HIGHEST) / jnp.where(some, total, 1)
    lse = jnp.where(some[..., 0],
                    jnp.log(jnp.where(some, total, 1))[..., 0] + jnp.where(some, scores, 0).max(-1), -jnp.inf)
    return o.reshape(B, H, d).astype(q.dtype), lse.reshape(B, H).astype(wide)
