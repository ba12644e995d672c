"""Packed rows as ranges of keys: a query sees the keys from the start of its segment, or of its window, up to
itself.

One number per token therefore describes the mask: `first`, the first key that the token sees. The mask is
first[t] <= s <= t, and keys need no ids, because all tokens between the start of t's segment and t belong to
that segment. Kernels walk over blocks of keys (for the gradients of keys, over blocks of queries). The tables
here say where each walk begins and ends, and which of its blocks need a mask. Blocks outside a window belong
to no walk.

Sequences that share a prefix lie as a tree in depth-first order, and the prefix once. Then `ends` is the one
number: the place behind the last token that sees a token. The mask is s <= t < ends[s], and a walk over keys
leaves out the longest run of blocks that none of its queries sees, such as the branches between a prefix and
a later branch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

CHUNK = 128  # N is a multiple of it
STEP = 64  # the unit, in keys or queries, of a walk's length
COPIED = 8  # rows that the copy engine moves together: a walk begins at a multiple of it
# Numbers in a row of a table of walks: 128 bytes, the alignment of the copy engine in shared memory.
WALK = 32


class Tables(NamedTuple):
    """Segment ids in the form that attention uses, the same for all layers with the same window."""

    segment_ids: Array  # [T] or [B, T]
    first: Array  # int32 [N]: the first key that each token sees; N for padding
    of_queries: dict[int, Array]  # walks, by the number of queries in a block
    of_keys: dict[int, Array]  # walks, by the number of keys in a block
    # int32 [N]: the place behind the last token that sees each token, 0 for padding
    ends: Array | None = None

    @property
    def limits(self) -> Array:
        """What kernels are given: `first`, and behind it the ends, if there are any, and a block of zeros."""
        return self.first if self.ends is None else jnp.concatenate([self.first, self.ends,
                                                                     jnp.zeros(CHUNK, jnp.int32)])


def tables_of(segment_ids: Array, window: int | Array | None = None, ends: Array | None = None) -> Tables:
    """segment_ids [T] or [B, T] int32 -> Tables of all tokens in one row, N with padding to a multiple of
    CHUNK.

    window: a token sees at most this many keys, the last of which is its own; None means no limit. It may be
    a traced int32 scalar, so that layers in one loop can have different windows.

    ends: like segment_ids, of each token the place in its row behind the last token that sees it, 0 for
    padding. A token then sees the tokens up to itself whose ends lie behind it, whatever their ids. There is
    no window then.

    Raises ValueError for ids of another shape or dtype, for ids known at trace time that are negative or that
    return after another id, for a window below 1, for ends of another shape or dtype, and for ends with a
    window.
    """
    check_ids(segment_ids)
    check_window(window)
    if ends is not None:
        return _tree_tables(segment_ids, window, ends)
    first, last = first_and_last(jnp.atleast_2d(segment_ids), window)
    return Tables(segment_ids, first, {rows: key_walks(first, rows) for rows in (64, 128)},
                  {keys: query_walks(last, keys) for keys in (64, 128)})


def _tree_tables(segment_ids: Array, window: int | Array | None, ends: Array) -> Tables:
    if ends.shape != segment_ids.shape or ends.dtype != jnp.int32:
        raise ValueError(f"ends {ends.dtype}{list(ends.shape)}: int32 as segment_ids are, "
                         f"{list(segment_ids.shape)}")
    if window is not None:
        raise ValueError(f"window = {window} with ends: in a tree the last keys are not those right "
                         f"before a token")
    rows, length = jnp.atleast_2d(segment_ids).shape
    flat = jnp.where(segment_ids > 0, ends, 0).reshape(rows, length)
    flat = jnp.where(flat > 0, flat + length * jnp.arange(rows, dtype=jnp.int32)[:, None], 0).reshape(-1)
    last = jnp.pad(flat, (0, -len(flat) % CHUNK))
    at = jnp.arange(len(last), dtype=jnp.int32)
    # seen by none of the tokens before
    begins = (last > 0) & (jnp.roll(running_max(last), 1).at[0].set(0) <= at)
    first = jnp.where(last > 0, running_max(jnp.where(begins, at, 0)), len(last))
    return Tables(segment_ids, first, {n: tree_walks(first, last, n) for n in (64, 128)},
                  {n: query_walks(last, n) for n in (64, 128)}, last)


def first_and_last(segment_ids: Array, window: int | Array | None = None) -> tuple[Array, Array]:
    """segment_ids [B, T] -> (first, last), int32 [N] each: the first key that each token sees, and the token
    after the last one that sees it.

    A segment is a run of equal ids above 0 in one row. Padding gets (N, 0), so no range contains it.
    """
    rows, length = segment_ids.shape
    ids = jnp.pad(segment_ids.reshape(-1), (0, -(rows * length) % CHUNK))
    n, at = len(ids), jnp.arange(len(ids), dtype=jnp.int32)
    begins = (ids != jnp.roll(ids, 1)) | (at % length == 0)
    ends = jnp.roll(begins, -1).at[-1].set(True)
    first = running_max(jnp.where(begins, at, 0))
    last = n - running_max(jnp.where(ends, n - 1 - at, 0)[::-1])[::-1]
    if window is not None:  # no larger than n, so that nothing overflows
        reach = jnp.minimum(min(window, n) if isinstance(window, int) else window, n)
        first, last = jnp.maximum(first, at + 1 - reach), jnp.minimum(last, at + reach)
    return jnp.where(ids > 0, first, n), jnp.where(ids > 0, last, 0)


def sees(bad: Array, first: Array, ends: Array | None = None) -> Array:
    """bad, first, ends [N] -> bool [N]: whether each token sees a bad token, itself included."""
    at = jnp.arange(len(bad))
    if ends is not None:
        return running_max(jnp.where(bad, ends, 0)) > at
    return running_max(jnp.where(bad, at + 1, 0)) > first


def seen_by(bad: Array, first: Array, ends: Array | None = None) -> Array:
    """bad, first, ends [N] -> bool [N]: whether each token is seen by a bad token, itself included."""
    n, at = len(bad), jnp.arange(len(bad))
    following = n - running_max(jnp.where(bad, n - at, 0)[::-1])[::-1]  # n where there is none
    if ends is not None:
        return following < ends
    return first.at[following].get(mode="fill", fill_value=n) <= at


def running_max(x: Array) -> Array:
    """The running maximum of x [N] >= 0, first within chunks and then over chunks: two passes, while a scan
    would be many kernels."""
    chunks = x.reshape(-1, CHUNK)
    inside = jnp.where(jnp.tri(CHUNK, dtype=bool), chunks[:, None], 0).max(-1)
    before = jnp.where(jnp.tri(len(chunks), k=-1, dtype=bool), inside[:, -1], 0).max(-1)
    return jnp.maximum(inside, before[:, None]).reshape(-1)


def key_walks(first: Array, rows: int) -> Array:
    """The walks of blocks of `rows` queries, longest first: int32 [blocks, WALK] with (block, begin, steps,
    clear) and zeros.

    A block sees keys from `begin` on, in `steps` of STEP. Before `clear` there are keys that some of its
    queries do not see because of their segments or windows. A walk has at least one step; a block of padding
    sees nothing in it.
    """
    at, first = (x.reshape(-1, rows) for x in (jnp.arange(len(first), dtype=jnp.int32), first))
    real = first <= at
    end = jnp.where(real, at, 0).max(1) + 1
    begin = jnp.minimum(first.min(1), end - 1) // COPIED * COPIED
    return _longest_first(begin, end, jnp.where(real, first, 0).max(1))


def tree_walks(first: Array, ends: Array, rows: int) -> Array:
    """`key_walks` in trees: int32 [blocks, WALK] with (block, begin, steps, clear, dirty, gap_at, gap) and
    zeros.

    Keys that some of the block's queries do not see lie from `dirty` to `clear`. The walk leaves out `gap`
    keys from `gap_at` on, which none of them sees; both are whole CHUNKs from `begin` on, whatever the size
    of its steps.
    """
    at = jnp.arange(len(first), dtype=jnp.int32).reshape(-1, rows)
    own = first.reshape(-1, rows)
    real, last = own <= at, jnp.where(own <= at, at, 0).max(1)
    since = jnp.where(real, at, len(first)).min(1)
    begin = jnp.minimum(own.min(1), last) // COPIED * COPIED
    some, none = ends.reshape(-1, COPIED).max(1), ends.reshape(-1, COPIED).min(1)  # of COPIED keys at a time
    each = jnp.arange(len(some), dtype=jnp.int32)
    among = (each * COPIED >= begin[:, None]) & (each * COPIED <= last[:, None])
    unseen = among & (some <= since[:, None])
    run = jnp.where(unseen, each - lax.cummax(jnp.where(unseen, -1, each), axis=1), 0)
    stop = jnp.argmax(run, 1).astype(jnp.int32)
    start = (stop + 1 - run.max(1)) * COPIED
    gap_at = begin - (begin - start) // CHUNK * CHUNK
    gap = jnp.maximum((stop + 1) * COPIED - gap_at, 0) // CHUNK * CHUNK
    hidden = among & (none <= last[:, None])
    clear = jnp.where(hidden, (each + 1) * COPIED, 0).max(1)
    dirty = jnp.where(hidden, each * COPIED, len(first)).min(1)
    return _longest_first(begin, last + 1 - gap, clear, dirty, gap_at, gap)


def query_walks(last: Array, keys: int) -> Array:
    """The walks of blocks of `keys` keys, longest first: int32 [blocks, WALK] with (block, begin, steps,
    clear) and zeros.

    A block is seen by queries from `begin` on, in `steps` of STEP. From `clear` on there are queries that do
    not see some of its keys because of their segments or windows. A block of padding has no steps.
    """
    last = last.reshape(-1, keys)
    begin = jnp.arange(len(last), dtype=jnp.int32) * keys
    return _longest_first(begin, jnp.maximum(last.max(1), begin), last.min(1))


def _longest_first(begin: Array, end: Array, *more: Array) -> Array:
    order = jnp.argsort(begin - end, stable=True).astype(jnp.int32)
    columns = order, begin[order], -((begin - end)[order] // STEP), *(x[order] for x in more)
    return jnp.pad(jnp.stack(columns, 1), ((0, 0), (0, WALK - len(columns))))


def check_window(window: int | Array | None) -> None:
    """Raise ValueError, with the rule, for an invalid window."""
    if isinstance(window, Array):
        if window.shape or window.dtype != jnp.int32:
            raise ValueError(f"window {window.dtype}{list(window.shape)}: an int, an int32 scalar, or None")
    elif window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"window = {window!r}: a query sees at least one key, its own; None for no window")


def check_ids(ids: Array) -> None:
    """Raise ValueError, with the rule, for invalid segment ids."""
    if ids.ndim not in (1, 2) or ids.dtype != jnp.int32:
        raise ValueError(f"segment_ids {ids.dtype}{list(ids.shape)}: int32 [T], or rows [B, T]")
    if not isinstance(ids, Tracer):
        for i, row in enumerate(np.atleast_2d(np.asarray(ids))):
            _check_row(i, row)


def _check_row(i: int, row: np.ndarray) -> None:
    begins = np.flatnonzero(np.diff(row, prepend=-1))
    if row.min(initial=0) < 0:
        raise ValueError(
            f"segment_ids: token {row.argmin()} of row {i} has {row.min()}; ids are above 0, "
            f"and 0 is padding")
    seen, counts = np.unique(row[begins][row[begins] > 0], return_counts=True)
    if counts.max(initial=1) > 1:
        segment = seen[counts.argmax()]
        back = begins[row[begins] == segment][1]
        raise ValueError(
            f"segment_ids: {segment} comes back at token {back} of row {i}; a segment's tokens "
            f"are contiguous")
