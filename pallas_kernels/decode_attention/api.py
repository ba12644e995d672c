"""Attention of one query per sequence over a paged cache, by the Hopper kernel or by reference.py: one
explicit choice.

A page holds the keys, or the values, of `page_size` consecutive tokens of one sequence, for all KV heads; a
row of `block_table` lists a sequence's pages in order. Only pages with a visible token are read: those up
to a sequence's length, and within its last `window` tokens. Tokens outside have no effect, not even NaN.
Query head h reads KV head h // (H / K), and no head is repeated in memory. A cache in E4M3 holds keys and
values divided by scales, one per KV head; scores and results are multiplied by them.

`backend` is that of `pallas_kernels.quantize.api`. Scores, sums and results are float32 until the last
rounding; exponentials enter the product with the values in float16 for an E4M3 cache, otherwise in the
cache's dtype. Pieces of a sequence are computed separately (flash-decoding) and joined in a fixed order, so
the same operands give the same bits on the same kind of GPU. The cuts of a sequence depend on the lengths of
all sequences in the batch and on the number of multiprocessors, and so do the last bits of its result. With
the kernel, a visible value that is not finite may reach all heads of its sequence, but never another
sequence.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention.segments import check_window
from pallas_kernels.decode_attention import reference, sm90, sm90_join
from pallas_kernels.decode_attention.deal import KEYS, deal
from pallas_kernels.decode_attention.sm90 import Plan, Tiles
from pallas_kernels.decode_attention.sm90_join import F32, ROWS
from pallas_kernels.forward_only import forward_only
from pallas_kernels.plgpu_compat import Backend, use_kernel

LOG2E = math.log2(math.e)
HEAD_SIZES = 64, 128, 256
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
# E4M3 numbers that make up a query of that type
PARTS = {jnp.dtype(jnp.bfloat16): 2, jnp.dtype(jnp.float16): 3}
no_derivative = forward_only("differentiate pallas_kernels.attention.api.attention, of whole sequences")


def decode_attention(
    q: Array, k_pages: Array, v_pages: Array, block_table: Array, lengths: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None, *, window: int | Array | None = None, scale: float | None = None,
    backend: Backend = "auto", tiles: Tiles | None = None, interpret=None,
) -> Array:
    """q [B, H, d], k_pages and v_pages [pages, page_size, K, d], block_table [B, max_pages] int32, lengths
    [B] int32 -> o [B, H, d] in q's dtype, 0 where the length is 0.

    k_scale, v_scale [K] float32: the scales of E4M3 keys and values; 1 if None. window: a query sees the last
    `window` keys of its sequence; all if None. An int, or an int32 scalar that may be traced, so that
    layers in one loop can have different windows. scale: the factor of the scores; d ** -0.5 if None.
    tiles: replaces the tuned ones. interpret: runs the kernel on a CPU, for tests.

    The kernel takes q in bfloat16 or float16, pages in E4M3 or q's dtype, d of 64, 128 or 256, pages of 8, 16
    or 32 tokens or a multiple of 64, and at most 64 queries per KV head; the reference takes any. Lengths
    must be at most max_pages * page_size, and the table must name existing pages. Neither is known at trace
    time, so neither is checked.

    Raises ValueError, with the operands found and the rule, for anything else, and TypeError if a derivative
    is computed. Source: PagedAttention (Kwon et al., 2023), in pieces that are joined as in flash-decoding
    (Dao et al., 2023).
    """
    return attention_and_lse(
        q, k_pages, v_pages, block_table, lengths, k_scale, v_scale, window=window, scale=scale,
        backend=backend, tiles=tiles, interpret=interpret,
    )[0]


@no_derivative
def attention_and_lse(
    q: Array, k_pages: Array, v_pages: Array, block_table: Array, lengths: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None, *, window: int | Array | None = None, scale: float | None = None,
    backend: Backend = "auto", tiles: Tiles | None = None, interpret=None,
) -> tuple[Array, Array]:
    """`decode_attention`, and the logarithm of each query's sum of exponentials, [B, H] float32; -inf where
    the length is 0."""
    _check(q, k_pages, v_pages, block_table, lengths, k_scale, v_scale)
    check_window(window)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale = {scale}: scores are multiplied by a finite number above 0")
    one = jnp.ones(k_pages.shape[2], F32)
    k_scale, v_scale = (one if s is None else s for s in (k_scale, v_scale))
    starts = None if window is None else jnp.maximum(lengths - window, 0)
    if not use_kernel(backend):
        return reference.attention_and_lse(
            q, k_pages, v_pages, block_table, lengths, k_scale, v_scale, scale, starts)
    _check_kernel(q, k_pages)
    return _by_kernel(q, k_pages, v_pages, block_table, lengths, starts, k_scale, v_scale, scale,
                      tiles or Tiles(), interpret)


def _by_kernel(q, k_pages, v_pages, block_table, lengths, starts, k_scale, v_scale, scale, tiles,
               interpret) -> tuple[Array, Array]:
    plan = plan_of(q, k_pages, tiles, interpret is not None, starts is not None)
    dealt = deal(lengths, plan.passes, sm90.workers(plan), starts)
    live = plan.heads * plan.group
    queries = jnp.pad(q.reshape(-1, live, plan.d), ((0, 0), (0, -live % 8), (0, 0)))
    factor = _by_row(plan, k_scale * (scale * LOG2E))
    k, v = (pages.reshape(-1, pages.shape[2] * plan.d) for pages in (k_pages, v_pages))
    starts = jnp.zeros_like(lengths) if starts is None else starts
    o, lse = sm90.attend(plan, queries, factor, k, v, block_table, starts, lengths, dealt, interpret)
    o, lse = sm90_join.join(o, lse, dealt, _by_row(plan, v_scale), q.dtype, interpret)
    return o[:, :live].reshape(q.shape), lse[:, :live].reshape(q.shape[:2]) * (1 / LOG2E)


def plan_of(q: Array, k_pages: Array, tiles: Tiles, simulated: bool = False, windowed: bool = False) -> Plan:
    """The plan with as many KV heads at once as the kernel has room for, and their queries; one head where
    queries are not in registers, in which the other heads' would be set to 0."""
    (_, page, K, d), group = k_pages.shape, q.shape[1] // k_pages.shape[2]
    heads = max(n for n in range(1, K + 1) if K % n == 0 and n * group <= ROWS) if d < sm90.LARGE else 1
    fp8 = k_pages.dtype == E4M3
    parts = PARTS[q.dtype] if fp8 else 1
    return Plan(tiles, K // heads, heads, group, d, page, parts, fp8, simulated, windowed)


def _by_row(plan: Plan, per_head: Array) -> Array:
    """[K] -> [passes, ROWS]: the value of each query's KV head."""
    of_query = jnp.repeat(per_head.reshape(plan.passes, plan.heads), plan.group, axis=1)
    return jnp.pad(of_query, ((0, 0), (0, ROWS - of_query.shape[1])))


def _check(q, k, v, table, lengths, k_scale, v_scale) -> None:
    named = ("q", q), ("k_pages", k), ("v_pages", v), ("block_table", table), ("lengths", lengths)
    found = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in named)
    if q.ndim != 3 or k.ndim != 4 or k.shape != v.shape or k.shape[-1] != q.shape[-1] or k.dtype != v.dtype:
        raise ValueError(f"{found}: q [B, H, d], k_pages and v_pages [pages, page_size, K, d] of one type")
    if not q.size or not k.size or q.shape[1] % k.shape[2]:
        raise ValueError(
            f"{found}: every KV head serves the same number of query heads, at least one, so K divides H")
    if not jnp.issubdtype(q.dtype, jnp.floating) or not jnp.issubdtype(k.dtype, jnp.floating):
        raise ValueError(f"{found}: q and pages are of floating-point types")
    if table.shape[:-1] != q.shape[:1] or table.ndim != 2 or lengths.shape != q.shape[:1]:
        raise ValueError(f"{found}: block_table [B, max_pages], lengths [B]")
    if table.dtype != jnp.int32 or lengths.dtype != jnp.int32:
        raise ValueError(f"{found}: block_table and lengths are int32")
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if x is not None and (x.shape != k.shape[2:3] or x.dtype != F32):
            raise ValueError(
                f"{name} is {x.dtype}{list(x.shape)}: float32, one for each of the {k.shape[2]} KV heads")


def _check_kernel(q: Array, k: Array) -> None:
    page, K, d = k.shape[1:]
    if q.dtype not in PARTS or k.dtype not in (E4M3, q.dtype):
        raise ValueError(
            f"q {q.dtype}, pages {k.dtype}: the kernel takes bfloat16 or float16 queries and pages of their type or E4M3; "
            'backend="reference" takes any'
        )
    if d not in HEAD_SIZES:
        raise ValueError(f'heads of {d}: the kernel has 64, 128 and 256; backend="reference" takes any')
    if page not in (8, 16, 32) and page % KEYS:
        raise ValueError(
            f'pages of {page} tokens: the kernel has 8, 16, 32 and multiples of {KEYS}; backend="reference" any'
        )
    if q.shape[1] // K > ROWS:
        raise ValueError(
            f'{q.shape[1] // K} queries a KV head: the kernel has up to {ROWS}; backend="reference" takes any')
