"""Attention of one query per sequence over a paged cache on Hopper: flash-decoding (Dao et al., 2023), with
the work dealt out evenly.

A worker is a warpgroup and a warp that copies for it; two workers share a multiprocessor. Each has chunks of
sequences (`deal.py`), which it reads in tiles of 64 keys. For each tile the keys of all its KV heads are
copied first and then their values, one head in each slot of a ring.

A tensor-core instruction has 64 rows, but a KV head has few queries. So the rows are the queries of all
heads, which share one softmax:

- scores are the sum over the heads of (that head's queries, with 0 in the rows of the others) times that
  head's keys;
- o is the sum over the heads of (that head's exponentials, with 0 likewise) times that head's values.

The tensor cores do up to eight times the work, and have the time for it: the kernel waits for memory. E4M3
keys are multiplied as they are, by queries in E4M3 parts whose sum is the 16-bit query (`api.py`). E4M3
values become float16, exactly, before their product. Each chunk leaves o and the logarithm of its sum;
`sm90_join.py` adds up those of a sequence in order. So a result depends on its own sequence alone, in every
bit.

A sequence's tiles begin with the one that holds its first visible key. In that tile and in the last one, the
keys outside get a score of -inf, and their values become 0.

o of heads of 256 fills half of the registers. There a multiprocessor has one worker, the queries stay in
shared memory, and a pass has one KV head, as the queries of several could not be set to 0 there.
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
from pallas_kernels.decode_attention.deal import places as places_of
from pallas_kernels.decode_attention.sm90_join import F32, ROWS, Softmax, nothing
from pallas_kernels.in_flight import dot
from pallas_kernels.persistent import slot_of
from pallas_kernels.plgpu_compat import ACC, ROW, WGMMA, Ref, multiprocessors, plgpu, spread, swizzled

LARGE = 256  # the size of heads from which on the queries stay in shared memory
REGISTERS = 232, 40  # registers per thread of a worker, and of the warps that copy
REGISTERS_ALONE = 248  # of a worker that has a multiprocessor alone
MEMORY = 224 * 1024  # bytes of shared memory of a block of threads
COLUMNS = 64  # of o that are stored at once
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
    windowed: bool  # sequences begin at `starts`, not at 0
    # whose queries a KV head has, the later token's after the earlier's; a power of two, up to 16
    tokens: int = 1

    @property
    def workers(self) -> int:
        """Workers per block of threads, which is one per multiprocessor."""
        return 1 if self.is_large else 2

    @property
    def is_large(self) -> bool:
        return self.d >= LARGE

    @property
    def live(self) -> int:
        """The queries of a pass."""
        return self.heads * self.group

    @property
    def slots_of_tile(self) -> int:
        return 2 * self.heads

    @property
    def turn(self) -> int:
        return math.gcd(self.tiles.turn, self.heads)

    @property
    def slots(self) -> int:
        size = 1 if self.fp8 else 2
        held = ROWS * (self.d * 2 + COLUMNS * 4) + self.fp8 * self.turn * KEYS * self.d * 2
        held += self.parts_in_memory * ROWS * self.d
        return self.tiles.slots or min((MEMORY // self.workers - held) // (KEYS * self.d * size), MOST_SLOTS)

    @property
    def parts_in_memory(self) -> int:
        """The number of E4M3 parts of the queries that are kept in shared memory."""
        return self.parts if self.fp8 and self.is_large else 0


class Shared(NamedTuple):
    """The shared memory of each worker."""

    q: Ref
    ring: Ref
    out: Ref  # COLUMNS of o, on their way out
    values: Ref  # of an E4M3 cache
    parts: Ref  # of the queries, for an E4M3 cache of large heads
    q_full: Ref
    q_empty: Ref
    full: Ref
    empty: Ref


def workers(plan: Plan) -> int:
    return plan.workers * (2 if plan.simulated else multiprocessors())


def attend(
    plan: Plan, q: Array, factor: Array, k: Array, v: Array, table: Array, starts: Array, lengths: Array,
    deal: Deal, first_page: Array, interpret=None
) -> tuple[Array, Array]:
    """(o [places, queries, d] of each chunk divided by its sum, log2 of that sum [places, ROWS]), float32.

    q [rows, queries, d]: the queries of a pass, padded to a multiple of 8. factor [passes, ROWS]: the factor
    of the scores, in units of log 2. k and v [tokens of all pages, KV heads * d]. table [B, pages]. starts,
    lengths [B]: each sequence's keys are those of [start, length). first_page [1]: added to the pages of the
    table.
    """
    if not plan.turn <= plan.slots <= MOST_SLOTS:
        raise ValueError(
            f"{plan.tiles}: a ring has {plan.turn} slots or more, those of a turn, and {MOST_SLOTS} at most")
    places, workers = places_of(len(lengths), table.shape[1] * plan.page, plan.passes), len(deal.first) - 1
    out = (places, q.shape[1], plan.d), (places, ROWS)
    return plgpu.kernel(
        functools.partial(_attend, plan), kernel_name="attend",
        out_type=tuple(jax.ShapeDtypeStruct(shape, F32) for shape in out),
        scratch_types=(_shared_memory(plan, k.dtype, q.dtype),), interpret=interpret,
        grid=(workers // plan.workers,), grid_names=("block",), num_threads=plan.workers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(q, factor, k, v, table, starts, lengths, first_page, *deal)


def _shared_memory(plan: Plan, cache: jnp.dtype, query: jnp.dtype) -> Shared:
    def memory(*shape: int, dtype: jnp.dtype) -> Ref:
        width = min(shape[-1], 128 // jnp.dtype(dtype).itemsize)
        return plgpu.SMEM((plan.workers, *shape), dtype, transforms=swizzled(dtype, width))

    barrier = functools.partial(plgpu.Barrier, num_barriers=plan.workers)
    ring = functools.partial(plgpu.Barrier, num_barriers=plan.workers * plan.slots)
    parts = plan.parts_in_memory
    return Shared(
        q=memory(ROWS, plan.d, dtype=query),
        ring=memory(plan.slots, KEYS, plan.d, dtype=cache),
        out=memory(ROWS, COLUMNS, dtype=F32),
        values=memory(plan.turn, KEYS, plan.d, dtype=jnp.float16) if plan.fp8 else None,
        parts=memory(parts, ROWS, plan.d, dtype=cache) if parts else None,
        q_full=barrier(), q_empty=barrier(),
        full=ring(num_arrivals=max(1, KEYS // plan.page)), empty=ring(),
    )


def _eight_a_thread(d: int):
    """The register layout of a matrix [KEYS, d]: a warp has whole rows, a thread 8 neighbouring elements,
    which are 8 bytes of E4M3 and 16 of float16."""
    rows = 32 * 8 // d
    if rows == 1:
        tiling = plgpu.Tiling(((4, d), (8,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = plgpu.Tiling(((4 * rows, d), (rows, d), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _attend(plan: Plan, q, factor, k, v, table, starts, lengths, first_page, begins, tiles, first, o, lse,
            shared: Shared) -> None:
    each = functools.partial(for_each_piece, Deal(begins, tiles, first), starts if plan.windowed else None,
                             plan.passes)
    wg = lax.axis_index("wg")

    @pl.when(wg == plan.workers)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")

        @plgpu.warp_map
        def _(warp):
            operands = q, k, v, table, starts, lengths, first_page
            pl.when(warp < plan.workers)(lambda: _produce(plan, warp, each, operands, shared))

    @pl.when(wg < plan.workers)
    def _():
        plgpu.set_max_registers(REGISTERS_ALONE if plan.is_large else REGISTERS[0], action="increase")
        worker = lax.axis_index("block") * plan.workers + wg
        bounds = starts, lengths
        each(worker, lambda piece: _consume(plan, wg, piece, factor, bounds, o, lse, shared))
        plgpu.wait_smem_to_gmem(0)


def _produce(plan: Plan, wg: Array, each, operands, shared: Shared) -> None:
    """Copy a piece's queries, then for each tile the keys and the values of every head, as slots become
    free."""
    q, k, v, table, starts, lengths, first_page = operands
    slots = plan.slots
    pages, height = max(1, KEYS // plan.page), min(KEYS, plan.page)
    page_of = lambda token: lax.div(token, jnp.int32(plan.page))  # noqa: E731

    def tokens(batch: Array, tile: Array) -> list[Array]:
        """The positions of a tile's parts; beyond the last visible page, that page again, and before the
        first likewise."""
        at = [tile * KEYS + i * height for i in range(pages)]
        numbers = [lax.min(page_of(t), page_of(lengths[batch] - 1)) for t in at]
        if plan.windowed:
            numbers = [lax.max(number, page_of(starts[batch])) for number in numbers]
        return [(first_page[0] + table[batch, number]) * plan.page + lax.rem(t, jnp.int32(plan.page))
                for number, t in zip(numbers, at)]

    def one(piece: Piece) -> None:
        pl.when(piece.before > 0)(lambda: plgpu.barrier_wait(shared.q_empty.at[wg]))
        plgpu.copy_gmem_to_smem(q.at[piece.row], shared.q.at[wg, pl.ds(0, q.shape[1])], shared.q_full.at[wg])
        batch, turn = lax.div(piece.row, jnp.int32(plan.passes)), lax.rem(piece.row, jnp.int32(plan.passes))

        @pl.loop(0, piece.stop - piece.start)
        def _(i):
            tile = _first_tile(plan, starts, batch) + piece.start + i
            at, used = tokens(batch, tile), (piece.before + i) * plan.slots_of_tile
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

    used = each(lax.axis_index("block") * plan.workers + wg, one) * plan.slots_of_tile
    pl.when(used > 0)(lambda: plgpu.barrier_wait(shared.q_empty.at[wg]))

    @pl.loop(lax.max(used - slots, 0), used)
    def _(i):
        plgpu.barrier_wait(shared.empty.at[wg * slots + slot_of(i, slots)])


def _first_tile(plan: Plan, starts: Ref, batch: Array) -> Array | int:
    """The tile of a sequence's first visible key."""
    return lax.div(starts[batch], jnp.int32(KEYS)) if plan.windowed else 0


