"""Attention of one query per sequence over a paged cache, by the Hopper kernel or by reference.py: one
explicit choice.

A page holds the keys, or the values, of `page_size` consecutive tokens of one sequence, for all KV heads; a
row of `block_table` lists a sequence's pages in order. Only pages with a visible token are read: those up
to a sequence's length, and within its last `window` tokens. Tokens outside have no effect, not even NaN.
Query head h reads KV head h // (H / K), and no head is repeated in memory. A cache in E4M3 holds keys and
values divided by scales, one per KV head; scores and results are multiplied by them.

`backend` is that of `pallas_kernels.quantize.api`. Scores, sums and results are float32 until the last
rounding; exponentials enter the product with the values in float16 for an E4M3 cache, otherwise in the
cache's dtype. Chunks of a sequence are computed separately (flash-decoding) and joined in a fixed order. They
are cut at fixed places, so that every bit of a result depends on its own sequence alone: neither on the
others in the batch nor on the number of multiprocessors. With the kernel, a visible value that is not finite
may reach all heads of its sequence, but never another sequence.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.attention.segments import check_window
from pallas_kernels.decode_attention import reference, sm90, sm90_join
from pallas_kernels.decode_attention.deal import KEYS, Deal, deal
from pallas_kernels.decode_attention.sm90 import Plan, Tiles
from pallas_kernels.decode_attention.sm90_join import F32, ROWS, WARPS
from pallas_kernels.forward_only import forward_only
from pallas_kernels.plgpu_compat import Backend, use_kernel
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize.reference import quantize_rows

LOG2E = math.log2(math.e)
Shape = Array | jax.ShapeDtypeStruct  # whose shape and dtype count
HEAD_SIZES = 64, 128, 256
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
# E4M3 numbers that make up a query of that type
PARTS = {jnp.dtype(jnp.bfloat16): 2, jnp.dtype(jnp.float16): 3}
no_derivative = forward_only("differentiate pallas_kernels.attention.api.attention, of whole sequences")


def decode_attention(
    q: Array, k_pages: Array, v_pages: Array, block_table: Array, lengths: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None, *, window: int | Array | None = None, scale: float | None = None,
    dealt: Deal | None = None, first_page: Array | None = None, backend: Backend = "auto",
    tiles: Tiles | None = None,
    interpret=None,
) -> Array:
    """q [B, H, d], k_pages and v_pages [pages, page_size, K, d], block_table [B, max_pages] int32, lengths
    [B] int32 -> o [B, H, d] in q's dtype, 0 where the length is 0.

    k_scale, v_scale [K] float32: the scales of E4M3 keys and values; 1 if None. window: a query sees the last
    `window` keys of its sequence; all if None. An int, or an int32 scalar that may be traced, so that layers
    in one loop can have different windows. scale: the factor of the scores; d ** -0.5 if None. dealt: of
    `deal_of`, which layers share. first_page: an int32 that is added to all pages of the table: those of a
    layer. tiles: replaces the tuned ones. interpret: runs the kernel on a CPU, for tests.

    The kernel takes q in bfloat16 or float16, pages in E4M3 or q's dtype, d of 64, 128 or 256, pages of 8, 16
    or 32 tokens or a multiple of 64, and at most 64 queries per KV head; the reference takes any. Lengths
    must be at most max_pages * page_size, and the table must name existing pages. Neither is known at trace
    time, so neither is checked.

    Raises ValueError, with the operands found and the rule, for anything else, and TypeError if a derivative
    is computed. Source: PagedAttention (Kwon et al., 2023), in pieces that are joined as in flash-decoding
    (Dao et al., 2023).
    """
    return attention_and_lse(
        q, k_pages, v_pages, block_table, lengths, k_scale, v_scale, window=window, scale=scale, dealt=dealt,
        first_page=first_page, backend=backend, tiles=tiles, interpret=interpret,
    )[0]


@no_derivative
def attention_and_lse(
    q: Array, k_pages: Array, v_pages: Array, block_table: Array, lengths: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None, *, window: int | Array | None = None, scale: float | None = None,
    dealt: Deal | None = None, first_page: Array | None = None, backend: Backend = "auto",
    tiles: Tiles | None = None,
    interpret=None,
) -> tuple[Array, Array]:
    """`decode_attention`, and the logarithm of each query's sum of exponentials, [B, H] float32; -inf where
    the length is 0. dealt: of `deal_of`. first_page: an int32 that is added to all pages of the table."""
    operands, starts = _operands(q, k_pages, v_pages, block_table, lengths, k_scale, v_scale, window, scale)
    if not use_kernel(backend):
        table = block_table if first_page is None else block_table + first_page
        *_, ks, vs, factor = operands
        return reference.attention_and_lse(q, k_pages, v_pages, table, lengths, ks, vs, factor, starts)
    _check_kernel(q, k_pages)
    q, k, v, table, lengths, k_scale, v_scale, scale = operands
    plan, o, lse, dealt, factor = _by_kernel(q, k, v, table, lengths, starts, k_scale, v_scale, scale, dealt,
                                             first_page,
                                             tiles or Tiles(), interpret)
    o, lse = sm90_join.join(o, lse, dealt, factor, q.dtype, interpret)
    return o[:, : plan.live].reshape(q.shape), lse[:, : plan.live].reshape(q.shape[:2]) * (1 / LOG2E)


@no_derivative
def attention_quantize(
    q: Array, k_pages: Array, v_pages: Array, block_table: Array, lengths: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None, *, amax_floor: float, window: int | Array | None = None,
    scale: float | None = None,
    dealt: Deal | None = None, first_page: Array | None = None, backend: Backend = "auto", interpret=None,
) -> tuple[Array, Array]:
    """`decode_attention`, as codes [B, H * d] E4M3 of 1x128 blocks and scales [H * d / 128, B] float32, in
    one kernel with what joins the chunks; where `quantizes` says so."""
    if not use_kernel(backend):
        o, _ = attention_and_lse(q, k_pages, v_pages, block_table, lengths, k_scale, v_scale, window=window,
                                 scale=scale,
                                 first_page=first_page, backend=backend)
        codes, scales = quantize_rows(o.reshape(len(o), -1), amax_floor=amax_floor)
        return codes, scales.T
    (q, k, v, table, lengths, k_scale, v_scale, scale), starts = _operands(
        q, k_pages, v_pages, block_table, lengths, k_scale, v_scale, window, scale)
    _check_kernel(q, k)
    if not quantizes(q, k):
        raise ValueError(f"q {list(q.shape)}: the kernel quantises heads of 128, of which a pass has "
                         f"a multiple of 4")
    plan, o, lse, dealt, factor = _by_kernel(q, k, v, table, lengths, starts, k_scale, v_scale, scale, dealt,
                                             first_page,
                                             Tiles(), interpret)
    return sm90_join.join_and_quantize(o, lse, dealt, factor, plan.live, q.dtype, amax_floor, interpret)


def quantizes(q: Shape, k_pages: Shape) -> bool:
    """Whether `attention_quantize` takes operands of these shapes and types."""
    return q.shape[-1] == BLOCK and plan_of(q, k_pages, Tiles()).live % WARPS == 0


def _operands(q, k_pages, v_pages, block_table, lengths, k_scale, v_scale, window,
              scale) -> tuple[tuple, Array | None]:
    """The operands, checked, with what is left out; and the first visible key of each sequence."""
    _check(q, k_pages, v_pages, block_table, lengths, k_scale, v_scale)
    check_window(window)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale = {scale}: scores are multiplied by a finite number above 0")
    one = np.ones(k_pages.shape[2], np.float32)
    k_scale, v_scale = (one if s is None else s for s in (k_scale, v_scale))
    return (q, k_pages, v_pages, block_table, lengths, k_scale, v_scale, scale), _starts(lengths, window)


def deal_of(q: Shape, k_pages: Shape, lengths: Array, window: int | Array | None = None,
            tiles: Tiles | None = None,
            interpret=None) -> Deal:
    """The distribution of the kernel's work, for calls with equal lengths and windows; of q and k_pages the
    shapes alone count."""
    plan = plan_of(q, k_pages, tiles or Tiles(), interpret is not None, window is not None)
    return deal(lengths, plan.passes, sm90.workers(plan), _starts(lengths, window))


def _starts(lengths: Array, window: int | Array | None) -> Array | None:
    return None if window is None else jnp.maximum(lengths - window, 0)


def _by_kernel(q, k_pages, v_pages, block_table, lengths, starts, k_scale, v_scale, scale, dealt, first_page,
               tiles,
               interpret, tokens: int = 1) -> tuple[Plan, Array, Array, Deal, Array]:
    """(the plan, o and the logarithms of sums of chunks, their deal, the factors of values). tokens: each KV
    head's queries are those of so many tokens (Plan)."""
    plan = plan_of(q, k_pages, tiles, interpret is not None, starts is not None)._replace(tokens=tokens)
    dealt = dealt or deal(lengths, plan.passes, sm90.workers(plan), starts)
    queries = jnp.pad(q.reshape(-1, plan.live, plan.d), ((0, 0), (0, -plan.live % 8), (0, 0)))
    factor = _by_row(plan, k_scale * np.float32(scale * LOG2E))
    k, v = (pages.reshape(-1, pages.shape[2] * plan.d) for pages in (k_pages, v_pages))
    starts = lengths if starts is None else starts  # which the kernel does not read then
    first = jnp.zeros(1, jnp.int32) if first_page is None else first_page.reshape(1)
    o, lse = sm90.attend(plan, queries, factor, k, v, block_table, starts, lengths, dealt, first, interpret)
    return plan, o, lse, dealt, _by_row(plan, v_scale)


