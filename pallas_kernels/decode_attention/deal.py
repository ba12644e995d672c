"""Work dealt out evenly on the device: which worker has which tiles of keys of which sequences.

A row is a sequence, or one of several passes over its KV heads. All tiles lie in one line, row after row;
every worker takes an equal stretch of it, to one tile. What a worker has of a row is a piece. The piece of
worker w in row r is at place w + r of all results: from a piece to the next either of the two grows by one,
so that places are all different, and those of a row are neighbours, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.plgpu_compat import Ref

KEYS = 64  # of a tile


class Deal(NamedTuple):
    """Two tables, one comparison and one sum each: a small XLA kernel."""

    begins: Array  # [rows + 1]: the first tile of each row, and how many there are
    first: Array  # [workers + 1]: the row of each worker's first tile; the number of rows behind the last


def deal(lengths: Array, passes: int, workers: int) -> Deal:
    """Of `lengths` [B] int32."""
    tiles = jnp.repeat(pl.cdiv(lengths, KEYS), passes)
    rows = jnp.arange(len(tiles) + 1)
    begins = jnp.where(rows[:-1] < rows[:, None], tiles, 0).sum(1, dtype=jnp.int32)
    stretch = begin_of(jnp.arange(workers + 1, dtype=jnp.int32), begins[-1], workers)
    return Deal(begins, (begins[1:] <= stretch[:, None]).sum(1, dtype=jnp.int32))


def begin_of(worker: Array, total: Array, workers: int) -> Array:
    """The first of its tiles."""
    each, more = _shares(total, workers)
    return worker * each + lax.min(worker, jnp.broadcast_to(more, worker.shape))


def worker_of(tile: Array, total: Array, workers: int) -> Array:
    each, more = _shares(total, workers)
    long = more * (each + 1)  # tiles of the workers that have one more
    return jnp.where(tile < long, lax.div(tile, each + 1),
                     more + lax.div(tile - long, lax.max(each, jnp.int32(1))))


def _shares(total: Array, workers: int) -> tuple[Array, Array]:
    return lax.div(total, jnp.int32(workers)), lax.rem(total, jnp.int32(workers))


def pieces_of(begins: Ref, row: Array, workers: int) -> tuple[Array, Array]:
    """In a kernel: the place of the first of a row's pieces, and how many there are."""
    begin, end, total = begins[row], begins[row + 1], begins[begins.shape[0] - 1]
    first = worker_of(begin, total, workers)
    return first + row, jnp.where(begin < end, worker_of(end - 1, total, workers) - first + 1, 0)


class Piece(NamedTuple):
    """Tiles [start, stop) of a row, counted from its first key; `before`: tiles of the worker before."""

    row: Array
    start: Array
    stop: Array
    before: Array


def for_each_piece(begins: Ref, first: Ref, worker: Array, body: Callable[[Piece], None]) -> Array:
    """In a kernel: body(piece) for every piece of a worker, in order -> the number of its tiles."""
    rows, workers = begins.shape[0] - 1, first.shape[0] - 1
    begin, end = (begin_of(w, begins[rows], workers) for w in (worker, worker + 1))

    @pl.when(begin < end)
    def _():
        @pl.loop(first[worker], lax.min(first[worker + 1], rows - 1) + 1)
        def _(row):
            start, stop = lax.max(begins[row], begin), lax.min(begins[row + 1], end)
            pl.when(start < stop)(lambda: body(Piece(row, start - begins[row], stop - begins[row],
                                                     start - begin)))

    return end - begin