def _consume(plan: Plan, wg: Array, piece: Piece, factor, bounds: tuple[Ref, Ref], o, lse,
             shared: Shared) -> None:
    """Attend to a piece, and store the result."""
    batch, turn = lax.div(piece.row, jnp.int32(plan.passes)), lax.rem(piece.row, jnp.int32(plan.passes))
    starts, lengths = bounds
    factors = plgpu.load(factor.at[turn], layout=ROW, optimized=False)
    plgpu.barrier_wait(shared.q_full.at[wg])
    queries, power = _queries(plan, wg, shared)
    factors = factors if power is None else factors * power
    tile = _first_tile(plan, starts, batch) + piece.start
    seen = Seen(starts[batch] - tile * KEYS if plan.windowed else None, lengths[batch] - tile * KEYS,
                plan.tokens)
    consumer = Consumer(plan, wg, piece, seen, factors, queries, shared)
    if not plan.is_large:
        plgpu.barrier_arrive(shared.q_empty.at[wg])
    state = lax.fori_loop(0, piece.stop - piece.start, consumer.step, nothing(plan.d))
    if plan.is_large:
        plgpu.barrier_arrive(shared.q_empty.at[wg])
    result, buffer = state.o * spread(1.0 / state.total, state.o.shape, 0), shared.out.at[wg]
    for c in range(0, plan.d, COLUMNS):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = result[:, c : c + COLUMNS]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, o.shape[1])], o.at[piece.place, :, pl.ds(c, COLUMNS)])
    lse[piece.place] = state.maximum + jnp.log2(state.total)


