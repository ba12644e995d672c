"""The scaled FP8 products on Hopper: y = a b^T with a [M, K] and b [N, K], both contiguous along the
contraction.

One persistent kernel serves all three passes. A block of threads computes tiles of y one after the other; in
it

- one warp is the *producer*: it walks all tiles of its block and keeps the copy engine a few stages ahead of
  the products, over the borders of tiles too, so that no tile waits for its first operands. In a cluster two
  blocks share rows of a by multicast;
- one to three warpgroups are the *consumers*, each with 64 rows of the tile, twice 64, or some columns. The
  tensor cores sum 128 products in registers; then that partial times its scales is added to a float32 sum
  (DeepSeek-V3, 2024, section 3.3.2).

That promotion is what costs. Warpgroups that share the tensor cores fall into step, and then all promote at
once while the tensor cores rest; three warpgroups lose less by it than two, and at a tile's end, too: one
stores while two compute. Where there are two, of twice 64 rows, the results of a tile leave behind the first
products of the next. Between the wait for one product and the start of the next nothing else should stand, so
where the next operands lie is found while the last product is computed, and each is written over the
registers of the last (`tensor_cores.py`). Where b has a scale a column (wgrad), those are read from shared
memory a few columns at a time, or three warpgroups would not have the registers. Of few rows one consumer has
several products in flight (`_sum_in_flight`), and as many stages as fit: what takes the time is reading b.

Edges need be no multiples of a tile: the copy engine reads zeros beyond them and writes nothing there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.blockwise_matmul.tiles import REGISTERS, ROWS, Tiles, check_tiles
from pallas_kernels.in_flight import multiply
from pallas_kernels.persistent import drain, for_each_tile, slot_of, specialise
from pallas_kernels.plgpu_compat import COLUMN, ROW, WGMMA, multiprocessors, plgpu, spread, swizzled
from pallas_kernels.quantize import BLOCK

F32 = jnp.float32
# columns, each with its own scale, whose scales a consumer of a 1x128 by 1x128 product holds at once
SLAB = 32


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is static in one kernel."""

    tiles: Tiles
    m: int
    n: int
    k_blocks: int
    b_blocks: bool  # b's scales are of 128x128 blocks; else of 1x128
    out_dtype: jnp.dtype
    blocks: int  # of threads, or clusters of two
    simulated: bool

    @property
    def one_row(self) -> bool:
        return reads_scalars(self.m, self.b_blocks)

    @property
    def box(self) -> int:
        """Rows of a that are copied for a tile: all of it, or, where a has fewer, those, in whole boxes of 8
        a block. What lies where the others would makes rows of the sum that are stored nowhere."""
        boxes = 8 * (1 + bool(self.tiles.cluster))
        return min(self.tiles.m, boxes * pl.cdiv(self.m, boxes))

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along M, and tiles, or pairs of them, along N."""
        return pl.cdiv(self.m, self.tiles.m), pl.cdiv(self.n, self.tiles.n * (1 + bool(self.tiles.cluster)))

    @property
    def slab(self) -> int:
        """Columns promoted together: those that surely share a scale of b, or few enough for their scales to
        fit in registers."""
        return math.gcd(self.tiles.width, BLOCK if self.b_blocks else SLAB)

    @property
    def slabs(self) -> int:
        return self.tiles.width // self.slab

    @property
    def store_width(self) -> int:
        """Columns stored at once: 128 bytes, the swizzled row, or what a consumer has."""
        return math.gcd(self.slab, 128 // self.out_dtype.itemsize)


class Shared(NamedTuple):
    """Shared memory: a ring of stages, and results on their way out."""

    a: jax.Ref
    b: jax.Ref
    a_scale: jax.Ref
    b_scale: jax.Ref
    out: jax.Ref
    full: jax.Ref
    empty: jax.Ref


def reads_scalars(m: int, b_blocks: bool) -> bool:
    """Whether a's scales are read one by one, as b's of 128x128 blocks are: one row has no more, and a copy
    would want four."""
    return m == 1 and b_blocks


def matmul(
    a: Array, a_scale: Array, b: Array, b_scale: Array, tiles: Tiles, *, b_blocks: bool, out_dtype: jnp.dtype,
    interpret=None
) -> Array:
    """a [M, K] times b [N, K] transposed -> [M, N] in `out_dtype`, bfloat16 or float32.

    a_scale [K/128, M] and b_scale [K/128, N], or [N/128, K/128] for `b_blocks`; float32. The copy engine
    moves boxes of 8 rows by 128 bytes: M is a multiple of 8 or below it, K of 128, N of 64 (bfloat16) or 32
    (float32). a_scale has whole boxes of 8, unless `reads_scalars`. `api.py` pads.
    """
    (m, k), n, csize = a.shape, b.shape[0], 1 + bool(tiles.cluster)
    blocks = (2 * csize if interpret else multiprocessors()) // csize
    plan = Plan(tiles, m, n, pl.cdiv(k, BLOCK), b_blocks, jnp.dtype(out_dtype), blocks, bool(interpret))
    check_tiles(tiles, plan.store_width, pairs=b_blocks)
    scratch = shared_memory(plan, a.dtype, b.dtype)
    clusters = dict(cluster=(2,), cluster_names=("cluster",)) if tiles.cluster else {}
    return plgpu.kernel(
        functools.partial(_kernel, plan), out_type=jax.ShapeDtypeStruct((m, n), out_dtype), grid=(blocks,),
        grid_names=("block",),
        num_threads=tiles.consumers + 1, thread_name="wg", scratch_types=scratch, interpret=interpret,
        **clusters,
    )(a, a_scale, b, b_scale)


def shared_memory(plan: Plan, a_dtype: jnp.dtype, b_dtype: jnp.dtype) -> Shared:
    t, store = plan.tiles, (ROWS, plan.store_width)
    store_layout = plgpu.TilingTransform((8, store[1])), plgpu.SwizzleTransform(
        store[1] * plan.out_dtype.itemsize)
    barrier = functools.partial(plgpu.ClusterBarrier,
                                collective_axes=("cluster",)) if t.cluster else plgpu.Barrier
    return Shared(
        a=plgpu.SMEM((t.stages, t.m, BLOCK), a_dtype, transforms=swizzled(a_dtype)),
        b=plgpu.SMEM((t.stages, t.n, BLOCK), b_dtype, transforms=swizzled(b_dtype)),
        a_scale=plgpu.SMEM((t.stages, t.m), F32),
        # blocks' scales are read as scalars
        b_scale=plgpu.SMEM((t.stages, t.n) if not plan.b_blocks else (8,), F32),
        out=plgpu.SMEM((t.consumers, t.buffers, *store), plan.out_dtype, transforms=store_layout),
        full=plgpu.Barrier(num_arrivals=3 + (not plan.b_blocks) - plan.one_row, num_barriers=t.stages),
        empty=barrier(num_arrivals=t.consumers, num_barriers=t.stages),
    )


def _kernel(plan: Plan, a, a_scale, b, b_scale, out, *shared) -> None:
    shared, consumers = Shared(*shared), plan.tiles.consumers
    produce = functools.partial(_produce, plan, (a, a_scale, b, b_scale), shared)
    specialise(consumers, REGISTERS[consumers], produce,
               lambda wg: _consume(plan, wg, a_scale, b_scale, out, shared))


def _produce(plan: Plan, operands, shared: Shared) -> None:
    """Copy the operands of every tile, block by block of the contraction, as stages become free."""
    a, a_scale, b, b_scale = operands
    t = plan.tiles
    share = dict(collective_axes="cluster") if t.cluster else {}

    def tile(mi, ni, before):
        rows, columns, box = pl.ds(mi * t.m, plan.box), pl.ds(ni * t.n, t.n), pl.ds(0, plan.box)

        @pl.loop(0, plan.k_blocks)
        def _(ki):
            slot = slot_of(before + ki, t.stages)
            pl.when(before + ki >= t.stages)(lambda: plgpu.barrier_wait(shared.empty.at[slot]))
            copy, full = plgpu.copy_gmem_to_smem, shared.full.at[slot]
            ks = pl.ds(ki * BLOCK, BLOCK)
            copy(a.at[rows, ks], shared.a.at[slot, box], full, **share)
            copy(b.at[columns, ks], shared.b.at[slot], full)
            if not plan.one_row:
                copy(a_scale.at[ki, rows], shared.a_scale.at[slot, box], full)
            if not plan.b_blocks:
                copy(b_scale.at[ki, columns], shared.b_scale.at[slot], full)

    for_each_tile(plan, tile)
    drain(plan, shared.empty)


class Consumer(NamedTuple):
    """One warpgroup's view of the ring, for one product in one tile; `i` counts the tile's blocks of the
    contraction."""

    plan: Plan
    shared: Shared
    row: Array  # of this product in the tile
    column: Array
    before: Array  # stages used by the tiles before

    def slot(self, i: Array) -> Array:
        return slot_of(self.before + i, self.plan.tiles.stages)

    @property
    def rows(self) -> pl.Slice:
        return pl.ds(self.row, ROWS)

    def parts(self) -> tuple[Consumer, ...]:
        """One for each product that it makes of a stage."""
        return tuple(self._replace(row=self.row + h * ROWS) for h in range(self.plan.tiles.high))

    def operands(self, i: Array) -> tuple[jax.Ref, jax.Ref]:
        return self.of_stage(self.slot(i))

    def of_stage(self, slot: Array | int) -> tuple[jax.Ref, jax.Ref]:
        columns = pl.ds(self.column, self.plan.tiles.width)
        return self.shared.a.at[slot, self.rows], self.shared.b.at[slot, columns]

    def row_scales(self, i: Array) -> Array:
        return plgpu.load(self.shared.a_scale.at[self.slot(i), self.rows], layout=ROW, optimized=False)

    def arrived(self, i: Array) -> None:
        plgpu.barrier_wait(self.shared.full.at[self.slot(i)])

    def release(self, i: Array) -> None:
        """Of what has been read. The simulator wants the scales' reads fenced from the copy that will write
        over them; on the device those that have arrived in registers are done."""
        if self.plan.simulated:
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared.empty.at[self.slot(i)])

    def promote(self, total: tuple[Array, ...], partial: Array, scales: tuple[Array, ...],
                i: Array) -> tuple[Array, ...]:
        """total + partial * scales, slab by slab, so that few scales of b's columns are held at once.
        `scales` is a's by row: one vector a slab with b's multiplied in, or one, and b's are read by column.
        """
        out, width = [], self.plan.slab
        for s, t in enumerate(total):
            part = partial[:, s * width : (s + 1) * width]
            if self.plan.b_blocks:
                scale = spread(scales[s], part.shape, 0)
            else:
                at = self.shared.b_scale.at[self.slot(i), pl.ds(self.column + s * width, width)]
                by_column = plgpu.load(at, layout=COLUMN, optimized=False)
                scale = spread(scales[0], part.shape, 0) * spread(by_column, part.shape, 1)
            out.append(t + part * scale)
        return tuple(out)


def _consume(plan: Plan, wg: Array, a_scale, b_scale, out, shared: Shared) -> None:
    """Compute this warpgroup's part of every tile."""
    t = plan.tiles
    row, column = lax.div(wg, t.across) * t.high * ROWS, lax.rem(wg, t.across) * t.width
    later = t.high > 1  # whether a tile's results leave behind the next one's first products

    def tile(mi, ni, before, *tile_before):
        def scalars(ki):
            """Scales that are not in shared memory: of b's blocks, and before them a single row's."""
            if not plan.b_blocks:
                return ()
            at = (ni * t.n + column + s for s in range(0, t.width, plan.slab))
            last = b_scale.shape[0] - 1  # a consumer that lies beyond N multiplies zeros, by any scale
            by_block = (b_scale[lax.min(lax.div(c, BLOCK), last), ki] for c in at)
            return (a_scale[ki, 0], *by_block) if plan.one_row else tuple(by_block)

        def scales(part, ki, read=None):
            near = () if plan.one_row else (part.row_scales(ki),)
            by_row, *by_block = *near, *(scalars(ki) if read is None else read)
            by_row = plgpu.layout_cast(jnp.full(ROWS, by_row), ROW) if plan.one_row else by_row
            return tuple(by_row * b for b in by_block) or (by_row,)

        parts = Consumer(plan, shared, row, column, before).parts()
        begin = (lambda n: store(n, *tile_before)) if later else None
        totals, _ = sum_tile(parts, plan.k_blocks, scales, begin, scalars=scalars)
        if later:
            return totals, mi, ni
        store(0, totals, mi, ni)

    def store(n, totals, mi, ni):
        """The n-th part of a tile."""
        at = out.at[pl.ds(mi * t.m + row + n * ROWS, ROWS), pl.ds(ni * t.n + column, t.width)]
        store_sums(plan, totals[n], at, shared.out.at[wg])

    if later:
        # Before the first, a tile below the result, of which the copy engine writes nothing; every block has
        # its own, or the simulator would see a race. By a condition instead, the compiler would promote the
        # product behind which results leave after the start of the next, and spill.
        nothing = tuple(zeros(plan) for _ in range(t.high))
        nowhere = plan.grid[0] + lax.axis_index("block"), lax.axis_index(
            "cluster") if t.cluster else jnp.int32(0)
        last = for_each_tile(plan, tile, (nothing, *nowhere))
        for n in range(t.high):
            store(n, *last)
    else:
        for_each_tile(plan, tile)
    plgpu.wait_smem_to_gmem(0)


