"""Causal attention over packed sequences, by the Hopper kernels or by reference.py: one visible choice.

A row holds several sequences one after the other; `segment_ids` says which token is of which. A query sees its own segment up to
itself. Query head h reads KV head h // (H / K), and none is repeated. Scores, sums and the logarithm of the sum are float32;
exponentials enter the product with the values in the values' type, as in FlashAttention (Dao et al., 2022, algorithm 1).

`backend` as in `pallas_kernels.quantize.api`. The kernels skip what lies outside a query's segment, forward and backward, add in
a fixed order, and make nothing of the size [T, T]; the reference makes exactly that.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.attention import reference, sm90_dkv, sm90_dq, sm90_forward
from pallas_kernels.attention.schedule import LOG2E
from pallas_kernels.attention.segments import Segments, segments_of
from pallas_kernels.plgpu_compat import Backend, use_kernel

HEAD_SIZES = 64, 128
DTYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)


class Tiles(NamedTuple):
    forward: sm90_forward.Tiles = sm90_forward.Tiles()
    dq: sm90_dq.Tiles = sm90_dq.Tiles()
    dkv: sm90_dkv.Tiles = sm90_dkv.Tiles()


def attention(
    q: Array, k: Array, v: Array, segment_ids: Array, *, scale: float | None = None, backend: Backend = "auto",
    tiles: Tiles | None = None, interpret=None,
) -> Array:  # fmt: skip
    """q [T, H, d], k and v [T, K, d], segment_ids [T] int32 -> o [T, H, d] in q's dtype; or all with rows [B, T, ...] in front.

    A segment is a run of equal ids above 0 in one row; 0 is padding, of which o and gradients are 0 (q, k, v finite there, too).
    `scale` of the scores: d ** -0.5 if None. The kernels take bfloat16 or float16, one type for all, and d of 64 or 128; the
    reference any. `tiles`: other than the tuned ones. `interpret`: run the kernels on a CPU, for tests.

    Raises ValueError, with what was found and the rule, for anything else; ids that are known when the program is traced are
    checked too: none below 0, and none that comes back after another. Ids that are not known begin a new segment there.
    """
    return attention_and_lse(
        q, k, v, segment_ids, scale=scale, backend=backend, tiles=tiles, interpret=interpret
    )[0]  # fmt: skip


def attention_and_lse(
    q: Array, k: Array, v: Array, segment_ids: Array, *, scale: float | None = None, backend: Backend = "auto",
    tiles: Tiles | None = None, interpret=None,
) -> tuple[Array, Array]:  # fmt: skip
    """`attention`, and the logarithm of each query's sum of exponentials: [H, T] float32, or [B, H, T]; +inf for padding."""
    _check(q, k, v, segment_ids)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale = {scale}: scores are multiplied by a finite number above 0")
    rows = q.ndim == 4
    q, k, v, ids = (x if rows else x[None] for x in (q, k, v, segment_ids))
    if use_kernel(backend):
        _check_kernel(q)
        o, lse = _by_kernel(q, k, v, ids, scale, tiles or Tiles(), interpret)
    else:
        o, lse = reference.attention_and_lse(q, k, v, ids, scale)
    return (o, lse) if rows else (o[0], lse[0])


def _by_kernel(q: Array, k: Array, v: Array, ids: Array, scale: float, tiles: Tiles, interpret) -> tuple[Array, Array]:
    """All rows in one, padded to whole chunks of tokens: a row that begins is a segment that begins."""
    B, T, H, _ = q.shape
    segments = segments_of(ids)
    flat = (_padded(x.reshape(B * T, *x.shape[2:]), len(segments.first)) for x in (q, k, v))
    o, lse = _attend(scale, tiles, interpret, *flat, segments)
    return o[: B * T].reshape(q.shape), lse[:, : B * T].reshape(H, B, T).swapaxes(0, 1)


def _padded(x: Array, tokens: int) -> Array:
    return x if len(x) == tokens else jnp.pad(x, ((0, tokens - len(x)), (0, 0), (0, 0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(scale, tiles, interpret, q, k, v, segments) -> tuple[Array, Array]:
    """Of N tokens in a row -> o [N, H, d], lse [H, N]."""
    return forward(scale, tiles, interpret, q, k, v, segments)[0]


def forward(scale: float, tiles: Tiles, interpret, q: Array, k: Array, v: Array, segments: Segments):
    """(o [N, H, d], lse [H, N]), and what `backward` needs."""
    o, lse = sm90_forward.forward(q, k, v, segments, scale, tiles.forward, interpret)
    return (o, lse * (1 / LOG2E)), (q, k, v, segments, o, lse)


def backward(scale: float, tiles: Tiles, interpret, saved: tuple, cotangents: tuple[Array, Array]):
    """dq, dk, dv, and nothing for the segments. dS = P (dP - delta + dlse): what comes in for lse is part of delta."""
    q, k, v, segments, o, lse = saved
    do, dlse = cotangents
    delta = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1).T - dlse
    args = q, k, v, do, lse, delta, segments, scale
    return sm90_dq.gradient(*args, tiles.dq, interpret), *sm90_dkv.gradients(*args, tiles.dkv, interpret), None


_attend.defvjp(forward, backward)


def _check(q: Array, k: Array, v: Array, ids: Array) -> None:
    found = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v), ("segment_ids", ids)))
    if q.ndim not in (3, 4) or k.shape != v.shape or (*k.shape[:-2], k.shape[-1]) != (*q.shape[:-2], q.shape[-1]):
        raise ValueError(f"{found}: q [T, H, d], k and v [T, K, d], or with rows [B, T, ...] in front")
    if not q.size or not k.size or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{found}: every KV head serves the same number of query heads, at least one, so K divides H")
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"{found}: q, k and v are of one floating-point type")
    if ids.shape != q.shape[:-2] or ids.dtype != jnp.int32:
        raise ValueError(f"{found}: segment_ids is int32, one a token")
    if not isinstance(ids, jax.core.Tracer):
        _check_ids(np.asarray(ids).reshape(-1, q.shape[-3]))


def _check_ids(rows: np.ndarray) -> None:
    for i, row in enumerate(rows):
        begins = np.flatnonzero(np.diff(row, prepend=-1))
        if row.min() < 0:
            raise ValueError(f"segment_ids: token {row.argmin()} of row {i} has {row.min()}; ids are above 0, and 0 is padding")
        seen, counts = np.unique(row[begins][row[begins] > 0], return_counts=True)
        if counts.max(initial=1) > 1:
            segment = seen[counts.argmax()]
            back = begins[row[begins] == segment][1]
            raise ValueError(f"segment_ids: {segment} comes back at token {back} of row {i}; a segment's tokens are contiguous")


def _check_kernel(q: Array) -> None:
    if q.dtype not in DTYPES:
        raise ValueError(f'q is {q.dtype}: the kernels take bfloat16 or float16; backend="reference" takes any')
    if q.shape[-1] not in HEAD_SIZES:
        raise ValueError(f'heads of {q.shape[-1]}: the kernels have 64 and 128; backend="reference" takes any')