def _queries(plan: Plan, wg: Array, shared: Shared) -> tuple[list, Array | None]:
    """The parts of the queries, in registers or in shared memory, and the power of two by which they are to
    be multiplied."""
    if not plan.fp8:
        return [shared.q.at[wg] if plan.is_large else plgpu.load(shared.q.at[wg], layout=WGMMA)], None
    queries = plgpu.load(shared.q.at[wg], layout=WGMMA if plan.is_large else plgpu.Layout.WGMMA_8BIT)
    parts, power = _parts(queries.astype(F32), plan.parts)
    if not plan.is_large:
        return parts, power
    for i, part in enumerate(parts):
        shared.parts[wg, i] = part
    plgpu.commit_smem()
    return [shared.parts.at[wg, i] for i in range(plan.parts)], power


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


class Seen(NamedTuple):
    """The visible keys [first, end), counted from the first key of a tile; None: all before the end. Of
    several tokens the last live one sees these, each earlier one a key less."""

    first: Array | None
    end: Array
    tokens: int = 1

    def after(self, tiles: Array) -> Seen:
        """The same keys, counted from a later tile."""
        first = None if self.first is None else self.first - tiles * KEYS
        return Seen(first, self.end - tiles * KEYS, self.tokens)

    def is_partial(self) -> Array:
        """Whether the tile has a key that is not visible, to one of the tokens."""
        least = self.end if self.tokens == 1 else self.of_first_token()
        return least < KEYS if self.first is None else (least < KEYS) | (self.first > 0)

    def of_first_token(self) -> Array:
        """The end for the first of several tokens, whose number of keys is one above a multiple of theirs."""
        return lax.bitwise_and(self.end - 1, jnp.int32(-self.tokens)) + 1

    def nothing(self) -> Array:
        """0, in a form that the compiler has to compute for each tile.

        The queries of a head are the same for all tiles, and ptxas 13.0 keeps them in the registers from
        which a product reads them, although it also puts exponentials there: from the second tile on the
        scores were wrong. What depends on the tile is written anew before each product.
        """
        return lax.shift_right_logical(self.end, jnp.int32(31))

    def holds(self, keys: Array) -> Array:
        return keys < self.end if self.first is None else (keys < self.end) & (keys >= self.first)


