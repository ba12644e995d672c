"""The grouped FP8 products on Hopper: the pipeline of `blockwise_matmul.sm90`, whose tiles come from a table
on the device.

A tile of the result belongs to one expert. Producer and consumers read the same table, each tile's entry
while the tile before is computed; there is no round trip to the host, and other sizes need no compilation.

- fprop, dgrad: tiles walk down each group's rows, all columns of a row of tiles before the next, so that
  those in flight share an expert or two. Groups are padded to 128 rows and tiles are 64 rows a consumer: a
  consumer whose 64 rows begin where the group has no more rows does not compute them, and does not write what
  is another tile's.
- wgrad: the contraction is over an expert's blocks of 128 rows, of which there may be none. Experts come in
  the order of their sizes, largest first, so that all multiprocessors end at nearly the same time.
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

Entry = tuple[Array, ...]  # a row's or an expert's numbers in the table, int32
QUAD = 4  # scales of neighbouring blocks: 16 bytes, the least that the copy engine moves


class Work(NamedTuple):
    """One tile of the result, int32 each; rows of a in parts of 64, a consumer's."""

    part: Array  # its first rows
    filled: Array  # where the parts end that have something to sum: those after it are zeros
    end: Array  # where the parts end that this tile writes
    column: Array  # of tiles
    expert: Array
    first: Array  # block of the contraction,
    blocks: Array  # and how many


def grouped_matmul(
    x: Array, x_scale: Array, w: Array, w_scale: Array, groups: Groups, tiles: Tiles, *, out_dtype: jnp.dtype,
    interpret=None
) -> Array:
    """x [P, K] times its expert's w [E, N, K] transposed -> [P, N] in `out_dtype`, bfloat16 or float32; zeros
    elsewhere.

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
            f"{tiles}: a consumer has 64 rows here, after any of which a group may end, so high is 1")
    if tiles.flight > 1:
        raise ValueError(
            f"{tiles}: experts differ in how many products they have, computed here one by one, and flight is 1")
    if tiles.unroll > 1:
        raise ValueError(f"{tiles}: how many stages a tile has is known on the device alone, so unroll is 1")
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
    """Scales of b's blocks come through shared memory too: read from memory, each expert's first would be
    waited for."""
    shared, stages = shared_memory(plan, a_dtype, b_dtype), plan.tiles.stages
    if not plan.b_blocks:
        return shared
    full = plgpu.Barrier(num_arrivals=4, num_barriers=stages)
    # a stage begins at 128 bytes
    return shared._replace(b_scale=plgpu.SMEM((stages, 32 // QUAD, QUAD), F32), full=full)


def _row_tiles(groups: Groups, rows: int, down: int) -> tuple[Array, Array]:
    """[4, bound] int32, of each row of tiles what `Work` calls part, filled, end and expert; and how many
    there are, [1].

    The rows after the last group are one more group, all padding.
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
    """body(tile, stages used before, what reads the next entry) -> that entry, for every tile of this block
    of threads.

    Returns the stages used in all.
    """
    tile_of, per_entry = (_row_tile, plan.grid[1]) if plan.b_blocks else (_weight_tile, math.prod(plan.grid))
    total, start = count[0] * per_entry, lax.axis_index("block")

    def place(i) -> tuple[Array, Array]:
        """The entry of this block's tile i, and which of the entry's tiles it is."""
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
    """Of fprop and dgrad: the columns of a row of tiles one after the other."""
    part, filled, end, expert = entry
    blocks = jnp.where(part < filled, jnp.int32(plan.k_blocks), jnp.int32(0))
    return Work(part, filled, end, ni, expert, jnp.int32(0), blocks)


def _weight_tile(plan: Plan, entry: Entry, index: Array) -> Work:
    """Of wgrad: the tiles of an expert's gradient one after the other."""
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
    # stay until every stage is free: no arrival at a barrier is left over
    left = lax.min(used, jnp.int32(t.stages))
    pl.loop(0,
            left)(lambda i: plgpu.barrier_wait(shared.empty.at[slot_of(used - left + i, plan.tiles.stages)]))


def _blocks_of(tiles: Tiles) -> int:
    """The most blocks of 128 columns that a tile has some of."""
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
            # behind the last product, where the compiler waits for that entry
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


FORWARD = {  # what benchmarks/grouped.py --tune compares; names are down x across x width
    "2x1x192": Tiles(2, width=192),
    "2x1x128": Tiles(2, stages=5, buffers=2),
    "3x1x128": Tiles(buffers=2),
}
WEIGHTS = {
    "3x1x128": Tiles(buffers=2),
    "3x1x128 bands of 2": Tiles(buffers=2, band=2),
    "2x1x192": Tiles(2, width=192),
}
