"""The scaled FP8 products on Hopper: y = a b^T with a [M, K] and b [N, K], both contiguous along the
contraction.

One persistent kernel serves all three passes. A block of threads computes tiles of y one after the other. It
has two kinds of threads:

- One warp is the *producer*. It walks all tiles of its block and keeps the copy engine a few stages ahead of
  the products, across the borders of tiles too, so that no tile waits for its first operands. A stage is a
  block of 128 along the contraction: rows of a, rows of b, and their scales. In a cluster two blocks of
  threads share rows of a by multicast.
- One to three warpgroups are the *consumers*. Each computes its part of the tile: 64 rows, twice 64 rows, or
  some columns. The tensor cores sum 128 products in registers. That partial sum times its scales is then
  added to a float32 sum (DeepSeek-V3, 2024, section 3.3.2); this is called *promotion*.

The timeline of a consumer, where `p(i)` is the product of stage i:

    one part of 64 rows (`sum_one_part`)

        tensor cores |  p(i)                                       |         |  p(i+1)  ...
        threads      |  read scales of i; wait for stage i+1;      | release | promote |
                     |  find where its operands lie                | i       | p(i)    |

    two parts of 64 rows (`sum_two_parts`), upper u and lower l, which read the same rows of b

        tensor cores |  u(i)            |         |  l(i)                      |         |         | u(i+1)
        threads      |  read scales     | promote |  wait for stage i+1; find  | release | promote |
                     |  of l(i)         | u(i)    |  it; read scales of u(i+1) | i       | l(i)    |

    and in the first stage of a tile also, behind u(0) and l(0): store u and l of the tile before.

- Promotion is what costs: the tensor cores rest meanwhile, unless another consumer uses them. Two consumers
  tend to fall into step and promote at the same time; three lose less by it, and also lose less at the end of
  a tile, where one stores while two compute. Two consumers with two parts each store the results of a tile
  behind the first products of the next.
- Nothing else may stand between the wait for one product and the start of the next. So the place of the next
  operands is found while the last product is computed, and each product is written over the registers of the
  one before (`tensor_cores.py`).
- A stage is released as soon as its last product is done. Only where b has a scale for each column (wgrad) is
  it released after promotion, which reads those scales from shared memory a few columns at a time: three
  consumers do not have the registers to hold them all.
- In a cluster, scales are read ahead for one part too: see `all_have`.
- For few rows one consumer has several products in flight (`sum_in_flight`) and as many stages as fit:
  reading b is then what takes the time.

The sizes of a and b need not be multiples of a tile: the copy engine reads zeros beyond the edge and writes
nothing there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.blockwise_matmul.tiles import REGISTERS, ROWS, Tiles, check_tiles
from pallas_kernels.in_flight import multiply
from pallas_kernels.persistent import drain, for_each_tile, slot_of, specialise
from pallas_kernels.plgpu_compat import (
    ACC,
    COLUMN,
    ROW,
    WGMMA,
    Index,
    Ref,
    multiprocessors,
    plgpu,
    spread,
    swizzled,
)
from pallas_kernels.quantize import BLOCK

F32 = jnp.float32
# Columns whose scales a consumer holds at once where each column has its own (a 1x128 by 1x128 product).
SLAB = 32
Sums = tuple[Array, ...]  # float32 [64, slab] for each slab of a part's columns
# By row, float32 [64]: one for each slab, with b's scale multiplied in; or one, and b's are read by column.
Scales = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static parameters of one kernel."""

    tiles: Tiles
    m: int
    n: int
    k_blocks: int
    b_blocks: bool  # b's scales are of 128x128 blocks; else of 1x128
    out_dtype: jnp.dtype
    blocks: int  # of threads, or clusters of two
    simulated: bool
    ends: tuple[int, ...] = ()  # of the parts that b lies in

    @property
    def one_row(self) -> bool:
        return reads_scalars(self.m, self.b_blocks)

    @property
    def box(self) -> int:
        """The rows of a that are copied for a tile: all rows of the tile or, if a has fewer, those of a, in
        whole boxes of 8 for each block of threads. The memory of the other rows is not initialised; it only
        affects rows of the sum that are not stored."""
        boxes = 8 * (1 + bool(self.tiles.cluster))
        return min(self.tiles.m, boxes * pl.cdiv(self.m, boxes))

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along M, and tiles, or pairs of them, along N."""
        return pl.cdiv(self.m, self.tiles.m), pl.cdiv(self.n, self.tiles.n * (1 + bool(self.tiles.cluster)))

    @property
    def slab(self) -> int:
        """Columns promoted together: those that certainly share a scale of b, or few enough for their scales
        to fit in registers."""
        return math.gcd(self.tiles.width, BLOCK if self.b_blocks else SLAB)

    @property
    def slabs(self) -> int:
        return self.tiles.width // self.slab

    @property
    def store_width(self) -> int:
        """Columns stored at once: 128 bytes, which is a swizzled row, or the whole slab if it has fewer."""
        return math.gcd(self.slab, 128 // self.out_dtype.itemsize)


class Shared(NamedTuple):
    """Shared memory: a ring of stages, and buffers for results that are being stored."""

    a: Ref
    b: Ref
    a_scale: Ref
    b_scale: Ref
    out: Ref
    full: Ref
    empty: Ref


def reads_scalars(m: int, b_blocks: bool) -> bool:
    """Whether a's scales are read one by one, as those of b's 128x128 blocks are: a single row has one scale
    per stage, and a copy moves at least four."""
    return m == 1 and b_blocks


def matmul(
    a: Array, a_scale: Array, b: Array | tuple[Array, ...], b_scale: Array, tiles: Tiles, *, b_blocks: bool,
    out_dtype: jnp.dtype, interpret=None
) -> Array:
    """a [M, K] times b [N, K] transposed -> [M, N] in `out_dtype`, bfloat16 or float32. b may lie in parts
    [N_i, K], of which no tile has rows of two.

    a_scale [K/128, M] and b_scale [K/128, N], or [N/128, K/128] for `b_blocks`; float32. The copy engine
    moves boxes of 8 rows by 128 bytes: M is a multiple of 8 or below it, K of 128, N of 64 (bfloat16) or 32
    (float32). a_scale has whole boxes of 8, unless `reads_scalars`. `api.py` pads.
    """
    b = b if isinstance(b, tuple) else (b,)
    ends = tuple(itertools.accumulate(map(len, b)))
    if any(end % (tiles.n * (1 + bool(tiles.cluster))) for end in ends[:-1]):
        raise ValueError(f"{tiles}: a tile has rows of two of the parts that end at {ends}")
    (m, k), n, csize = a.shape, ends[-1], 1 + bool(tiles.cluster)
    blocks = (2 * csize if interpret else multiprocessors()) // csize
    plan = Plan(tiles, m, n, pl.cdiv(k, BLOCK), b_blocks, jnp.dtype(out_dtype), blocks, bool(interpret), ends)
    check_tiles(tiles, plan.store_width, pairs=b_blocks)
    scratch, name = shared_memory(plan, a.dtype, b[0].dtype), f"blockwise_matmul_{m}x{n}x{k}"
    return plgpu.kernel(
        functools.partial(_kernel, plan), out_type=jax.ShapeDtypeStruct((m, n), out_dtype), kernel_name=name,
        grid=(blocks,), grid_names=("block",),
        cluster=(2,) if tiles.cluster else (), cluster_names=("cluster",) if tiles.cluster else (),
        num_threads=tiles.consumers + 1, thread_name="wg", scratch_types=scratch, interpret=interpret,
    )(a, a_scale, b_scale, *b)


def shared_memory(plan: Plan, a_dtype: jnp.dtype, b_dtype: jnp.dtype) -> Shared:
    t = plan.tiles
    if t.cluster:
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    else:
        barrier = plgpu.Barrier
    return Shared(
        a=plgpu.SMEM((t.stages, t.m, BLOCK), a_dtype, transforms=swizzled(a_dtype)),
        b=plgpu.SMEM((t.stages, t.n, BLOCK), b_dtype, transforms=swizzled(b_dtype)),
        a_scale=plgpu.SMEM((t.stages, t.m), F32),
        # the scales of blocks are read from memory, one by one
        b_scale=plgpu.SMEM((t.stages, t.n) if not plan.b_blocks else (8,), F32),
        out=plgpu.SMEM((t.consumers, t.buffers, ROWS, plan.store_width), plan.out_dtype,
                       transforms=swizzled(plan.out_dtype, plan.store_width)),
        full=plgpu.Barrier(num_arrivals=3 + (not plan.b_blocks) - plan.one_row, num_barriers=t.stages),
        empty=barrier(num_arrivals=t.consumers, num_barriers=t.stages),
    )


def _kernel(plan: Plan, a, a_scale, b_scale, *refs) -> None:
    parts = len(plan.ends)
    b, out, shared, consumers = refs[:parts], refs[parts], Shared(*refs[parts + 1 :]), plan.tiles.consumers
    produce = functools.partial(_produce, plan, (a, a_scale, b, b_scale), shared)
    specialise(consumers, REGISTERS[consumers], produce,
               lambda wg: _consume(plan, wg, a_scale, b_scale, out, shared))


def _produce(plan: Plan, operands, shared: Shared) -> None:
    """Copy the operands of every tile, block by block of the contraction, as stages become free."""
    a, a_scale, b, b_scale = operands
    t = plan.tiles

    def tile(mi, ni, before):
        rows, columns, box = pl.ds(mi * t.m, plan.box), pl.ds(ni * t.n, t.n), pl.ds(0, plan.box)

        @pl.loop(0, plan.k_blocks)
        def _(ki):
            slot = slot_of(before + ki, t.stages)
            pl.when(before + ki >= t.stages)(lambda: plgpu.barrier_wait(shared.empty.at[slot]))
            copy, full = plgpu.copy_gmem_to_smem, shared.full.at[slot]
            ks = pl.ds(ki * BLOCK, BLOCK)
            copy(a.at[rows, ks], shared.a.at[slot, box], full,
                 collective_axes="cluster" if t.cluster else None)
            _copy_b(plan, b, ni * t.n, ks, shared.b.at[slot], full)
            if not plan.one_row:
                copy(a_scale.at[ki, rows], shared.a_scale.at[slot, box], full)
            if not plan.b_blocks:
                copy(b_scale.at[ki, columns], shared.b_scale.at[slot], full)

    for_each_tile(plan, tile)
    drain(plan, shared.empty)


def _copy_b(plan: Plan, b: tuple[Ref, ...], first: Array, ks, into: Ref, full: Ref) -> None:
    """Copy a tile's rows of b, from the part that has them."""
    for part, start, end in zip(b, (0, *plan.ends), plan.ends):
        copy = functools.partial(plgpu.copy_gmem_to_smem, part.at[pl.ds(first - start, plan.tiles.n), ks],
                                 into, full)
        pl.when((start <= first) & (first < end))(copy) if len(b) > 1 else copy()


