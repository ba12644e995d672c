"""Shared by the kernels that walk over keys, the forward pass and dq: 128 queries per block of threads, 64
for each of its consumers.

The two consumers have the same 64 queries of two heads of a group, which share every key and finish at the
same time. If the group has an odd number of heads, they have 128 queries of one head instead. A producer warp
keeps a ring full with blocks of keys and values, from the diagonal back to the start of the first query's
segment, and fetches the next queries; nothing else is read. Blocks are counted from that start and walked
from the diagonal as in FlashAttention 3, so that a running maximum covers the same keys as there. In trees
(`segments.Tables.ends`) a walk steps over a gap that none of its queries sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.schedule import (
    BLOCK,
    COLUMNS,
    CONSUMERS,
    ROWS,
    Deal,
    Seen,
    Work,
    buffer_of,
    drain,
    keep,
    launch,
    rows,
    since,
    steps_of,
    up_to,
)
from pallas_kernels.attention.segments import COPIED, WALK, Tables
from pallas_kernels.persistent import slot_of
from pallas_kernels.plgpu_compat import COLUMN, ROW, Index, Ref, plgpu, spread, swizzled


class Tiles(NamedTuple):
    """The tile sizes of such a kernel."""

    keys: int  # keys per step
    k_stages: int
    v_stages: int
    heads: int = 2  # heads of a block of threads: 2 with 64 queries each, or 1 with 128
    buffers: int = 2  # for queries: the current ones and, with 2, the next ones

    def of(self, group: int) -> Tiles:
        """The tiles for a group of this many query heads."""
        return self if group % self.heads == 0 else self._replace(heads=1)

    @property
    def rows(self) -> int:
        """The number of queries of a walk."""
        return BLOCK // self.heads


class Plan(NamedTuple):
    """The static parameters of the kernel."""

    tiles: Tiles
    walks: int
    units: int  # sets of heads that a block of threads processes at a time
    group: int  # query heads per KV head
    scale: float
    simulated: bool
    tokens: int  # in trees, else 0
    blocks: int  # blocks of threads
    limits: Ref | None = None  # those of Tables, inside the kernel

    @property
    def deal(self) -> Deal:
        return Deal(self.walks, self.units, self.blocks)

    def head(self, work: Work, wg: Array | int) -> Array:
        """The query head of a consumer."""
        return work.head * 2 + wg if self.tiles.heads == 2 else work.head

    def row(self, block: Array, wg: Array | int) -> Array:
        """The first query of a consumer."""
        return block * self.tiles.rows + (0 if self.tiles.heads == 2 else wg * ROWS)


class Walk(NamedTuple):
    """A consumer's 64 queries and the keys that they see."""

    slot: Array  # the buffer that holds the queries
    block: Array  # the block of queries
    row: Array  # the first query
    head: Array
    first: Array  # [64]: the first key of each query
    begin: Array
    steps: Array
    clear: Array
    tree: Tree | None

    def key(self, step: Index, size: int) -> Array:
        """The first key of a step."""
        key = self.begin + (self.steps - 1 - step) * size
        return key if self.tree is None else key + jnp.where(key >= self.tree.gap_at, self.tree.gap, 0)


class Tree(NamedTuple):
    """What a walk has in a tree beside the rest (`segments.tree_walks`)."""

    dirty: Array
    gap_at: Array
    gap: Array


def kernel(body, tiles: Tiles, tables: Tables, q: Array, k: Array, scale: float, out_type, shared,
           interpret) -> Callable:
    """The kernel body(Plan, *operands, first, walks, *results, *shared), to be called with its operands.
    `tiles` must fit the group (`Tiles.of`)."""
    walks, units = tables.of_queries[tiles.rows], q.shape[1] // tiles.heads
    make = functools.partial(Plan, tiles, len(walks), units, q.shape[1] // k.shape[1], scale,
                             interpret is not None, 0 if tables.ends is None else len(tables.first))
    run = launch(body, make, out_type, shared, len(walks) * units, interpret)
    return lambda *operands: run(*operands, tables.limits, walks)


def shared_memory(tiles: Tiles, d: int, dtype: jnp.dtype, copies: int) -> dict:
    """The shared memory of a block of threads: buffers for the queries, each filled by `copies` copies, the
    ring of keys and values, and their barriers."""
    memory = functools.partial(plgpu.SMEM, dtype=dtype, transforms=swizzled(dtype))
    full, empty = plgpu.Barrier, functools.partial(plgpu.Barrier, num_arrivals=CONSUMERS)
    slots = tiles.buffers * CONSUMERS
    return dict(
        q=memory((slots, ROWS, d)), seen=plgpu.SMEM((slots, ROWS + WALK), jnp.int32),
        k=memory((tiles.k_stages, tiles.keys, d)), v=memory((tiles.v_stages, tiles.keys, d)),
        q_full=plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
        q_empty=plgpu.Barrier(num_barriers=slots),
        k_full=full(num_barriers=tiles.k_stages), k_empty=empty(num_barriers=tiles.k_stages),
        v_full=full(num_barriers=tiles.v_stages), v_empty=empty(num_barriers=tiles.v_stages),
    )


