"""Attention of one query per sequence over a paged cache on Hopper: flash-decoding (Dao et al., 2023), with
the work dealt out evenly.

A worker is a warpgroup and a warp that copies for it; two workers share a multiprocessor. Each has pieces of
sequences (`deal.py`), which it reads in tiles of 64 keys. For each tile the keys of all its KV heads are
copied first and then their values, one head in each slot of a ring.

A tensor-core instruction has 64 rows, but a KV head has few queries. So the rows are the queries of all
heads, which share one softmax:

- scores are the sum over the heads of (that head's queries, with 0 in the rows of the others) times that
  head's keys;
- o is the sum over the heads of (that head's exponentials, with 0 likewise) times that head's values.

The tensor cores do up to eight times the work, and have the time for it: the kernel waits for memory. E4M3
keys are multiplied as they are, by queries in E4M3 parts whose sum is the 16-bit query (`api.py`). E4M3
values become float16, exactly, before their product. Each piece leaves o and the logarithm of its sum;
`sm90_join.py` adds up those of a sequence in order.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.decode_attention.deal import KEYS, Deal, Piece, for_each_piece
from pallas_kernels.decode_attention.sm90_join import F32, ROWS, Softmax, nothing
from pallas_kernels.in_flight import dot
from pallas_kernels.persistent import slot_of
from pallas_kernels.plgpu_compat import ACC, ROW, WGMMA, Ref, multiprocessors, plgpu, spread, swizzled

WORKERS = 2  # per block of threads
REGISTERS = 232, 40  # registers per thread of a worker, and of the warps that copy
MEMORY = 224 * 1024  # bytes of shared memory of a block of threads
MOST_SLOTS = 16  # slots of a ring; a wait can track 32 barriers


class Tiles(NamedTuple):
    """The tile sizes."""

    turn: int = 2  # heads whose products are in flight together
    slots: int | None = None  # slots of a worker's ring; None: as many as there is room for


class Plan(NamedTuple):
    """The static parameters of the kernel."""

    tiles: Tiles
    passes: int  # passes over the KV heads
    heads: int  # KV heads per pass
    group: int  # queries per KV head
    d: int
    page: int  # tokens of it
    parts: int  # E4M3 numbers whose sum is a query, for an E4M3 cache
    fp8: bool
    simulated: bool

    @property
    def slots_of_tile(self) -> int:
        return 2 * self.heads

    @property
    def turn(self) -> int:
        return math.gcd(self.tiles.turn, self.heads)

    @property
    def slots(self) -> int:
        size = 1 if self.fp8 else 2
        held = ROWS * self.d * 2 + self.fp8 * self.turn * KEYS * self.d * 2
        return self.tiles.slots or min((MEMORY // WORKERS - held) // (KEYS * self.d * size), MOST_SLOTS)


class Shared(NamedTuple):
    """The shared memory of each worker."""

    q: Ref
    ring: Ref
    values: Ref
    q_full: Ref
    q_empty: Ref
    full: Ref
    empty: Ref


def workers(interpret=None) -> int:
    return WORKERS * (2 if interpret else multiprocessors())


def attend(
    plan: Plan, q: Array, factor: Array, k: Array, v: Array, table: Array, lengths: Array, deal: Deal,
    interpret=None
) -> tuple[Array, Array]:
    """(o [pieces, ROWS, d] of each piece divided by its sum, log2 of that sum [pieces, ROWS]), float32.

    q [rows, queries, d]: the queries of a pass, padded to a multiple of 8. factor [passes, ROWS]: the factor
    of the scores, in units of log 2. k and v [tokens of all pages, KV heads * d]. table [B, pages], lengths
    [B].
    """
    if not plan.turn <= plan.slots <= MOST_SLOTS:
        raise ValueError(
            f"{plan.tiles}: a ring has {plan.turn} slots or more, those of a turn, and {MOST_SLOTS} at most")
    places, workers = len(deal.begins) + len(deal.first) - 2, len(deal.first) - 1
    out = (places, ROWS, plan.d), (places, ROWS)
    return plgpu.kernel(
        functools.partial(_attend, plan), out_type=tuple(jax.ShapeDtypeStruct(shape, F32) for shape in out),
        scratch_types=_shared_memory(plan, k.dtype, q.dtype), interpret=interpret,
        grid=(workers // WORKERS,), grid_names=("block",), num_threads=WORKERS + 1, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(q, factor, k, v, table, lengths, *deal)


def _shared_memory(plan: Plan, cache: jnp.dtype, query: jnp.dtype) -> Shared:
    def memory(*shape: int, dtype: jnp.dtype) -> Ref:
        width = min(shape[-1], 128 // jnp.dtype(dtype).itemsize)
        return plgpu.SMEM((WORKERS, *shape), dtype, transforms=swizzled(dtype, width))

    barrier = functools.partial(plgpu.Barrier, num_barriers=WORKERS)
    ring = functools.partial(plgpu.Barrier, num_barriers=WORKERS * plan.slots)
    return Shared(
        q=memory(ROWS, plan.d, dtype=query),
        ring=memory(plan.slots, KEYS, plan.d, dtype=cache),
        values=memory(plan.turn, KEYS, plan.d, dtype=jnp.float16) if plan.fp8
        else plgpu.SMEM((1,), jnp.int32),
        q_full=barrier(), q_empty=barrier(),
        full=ring(num_arrivals=max(1, KEYS // plan.page)), empty=ring(),
    )


def _eight_a_thread(d: int):
    """The register layout of a matrix [KEYS, d]: a warp has whole rows, a thread 8 neighbouring elements,
    which are 8 bytes of E4M3 and 16 of float16."""
    rows = 32 * 8 // d
    tiling = plgpu.Tiling(((4 * rows, d), (rows, d), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _attend(plan: Plan, q, factor, k, v, table, lengths, begins, first, o, lse, *shared) -> None:
    shared, each = Shared(*shared), functools.partial(for_each_piece, begins, first)
    wg = lax.axis_index("wg")

    @pl.when(wg == WORKERS)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp < WORKERS)(lambda: _produce(plan, warp, each, (q, k, v, table, lengths), shared))

    @pl.when(wg < WORKERS)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        worker = lax.axis_index("block") * WORKERS + wg
        each(worker, lambda piece: _consume(plan, wg, worker, piece, factor, lengths, o, lse, shared))


def _produce(plan: Plan, wg: Array, each, operands, shared: Shared) -> None:
    """Copy a piece's queries, then for each tile the keys and the values of every head, as slots become
    free."""
    q, k, v, table, lengths = operands
    slots = plan.slots
    pages, height = max(1, KEYS // plan.page), min(KEYS, plan.page)

    def tokens(batch: Array, tile: Array) -> list[Array]:
        """The positions of a tile's parts; beyond the last page, that page again."""
        last = lax.div(lengths[batch] - 1, jnp.int32(plan.page))
        at = [tile * KEYS + i * height for i in range(pages)]
        whose = [table[batch, lax.min(lax.div(t, jnp.int32(plan.page)), last)] for t in at]
        return [page * plan.page + lax.rem(t, jnp.int32(plan.page)) for page, t in zip(whose, at)]

    def one(piece: Piece) -> None:
        pl.when(piece.before > 0)(lambda: plgpu.barrier_wait(shared.q_empty.at[wg]))
        plgpu.copy_gmem_to_smem(q.at[piece.row], shared.q.at[wg, pl.ds(0, q.shape[1])], shared.q_full.at[wg])
        batch, turn = lax.div(piece.row, jnp.int32(plan.passes)), lax.rem(piece.row, jnp.int32(plan.passes))

        @pl.loop(0, piece.stop - piece.start)
        def _(i):
            at, used = tokens(batch, piece.start + i), (piece.before + i) * plan.slots_of_tile
            for which, source in enumerate((k, v)):

                @pl.loop(0, plan.heads)
                def _(head, which=which, source=source):
                    number = used + which * plan.heads + head
                    slot = slot_of(number, slots)
                    barrier = wg * slots + slot
                    pl.when(number >= slots)(lambda: plgpu.barrier_wait(shared.empty.at[barrier]))
                    columns = pl.ds((turn * plan.heads + head) * plan.d, plan.d)
                    for j, token in enumerate(at):
                        into = shared.ring.at[wg, slot, pl.ds(j * height, height)]
                        plgpu.copy_gmem_to_smem(source.at[pl.ds(token, height), columns], into,
                                                shared.full.at[barrier])

    used = each(lax.axis_index("block") * WORKERS + wg, one) * plan.slots_of_tile
    pl.when(used > 0)(lambda: plgpu.barrier_wait(shared.q_empty.at[wg]))

    @pl.loop(lax.max(used - slots, 0), used)
    def _(i):
        plgpu.barrier_wait(shared.empty.at[wg * slots + slot_of(i, slots)])