class Consumer(NamedTuple):
    """A warpgroup's view of the ring for one part of one tile. `i` counts the tile's blocks of the
    contraction."""

    plan: Plan
    shared: Shared
    row: Array  # of this part in the tile
    column: Array
    before: Array  # stages used by the tiles before

    def part(self, number: int) -> Consumer:
        """The view for another 64 rows, `number` times 64 further down."""
        return self._replace(row=self.row + number * ROWS)

    def slot(self, i: Index) -> Array:
        return slot_of(self.before + i, self.plan.tiles.stages)

    @property
    def rows(self) -> pl.Slice:
        return pl.ds(self.row, ROWS)

    def operands(self, i: Index) -> tuple[Ref, Ref]:
        return self.of_stage(self.slot(i))

    def of_stage(self, slot: Index) -> tuple[Ref, Ref]:
        columns = pl.ds(self.column, self.plan.tiles.width)
        return self.shared.a.at[slot, self.rows], self.shared.b.at[slot, columns]

    def row_scales(self, i: Index) -> Array:
        return plgpu.load(self.shared.a_scale.at[self.slot(i), self.rows], layout=ROW, optimized=False)

    def arrived(self, i: Index) -> None:
        """Wait until the producer has filled stage i."""
        plgpu.barrier_wait(self.shared.full.at[self.slot(i)])

    def release(self, i: Index) -> None:
        """Give stage i back to the producer. The simulator wants the reads of scales fenced from the copy
        that will write over them; on the device, scales that have arrived in registers are safe."""
        if self.plan.simulated:
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared.empty.at[self.slot(i)])

    def promote(self, sums: Sums, partial: Array, scales: Scales, i: Index) -> Sums:
        """sums + partial * scales, slab by slab, so that few scales of b's columns are held at once."""
        promoted, width = [], self.plan.slab
        for s, sum_of_slab in enumerate(sums):
            part = partial[:, s * width : (s + 1) * width]
            if self.plan.b_blocks:
                scale = spread(scales[s], part.shape, 0)
            else:
                at = self.shared.b_scale.at[self.slot(i), pl.ds(self.column + s * width, width)]
                by_column = plgpu.load(at, layout=COLUMN, optimized=False)
                scale = spread(scales[0], part.shape, 0) * spread(by_column, part.shape, 1)
            promoted.append(sum_of_slab + part * scale)
        return tuple(promoted)

    def promote_and_release(self, sums: Sums, partial: Array, scales: Scales, i: Index) -> Sums:
        """`promote` the last product of stage i, and release the stage, before the promotion unless it reads
        b's scales from the stage."""
        if self.plan.b_blocks:
            self.release(i)
        promoted = self.promote(sums, partial, scales, i)
        if not self.plan.b_blocks:
            self.release(i)
        return promoted