def produce(plan: Plan, matrices: list, vectors: list, k, v, first, walks, shared) -> None:
    """Copy the queries of the next work, then block after block of keys and values as slots become free.

    matrices, vectors: pairs of a source, [N, H, d] or [H, N], and the buffers that its queries are copied to.
    """
    tiles, copy = plan.tiles, plgpu.copy_gmem_to_smem

    def queries(work: Work, wg: int, block: Array) -> None:
        slot, head = buffer_of(work.number, tiles.buffers, wg), plan.head(work, wg)
        mine, full = pl.ds(plan.row(block, wg), ROWS), shared.q_full.at[slot]
        pl.when(work.number >= tiles.buffers)(lambda: plgpu.barrier_wait(shared.q_empty.at[slot]))
        for matrix, into in matrices:
            copy(matrix.at[mine, head], into.at[slot], full)
        for vector, into in vectors:
            copy(vector.at[head, mine], into.at[slot], full)
        copy(first.at[mine], shared.seen.at[slot, pl.ds(0, ROWS)], full)
        copy(walks.at[work.walk], shared.seen.at[slot, pl.ds(ROWS, WALK)], full)

    def one(work: Work) -> Array:
        block, begin, steps = (walks[work.walk, i] for i in range(3))
        for wg in range(CONSUMERS):
            queries(work, wg, block)
        head, steps = lax.div(plan.head(work, 0), jnp.int32(plan.group)), steps_of(steps, tiles.keys)
        chunk = lax.div(begin, jnp.int32(COPIED))  # makes the offset below a visible multiple of COPIED
        in_chunks = lambda i: lax.div(walks[work.walk, i], jnp.int32(COPIED))
        gap_at, gap = (in_chunks(5), in_chunks(6)) if plan.tokens else (chunk, 0)

        @pl.loop(0, steps)
        def _(step):
            place = chunk + (steps - 1 - step) * (tiles.keys // COPIED)
            if plan.tokens:
                place += jnp.where(place >= gap_at, gap, 0)
            keys = pl.ds(place * COPIED, tiles.keys)
            for ref, ring, full, empty, stages in (
                (k, shared.k, shared.k_full, shared.k_empty, tiles.k_stages),
                (v, shared.v, shared.v_full, shared.v_empty, tiles.v_stages),
            ):
                slot = slot_of(work.before + step, stages)
                pl.when(work.before
                        + step >= stages)(lambda empty=empty, slot=slot: plgpu.barrier_wait(empty.at[slot]))
                copy(ref.at[keys, head], ring.at[slot], full.at[slot])

        return steps

    works, steps = plan.deal.for_each(one)
    drain(steps, tiles.k_stages, shared.k_empty)
    drain(steps, tiles.v_stages, shared.v_empty)
    drain(works * CONSUMERS, tiles.buffers * CONSUMERS, shared.q_empty)


def arrived(plan: Plan, wg: Array, work: Work, shared, more: Array | bool = True) -> Walk:
    """Wait for a consumer's next queries if there are `more`; otherwise the result is meaningless."""
    slot = buffer_of(work.number, plan.tiles.buffers, wg)
    pl.when(more)(lambda: plgpu.barrier_wait(shared.q_full.at[slot]))
    block, begin, steps, clear = (shared.seen[slot, ROWS + i] for i in range(4))
    first = plgpu.load(shared.seen.at[slot, pl.ds(0, ROWS)], layout=ROW, optimized=False)
    tree = Tree(*(shared.seen[slot, ROWS + i] for i in (4, 5, 6))) if plan.tokens else None
    return Walk(slot, block, plan.row(block, wg), plan.head(work, wg), first, begin,
                steps_of(steps, plan.tiles.keys), clear, tree)


def ancestors(plan: Plan, walk: Walk, key: Array) -> Seen:
    """In each row, the columns of keys, from `key` on, whose ends lie behind the query."""
    assert plan.limits is not None
    shape, limits = (ROWS, COLUMNS), plan.limits
    query, ends = spread(rows() + walk.row, shape, 0), plan.tokens + key
    of = lambda at: plgpu.load(limits.at[pl.ds(ends + at, COLUMNS)], layout=COLUMN, optimized=False)
    return lambda at: spread(of(at), shape, 1) > query


def masked(plan: Plan, x: Array, walk: Walk, step: Index, other: float) -> Array:
    """x with `other` for keys of other segments and keys behind the query, in steps that contain any."""
    size = x.shape[1]
    key = walk.key(step, size)
    if walk.tree is None:
        own = keep(key < walk.clear, x, lambda: since(walk.first - key), other)
    else:
        own = keep((key < walk.clear) & (key + size > walk.tree.dirty), x, lambda: ancestors(plan, walk, key),
                   other)
    return keep(key + size > walk.row + 1, own, lambda: up_to(rows() + (walk.row - key)), other)