def zeros(plan: Plan) -> tuple[Array, ...]:
    return tuple(_registers((ROWS, plan.slab)) for _ in range(plan.slabs))


def _registers(shape: tuple[int, int]) -> Array:
    return plgpu.layout_cast(jnp.zeros(shape, F32), WGMMA)


def sum_tile(
    parts: tuple[Consumer, ...], blocks: int | Array, scales: Callable[[Consumer, Array], tuple[Array, ...]],
    begin: Callable[[int], None] | None = None, at_end: Callable[[], object] = lambda: (),
    scalars: Callable | None = None,
) -> tuple[tuple[tuple[Array, ...], ...], object]:
    """The sum of each part of the tile, every partial promoted as it is done, and what `at_end` returns.

    `begin`, of a part's number, is run behind the first product of that part; where there is one, `blocks` is
    an int. `scalars`, of a block, is what `scales` takes as its last argument, where it can be read earlier.
    """
    if parts[0].plan.tiles.flight > 1:
        return _sum_in_flight(*parts, blocks, scales, scalars), at_end()
    return _sum_one_by_one(parts, blocks, scales, begin, at_end)


def all_have(scales: Callable, part: Consumer, *which) -> tuple[Array, ...]:
    """Scales of a stage; of a pair, once all four warps have read theirs. There one warp releases a stage for
    all, a copy may then write over it, and nothing else orders the other warps' reads before that. They wait
    behind a product, where nothing waits for them."""
    own = scales(part, *which)
    if part.plan.tiles.cluster and not part.plan.simulated:  # there `release` fences the reads
        from pallas_kernels.tensor_cores import wait_for_warps

        wait_for_warps()
    return own