class ScaleReader(NamedTuple):
    """Reads the scales of a consumer's part of one tile of the dense product."""

    plan: Plan
    a_scale: Ref
    b_scale: Ref
    tile_column: Array  # of tiles
    column: Array  # of this consumer in the tile

    def in_memory(self, ki: Index) -> tuple[Array, ...]:
        """The scales of stage ki that are not in shared memory: the row's if a has a single row, then those
        of b's blocks, one for each slab."""
        if not self.plan.b_blocks:
            return ()
        found = [self.a_scale[ki, 0]] if self.plan.one_row else []
        last = self.b_scale.shape[0] - 1  # a consumer beyond N multiplies zeros, so its scale does not matter
        for s in range(0, self.plan.tiles.width, self.plan.slab):
            block = lax.div(self.tile_column * self.plan.tiles.n + self.column + s, BLOCK)
            found.append(self.b_scale[lax.min(block, last), ki])
        return tuple(found)

    def __call__(self, part: Consumer, ki: Index, in_memory: tuple[Array, ...] | None = None) -> Scales:
        """The scales of stage ki. `in_memory`: the result of that function, if it has been called before."""
        if self.plan.one_row:
            of_row, *of_blocks = self.in_memory(ki) if in_memory is None else in_memory
            by_row = plgpu.layout_cast(jnp.full(ROWS, of_row), ROW)
        else:
            by_row = part.row_scales(ki)
            of_blocks = self.in_memory(ki) if in_memory is None else in_memory
        return tuple(by_row * of_block for of_block in of_blocks) or (by_row,)


