"""Causal attention over packed sequences, by the Hopper kernels or by reference.py: one explicit choice.

A row holds several sequences one after the other, and `segment_ids` assigns each token to its sequence. A
query sees its own segment up to itself, or the last `window` keys of that. Query head h reads KV head h // (H
/ K), and no head is repeated in memory. Scores, sums and the logarithm of the sum are float32; exponentials
enter the product with the values in the values' dtype, as in FlashAttention (Dao et al., 2022, algorithm 1).

`backend` is that of `pallas_kernels.quantize.api`. The kernels skip blocks outside a segment or window,
forward and backward, add in a fixed order, and materialise nothing of size [T, T]; the reference materialises
exactly that.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import queries, reference, sm90_dkv, sm90_dq, sm90_forward
from pallas_kernels.attention.masked import finite
from pallas_kernels.attention.schedule import LOG2E
from pallas_kernels.attention.segments import Tables, check_ids, seen_by, sees, tables_of
from pallas_kernels.plgpu_compat import Backend, use_kernel

HEAD_SIZES = 64, 128, 256
DTYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)


class Tiles(NamedTuple):
    """The tiles of each kernel; None means those tuned for the head size."""

    forward: queries.Tiles | None = None
    dq: queries.Tiles | None = None
    dkv: sm90_dkv.Tiles | None = None


TILES = Tiles()


class How(NamedTuple):
    """The static arguments of a kernel call."""

    scale: float
    fp8: bool = False
    tiles: Tiles = TILES
    interpret: object = None


def attention(
    q: Array, k: Array, v: Array, segments: Array | Tables, *, window: int | Array | None = None,
    scale: float | None = None, fp8: bool = False, backend: Backend = "auto", tiles: Tiles = TILES,
    interpret=None,
) -> Array:
    """q [T, H, d], k and v [T, K, d], segment ids [T] int32 -> o [T, H, d] in q's dtype; or all of them with
    rows [B, T, ...] in front.

    segments: the ids, or `tables_of` them, which are the same for all layers with one window. A segment is a
    run of equal ids above 0 in one row. 0 is padding: its o and gradients are 0, whatever q, k and v hold
    there. Tables with `ends` are of rows that hold shared prefixes once: a token sees its ancestors.

    window: a query sees at most this many keys, the last of which is its own (transformers' `sliding_window`;
    vLLM's window_size = (window - 1, 0)). None means no limit. Tables already have a window.

    scale: the factor of the scores; d ** -0.5 if None.

    fp8: exponentials, times 2^8, are rounded to E4M3 before they are multiplied with the values, but not in
    their sum, as in FlashAttention 3 with FP8. q, k and v must then be E4M3 numbers times powers of two, in
    their wider dtype, so that products equal those of the codes. The backward pass ignores the rounding.

    tiles: replaces the tuned ones. interpret: runs the kernels on a CPU, for tests.

    A value that is not finite makes the whole result of every query that sees it NaN, and affects no other
    query; the same holds for gradients. Only o and lse of a query whose score is -inf stay finite: the weight
    of that key is 0. The kernels take bfloat16 or float16, one dtype for all operands, and d of 64, 128 or
    256; the reference takes any.

    Raises ValueError, with the operands found and the rule, for anything else. Ids known at trace time are
    checked too: none may be negative, and none may return after another. With unknown ids, a returning id
    begins a new segment.

    Source: FlashAttention (Dao et al., 2022), algorithm 1.
    """
    return attention_and_lse(
        q, k, v, segments, window=window, scale=scale, fp8=fp8, backend=backend, tiles=tiles,
        interpret=interpret
    )[0]


def attention_and_lse(
    q: Array, k: Array, v: Array, segments: Array | Tables, *, window: int | Array | None = None,
    scale: float | None = None, fp8: bool = False, backend: Backend = "auto", tiles: Tiles = TILES,
    interpret=None,
) -> tuple[Array, Array]:
    """`attention`, and the logarithm of each query's sum of exponentials, [H, T] or [B, H, T] float32; +inf
    for padding."""
    tables = segments if isinstance(segments, Tables) else None
    ids = segments.segment_ids if isinstance(segments, Tables) else segments
    _check(q, k, v, ids)
    if tables is None:
        tables = tables_of(ids, window)
    elif window is not None:
        raise ValueError(f"window = {window}, but tables already have a window: pass it to `tables_of`")
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale = {scale}: scores are multiplied by a finite number above 0")
    if use_kernel(backend):
        _check_kernel(q)
        return _by_kernel(How(scale, fp8, tiles, interpret), q, k, v, tables)
    seen = reference.visible_from(tables.first, ids.shape, tables.ends)
    if q.ndim == 4:
        return reference.attention_and_lse(q, k, v, seen, scale, fp8)
    q, k, v = (x[None] for x in (q, k, v))
    o, lse = reference.attention_and_lse(q, k, v, seen, scale, fp8)
    return o[0], lse[0]


def _by_kernel(how: How, q: Array, k: Array, v: Array, tables: Tables) -> tuple[Array, Array]:
    """Run the kernels on all rows joined into one, padded to whole chunks of tokens: each row begins a new
    segment."""
    tokens = math.prod(q.shape[:-2])
    flat = (_padded(x.reshape(tokens, *x.shape[-2:]), len(tables.first)) for x in (q, k, v))
    # partial(custom_vjp) hides the type of its result
    o, lse = _attend(how, *flat, tables)  # pyright: ignore[reportGeneralTypeIssues]
    lse = lse[:, :tokens].reshape(-1, *q.shape[:-2])
    return o[:tokens].reshape(q.shape), lse if q.ndim == 3 else lse.swapaxes(0, 1)


def not_finite(x: Array) -> Array:
    """bool [N]: the tokens of x [N, K, d] with a value that is not finite."""
    return ~jnp.isfinite(x).all((1, 2))


def _padded(x: Array, tokens: int) -> Array:
    return x if len(x) == tokens else jnp.pad(x, ((0, tokens - len(x)), (0, 0), (0, 0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: How, q: Array, k: Array, v: Array, tables: Tables) -> tuple[Array, Array]:
    """N tokens in one row -> o [N, H, d], lse [H, N]."""
    return forward(how, q, k, v, tables)[0]


def forward(how: How, q: Array, k: Array, v: Array, tables: Tables):
    """(o [N, H, d], lse [H, N]) and the residuals for `backward`."""
    o, lse = sm90_forward.forward(
        q, k, v, tables, scale=how.scale, fp8=how.fp8, tiles=how.tiles.forward, interpret=how.interpret
    )
    o, lse = (checkpoint_name(x, "attention") for x in (o, lse))  # lets jax.checkpoint policies keep them
    return (o, lse * (1 / LOG2E)), (q, k, v, tables, o, lse)


def backward(how: How, saved: tuple, cotangents: tuple[Array, Array]):
    """dq, dk and dv, and None for the tables. dS = P (dP - delta + dlse), so the cotangent of lse is
    subtracted from delta, except at padding, where lse is constant. The kernels multiply masked values by 0,
    so what they sum over must be finite. A query that sees a key or value that is not finite gets NaN, and so
    does a key whose sum should include a P or dS that is not finite."""
    q, k, v, tables, o, lse = saved
    do, dlse = cotangents
    lse = jnp.where(sees(not_finite(k) | not_finite(v), tables.first, tables.ends), jnp.nan, lse)
    k, v = finite(k), finite(v)
    padding, how_both = jnp.isinf(lse), dict(scale=how.scale, interpret=how.interpret)
    delta = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1).T - jnp.where(padding, 0, dlse)
    dq = sm90_dq.gradient(q, k, v, do, lse, delta, tables, tiles=how.tiles.dq, **how_both)
    bad = jnp.isnan(lse) | ~jnp.isfinite(delta)
    summed = finite(q), k, v, finite(do), jnp.where(bad, jnp.inf, lse), jnp.where(bad, 0, delta)
    grads = sm90_dkv.gradients(*summed, tables, tiles=how.tiles.dkv, **how_both)
    of_group = (bad & ~padding).reshape(k.shape[1], -1, len(k)).any(1)
    seen = jax.vmap(lambda bad: seen_by(bad, tables.first, tables.ends), 0, 1)(of_group)[..., None]
    return dq, *(jnp.where(seen, jnp.nan, grad).astype(grad.dtype) for grad in grads), None


_attend.defvjp(forward, backward)


def _check(q: Array, k: Array, v: Array, ids: Array) -> None:
    found = ", ".join(f"{name} {x.dtype}{list(x.shape)}"
                      for name, x in (("q", q), ("k", k), ("v", v), ("segment_ids", ids)))
    if q.ndim not in (3, 4) or k.shape != v.shape or (*k.shape[:-2],
                                                      k.shape[-1]) != (*q.shape[:-2], q.shape[-1]):
        raise ValueError(f"{found}: q [T, H, d], k and v [T, K, d], or with rows [B, T, ...] in front")
    if not q.size or not k.size or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"{found}: every KV head serves the same number of query heads, at least one, so K divides H")
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"{found}: q, k and v are of one floating-point type")
    if ids.shape != q.shape[:-2] or ids.dtype != jnp.int32:
        raise ValueError(f"{found}: segment_ids is int32, one a token")
    check_ids(ids)


def _check_kernel(q: Array) -> None:
    if q.dtype not in DTYPES:
        raise ValueError(
            f'q is {q.dtype}: the kernels take bfloat16 or float16; backend="reference" takes any')
    if q.shape[-1] not in HEAD_SIZES:
        raise ValueError(
            f'heads of {q.shape[-1]}: the kernels have 64, 128 and 256; backend="reference" takes any')