class Consumer(NamedTuple):
    """A worker's view of a piece."""

    plan: Plan
    wg: Array
    piece: Piece
    seen: Seen  # from the piece's first tile on
    factors: Array
    queries: list  # the parts of the queries, in registers or in shared memory
    shared: Shared

    def step(self, i: Array, state: Softmax) -> Softmax:
        """One tile."""
        seen = self.seen.after(i)
        used = (self.piece.before + i) * self.plan.slots_of_tile
        scores = self.masked(self.scores(used, seen) * spread(self.factors, (ROWS, KEYS), 0), seen)
        maximum = jnp.maximum(state.maximum, scores.max(axis=1))
        alpha = jnp.exp2(state.maximum - maximum)
        p = jnp.exp2(scores - spread(maximum, scores.shape, 0))
        total = state.total * alpha + p.sum(axis=1)
        o = state.o * spread(alpha, state.o.shape, 0)
        return Softmax(self.add_values(o, p, used + self.plan.heads, seen), maximum, total)

    def scores(self, used: Array, seen: Seen) -> Array:
        """[ROWS, KEYS]: each query times its head's keys."""
        keys = lambda head, _: self.arrived(used + head).transpose((1, 0))  # noqa: E731
        return self.sum_over_heads(jnp.zeros((ROWS, KEYS), F32), self.queries, keys, used, seen.nothing())

    def add_values(self, o: Array, p: Array, used: Array, seen: Seen) -> Array:
        """o [ROWS, d] plus each query's exponentials times its head's values."""
        p = p.astype(jnp.float16 if self.plan.fp8 else self.shared.ring.dtype)
        return self.sum_over_heads(o, [p], lambda head, i: self.values(self.arrived(used + head), i, seen),
                                   used)

    def sum_over_heads(self, initial: Array, parts: list, right, used: Array, zero: Array | int = 0) -> Array:
        """initial + the sum, over heads and over parts, of the head's rows of a part times right(head, its
        number in the turn). zero: is 0, of a tile, if the parts are those of all tiles."""
        plan = self.plan

        def turn(first: Array, multiply) -> None:
            heads = [first * plan.turn + i for i in range(plan.turn)]
            # Operands in registers must be ready before the first product is issued, or ptxas serialises the
            # products.
            lefts = [[self.of_head(head + zero, x) for x in parts] for head in heads]
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
                turn(i, lambda a, b: made.append(dot(a[...], b[...])))
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

    def of_head(self, head: Array, x: Array | Ref) -> Array | Ref:
        """x [ROWS, n] with 0 in the rows that are not queries of this head. Large heads are alone, so their
        other rows, whatever they hold, reach no result."""
        if self.plan.is_large:
            return x
        layout = plgpu.Layout.WGMMA_8BIT.reduce(1) if x.dtype.itemsize == 1 else ROW
        rows = lax.div(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout),
                       jnp.int32(self.plan.group))
        if x.dtype.itemsize > 1:
            return x * spread(jnp.where(rows == head, 1.0, 0.0).astype(x.dtype), x.shape, 0)
        kept = spread(jnp.where(rows == head, -1, 0).astype(jnp.int8), x.shape, 0)
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int8) & kept, x.dtype)

    def masked(self, scores: Array, seen: Seen) -> Array:
        """The scores with -inf where a key is not visible."""

        def mask(scores):
            columns = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
            kept = seen.holds(columns)
            if seen.tokens > 1:
                each = self.plan.group // seen.tokens  # queries of a token
                rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
                token = lax.div(lax.rem(rows, jnp.int32(self.plan.group)), jnp.int32(each))
                kept &= columns < spread(token + seen.of_first_token(), scores.shape, 0)
            return jnp.where(kept, scores, -jnp.inf)

        return lax.cond(seen.is_partial(), mask, lambda scores: scores, scores)

    def values(self, values: Ref, buffer: int, seen: Seen) -> Ref:
        """Values in the dtype of the exponentials, with zeros where a key is not visible: the memory may
        hold NaN there."""
        fp8 = self.plan.fp8
        layout = _eight_a_thread(self.plan.d) if fp8 else WGMMA
        if fp8:
            converted = plgpu.load(values, layout=layout).astype(jnp.float16)
            values = self.shared.values.at[self.wg, buffer]
            values[...] = converted

        @pl.when(seen.is_partial())
        def _():
            x = plgpu.load(values, layout=layout)
            rows = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
            values[...] = jnp.where(seen.holds(rows), x, jnp.zeros_like(x))
            plgpu.commit_smem()

        if fp8:
            plgpu.commit_smem()
        return values
