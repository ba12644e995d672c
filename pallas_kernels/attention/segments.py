"""Packed rows as ranges of keys: a query sees the keys from the start of its segment up to itself.

So one number a token says all: `first`, the first token of its segment. The mask is first[t] <= s <= t, and no key needs an id:
what lies between the start of t's segment and t is of that segment. Kernels walk blocks of keys (or, for the gradients of keys,
blocks of queries) and take from the tables here where a walk begins and ends, and which of its blocks need a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

CHUNK = 128  # what N is a multiple of
COPIED = 8  # rows that the copy engine moves together: where a walk may begin
WALK = 32  # numbers in a row of a table of walks: 128 bytes, as the copy engine's addresses in shared memory are


class Segments(NamedTuple):
    """int32 [N]: the first token of each token's segment, and the one after its last. Padding: N and 0, which no token is in."""

    first: Array
    last: Array


def segments_of(segment_ids: Array) -> Segments:
    """segment_ids [B, T] -> Segments of the B * T tokens in a row, N of them with padding up to a multiple of CHUNK.

    A segment is a run of equal ids above 0 in one row.
    """
    rows, length = segment_ids.shape
    ids = jnp.pad(segment_ids.reshape(-1), (0, -(rows * length) % CHUNK))
    n, at = len(ids), jnp.arange(len(ids), dtype=jnp.int32)
    begins = (ids != jnp.roll(ids, 1)) | (at % length == 0)
    ends = jnp.roll(begins, -1).at[-1].set(True)
    first = _running_max(jnp.where(begins, at, 0))
    last = n - _running_max(jnp.where(ends, n - 1 - at, 0)[::-1])[::-1]
    return Segments(jnp.where(ids > 0, first, n), jnp.where(ids > 0, last, 0))


def _running_max(x: Array) -> Array:
    """The largest so far, of x [N] >= 0: in chunks, then over the chunks. Two passes, where a scan would be many kernels."""
    chunks = x.reshape(-1, CHUNK)
    inside = jnp.where(jnp.tri(CHUNK, dtype=bool), chunks[:, None], 0).max(-1)
    before = jnp.where(jnp.tri(len(chunks), k=-1, dtype=bool), inside[:, -1], 0).max(-1)
    return jnp.maximum(inside, before[:, None]).reshape(-1)


def key_walks(first: Array, rows: int, keys: int) -> Array:
    """For blocks of `rows` queries, longest walk first: int32 [blocks, WALK], (block, begin, clear, steps) and zeros.

    The block sees keys from `begin` on, in `steps` blocks of `keys`; before `clear` there are keys that some of its queries do
    not see because of their segments. A walk has a step at least, of which a block of padding sees nothing.
    """
    at, first = (x.reshape(-1, rows) for x in (jnp.arange(len(first), dtype=jnp.int32), first))
    real = first <= at
    end = jnp.where(real, at, 0).max(1) + 1
    begin = jnp.minimum(first.min(1), end - 1) // COPIED * COPIED
    return _longest_first(begin, jnp.where(real, first, 0).max(1), -(-(end - begin) // keys))


def query_walks(last: Array, keys: int, rows: int) -> Array:
    """For blocks of `keys` keys, longest walk first: int32 [blocks, WALK], (block, begin, clear, steps) and zeros.

    The block is seen by queries from `begin` on, in `steps` blocks of `rows`; from `clear` on there are queries that do not see
    some of its keys because of their segments. A block of padding has no step.
    """
    last = jnp.pad(last, (0, -len(last) % keys)).reshape(-1, keys)
    begin = jnp.arange(len(last), dtype=jnp.int32) * keys
    return _longest_first(begin, last.min(1), jnp.maximum(-(-(last.max(1) - begin) // rows), 0))


def _longest_first(begin: Array, clear: Array, steps: Array) -> Array:
    order = jnp.argsort(-steps, stable=True).astype(jnp.int32)
    return jnp.pad(jnp.stack([order, begin[order], clear[order], steps[order]], 1), ((0, 0), (0, WALK - 4)))