class Finished(NamedTuple):
    """A tile whose results are still in registers."""

    sums: tuple[Sums, Sums]  # of the upper and the lower 64 rows
    mi: Array  # row of tiles
    ni: Array  # column of tiles


def _consume(plan: Plan, wg: Array, a_scale: Ref, b_scale: Ref, out: Ref, shared: Shared) -> None:
    """Compute this warpgroup's part of every tile."""
    t = plan.tiles
    row, column = lax.div(wg, t.across) * t.high * ROWS, lax.rem(wg, t.across) * t.width

    def store(number: int, sums: Sums, mi, ni) -> None:
        """Part `number` of a tile."""
        at = out.at[pl.ds(mi * t.m + row + number * ROWS, ROWS), pl.ds(ni * t.n + column, t.width)]
        store_sums(plan, sums, at, shared.out.at[wg])

    def one_part(mi, ni, before) -> None:
        part = Consumer(plan, shared, row, column, before).part(0)
        scales = ScaleReader(plan, a_scale, b_scale, ni, column)
        if t.flight > 1:
            sums = sum_in_flight(part, plan.k_blocks, scales)
        else:
            sums, _ = sum_one_part(part, plan.k_blocks, scales)
        store(0, sums, mi, ni)

    def two_parts(mi, ni, before, last: Finished) -> Finished:
        me = Consumer(plan, shared, row, column, before)
        scales = ScaleReader(plan, a_scale, b_scale, ni, column)
        store_last = lambda number: store(number, last.sums[number], last.mi, last.ni)
        sums = sum_two_parts(me.part(0), me.part(1), plan.k_blocks, scales, store_last)
        return Finished(sums, mi, ni)

    if t.high == 1:
        for_each_tile(plan, one_part)
    else:
        last = for_each_tile(plan, two_parts, _nothing_yet(plan))
        for number in range(t.high):
            store(number, last.sums[number], last.mi, last.ni)
    plgpu.wait_smem_to_gmem(0)


