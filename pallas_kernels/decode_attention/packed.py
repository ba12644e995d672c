"""Attention of packed sequences in the order of sums of paged decode attention: each token has the bits that
decoding it against a cache of the same keys and values gives.

The kernel is that of decoding. Where that has the queries of one token in a row, here are those of up to 16
tokens that follow one another, each of which sees the keys up to its own. All of them have the same tiles and
chunks, as 16 divides a tile, so each query's sums are those of a row of its own. Sequences are first laid out
at multiples of a page.

`backend` is that of `pallas_kernels.quantize.api`. The reference is `ordered`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.segments import check_window
from pallas_kernels.decode_attention import api, ordered, sm90_join
from pallas_kernels.decode_attention.deal import CHUNK, KEYS
from pallas_kernels.decode_attention.sm90 import Tiles
from pallas_kernels.decode_attention.sm90_join import ROWS
from pallas_kernels.forward_only import forward_only
from pallas_kernels.plgpu_compat import Backend, use_kernel

PAGE = 16  # tokens; sequences begin at multiples of it
MEMORY = 2**28  # bytes that the chunks of a part of the tokens may take
no_derivative = forward_only("differentiate pallas_kernels.attention.api.attention")


@no_derivative
def attention(q: Array, k: Array, v: Array, lengths: Array, k_scale: Array, v_scale: Array, *, longest: int,
              scale: float | None = None, window: int | Array | None = None, backend: Backend = "auto",
              interpret=None) -> Array:
    """q [N, H, d], k and v [N, K, d] as a cache holds them -> o [N, H, d] in q's dtype.

    lengths [N] int32: of a token the number of those of its sequence up to it, which are the lengths[i]
    tokens that end with it; 0 for padding, which gets 0. longest: at least the longest sequence. k_scale,
    v_scale [K] float32, scale and window as in `api.decode_attention`; with a window each token is computed
    apart, which is slow.

    With the kernel all results are NaN where a sequence is longer than `longest`, or where there are so many
    short ones that they do not fit into 2 N tokens in whole pages. It takes what `api.decode_attention`'s
    does. Raises ValueError for anything else, and TypeError if a derivative is computed."""
    check_window(window)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if not use_kernel(backend):
        firsts = jnp.arange(len(q), dtype=jnp.int32) - lengths + 1
        starts = None if window is None else jnp.maximum(lengths - window, 0)
        return ordered.attention(q, k, v, lengths, lambda first, at: first[:, None] + at, firsts, k_scale,
                                 v_scale,
                                 scale, starts)
    (N, H, d), K = q.shape, k.shape[1]
    api._check_kernel(q, k.reshape(1, N, K, d)[:, :PAGE])
    count = 1 if window is not None else tokens_of(H // K, K, d)
    at, room = places(lengths)
    put = lambda x: jnp.zeros((room, *x.shape[1:]), x.dtype).at[at].set(x, mode="drop")
    queries = put(q).reshape(-1, count, K, H // K, d).swapaxes(1, 2).reshape(-1, H * count, d)
    seen = jnp.minimum(lengths, longest)  # the table ends there
    ends = jnp.zeros(room // count, jnp.int32).at[at // count].max(seen, mode="drop")
    begins = jnp.zeros(room // count, jnp.int32).at[at // count].max((at - lengths + 1) // PAGE, mode="drop")
    k_pages, v_pages = (put(x).reshape(-1, PAGE, K, d) for x in (k, v))
    table = jnp.arange(pl.cdiv(longest, PAGE), dtype=jnp.int32)

    def part(operands: tuple[Array, Array, Array]) -> Array:
        queries, ends, begins = operands
        of_part = jnp.minimum(begins[:, None] + table, len(k_pages) - 1)
        starts = None if window is None else jnp.maximum(ends - window, 0)
        plan, o, lse, dealt, factor = api._by_kernel(
            queries, k_pages, v_pages, of_part, ends, starts, k_scale, v_scale, scale, None, None, Tiles(),
            interpret,
            tokens=count)
        return sm90_join.join(o, lse, dealt, factor, q.dtype,
                              interpret)[0][:, : plan.live].reshape(queries.shape)

    o = by_parts(part, (queries, ends, begins), K, longest, d)
    o = o.reshape(-1, K, count, H // K, d).swapaxes(1, 2).reshape(room, H, d)
    o = o.at[at].get(mode="fill", fill_value=0)
    fits = jnp.all((lengths <= longest) & ((lengths == 0) | (at < room)))
    return jnp.where(fits, o, jnp.nan)


def tokens_of(group: int, K: int, d: int) -> int:
    """The number of tokens whose queries make up a row, of `group` queries a KV head: a power of two, such
    that a pass has as many heads as in decoding."""
    heads = api.heads_of(group, K, d)
    return 1 << min(PAGE.bit_length() - 1, (ROWS // (heads * group)).bit_length() - 1)


def places(lengths: Array) -> tuple[Array, int]:
    """(the places [N] of tokens where sequences begin at multiples of PAGE, past the end for padding, the
    number of places)."""
    live, room = lengths > 0, 2 * -(-len(lengths) // PAGE) * PAGE
    last = live & (jnp.append(lengths[1:], 0) != lengths + 1)
    gap = jnp.where(last, -lengths % PAGE, 0)
    return jnp.where(live, jnp.cumsum(live) - 1 + jnp.cumsum(gap) - gap, room), room


def by_parts(part, operands: tuple[Array, ...], K: int, longest: int, d: int) -> Array:
    """part(operands) of so many rows at a time that their chunks fit into MEMORY."""
    rows = len(operands[0])
    of_row = K * pl.cdiv(longest, CHUNK * KEYS) * ROWS * d * 4
    each = max(1, min(rows, MEMORY // of_row))
    count = pl.cdiv(rows, each)
    if count == 1:
        return part(operands)
    cut = lambda x: jnp.pad(x, ((0, count * each - rows),
                                *((0, 0),) * (x.ndim - 1))).reshape(count, each, *x.shape[1:])
    return lax.map(part, jax.tree.map(cut, operands)).reshape(-1, *operands[0].shape[1:])[:rows]