def _sum_one_by_one(parts: tuple[Consumer, ...], blocks: int | Array, scales, begin,
                    at_end) -> tuple[tuple, object]:
    """Nothing but promotion stands between two products: behind one, the next one's operands are waited for
    and found, and where a consumer makes several of a stage, its scales are read. The scales of a single one
    are read behind itself, but not in a pair: there one warp tells both blocks that a stage is read, for all
    four. When a product is done, all warps have started it, so what they read before, and waited for
    together, they have (`all_have`)."""
    plan, last, read = parts[0].plan, parts[-1], functools.partial(all_have, scales)
    alone = len(parts) == 1 and not plan.tiles.cluster
    find, old = (lambda i: ()), ()
    if not plan.simulated:
        # parts of JAX that are not public: who does not multiply here does not need them
        from pallas_kernels import tensor_cores

        origin, old = tensor_cores.describe(*parts[0].of_stage(0)), _registers((ROWS, plan.tiles.width))
        find = lambda i: tuple(at.moved(last.slot(i) * rows)
                               for at, rows in zip(origin, (plan.tiles.m, plan.tiles.n)))

    def ready(i):
        last.arrived(i)
        return find(i), () if alone else read(parts[0], i)

    def block(i, state, meanwhile, begin=None):
        totals, old, (operands, loaded) = list(state[0]), *state[1:]
        for n, part in enumerate(parts):

            def behind(part=part, n=n, rest=parts[n + 1 :], loaded=loaded):
                if begin:
                    begin(n)
                own = scales(part, i) if alone else loaded
                return own, read(rest[0], i) if rest else meanwhile()

            partial, (own, following) = _product(part, n, i, old, operands, behind)
            if part is last and plan.b_blocks:
                last.release(i)
            totals[n] = part.promote(totals[n], partial, own, i)
            old, loaded = old if plan.simulated else partial, following
        if not plan.b_blocks:  # promotion reads b's scales
            last.release(i)
        return tuple(totals), old, following

    state, first = (tuple(zeros(plan) for _ in parts), old, ready(0)), 0
    following = lambda i, state, begin=None: block(i, state, lambda: ready(i + 1), begin)
    if begin and blocks > 1:
        state, first, begin = following(0, state, begin), 1, None
    unroll = plan.tiles.unroll
    rest = (blocks - 1 - first) % unroll if unroll > 1 else 0  # of one, blocks may be an array
    state = lax.fori_loop(first, blocks - 1 - rest, following, state, unroll=unroll)
    for i in range(rest):
        state = following(blocks - 1 - rest + i, state)
    totals, _, result = block(blocks - 1, state, at_end, begin)
    return totals, result