def _nothing_yet(plan: Plan) -> Finished:
    """The tile that is "stored" behind the first one: a tile below the result, of which the copy engine
    writes nothing.

    Each block of threads has its own tile, or the simulator would report a race. With a condition instead,
    the compiler would move the promotion of the product that hides the store behind the start of the next
    product, and spill registers.
    """
    sums = zeros(plan), zeros(plan)
    mi = plan.grid[0] + lax.axis_index("block")
    return Finished(sums, mi, lax.axis_index("cluster") if plan.tiles.cluster else jnp.int32(0))


def zeros(plan: Plan) -> Sums:
    return tuple(_registers((ROWS, plan.slab)) for _ in range(plan.slabs))


def _registers(shape: tuple[int, int]) -> Array:
    return plgpu.layout_cast(jnp.zeros(shape, F32), WGMMA)


class Ahead(NamedTuple):
    """The state that is prepared for a stage before its first product begins."""

    operands: tuple  # descriptors of a and b, those of the first part; nothing in the simulator
    scales: Scales  # of the first part, where they are read ahead


class State(NamedTuple):
    """The values that a consumer carries from one stage to the next."""

    sums: Any  # of one part, or of both
    registers: Any  # of the last product, over which the next is written; nothing in the simulator
    ahead: Any  # of the next stage; after the last one, the result of the caller's `at_end`


