"""Packed causal attention on Hopper: the gradients of keys and values.

Blocks of threads are persistent. Each takes 128 keys of a KV head at a time, 64 for each of its two
consumers, and walks the queries that see them. It walks those of all query heads of the group, so that the
sum over the group never leaves registers. Everything is transposed, P^T [keys, queries]: with P = exp(S -
lse) from the forward's logarithms, dV = P^T dO, dP^T = V dO^T, dS^T = P^T (dP^T - delta) and dK = dS^T Q,
delta = rowsum(dO O) (Dao et al., 2022, algorithm 4). Everything is added in a fixed order.

The timeline of a consumer, for step i of a walk over blocks of queries:

    tensor cores |  V dO^T of i  |          |  K Q^T of i+1  |  P^T dO and dS^T Q of i             |         |
    threads      |               |  dS of i |                |  P of i+1; wait for dO, delta of    | release |
                 |               |          |                |  i+1                                | i       |

The two consumers issue their products in turn, so that one computes while the tensor cores have the products
of the other (`Consumer.multiply`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.schedule import (
    BLOCK,
    COLUMNS,
    CONSUMERS,
    F32,
    LOG2E,
    REGISTERS,
    ROWS,
    Deal,
    Seen,
    Work,
    buffer_of,
    drain,
    give_back,
    keep,
    launch,
    nothing,
    rows,
    since,
    steps_of,
    up_to,
)
from pallas_kernels.attention.segments import WALK, Tables
from pallas_kernels.forward_only import forward_only
from pallas_kernels.in_flight import multiply
from pallas_kernels.persistent import slot_of, specialise
from pallas_kernels.plgpu_compat import COLUMN, ROW, Index, Ref, plgpu, spread, swizzled

no_derivative = forward_only(
    "pallas_kernels.attention.api.attention has a first derivative, by reverse mode, and no other")


class Tiles(NamedTuple):
    """The tile sizes."""

    queries: int = 64  # queries per step
    q_stages: int = 3
    do_stages: int = 2
    keys: int = BLOCK  # keys per block of threads: 64 per consumer, or the same 64 and half of d per consumer
    buffers: int = 2  # for keys and values: those that are worked on and those that come next; or the former

    @property
    def halves(self) -> bool:
        """Whether both consumers have the same keys and each computes half of the columns of their gradients.
        With d = 256, the full gradients of 64 keys would take all registers. Scores are then computed
        twice."""
        return self.keys == ROWS


TILES = {  # by head size
    64: Tiles(), 128: Tiles(), 256: Tiles(q_stages=2, do_stages=2, keys=ROWS, buffers=1),
}


class Plan(NamedTuple):
    """The static parameters of the kernel."""

    tiles: Tiles
    walks: int
    heads: int  # KV heads
    group: int  # query heads per KV head
    scale: float
    simulated: bool
    tokens: int  # in trees, else 0
    blocks: int  # blocks of threads

    def slot(self, number: Array, wg: Array | int) -> Array:
        """The buffer of a consumer's keys and values for work unit `number`."""
        buffers = self.tiles.buffers
        return slot_of(number, buffers) if self.tiles.halves else buffer_of(number, buffers, wg)


class Shared(NamedTuple):
    k: Ref  # and dk on its way out
    v: Ref  # and dv
    walk: Ref
    q: Ref
    do: Ref
    lse: Ref
    delta: Ref
    kv_full: Ref
    kv_empty: Ref
    q_full: Ref
    do_full: Ref
    q_empty: Ref
    do_empty: Ref
    turn: Ref  # one barrier per consumer, for their turns
    both: Ref  # both consumers have read the last keys and values


@no_derivative
@functools.partial(jax.jit, static_argnames=("scale", "tiles", "interpret"))
def gradients(
    q: Array, k: Array, v: Array, do: Array, lse: Array, delta: Array, tables: Tables, *, scale: float,
    tiles: Tiles | None, interpret=None,
) -> tuple[Array, Array]:
    """dk and dv [N, K, d] from q and do [N, H, d], the forward pass's lse in base 2, and delta [H, N]
    float32."""
    tiles = tiles or TILES[q.shape[-1]]
    walks, heads = tables.of_keys[tiles.keys], k.shape[1]
    make = functools.partial(Plan, tiles, len(walks), heads, q.shape[1] // heads, scale,
                             interpret is not None, 0 if tables.ends is None else len(tables.first))
    like = jax.ShapeDtypeStruct(k.shape, k.dtype)
    args = q, k, v, do, lse, delta, tables.limits, walks
    return launch(_kernel, make, (like, like), _shared_memory(tiles, q), len(walks) * heads, interpret)(*args)