def _consume(plan: Plan, wg: Array, worker: Array, piece: Piece, factor, lengths, o, lse,
             shared: Shared) -> None:
    """Attend to a piece, and store the result."""
    batch, turn = lax.div(piece.row, jnp.int32(plan.passes)), lax.rem(piece.row, jnp.int32(plan.passes))
    length, factors = lengths[batch], plgpu.load(factor.at[turn], layout=ROW, optimized=False)
    plgpu.barrier_wait(shared.q_full.at[wg])
    queries = [plgpu.load(shared.q.at[wg], layout=plgpu.Layout.WGMMA_8BIT if plan.fp8 else WGMMA)]
    plgpu.barrier_arrive(shared.q_empty.at[wg])
    if plan.fp8:
        queries, power = _parts(queries[0].astype(F32), plan.parts)
        factors *= power
    consumer = Consumer(plan, wg, piece, length, factors, queries, shared)
    state = lax.fori_loop(0, piece.stop - piece.start, consumer.step, nothing(plan.d))
    at = worker + piece.row
    o[at] = state.o * spread(1.0 / state.total, state.o.shape, 0)
    lse[at] = state.maximum + jnp.log2(state.total)


def _parts(x: Array, count: int) -> tuple[list[Array], Array]:
    """x [ROWS, d] as a sum of E4M3 numbers times a power of two [ROWS]. Each part has four bits of the
    remainder of the previous ones. The sum is exact for elements down to 2^-8 of the row's largest in
    bfloat16 and 2^-5 in float16, and below that to 2^-16 of the largest. The smallest part comes first,
    because products are truncated at the magnitude of their sum."""
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=1), jnp.int32) & 0x7F800000
    bits = jnp.maximum(bits, 0x10000000)  # a row of zeros needs a power too
    power, inverse = (lax.bitcast_convert_type(b, F32) for b in (bits, 0x7F000000 - bits))
    left, found = x * spread(inverse * 64.0, x.shape, 0), []
    for _ in range(count):
        found.append(left.astype(jnp.float8_e4m3fn))
        left = left - found[-1].astype(F32)
    return found[::-1], power * (1 / 64)