def plan_of(q: Shape, k_pages: Shape, tiles: Tiles, simulated: bool = False, windowed: bool = False) -> Plan:
    """The plan with two KV heads at once, and their queries: so many chunks keep all workers busy evenly, and
    little is written for each. One head where there is no room, or where queries are not in registers, in
    which the other head's would be set to 0."""
    (_, page, K, d), group = k_pages.shape, q.shape[1] // k_pages.shape[2]
    heads = heads_of(group, K, d)
    fp8 = k_pages.dtype == E4M3
    parts = PARTS[q.dtype] if fp8 else 1
    return Plan(tiles, K // heads, heads, group, d, page, parts, fp8, simulated, windowed)


def heads_of(group: int, K: int, d: int) -> int:
    """The number of KV heads of a pass, of `group` queries each."""
    return 2 if K % 2 == 0 and 2 * group <= ROWS and d < sm90.LARGE else 1


def _by_row(plan: Plan, per_head: Any) -> Any:
    """[K] -> [passes, ROWS]: the value of each query's KV head. NumPy's remain so: a constant of the
    program."""
    on = np if isinstance(per_head, np.ndarray) else jnp
    of_query = on.repeat(per_head.reshape(plan.passes, plan.heads), plan.group, axis=1)
    return on.pad(of_query, ((0, 0), (0, ROWS - of_query.shape[1])))


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
            f"q {q.dtype}, pages {k.dtype}: the kernel takes bfloat16 or float16 queries and pages of their "
            f"type or E4M3; "
            'backend="reference" takes any'
        )
    if d not in HEAD_SIZES:
        raise ValueError(f'heads of {d}: the kernel has 64, 128 and 256; backend="reference" takes any')
    if page not in (8, 16, 32) and page % KEYS:
        raise ValueError(
            f'pages of {page} tokens: the kernel has 8, 16, 32 and multiples of {KEYS}; '
            f'backend="reference" any'
        )
    if q.shape[1] // K > ROWS:
        raise ValueError(
            f'{q.shape[1] // K} queries a KV head: the kernel has up to {ROWS}; '
            f'backend="reference" takes any')