def _shared_memory(tiles: Tiles, q: Array) -> Shared:
    memory = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=swizzled(q.dtype))
    slots, barrier = tiles.buffers * (1 if tiles.halves else CONSUMERS), plgpu.Barrier
    d = q.shape[-1]
    mine = memory((slots, ROWS, d))
    ring = lambda stages: memory((stages, tiles.queries, d))
    vectors = lambda stages: plgpu.SMEM((stages, tiles.queries), F32)
    full = functools.partial(plgpu.Barrier, num_arrivals=2)
    return Shared(
        k=mine, v=mine, walk=plgpu.SMEM((slots, WALK), jnp.int32),
        q=ring(tiles.q_stages), lse=vectors(tiles.q_stages), do=ring(tiles.do_stages),
        delta=vectors(tiles.do_stages),
        kv_full=barrier(num_arrivals=3, num_barriers=slots),
        kv_empty=barrier(num_arrivals=CONSUMERS if tiles.halves else 1, num_barriers=slots),
        q_full=full(num_barriers=tiles.q_stages), do_full=full(num_barriers=tiles.do_stages),
        q_empty=barrier(num_arrivals=CONSUMERS, num_barriers=tiles.q_stages),
        do_empty=barrier(num_arrivals=CONSUMERS, num_barriers=tiles.do_stages),
        turn=barrier(num_barriers=CONSUMERS), both=barrier(num_arrivals=CONSUMERS),
    )


def _kernel(plan: Plan, q, k, v, do, lse, delta, first, walks, dk, dv, *shared) -> None:
    shared = Shared(*shared)
    each = Deal(plan.walks, plan.heads, plan.blocks).for_each

    def consume(wg):
        pl.when(wg == 1)(lambda: plgpu.barrier_arrive(shared.turn.at[0]))  # the first turn
        works, _ = each(lambda work: _consume(plan, wg, work, first, dk, dv, shared))
        # the last, for which there is nothing left
        pl.when(wg == 0)(lambda: plgpu.barrier_wait(shared.turn.at[0]))
        if plan.tiles.buffers > 1:
            give_back(shared.kv_empty, plan.slot(works - 1, wg))
        plgpu.wait_smem_to_gmem(0)

    specialise(CONSUMERS, REGISTERS, lambda: _produce(plan, each, (q, k, v, do, lse, delta, walks), shared),
               consume)


