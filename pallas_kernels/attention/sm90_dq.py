"""Packed causal attention on Hopper: the gradient of queries.

Persistent blocks of threads; each takes 128 queries of a head at a time, 64 for each of its two consumers, and walks the keys
they see, as the forward does. With P = exp(S - lse) from the forward's logarithms, dP = dO V^T, dS = P (dP - delta) and
dQ = dS K, delta = rowsum(dO O) (Dao et al., 2022, algorithm 4). The tensor cores multiply dS of a block by its keys while that
of the next is computed.
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


class Tiles(NamedTuple):
    """How it is cut up."""

    keys: int = 64  # of a step
    k_stages: int = 3
    v_stages: int = 2
    pairs: bool = False  # blocks of threads with two heads of a group share keys and values
    heads_first: bool = False  # all heads of a block of queries before the next block


class Plan(NamedTuple):
    """All that is static in the kernel."""

    tiles: Tiles
    walks: int
    heads: int  # or pairs of them
    group: int  # query heads of a KV head
    blocks: int  # of threads
    scale: float
    simulated: bool


class Shared(NamedTuple):
    q: jax.Ref  # and dq on its way out
    do: jax.Ref
    lse: jax.Ref
    delta: jax.Ref
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


def gradient(
    q: Array, k: Array, v: Array, do: Array, lse: Array, delta: Array, segments: Segments, scale: float, tiles: Tiles,
    interpret=None,
) -> Array:  # fmt: skip
    """dq [N, H, d] from q and do [N, H, d], k and v [N, K, d], the forward's lse, in base 2, and delta [H, N] float32."""
    walks, group = key_walks(segments.first, BLOCK, tiles.keys), q.shape[1] // k.shape[1]
    tiles = tiles._replace(pairs=tiles.pairs and group % 2 == 0)
    heads = q.shape[1] // (2 if tiles.pairs else 1)
    make = functools.partial(Plan, tiles, len(walks), heads, group, scale=scale, simulated=interpret is not None)
    args = q, k, v, do, lse, delta, segments.first, walks
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return launch(_kernel, make, like, _shared_memory(tiles, q), len(walks) * heads, interpret, tiles.pairs)(*args)


def _shared_memory(tiles: Tiles, q: Array) -> Shared:
    memory = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=swizzled(q.dtype))
    slots, d, barrier = BUFFERS * CONSUMERS, q.shape[-1], plgpu.Barrier
    mine, vectors = memory((slots, ROWS, d)), plgpu.SMEM((slots, ROWS), F32)
    shared_by = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",)) if tiles.pairs else barrier
    full, empty = barrier, functools.partial(shared_by, num_arrivals=CONSUMERS)
    return Shared(
        q=mine, do=mine, lse=vectors, delta=vectors,
        first=plgpu.SMEM((slots, ROWS), jnp.int32), walk=plgpu.SMEM((slots, WALK), jnp.int32),
        k=memory((tiles.k_stages, tiles.keys, d)), v=memory((tiles.v_stages, tiles.keys, d)),
        q_full=barrier(num_arrivals=6, num_barriers=slots), q_empty=barrier(num_barriers=slots),
        k_full=full(num_barriers=tiles.k_stages), k_empty=empty(num_barriers=tiles.k_stages),
        v_full=full(num_barriers=tiles.v_stages), v_empty=empty(num_barriers=tiles.v_stages),
    )  # fmt: skip


def _kernel(plan: Plan, q, k, v, do, lse, delta, first, walks, dq, *shared) -> None:
    shared = Shared(*shared)
    each = functools.partial(for_each, plan.walks, plan.heads, plan.blocks, plan.tiles.heads_first)

    def consume(wg):
        works, _ = each(lambda work: _consume(plan, wg, work, dq, shared))
        give_back(shared.q_empty, wg, works - 1)
        plgpu.wait_smem_to_gmem(0)

    specialise(CONSUMERS, REGISTERS, lambda: _produce(plan, each, (q, k, v, do, lse, delta, first, walks), shared), consume)


