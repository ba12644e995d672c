"""Packed causal attention on Hopper, forward: FlashAttention-3's schedule (Shah et al., 2024) over ranges of keys.

Persistent blocks of threads; each takes 128 queries of a head at a time, 64 for each of its two consumers. A producer warp keeps
a ring of blocks of keys and values full, from the start of the first query's segment to the diagonal, and the next queries ready;
nothing else is read. A consumer computes the exponentials of a block while the tensor cores multiply those of the block before
with its values.

Scores are kept in units of log 2, so that the scale, the change of base and the maximum are one fused multiply-add.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.schedule import (
    BLOCK, BUFFERS, CONSUMERS, F32, LOG2E, REGISTERS, ROWS, Work, drain, for_each, give_back, head_of, indices, launch,
    multiply, nothing,
)  # fmt: skip
from pallas_kernels.attention.segments import COPIED, WALK, Segments, key_walks
from pallas_kernels.persistent import slot_of, specialise
from pallas_kernels.plgpu_compat import ROW, plgpu, spread, swizzled

LOWEST = -1e30  # the maximum of no scores: finite, so that -inf minus it is no NaN


class Tiles(NamedTuple):
    """How the forward is cut up."""

    keys: int = 128  # of a step
    stages: int = 2
    pairs: bool = False  # blocks of threads with two heads of a group share keys and values
    heads_first: bool = True  # all heads of a block of queries before the next block


class Plan(NamedTuple):
    """All that is static in the kernel."""

    tiles: Tiles
    walks: int
    heads: int  # or pairs of them
    group: int  # query heads of a KV head
    blocks: int  # of threads
    scale: float  # of scores, to logarithms of base 2
    simulated: bool


class Shared(NamedTuple):
    q: jax.Ref  # and o on its way out
    first: jax.Ref
    walk: jax.Ref
    k: jax.Ref
    v: jax.Ref
    q_full: jax.Ref
    q_empty: jax.Ref
    k_full: jax.Ref
    k_empty: jax.Ref
    v_full: jax.Ref
    v_empty: jax.Ref


def forward(
    q: Array, k: Array, v: Array, segments: Segments, scale: float, tiles: Tiles, interpret=None
) -> tuple[Array, Array]:  # fmt: skip
    """q [N, H, d], k and v [N, K, d] -> o [N, H, d], and log2 of the sums of exponentials, [H, N] float32.

    N is a multiple of 128, d 64 or 128. Padding gets o = 0 and +inf.
    """
    n, heads, d = q.shape
    walks = key_walks(segments.first, BLOCK, tiles.keys)
    group, simulated = heads // k.shape[1], interpret is not None
    tiles = tiles._replace(pairs=tiles.pairs and group % 2 == 0)
    units = heads // (2 if tiles.pairs else 1)
    make = functools.partial(Plan, tiles, len(walks), units, group, scale=scale * LOG2E, simulated=simulated)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((heads, n), F32)
    return launch(_forward, make, out, _shared_memory(tiles, d, q.dtype), len(walks) * units, interpret, tiles.pairs)(
        q, k, v, segments.first, walks
    )


def _shared_memory(tiles: Tiles, d: int, dtype: jnp.dtype) -> Shared:
    memory = functools.partial(plgpu.SMEM, dtype=dtype, transforms=swizzled(dtype))
    full = plgpu.Barrier(num_barriers=tiles.stages)
    barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",)) if tiles.pairs else plgpu.Barrier
    empty = barrier(num_arrivals=CONSUMERS, num_barriers=tiles.stages)
    slots, ring = BUFFERS * CONSUMERS, memory((tiles.stages, tiles.keys, d))
    return Shared(
        q=memory((slots, ROWS, d)), first=plgpu.SMEM((slots, ROWS), jnp.int32), walk=plgpu.SMEM((slots, WALK), jnp.int32),
        k=ring, v=ring,
        q_full=plgpu.Barrier(num_arrivals=3, num_barriers=slots), q_empty=plgpu.Barrier(num_barriers=slots),
        k_full=full, k_empty=empty, v_full=full, v_empty=empty,
    )  # fmt: skip


def _forward(plan: Plan, q, k, v, first, walks, o, lse, *shared) -> None:
    shared = Shared(*shared)
    each = functools.partial(for_each, plan.walks, plan.heads, plan.blocks, plan.tiles.heads_first)

    def consume(wg):
        works, _ = each(lambda work: _consume(plan, wg, work, o, lse, shared))
        give_back(shared.q_empty, wg, works - 1)
        plgpu.wait_smem_to_gmem(0)

    specialise(CONSUMERS, REGISTERS, lambda: _produce(plan, each, (q, k, v, first, walks), shared), consume)


def _produce(plan: Plan, each, operands, shared: Shared) -> None:
    """Copy queries for the work to come, then block after block of keys and values, as room is made for them."""
    q, k, v, first, walks = operands
    tiles, copy = plan.tiles, plgpu.copy_gmem_to_smem
    share = dict(collective_axes="cluster") if tiles.pairs else {}

    def one(work: Work) -> Array:
        query_head = head_of(work, tiles.pairs)
        block, begin, steps = (walks[work.walk, i] for i in (0, 1, 3))
        for i in range(CONSUMERS):
            slot, rows = slot_of(work.number, BUFFERS) * CONSUMERS + i, pl.ds(block * BLOCK + i * ROWS, ROWS)
            full, empty = shared.q_full.at[slot], shared.q_empty.at[slot]
            pl.when(work.number >= BUFFERS)(lambda empty=empty: plgpu.barrier_wait(empty))
            copy(q.at[rows, query_head], shared.q.at[slot], full)
            copy(first.at[rows], shared.first.at[slot], full)
            copy(walks.at[work.walk], shared.walk.at[slot], full)
        chunk = lax.div(begin, jnp.int32(COPIED))  # so that what follows is seen to be a multiple

        @pl.loop(0, steps)
        def _(step):
            count, keys = work.before + step, pl.ds((chunk + step * (tiles.keys // COPIED)) * COPIED, tiles.keys)
            slot, head = slot_of(count, tiles.stages), lax.div(query_head, jnp.int32(plan.group))
            for ref, ring, full, empty in (
                (k, shared.k, shared.k_full, shared.k_empty), (v, shared.v, shared.v_full, shared.v_empty)
            ):  # fmt: skip
                pl.when(count >= tiles.stages)(lambda empty=empty: plgpu.barrier_wait(empty.at[slot]))
                copy(ref.at[keys, head], ring.at[slot], full.at[slot], **share)

        return steps

    works, steps = each(one)
    drain(steps, tiles.stages, shared.k_empty, shared.v_empty)
    drain(works * CONSUMERS, BUFFERS * CONSUMERS, shared.q_empty)


class Softmax(NamedTuple):
    """The running state of 64 queries: o [64, d] not yet divided by the sums [64], and the maxima [64]."""

    o: Array
    maximum: Array
    total: Array


def _consume(plan: Plan, wg: Array, work: Work, o, lse, shared: Shared) -> Array:
    """Attend from this warpgroup's 64 queries, and store; -> the number of steps."""
    slot = slot_of(work.number, BUFFERS) * CONSUMERS + wg
    plgpu.barrier_wait(shared.q_full.at[slot])
    block, begin, clear, steps = (shared.walk[slot, i] for i in range(4))
    first = plgpu.load(shared.first.at[slot], layout=ROW, optimized=False)
    row = block * BLOCK + wg * ROWS
    state = Consumer(plan, wg, slot, row, begin, clear, first, work, shared).attend(steps)
    real = first <= plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + row
    inverse, shape = jnp.where(real, 1.0 / state.total, 0.0), state.o.shape
    shared.q[slot] = jnp.where(spread(real, shape, 0), state.o * spread(inverse, shape, 0), 0.0).astype(o.dtype)
    plgpu.commit_smem()
    rows, head = pl.ds(row, ROWS), head_of(work, plan.tiles.pairs)
    plgpu.copy_smem_to_gmem(shared.q.at[slot], o.at[rows, head])
    lse[head, rows] = jnp.where(real, state.maximum + jnp.log(state.total) * LOG2E, jnp.inf)
    return steps