def _produce(plan: Plan, each, operands, shared: Shared) -> None:
    """Copy the keys and values of the next work, then block after block of queries as slots become free."""
    q, k, v, do, lse, delta, walks = operands
    tiles, copy = plan.tiles, plgpu.copy_gmem_to_smem

    def one(work: Work) -> Array:
        block, blocks = walks[work.walk, 0], steps_of(walks[work.walk, 2], tiles.queries)
        for i in range(tiles.keys // ROWS):
            slot, rows = plan.slot(work.number, i), pl.ds(block * tiles.keys + i * ROWS, ROWS)
            full = shared.kv_full.at[slot]
            pl.when(work.number >= tiles.buffers)(
                lambda slot=slot: plgpu.barrier_wait(shared.kv_empty.at[slot]))
            copy(k.at[rows, work.head], shared.k.at[slot], full)
            copy(v.at[rows, work.head], shared.v.at[slot], full)
            copy(walks.at[work.walk], shared.walk.at[slot], full)

        @pl.loop(0, plan.group)
        def _(member):
            head = work.head * plan.group + member

            @pl.loop(0, blocks)
            def _(i):
                count = work.before + member * blocks + i
                rows = pl.ds((block * (tiles.keys // tiles.queries) + i) * tiles.queries, tiles.queries)
                slot = slot_of(count, tiles.q_stages)
                pl.when(count >= tiles.q_stages)(
                    lambda slot=slot: plgpu.barrier_wait(shared.q_empty.at[slot]))
                copy(q.at[rows, head], shared.q.at[slot], shared.q_full.at[slot])
                copy(lse.at[head, rows], shared.lse.at[slot], shared.q_full.at[slot])
                slot = slot_of(count, tiles.do_stages)
                pl.when(count >= tiles.do_stages)(
                    lambda slot=slot: plgpu.barrier_wait(shared.do_empty.at[slot]))
                copy(do.at[rows, head], shared.do.at[slot], shared.do_full.at[slot])
                copy(delta.at[head, rows], shared.delta.at[slot], shared.do_full.at[slot])

        return blocks * plan.group

    works, steps = each(one)
    drain(steps, tiles.q_stages, shared.q_empty)
    drain(steps, tiles.do_stages, shared.do_empty)
    slots = tiles.keys // ROWS
    drain(works * slots, tiles.buffers * slots, shared.kv_empty)


def _consume(plan: Plan, wg: Array, work: Work, first, dk, dv, shared: Shared) -> Array:
    """Store the gradients of this warpgroup's 64 keys, or its half of their columns. Returns the number of
    steps."""
    tiles, slot = plan.tiles, plan.slot(work.number, wg)
    plgpu.barrier_wait(shared.kv_full.at[slot])
    block, begin, steps, clear = (shared.walk[slot, i] for i in range(4))
    key, blocks = block * tiles.keys + (0 if tiles.halves else wg * ROWS), steps_of(steps, tiles.queries)
    me = Consumer(plan, wg, work, slot, key, begin, clear, blocks, first, shared)
    dk_sum, dv_sum = lax.cond(blocks > 0, me.walk, lambda: (nothing(me.width), nothing(me.width)))
    if tiles.buffers > 1:
        pl.when((blocks == 0) & (work.number > 0))(me.give_back_last)
    me.together()  # the store overwrites a buffer that the other consumer may still read
    shared.k[slot, :, me.columns] = (dk_sum * plan.scale).astype(dk.dtype)
    shared.v[slot, :, me.columns] = dv_sum.astype(dv.dtype)
    plgpu.commit_smem()
    me.together()
    store = lambda which, x, out: pl.when(not tiles.halves or wg == which)(
        lambda: plgpu.copy_smem_to_gmem(x.at[slot], out.at[pl.ds(key, ROWS), work.head]))
    store(0, shared.k, dk), store(1, shared.v, dv)
    if tiles.buffers == 1:
        give_back(shared.kv_empty, slot)
    return blocks * plan.group


class Consumer(NamedTuple):
    """One warpgroup's view of one walk."""

    plan: Plan
    wg: Array
    work: Work
    keys: Array  # the slot of the keys
    key: Array  # the first key
    begin: Array
    clear: Array
    blocks: Array
    first: Ref
    shared: Shared

    @property
    def width(self) -> int:
        """The number of columns of dk and dv that this consumer sums."""
        return self.shared.k.shape[-1] // (2 if self.plan.tiles.halves else 1)

    @property
    def columns(self) -> pl.Slice:
        """The columns of dk and dv that this consumer sums."""
        return pl.ds(self.wg * self.width if self.plan.tiles.halves else 0, self.width)

    def together(self) -> None:
        """Wait for the other consumer if it has the same keys."""
        if self.plan.tiles.halves:
            plgpu.barrier_arrive(self.shared.both)
            plgpu.barrier_wait(self.shared.both)

    def give_back_last(self) -> None:
        """Give back the buffer of the previous work."""
        give_back(self.shared.kv_empty, self.plan.slot(self.work.number - 1, self.wg))

    def q_slot(self, step: Index) -> Array:
        return slot_of(self.work.before + step, self.plan.tiles.q_stages)

    def do_slot(self, step: Index) -> Array:
        return slot_of(self.work.before + step, self.plan.tiles.do_stages)

    def walk(self) -> tuple[Array, Array]:
        """dk, not yet scaled, and dv. There is at least one step."""
        d, last = self.width, self.blocks * self.plan.group - 1
        plgpu.barrier_wait(self.shared.q_full.at[self.q_slot(0)])
        p = self.multiply(lambda take: self.probabilities(take(), 0), self.scores(0))
        if self.plan.tiles.buffers > 1:
            pl.when(self.work.number > 0)(self.give_back_last)
        p, dk, dv = lax.fori_loop(0, last, self.step, (p, nothing(d), nothing(d)))
        p, ds = self.differences(last, p)
        dv, dk = self.multiply(lambda take: (take(), take()), *self.sums(last, p, ds, dk, dv))
        self.free(last)
        return dk, dv

    def step(self, step: Index, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Add a step's contributions to dk and dv, and compute the next step's probabilities beside these
        products."""
        p, dk, dv = carry
        p, ds = self.differences(step, p)
        plgpu.barrier_wait(self.shared.q_full.at[self.q_slot(step + 1)])

        def body(take):
            p = lax.optimization_barrier(self.probabilities(take(), step + 1))
            plgpu.barrier_wait(self.shared.do_full.at[self.do_slot(step + 1)])
            dv, dk = take(), take()
            return *lax.optimization_barrier((p, dk)), dv

        p, dk, dv = self.multiply(body, self.scores(step + 1), *self.sums(step, p, ds, dk, dv))
        self.free(step)
        return p, dk, dv

    def multiply(self, body, *of):
        """Products issued in turn with the other consumer: while one computes, the tensor cores run the
        other's products."""
        turn = self.shared.turn
        plgpu.barrier_wait(turn.at[self.wg])

        def issued(take):
            plgpu.barrier_arrive(turn.at[CONSUMERS - 1 - self.wg])
            return body(take)

        return multiply(self.plan.simulated, issued, *of)

    def my(self, ring) -> Ref:
        """The keys or values. Their addresses are recomputed in every step: kept, they would take
        registers that are needed."""
        return ring.at[lax.optimization_barrier(self.keys)]

    def scores(self, step: Index) -> tuple:
        """The operands of the product for a step's scores, [keys, queries]."""
        return None, self.my(self.shared.k), self.shared.q.at[self.q_slot(step)].transpose((1, 0))

    def sums(self, step: Index, p: Array, ds: Array, dk: Array, dv: Array) -> tuple[tuple, tuple]:
        """The operands of the products that are added to dv and dk."""
        do, q = self.shared.do.at[self.do_slot(step)], self.shared.q.at[self.q_slot(step)]
        return (dv, p, do.at[:, self.columns]), (dk, ds, q.at[:, self.columns])

    def free(self, step: Index) -> None:
        plgpu.barrier_arrive(self.shared.q_empty.at[self.q_slot(step)])
        plgpu.barrier_arrive(self.shared.do_empty.at[self.do_slot(step)])

    def differences(self, step: Index, p: Array) -> tuple[Array, Array]:
        """P and dS in the dtype of their products."""
        slot, shared = self.do_slot(step), self.shared
        pl.when(step == 0)(lambda: plgpu.barrier_wait(shared.do_full.at[slot]))
        turned = shared.do.at[slot].transpose((1, 0))
        dp = self.multiply(lambda take: take(), (None, self.my(shared.v), turned))
        ds = p * (dp - self.by_column(shared.delta.at[slot]))
        return p.astype(shared.q.dtype), ds.astype(shared.q.dtype)

    def by_column(self, vector) -> Array:
        return spread(plgpu.load(vector, layout=COLUMN, optimized=False), (ROWS, self.plan.tiles.queries), 1)

    def probabilities(self, scores: Array, step: Index) -> Array:
        """[keys, queries]; 0 for queries of other segments and queries before the key, in blocks that contain
        any. Masked as in dq."""
        size, slot = scores.shape[1], self.q_slot(step)
        row = self.begin + lax.rem(jnp.int32(step), self.blocks) * size

        def own() -> Seen:
            if at := self.plan.tokens:
                mine = self.first.at[pl.ds(at + self.key, ROWS)]
                return up_to(plgpu.load(mine, layout=ROW, optimized=False) - (row + 1))
            first, key = self.by_column(self.first.at[pl.ds(row, size)]), spread(
                rows() + self.key, (ROWS, COLUMNS), 0)
            return lambda at: first[:, at : at + COLUMNS] <= key

        p = jnp.exp2(scores * (self.plan.scale * LOG2E) - self.by_column(self.shared.lse.at[slot]))
        p = keep(row + size > self.clear, p, own, 0.0)
        return keep(row < self.key + ROWS - 1, p, lambda: since(rows() + (self.key - row)), 0.0)