def sum_one_part(
    part: Consumer, blocks: Index, read_scales: Callable[..., Scales],
    at_end: Callable[[], Any] = lambda: (),
) -> tuple[Sums, Any]:
    """The sums of a tile's only part over this many blocks, and the result of `at_end`, which runs while the
    last product is computed. `blocks` may be an array if `unroll` is 1.

    The scales of a stage are read during its product, but in a cluster during the previous product
    (`all_have`).
    """
    ahead_of_product = bool(part.plan.tiles.cluster)
    find, registers = _first_product(part)

    def look_ahead(i: Index) -> Ahead:
        part.arrived(i)
        return Ahead(find(i), all_have(read_scales, part, i) if ahead_of_product else ())

    def step(i: Index, state: State, meanwhile: Callable[[], Any]) -> State:
        def behind():
            scales = state.ahead.scales if ahead_of_product else read_scales(part, i)
            return scales, meanwhile()

        partial, registers, (scales, ahead) = _product(part, 0, i, state, behind)
        return State(part.promote_and_release(state.sums, partial, scales, i), registers, ahead)

    state = State(zeros(part.plan), registers, look_ahead(0))
    next_step = lambda i, state: step(i, state, lambda: look_ahead(i + 1))
    state = _for_all_but_the_last(0, blocks, next_step, state, part.plan.tiles.unroll)
    state = step(blocks - 1, state, at_end)
    return state.sums, state.ahead


def sum_two_parts(
    upper: Consumer, lower: Consumer, blocks: int, read_scales: Callable[..., Scales],
    store_last: Callable[[int], None],
) -> tuple[Sums, Sums]:
    """The sums of a tile's two parts. `store_last(number)` runs during the first product of part `number`,
    where it stores the previous tile.

    The scales of the upper part are read a stage ahead, those of the lower part during the upper part's
    product.
    """
    find, registers = _first_product(upper)

    def look_ahead(i: Index) -> Ahead:
        lower.arrived(i)
        return Ahead(find(i), all_have(read_scales, upper, i))

    def step(i: Index, state: State, meanwhile: Callable[[], Any],
             also: Callable[[int], None] = lambda number: None) -> State:
        def behind_upper():
            also(0)
            return all_have(read_scales, lower, i)

        def behind_lower():
            also(1)
            return meanwhile()

        partial, registers, scales_of_lower = _product(upper, 0, i, state, behind_upper)
        sums_of_upper = upper.promote(state.sums[0], partial, state.ahead.scales, i)
        partial, registers, ahead = _product(lower, 1, i, state._replace(registers=registers), behind_lower)
        sums_of_lower = lower.promote_and_release(state.sums[1], partial, scales_of_lower, i)
        return State((sums_of_upper, sums_of_lower), registers, ahead)

    state = State((zeros(upper.plan), zeros(upper.plan)), registers, look_ahead(0))
    next_step = lambda i, state: step(i, state, lambda: look_ahead(i + 1))
    nothing, unroll = (lambda: ()), upper.plan.tiles.unroll
    if blocks == 1:
        return step(0, state, nothing, store_last).sums
    state = step(0, state, lambda: look_ahead(1), store_last)
    state = _for_all_but_the_last(1, blocks, next_step, state, unroll)
    return step(blocks - 1, state, nothing).sums


def _for_all_but_the_last(
    first: int, blocks: Index, step: Callable[[Index, State], State], state: State, unroll: int
) -> State:
    """step(i, state) for i from `first` to blocks - 2; `blocks` may be an array if `unroll` is 1."""
    rest = (blocks - 1 - first) % unroll if unroll > 1 else 0
    state = lax.fori_loop(first, blocks - 1 - rest, step, state, unroll=unroll)
    for i in range(rest):
        state = step(blocks - 1 - rest + i, state)
    return state


def all_have(read_scales: Callable[..., Scales], part: Consumer, *which) -> Scales:
    """The scales of a stage; in a cluster, after all four warps have read theirs.

    In a cluster one warp releases a stage for all four, and a copy may then overwrite it; nothing else orders
    the other warps' reads before that. So the warps wait for each other during the previous product, where
    the wait costs nothing. When that product is done, all warps have started it, and the reads that they
    issued before it are complete.
    """
    scales = read_scales(part, *which)
    if part.plan.tiles.cluster and not part.plan.simulated:  # there `release` fences the reads
        from pallas_kernels.tensor_cores import wait_for_warps

        wait_for_warps()
    return scales


