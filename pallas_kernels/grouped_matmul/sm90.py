"""The grouped FP8 products on Hopper: the pipeline of `blockwise_matmul.sm90`, with tiles from a table on the
device.

A tile of the result belongs to one expert. Producer and consumers read the same table; each tile's entry is
read while the previous tile is computed. There is no round trip to the host, and other group sizes need no
recompilation.

- fprop, dgrad: tiles walk down each group's rows, all columns of a row of tiles before the next, so that the
  tiles in flight share one or two experts. Groups are padded to 128 rows, while consumers have 64 rows each.
  A consumer whose 64 rows begin beyond the group's rows computes nothing, and does not write rows of another
  tile.
- wgrad: the contraction runs over an expert's blocks of 128 rows, of which there may be none. Experts come in
  descending order of size, so that all multiprocessors finish at nearly the same time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.blockwise_matmul.sm90 import (
    F32,
    Consumer,
    Plan,
    Shared,
    shared_memory,
    store_sums,
    sum_one_part,
    zeros,
)
from pallas_kernels.blockwise_matmul.tiles import REGISTERS, ROWS, Tiles, check_tiles
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.persistent import slot_of, specialise
from pallas_kernels.plgpu_compat import multiprocessors, plgpu
from pallas_kernels.quantize import BLOCK

Entry = tuple[Array, ...]  # the numbers of a row of tiles or of an expert in the table, int32
QUAD = 4  # scales of neighbouring blocks: 16 bytes, the minimum of the copy engine


class Work(NamedTuple):
    """One tile of the result, int32 each. Rows of a are counted in parts of 64, one per consumer."""

    part: Array  # the first part
    filled: Array  # the end of the parts with rows to sum; later parts are zeros
    end: Array  # the end of the parts that this tile writes
    column: Array  # the column of tiles
    expert: Array
    first: Array  # the first block of the contraction
    blocks: Array  # the number of blocks of the contraction


def grouped_matmul(
    x: Array, x_scale: Array, w: Array, w_scale: Array, groups: Groups, tiles: Tiles, *, out_dtype: jnp.dtype,
    interpret=None
) -> Array:
    """x [P, K] times each row's expert w [E, N, K] transposed -> [P, N] in `out_dtype`, bfloat16 or float32;
    zeros elsewhere.

    x_scale [K/128, P], w_scale [E, N/128, K/128] float32. K is a multiple of 128, N of 64 (bfloat16) or 32
    (float32).
    """
    plan = _plan(tiles, x.shape[0], w.shape[1], x.shape[1], True, out_dtype, interpret)
    table, count = _row_tiles(groups, plan.m, tiles.down)
    w_scale = jnp.pad(w_scale, ((0, 0), (0, 0), (0, -w_scale.shape[2] % QUAD)))
    return _call(plan, (plan.m, plan.n), (table, count, x, x_scale, w, w_scale), interpret)


def grouped_wgrad(
    dy: Array, dy_scale: Array, x: Array, x_scale: Array, groups: Groups, tiles: Tiles, *,
    out_dtype: jnp.dtype, interpret=None
) -> Array:
    """dy [N, P] times x [K, P] transposed, over the rows of each expert -> [E, N, K] in `out_dtype`.

    dy_scale [P/128, N], x_scale [P/128, K] float32. N is a multiple of 8, K of 64 (bfloat16) or 32 (float32).
    """
    plan = _plan(tiles, dy.shape[0], x.shape[0], dy.shape[1], False, out_dtype, interpret)
    experts = groups.sizes.size
    order = jnp.argsort(-groups.sizes).astype(jnp.int32)
    table = jnp.stack([order, groups.starts[order] // BLOCK, pl.cdiv(groups.sizes[order], BLOCK)])
    count = jnp.full(1, experts, jnp.int32)
    return _call(plan, (experts, plan.m, plan.n), (table, count, dy, dy_scale, x, x_scale), interpret)


def _plan(tiles: Tiles, m: int, n: int, k: int, b_blocks: bool, out_dtype: jnp.dtype, interpret) -> Plan:
    blocks = 2 if interpret else multiprocessors()
    plan = Plan(tiles, m, n, pl.cdiv(k, BLOCK), b_blocks, jnp.dtype(out_dtype), blocks, bool(interpret))
    check_tiles(tiles, plan.store_width, pairs=False)
    if tiles.high > 1:
        raise ValueError(
            f"{tiles}: a consumer has 64 rows here, after any of which a group may end, so high must be 1")
    if tiles.flight > 1:
        raise ValueError(
            f"{tiles}: experts have different numbers of products, computed here one by one, so "
            f"flight must be 1")
    if tiles.unroll > 1:
        raise ValueError(f"{tiles}: the number of stages is known only on the device, so unroll must be 1")
    return plan


def _call(plan: Plan, shape: tuple[int, ...], operands: tuple[Array, ...], interpret) -> Array:
    a, b = operands[2], operands[4]
    return plgpu.kernel(
        functools.partial(_kernel, plan), out_type=jax.ShapeDtypeStruct(shape, plan.out_dtype),
        grid=(plan.blocks,),
        grid_names=("block",), num_threads=plan.tiles.consumers + 1, thread_name="wg",
        scratch_types=_scratch(plan, a.dtype, b.dtype), interpret=interpret,
    )(*operands)


def _scratch(plan: Plan, a_dtype: jnp.dtype, b_dtype: jnp.dtype) -> Shared:
    """The scratch memory. Scales of b's blocks also come through shared memory: read from global memory, each
    expert's first scale would stall the consumers."""
    shared, stages = shared_memory(plan, a_dtype, b_dtype), plan.tiles.stages
    if not plan.b_blocks:
        return shared
    full = plgpu.Barrier(num_arrivals=4, num_barriers=stages)
    # each stage is aligned to 128 bytes
    return shared._replace(b_scale=plgpu.SMEM((stages, 32 // QUAD, QUAD), F32), full=full)


def _row_tiles(groups: Groups, rows: int, down: int) -> tuple[Array, Array]:
    """([4, bound] int32 with the fields part, filled, end and expert of `Work` for each row of tiles, the
    number of rows of tiles [1]).

    The rows after the last group form one more group, all padding.
    """
    experts, parts = groups.sizes.size, rows // ROWS
    used = jnp.sum(groups.expert < experts, dtype=jnp.int32) * (BLOCK // ROWS)
    starts = jnp.append(groups.starts // ROWS, used)
    ends = jnp.append(starts[1:], parts)
    tiles = pl.cdiv(ends - starts, down)
    last = jnp.cumsum(tiles)
    place = jnp.arange((parts + (experts + 1) * (down - 1)) // down, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(place[:, None] >= last[None, :], 1, dtype=jnp.int32), experts)
    first = starts[group] + (place - (last - tiles)[group]) * down
    filled = (starts + jnp.append(pl.cdiv(groups.sizes, ROWS), 0))[group]
    return jnp.stack([first, filled, ends[group], jnp.minimum(group, experts - 1)]), last[-1:]


def _kernel(plan: Plan, table, count, a, a_scale, b, b_scale, out, *shared) -> None:
    shared, consumers = Shared(*shared), plan.tiles.consumers
    for_each_tile = functools.partial(_for_each_tile, plan, table, count)
    produce = functools.partial(_produce, plan, for_each_tile, (a, a_scale, b, b_scale), shared)
    specialise(consumers, REGISTERS[consumers], produce,
               lambda wg: _consume(plan, for_each_tile, wg, out, shared))


def _for_each_tile(plan: Plan, table, count,
                   body: Callable[[Work, Array, Callable[[], Entry]], Entry]) -> Array:
    """Run body(tile, stages used before, read_next) for every tile of this block of threads. read_next()
    reads the next tile's entry, which body returns.

    Returns the total number of stages used.
    """
    tile_of, per_entry = (_row_tile, plan.grid[1]) if plan.b_blocks else (_weight_tile, math.prod(plan.grid))
    total, start = count[0] * per_entry, lax.axis_index("block")

    def place(i) -> tuple[Array, Array]:
        """The entry of this block's tile i, and the tile's number within the entry."""
        index = lax.min(start + i * plan.blocks, total - 1)
        return lax.div(index, jnp.int32(per_entry)), lax.rem(index, jnp.int32(per_entry))

    def read(i) -> Entry:
        at, _ = place(i)
        return tuple(table[row, at] for row in range(table.shape[0]))

    def step(i, state):
        entry, before = state
        work = tile_of(plan, entry, place(i)[1])
        return body(work, before, lambda: read(i + 1)), before + work.blocks

    return lax.fori_loop(0, pl.cdiv(total - start, plan.blocks), step, (read(0), jnp.int32(0)))[1]


def _row_tile(plan: Plan, entry: Entry, ni: Array) -> Work:
    """A tile of fprop and dgrad: the columns of a row of tiles come one after the other."""
    part, filled, end, expert = entry
    blocks = jnp.where(part < filled, jnp.int32(plan.k_blocks), jnp.int32(0))
    return Work(part, filled, end, ni, expert, jnp.int32(0), blocks)


def _weight_tile(plan: Plan, entry: Entry, index: Array) -> Work:
    """A tile of wgrad: the tiles of an expert's gradient come one after the other."""
    t, (expert, first, blocks) = plan.tiles, entry
    mi, ni = plgpu.planar_snake(index, plan.grid, t.band_axis, t.band)
    end = jnp.int32(pl.cdiv(plan.m, ROWS))
    return Work(mi * t.down, jnp.where(blocks > 0, end, jnp.int32(0)), end, ni, expert, first, blocks)


def _produce(plan: Plan, for_each_tile, operands, shared: Shared) -> None:
    """Copy the operands of every tile, block by block of the contraction, as stages become free."""
    a, a_scale, b, b_scale = operands
    t = plan.tiles

    def tile(work: Work, before, read_next) -> Entry:
        following = read_next()
        rows, columns = pl.ds(work.part * ROWS, t.m), pl.ds(work.column * t.n, t.n)
        b_codes = b.at[work.expert] if plan.b_blocks else b

        @pl.loop(0, work.blocks)
        def _(i):
            ki, slot = work.first + i, slot_of(before + i, plan.tiles.stages)
            pl.when(before + i >= t.stages)(lambda: plgpu.barrier_wait(shared.empty.at[slot]))
            copy, full = plgpu.copy_gmem_to_smem, shared.full.at[slot]
            ks = pl.ds(ki * BLOCK, BLOCK)
            copy(a.at[rows, ks], shared.a.at[slot], full)
            copy(b_codes.at[columns, ks], shared.b.at[slot], full)
            copy(a_scale.at[ki, rows], shared.a_scale.at[slot], full)
            if plan.b_blocks:
                blocks, quad = _blocks_of(t), pl.ds(lax.div(ki, QUAD) * QUAD, QUAD)
                of_tile = b_scale.at[work.expert, pl.ds(lax.div(work.column * t.n, BLOCK), blocks), quad]
                copy(of_tile, shared.b_scale.at[slot, pl.ds(0, blocks)], full)
            else:
                copy(b_scale.at[ki, columns], shared.b_scale.at[slot], full)

        return following

    used = for_each_tile(tile)
    # wait until every stage is free, so that no arrival at a barrier is left over
    left = lax.min(used, jnp.int32(t.stages))
    pl.loop(0,
            left)(lambda i: plgpu.barrier_wait(shared.empty.at[slot_of(used - left + i, plan.tiles.stages)]))


def _blocks_of(tiles: Tiles) -> int:
    """The largest number of blocks of 128 columns that a tile overlaps."""
    return pl.cdiv(tiles.n + BLOCK - math.gcd(tiles.n, BLOCK), BLOCK)


def _consume(plan: Plan, for_each_tile, wg: Array, out, shared: Shared) -> None:
    """Compute this warpgroup's part of every tile."""
    t = plan.tiles
    down, column = lax.div(wg, t.across), lax.rem(wg, t.across) * t.width
    row = down * ROWS

    def tile(work: Work, before, read_next) -> Entry:
        me = Consumer(plan, shared, row, column, before)
        part, first_column = work.part + down, work.column * t.n + column

        def scales(me, i):
            by_row = me.row_scales(i)
            if not plan.b_blocks:
                return (by_row,)
            first, place = lax.div(work.column * t.n, BLOCK), lax.rem(work.first + i, QUAD)
            blocks = (lax.div(first_column + s, BLOCK) - first for s in range(0, t.width, plan.slab))
            return tuple(by_row * shared.b_scale[me.slot(i), block, place] for block in blocks)

        def store(total):
            at = (out if plan.b_blocks
                  else out.at[work.expert]).at[pl.ds(part * ROWS, ROWS), pl.ds(first_column, t.width)]
            store_sums(plan, total, at, shared.out.at[wg])

        def compute():
            # after the last product, where the compiler waits for that entry
            total, following = sum_one_part(me, work.blocks, scales, at_end=read_next)
            store(total)
            return following

        def skip():
            following = read_next()
            pl.loop(0, work.blocks)(lambda i: (me.arrived(i), me.release(i))[1])
            pl.when(part < work.end)(lambda: store(zeros(plan)))
            return following

        return lax.cond(part < work.filled, compute, skip)

    for_each_tile(tile)
    plgpu.wait_smem_to_gmem(0)


FORWARD = {  # compared by benchmarks/grouped.py --tune; names are down x across x width
    "2x1x192": Tiles(2, width=192),
    "2x1x128": Tiles(2, stages=5, buffers=2),
    "3x1x128": Tiles(buffers=2),
}
WEIGHTS = {
    "3x1x128": Tiles(buffers=2),
    "3x1x128 bands of 2": Tiles(buffers=2, band=2),
    "2x1x192": Tiles(2, width=192),
}