def _sum_in_flight(part: Consumer, blocks: int, scales, scalars) -> tuple[tuple[Array, ...]]:
    """The same of one part, in the same order: some products at a time, each promoted while the next is
    computed. What memory has of the next ones' scales is read before these are waited for."""

    def some(first: Array | int, count: int, total: tuple[Array, ...], read: tuple) -> tuple[Array, ...]:
        numbers = [first + n for n in range(count)]
        for i in numbers:
            part.arrived(i)

        def body(take):
            loaded, sums = [all_have(scales, part, i, r) for i, r in zip(numbers, read)], total
            for i, scale in zip(numbers, loaded):
                partial = take()
                if part.plan.b_blocks:
                    part.release(i)
                sums = part.promote(sums, partial, scale, i)
                if not part.plan.b_blocks:  # promotion reads b's scales
                    part.release(i)
            return sums

        operands = ((a, b.transpose((1, 0))) for a, b in map(part.operands, numbers))
        return multiply(part.plan.simulated, body, *((None, a, b) for a, b in operands))

    flight = part.plan.tiles.flight
    times, left = divmod(blocks, flight)
    ahead = lambda first: tuple(scalars(lax.min(first + n, jnp.int32(blocks - 1))) for n in range(flight))

    def turn(n, state):
        total, read = state
        following = ahead((n + 1) * flight)
        return some(n * flight, flight, total, read), following

    total, read = lax.fori_loop(0, times, turn, (zeros(part.plan), ahead(jnp.int32(0))))
    return (some(times * flight, left, total, read) if left else total,)