class Consumer(NamedTuple):
    """A worker's view of a piece."""

    plan: Plan
    wg: Array
    piece: Piece
    length: Array
    factors: Array
    queries: list[Array]  # the parts of the queries
    shared: Shared

    def step(self, i: Array, state: Softmax) -> Softmax:
        """One tile."""
        left = self.length - (self.piece.start + i) * KEYS  # keys left from the tile's first on
        used = (self.piece.before + i) * self.plan.slots_of_tile
        scores = self.masked(self.scores(used) * spread(self.factors, (ROWS, KEYS), 0), left)
        maximum = jnp.maximum(state.maximum, scores.max(axis=1))
        alpha = jnp.exp2(state.maximum - maximum)
        p = jnp.exp2(scores - spread(maximum, scores.shape, 0))
        total = state.total * alpha + p.sum(axis=1)
        o = state.o * spread(alpha, state.o.shape, 0)
        return Softmax(self.add_values(o, p, used + self.plan.heads, left), maximum, total)

    def scores(self, used: Array) -> Array:
        """[ROWS, KEYS]: each query times its head's keys."""
        keys = lambda head, _: self.arrived(used + head).transpose((1, 0))  # noqa: E731
        return self.sum_over_heads(jnp.zeros((ROWS, KEYS), F32), self.queries, keys, used)

    def add_values(self, o: Array, p: Array, used: Array, left: Array) -> Array:
        """o [ROWS, d] plus each query's exponentials times its head's values."""
        p = p.astype(jnp.float16 if self.plan.fp8 else self.shared.ring.dtype)
        return self.sum_over_heads(o, [p], lambda head, i: self.values(self.arrived(used + head), i, left),
                                   used)

    def sum_over_heads(self, initial: Array, parts: list[Array], right, used: Array) -> Array:
        """initial + the sum, over heads and over parts, of the head's rows of a part times right(head, its
        number in the turn)."""
        plan = self.plan

        def turn(first: Array, multiply) -> None:
            heads = [first * plan.turn + i for i in range(plan.turn)]
            # Operands in registers must be ready before the first product is issued, or ptxas serialises the
            # products.
            lefts = [[self.of_head(head, x) for x in parts] for head in heads]
            for i, head in enumerate(heads):
                b = right(head, i)
                for a in lefts[i]:
                    multiply(a, b)
            if not plan.simulated:
                plgpu.wgmma_wait(0)
            for head in heads:
                plgpu.barrier_arrive(self.shared.empty.at[self.slot(used + head)[1]])

        # the simulator supports neither an initial accumulator nor operands in registers
        if plan.simulated:

            def add(i, total):
                made = []
                turn(i, lambda a, b: made.append(dot(a, b[...])))
                return total + sum(made)

            return plgpu.layout_cast(lax.fori_loop(0, plan.heads // plan.turn, add, initial), WGMMA)

        def run(acc):
            acc[...] = plgpu.layout_cast(initial, WGMMA)
            pl.loop(0, plan.heads // plan.turn)(lambda i: turn(i, functools.partial(plgpu.wgmma, acc)))
            return acc[...]

        return pl.run_scoped(run, ACC((initial.shape[0], initial.shape[1]), F32))

    def slot(self, number: Array) -> tuple[Array, Array]:
        """A slot of the ring, and its barriers."""
        slot = slot_of(number, self.plan.slots)
        return slot, self.wg * self.plan.slots + slot

    def arrived(self, number: Array) -> Ref:
        slot, barrier = self.slot(number)
        plgpu.barrier_wait(self.shared.full.at[barrier])
        return self.shared.ring.at[self.wg, slot]

    def of_head(self, head: Array, x: Array) -> Array:
        """x [ROWS, n] with 0 in the rows that are not queries of this head."""
        layout = plgpu.Layout.WGMMA_8BIT.reduce(1) if x.dtype.itemsize == 1 else ROW
        rows = lax.div(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout),
                       jnp.int32(self.plan.group))
        if x.dtype.itemsize > 1:
            return x * spread(jnp.where(rows == head, 1.0, 0.0).astype(x.dtype), x.shape, 0)
        kept = spread(jnp.where(rows == head, -1, 0).astype(jnp.int8), x.shape, 0)
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int8) & kept, x.dtype)

    def masked(self, scores: Array, left: Array) -> Array:
        """The scores with -inf behind the end of the sequence."""

        def mask(scores):
            columns = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
            return jnp.where(columns < left, scores, -jnp.inf)

        return lax.cond(left < KEYS, mask, lambda scores: scores, scores)

    def values(self, values: Ref, buffer: int, left: Array) -> Ref:
        """Values in the dtype of the exponentials, with zeros behind the end of the sequence, where the
        memory may hold NaN."""
        fp8 = self.plan.fp8
        layout = _eight_a_thread(self.plan.d) if fp8 else WGMMA
        if fp8:
            converted = plgpu.load(values, layout=layout).astype(jnp.float16)
            values = self.shared.values.at[self.wg, buffer]
            values[...] = converted

        @pl.when(left < KEYS)
        def _():
            x = plgpu.load(values, layout=layout)
            rows = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
            values[...] = jnp.where(rows < left, x, jnp.zeros_like(x))
            plgpu.commit_smem()

        if fp8:
            plgpu.commit_smem()
        return values