def sum_in_flight(part: Consumer, blocks: int, scales: ScaleReader) -> Sums:
    """`sum_one_part`, in the same order of additions, with several products in flight, each promoted while
    the next is computed. The scales in memory of the next products are read before these are waited for."""

    def together(first: Index, count: int, sums: Sums, in_memory: tuple) -> Sums:
        numbers = [first + n for n in range(count)]
        for i in numbers:
            part.arrived(i)

        def promote_each(take: Callable[[], Array]) -> Sums:
            loaded, promoted = [all_have(scales, part, i, m) for i, m in zip(numbers, in_memory)], sums
            for i, scales_of_i in zip(numbers, loaded):
                promoted = part.promote_and_release(promoted, take(), scales_of_i, i)
            return promoted

        operands = ((a, b.transpose((1, 0))) for a, b in map(part.operands, numbers))
        return multiply(part.plan.simulated, promote_each, *((None, a, b) for a, b in operands))

    flight = part.plan.tiles.flight
    times, left = divmod(blocks, flight)

    def read(first: Array) -> tuple:
        return tuple(scales.in_memory(lax.min(first + n, jnp.int32(blocks - 1))) for n in range(flight))

    def turn(n, state: tuple[Sums, tuple]) -> tuple[Sums, tuple]:
        sums, in_memory = state
        following = read((n + 1) * flight)
        return together(n * flight, flight, sums, in_memory), following

    sums, in_memory = lax.fori_loop(0, times, turn, (zeros(part.plan), read(jnp.int32(0))))
    return together(times * flight, left, sums, in_memory) if left else sums


def _first_product(part: Consumer) -> tuple[Callable[[Index], tuple], Any]:
    """(the function that finds the operands of a stage's first product, registers for the very first
    product)."""
    if part.plan.simulated:
        return lambda i: (), ()
    # tensor_cores.py uses private parts of JAX; a program that does not multiply on a GPU must not depend on
    # them.
    from pallas_kernels import tensor_cores

    a, b = tensor_cores.describe(*part.of_stage(0))
    t = part.plan.tiles
    find = lambda i: (a.moved(part.slot(i) * t.m), b.moved(part.slot(i) * t.n))
    return find, _registers((ROWS, t.width))


def _product(
    part: Consumer, number: int, i: Index, state: State, behind: Callable[[], Any]
) -> tuple[Array, Any, Any]:
    """(the partial sum of part `number` and stage i, the registers that hold it and that the next product
    overwrites, the result of `behind`, which runs while the tensor cores compute)."""
    a, b = part.operands(i)
    if part.plan.simulated:

        def run(partial):
            plgpu.wgmma(partial, a, b.transpose((1, 0)))
            result = behind()
            return partial[...], result

        partial, result = pl.run_scoped(run, ACC((ROWS, part.plan.tiles.width), F32))
        return partial, (), result
    from pallas_kernels.tensor_cores import multiply_over

    at_a, at_b = state.ahead.operands
    partial = multiply_over(state.registers, at_a.moved(number * ROWS), at_b, (a.dtype, b.dtype))
    result = behind()
    plgpu.wgmma_wait(0)
    return partial, partial, result


def store_sums(plan: Plan, sums: Sums, at: Ref, buffers: Ref) -> None:
    """Store sums [64, width] to their place in the result, by way of shared memory: a swizzled 128-byte
    column per buffer, as many at once as there are buffers. The copies run while the next tile is
    computed."""
    width = plan.store_width
    for some in itertools.batched(range(0, plan.tiles.width, width), plan.tiles.buffers):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for n, c in enumerate(some):
            slab, first = divmod(c, plan.slab)
            buffers.at[n][...] = sums[slab][:, first : first + width].astype(plan.out_dtype)
        plgpu.commit_smem()
        for n, c in enumerate(some):
            plgpu.copy_smem_to_gmem(buffers.at[n], at.at[:, pl.ds(c, width)])