def _product(part: Consumer, n: int, i: Array, old, operands,
             behind: Callable[[], object]) -> tuple[Array, object]:
    """The partial of the n-th part and block i, and what `behind`, run while the tensor cores compute it,
    returns.

    It is written over `old`; `operands` is where those of the first part lie.
    """
    a, b = part.operands(i)
    if part.plan.simulated:

        def run(partial):
            plgpu.wgmma(partial, a, b.transpose((1, 0)))
            result = behind()
            return partial[...], result

        return pl.run_scoped(run, plgpu.ACC((ROWS, part.plan.tiles.width), F32))
    from pallas_kernels.tensor_cores import multiply_over

    at_a, at_b = operands
    partial = multiply_over(old, at_a.moved(n * ROWS), at_b, (a.dtype, b.dtype))
    result = behind()
    plgpu.wgmma_wait(0)
    return partial, result


def store_sums(plan: Plan, total: tuple[Array, ...], at: jax.Ref, buffers: jax.Ref) -> None:
    """Sums [64, width] to their place in the result through shared memory, a swizzled 128-byte column a
    buffer, as many at once as there are buffers; the copies run while the next tile is computed."""
    width = plan.store_width
    for some in itertools.batched(range(0, plan.tiles.width, width), plan.tiles.buffers):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for n, c in enumerate(some):
            slab, first = divmod(c, plan.slab)
            buffers.at[n][...] = total[slab][:, first : first + width].astype(plan.out_dtype)
        plgpu.commit_smem()
        for n, c in enumerate(some):
            plgpu.copy_smem_to_gmem(buffers.at[n], at.at[:, pl.ds(c, width)])