class Consumer(NamedTuple):
    """One warpgroup's view of one walk."""

    plan: Plan
    wg: Array
    queries: Array  # their slot
    row: Array  # of its first query
    begin: Array
    clear: Array
    first: Array
    work: Work
    shared: Shared

    def slot(self, step: Array) -> Array:
        return slot_of(self.work.before + step, self.plan.tiles.stages)

    def attend(self, steps: Array) -> Softmax:
        maximum, total = (plgpu.layout_cast(jnp.full((ROWS,), x, F32), ROW) for x in (LOWEST, 0.0))
        p, state = self.first_step(Softmax(nothing(self.shared.q.shape[-1]), maximum, total))
        p, state = lax.fori_loop(1, steps, lambda i, carry: self.step(i, *carry), (p, state))
        return state._replace(o=self.last_values(steps - 1, p, state.o))

    def scores(self, step: Array):
        """The product that makes them."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.shared.k_full.at[slot])
        return None, self.shared.q.at[self.queries], self.shared.k.at[slot].transpose((1, 0))

    def first_step(self, state: Softmax) -> tuple[Array, Softmax]:
        scores = multiply(self.plan.simulated, lambda take: take(), self.scores(0))
        plgpu.barrier_arrive(self.shared.k_empty.at[self.slot(0)])
        pl.when(self.work.number > 0)(lambda: give_back(self.shared.q_empty, self.wg, self.work.number - 1))
        p, _, maximum, total = self.softmax(scores, 0, state)
        plgpu.barrier_wait(self.shared.v_full.at[self.slot(0)])
        return p.astype(self.shared.v.dtype), Softmax(state.o, maximum, total)

    def last_values(self, step: Array, p: Array, o: Array) -> Array:
        slot = self.slot(step)
        o = multiply(self.plan.simulated, lambda take: take(), (o, p, self.shared.v.at[slot]))
        plgpu.barrier_arrive(self.shared.v_empty.at[slot])
        return o

    def step(self, step: Array, p: Array, state: Softmax) -> tuple[Array, Softmax]:
        """The scores of this step; beside its exponentials, the product of those of the step before with their values."""
        shared, before = self.shared, self.slot(step - 1)

        def body(take):
            scores = take()
            plgpu.barrier_arrive(shared.k_empty.at[self.slot(step)])
            p_next, alpha, maximum, total = lax.optimization_barrier(self.softmax(scores, step, state))
            plgpu.barrier_wait(shared.v_full.at[self.slot(step)])  # nothing above moves below it, nor the next wait above
            o = take()
            p_next, o = lax.optimization_barrier((p_next, o))  # p's registers are the product's until here
            plgpu.barrier_arrive(shared.v_empty.at[before])
            return p_next.astype(p.dtype), Softmax(o * spread(alpha, o.shape, 0), maximum, total)

        scores = self.scores(step)
        return multiply(self.plan.simulated, body, scores, (state.o, p, shared.v.at[before]))

    def softmax(self, scores: Array, step: Array, state: Softmax) -> tuple[Array, Array, Array, Array]:
        """The block's exponentials, what earlier sums are to be multiplied by, the maxima and the sums of exponentials."""
        scores, scale = self.masked(scores, self.begin + step * self.plan.tiles.keys), self.plan.scale
        maximum = jnp.maximum(state.maximum, scores.max(axis=1) * scale)
        alpha = jnp.exp2(state.maximum - maximum)
        p = jnp.exp2(scores * scale - spread(maximum, scores.shape, 0))
        return p, alpha, maximum, state.total * alpha + p.sum(axis=1)

    def masked(self, scores: Array, key: Array) -> Array:
        """-inf for keys of other segments and behind the query, in blocks (from `key` on) that have any."""

        def mask(scores):
            rows, columns = indices(scores.shape)
            seen = (spread(self.first - key, scores.shape, 0) <= columns) & (columns <= rows + (self.row - key))
            return jnp.where(seen, scores, -jnp.inf)

        return lax.cond((key < self.clear) | (key + self.plan.tiles.keys > self.row + 1), mask, lambda scores: scores, scores)
