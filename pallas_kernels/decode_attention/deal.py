"""Even distribution of work on the device: the tiles of keys that each worker gets.

A row is a sequence, or one of several passes over its KV heads. All tiles form one line, row after row; each
worker takes a contiguous stretch of it, and the stretches differ by at most one tile. The part of a row that
one worker has is a piece. The piece of worker w in row r has place w + r among all results. From each piece
to the next exactly one of w and r grows by one, so all places are different, and those of a row are
consecutive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.plgpu_compat import Ref

KEYS = 64  # keys per tile


class Deal(NamedTuple):
    """The distribution as two tables, each from one comparison and one sum: a small XLA kernel."""

    begins: Array  # [rows + 1]: the first tile of each row, then the number of tiles
    first: Array  # [workers + 1]: the row of each worker's first tile, then the number of rows


def deal(lengths: Array, passes: int, workers: int, starts: Array | None = None) -> Deal:
    """The distribution of the tiles that hold keys [starts, lengths) of each sequence, both [B] int32; None:
    those from 0 on."""
    tiles = pl.cdiv(lengths, KEYS) - (0 if starts is None else starts // KEYS)
    tiles = jnp.repeat(tiles, passes)
    rows = jnp.arange(len(tiles) + 1)
    begins = jnp.where(rows[:-1] < rows[:, None], tiles, 0).sum(1, dtype=jnp.int32)
    stretch = begin_of(jnp.arange(workers + 1, dtype=jnp.int32), begins[-1], workers)
    return Deal(begins, (begins[1:] <= stretch[:, None]).sum(1, dtype=jnp.int32))


def begin_of(worker: Array, total: Array, workers: int) -> Array:
    """The first tile of a worker."""
    each, more = _shares(total, workers)
    return worker * each + lax.min(worker, jnp.broadcast_to(more, worker.shape))


def worker_of(tile: Array, total: Array, workers: int) -> Array:
    each, more = _shares(total, workers)
    long = more * (each + 1)  # tiles of the workers with one tile more than the others
    return jnp.where(tile < long, lax.div(tile, each + 1),
                     more + lax.div(tile - long, lax.max(each, jnp.int32(1))))


def _shares(total: Array, workers: int) -> tuple[Array, Array]:
    return lax.div(total, jnp.int32(workers)), lax.rem(total, jnp.int32(workers))


def pieces_of(begins: Ref, row: Array, workers: int) -> tuple[Array, Array]:
    """In a kernel: (the place of a row's first piece, the number of its pieces)."""
    begin, end, total = begins[row], begins[row + 1], begins[begins.shape[0] - 1]
    first = worker_of(begin, total, workers)
    return first + row, jnp.where(begin < end, worker_of(end - 1, total, workers) - first + 1, 0)


class Piece(NamedTuple):
    """Tiles [start, stop) of a row, counted from its first; `before`: the worker's tiles before these."""

    row: Array
    start: Array
    stop: Array
    before: Array


def for_each_piece(begins: Ref, first: Ref, worker: Array, body: Callable[[Piece], None]) -> Array:
    """In a kernel: run body(piece) for every piece of a worker, in order. Returns the number of its tiles."""
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
