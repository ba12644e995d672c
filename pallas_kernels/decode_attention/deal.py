"""Even distribution of work on the device: the chunks of keys that each worker gets.

A row is a sequence, or one of several passes over its KV heads. Its keys are cut into chunks of CHUNK tiles,
at places that are multiples of that from the sequence's first key on: so the cuts of a sequence, and with
them the bits of its result, depend on that sequence alone. All chunks form one line, row after row; each
worker takes a contiguous stretch of it, and the stretches differ by at most one chunk. A chunk's place in the
line is that of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.plgpu_compat import Ref

KEYS = 64  # keys per tile
CHUNK = 4  # tiles, at most, of a chunk


class Deal(NamedTuple):
    """The distribution as tables, each from one comparison and one sum: a small XLA kernel."""

    begins: Array  # [rows + 1]: the place of each row's first chunk, then the number of chunks
    tiles: Array  # [rows + 1]: the number of tiles in the rows before each, then in all
    first: Array  # [workers + 1]: the row of each worker's first chunk, then the number of rows


def deal(lengths: Array, passes: int, workers: int, starts: Array | None = None) -> Deal:
    """The distribution of the tiles that hold keys [starts, lengths) of each sequence, both [B] int32; None:
    those from 0 on."""
    starts = jnp.zeros_like(lengths) if starts is None else starts
    repeated = lambda x: jnp.repeat(x, passes)
    ends = pl.cdiv(lengths, KEYS)
    begins = _before(repeated(pl.cdiv(ends, CHUNK) - _first_chunk(starts)))
    tiles = _before(repeated(ends - starts // KEYS))
    stretch = begin_of(jnp.arange(workers + 1, dtype=jnp.int32), begins[-1], workers)
    return Deal(begins, tiles, (begins[1:] <= stretch[:, None]).sum(1, dtype=jnp.int32))


def places(batch: int, keys: int, passes: int) -> int:
    """The most chunks that there can be, of so many sequences of at most `keys` keys."""
    return batch * passes * pl.cdiv(keys, KEYS * CHUNK)


def _before(counts: Array) -> Array:
    """[n] -> [n + 1]: the sum of those before each."""
    at = jnp.arange(len(counts) + 1)
    return jnp.where(at[:-1] < at[:, None], counts, 0).sum(1, dtype=jnp.int32)


def _first_chunk(start: Array) -> Array:
    return lax.div(start, jnp.asarray(KEYS * CHUNK, start.dtype))


def begin_of(worker: Array, total: Array, workers: int) -> Array:
    """The place of a worker's first chunk."""
    each, more = lax.div(total, jnp.int32(workers)), lax.rem(total, jnp.int32(workers))
    return worker * each + lax.min(worker, jnp.broadcast_to(more, worker.shape))


class Piece(NamedTuple):
    """A chunk: tiles [start, stop) of a row, counted from the row's first; `place` of its result; `before`:
    the worker's tiles before these."""

    row: Array
    start: Array
    stop: Array
    place: Array
    before: Array


def for_each_piece(deal: Deal, starts: Ref | None, passes: int, worker: Array,
                   body: Callable[[Piece], None]) -> Array:
    """In a kernel: run body(piece) for every chunk of a worker, in order. Returns the number of its tiles."""
    begins, tiles, first = deal
    rows, workers = begins.shape[0] - 1, first.shape[0] - 1
    begin, end = (begin_of(w, begins[rows], workers) for w in (worker, worker + 1))

    def tile(place: Array, row: Array) -> Array:
        """The first tile of the chunk at this place of a row, counted from the row's first."""
        start = jnp.int32(0) if starts is None else starts[lax.div(row, jnp.int32(passes))]
        within = (_first_chunk(start) + place - begins[row]) * CHUNK - lax.div(start, jnp.int32(KEYS))
        return lax.max(lax.min(within, tiles[row + 1] - tiles[row]), jnp.int32(0))

    last = lax.min(first[worker + 1], rows - 1)
    base = tiles[lax.min(first[worker], rows - 1)] + tile(begin, lax.min(first[worker], rows - 1))

    @pl.when(begin < end)
    def _():
        @pl.loop(first[worker], last + 1)
        def _(row):
            @pl.loop(lax.max(begins[row], begin), lax.min(begins[row + 1], end))
            def _(place):
                start, stop = tile(place, row), tile(place + 1, row)
                body(Piece(row, start, stop, place, tiles[row] + start - base))

    ends = tiles[last] + tile(end, last)
    return jnp.where(begin < end, ends - base, 0)