def _produce(plan: Plan, each, operands, shared: Shared) -> None:
    """Copy queries for the work to come, then block after block of keys and values, as room is made for them."""
    q, k, v, do, lse, delta, first, walks = operands
    tiles, copy = plan.tiles, plgpu.copy_gmem_to_smem
    share = dict(collective_axes="cluster") if tiles.pairs else {}

    def one(work: Work) -> Array:
        query_head = head_of(work, tiles.pairs)
        block, begin, steps = (walks[work.walk, i] for i in (0, 1, 3))
        for i in range(CONSUMERS):
            slot, rows = slot_of(work.number, BUFFERS) * CONSUMERS + i, pl.ds(block * BLOCK + i * ROWS, ROWS)
            full = shared.q_full.at[slot]
            pl.when(work.number >= BUFFERS)(lambda slot=slot: plgpu.barrier_wait(shared.q_empty.at[slot]))
            copy(q.at[rows, query_head], shared.q.at[slot], full)
            copy(do.at[rows, query_head], shared.do.at[slot], full)
            copy(lse.at[query_head, rows], shared.lse.at[slot], full)
            copy(delta.at[query_head, rows], shared.delta.at[slot], full)
            copy(first.at[rows], shared.first.at[slot], full)
            copy(walks.at[work.walk], shared.walk.at[slot], full)
        chunk = lax.div(begin, jnp.int32(COPIED))  # so that what follows is seen to be a multiple

        @pl.loop(0, steps)
        def _(step):
            count, keys = work.before + step, pl.ds((chunk + step * (tiles.keys // COPIED)) * COPIED, tiles.keys)
            head = lax.div(query_head, jnp.int32(plan.group))
            for ref, ring, full, empty, stages in (
                (k, shared.k, shared.k_full, shared.k_empty, tiles.k_stages),
                (v, shared.v, shared.v_full, shared.v_empty, tiles.v_stages),
            ):
                slot = slot_of(count, stages)
                pl.when(count >= stages)(lambda empty=empty, slot=slot: plgpu.barrier_wait(empty.at[slot]))
                copy(ref.at[keys, head], ring.at[slot], full.at[slot], **share)

        return steps

    works, steps = each(one)
    drain(steps, tiles.k_stages, shared.k_empty)
    drain(steps, tiles.v_stages, shared.v_empty)
    drain(works * CONSUMERS, BUFFERS * CONSUMERS, shared.q_empty)


def _consume(plan: Plan, wg: Array, work: Work, dq, shared: Shared) -> Array:
    """The gradient of this warpgroup's 64 queries, stored; -> the number of steps."""
    slot = slot_of(work.number, BUFFERS) * CONSUMERS + wg
    plgpu.barrier_wait(shared.q_full.at[slot])
    block, begin, clear, steps = (shared.walk[slot, i] for i in range(4))
    lse, delta, first = (plgpu.load(x.at[slot], layout=ROW, optimized=False) for x in (shared.lse, shared.delta, shared.first))
    row = block * BLOCK + wg * ROWS
    me = Consumer(plan, work, slot, row, begin, clear, steps, lse, delta, first, shared)
    total = me.walk()
    shared.q[slot] = (total * plan.scale).astype(dq.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared.q.at[slot], dq.at[pl.ds(row, ROWS), head_of(work, plan.tiles.pairs)])
    return steps


class Consumer(NamedTuple):
    """One warpgroup's view of one walk."""

    plan: Plan
    work: Work
    queries: Array  # their slot
    row: Array  # the first of them
    begin: Array
    clear: Array
    steps: Array
    lse: Array
    delta: Array
    first: Array
    shared: Shared

    def k_slot(self, step: Array) -> Array:
        return slot_of(self.work.before + step, self.plan.tiles.k_stages)

    def v_slot(self, step: Array) -> Array:
        return slot_of(self.work.before + step, self.plan.tiles.v_stages)

    def walk(self) -> Array:
        self.k_arrived(0), self.v_arrived(0)
        (ds,) = self.differences(0)
        wg = lax.rem(self.queries, jnp.int32(CONSUMERS))
        pl.when(self.work.number > 0)(lambda: give_back(self.shared.q_empty, wg, self.work.number - 1))
        ds, total = lax.fori_loop(1, self.steps, self.step, (ds, nothing(self.shared.q.shape[-1])))
        last = self.k_slot(self.steps - 1)
        total = multiply(self.plan.simulated, lambda take: take(), (total, ds, self.shared.k.at[last]))
        plgpu.barrier_arrive(self.shared.k_empty.at[last])
        return total

    def step(self, step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """dS of this step, and beside it the product of that of the step before with its keys."""
        ds, total = carry
        before = self.k_slot(step - 1)
        ds, total = self.differences(step, (total, ds, self.shared.k.at[before]))
        plgpu.barrier_arrive(self.shared.k_empty.at[before])
        return ds, total

    def k_arrived(self, step: Array) -> None:
        pl.when(step < self.steps)(lambda: plgpu.barrier_wait(self.shared.k_full.at[self.k_slot(step)]))

    def v_arrived(self, step: Array) -> None:
        pl.when(step < self.steps)(lambda: plgpu.barrier_wait(self.shared.v_full.at[self.v_slot(step)]))

    def differences(self, step: Array, *more) -> tuple[Array, ...]:
        """dS [queries, keys] of a step; and another product, computed beside it."""
        shared, v_slot = self.shared, self.v_slot(step)

        def body(take):
            p = lax.optimization_barrier(self.probabilities(take(), self.begin + step * self.plan.tiles.keys))
            self.k_arrived(step + 1)  # what is above such a wait stays above, and the next product's wait below
            dp = take()
            plgpu.barrier_arrive(shared.v_empty.at[v_slot])
            ds = lax.optimization_barrier(p * (dp - spread(self.delta, dp.shape, 0)))
            self.v_arrived(step + 1)
            ds, *rest = lax.optimization_barrier((ds, *(take() for _ in more)))  # in the other product's registers from here on
            return ds.astype(shared.q.dtype), *rest

        k, v = (ring.transpose((1, 0)) for ring in (shared.k.at[self.k_slot(step)], shared.v.at[v_slot]))
        q, do = shared.q.at[self.queries], shared.do.at[self.queries]
        return multiply(self.plan.simulated, body, (None, q, k), (None, do, v), *more)

    def probabilities(self, scores: Array, key: Array) -> Array:
        """[queries, keys]; 0 for keys of other segments and behind the query, in blocks (from `key` on) that have any."""

        def mask(scores):
            queries, keys = indices(scores.shape)
            seen = (spread(self.first - key, scores.shape, 0) <= keys) & (keys <= queries + (self.row - key))
            return jnp.where(seen, scores, -jnp.inf)

        border = (key < self.clear) | (key + self.plan.tiles.keys > self.row + 1)
        scores = lax.cond(border, mask, lambda scores: scores, scores)
        return jnp.exp2(scores * (self.plan.scale * LOG2E) - spread(self.lse, scores.shape, 0))
