"""Packed causal attention on Hopper: the gradient of queries.

Blocks of queries walk over the keys they see, as the forward's do (`queries.py`). With P = exp(S - lse) from
the forward's logarithms, dP = dO V^T, dS = P (dP - delta) and dQ = dS K, delta = rowsum(dO O) (Dao et al.,
2022, algorithm 4). The timeline of a consumer, for step i of a walk over blocks of keys:

    tensor cores |  Q K^T of i  |  dO V^T of i                     |  dS K of i-1               |  Q K^T of i+1
    threads      |              |  P of i; wait for K of i+1       |  dS of i; wait for V of    |  release K
                 |              |                                  |  i+1 (V of i is released)  |  of i-1
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention import queries
from pallas_kernels.attention.queries import Plan, Tiles, Walk
from pallas_kernels.attention.schedule import (
    CONSUMERS,
    F32,
    LOG2E,
    REGISTERS,
    ROWS,
    Work,
    buffer_of,
    give_back,
    nothing,
    rows,
)
from pallas_kernels.attention.segments import Tables
from pallas_kernels.forward_only import forward_only
from pallas_kernels.in_flight import multiply
from pallas_kernels.persistent import slot_of, specialise
from pallas_kernels.plgpu_compat import ROW, WGMMA, Index, Ref, plgpu, spread, swizzled

TILES = {  # by head size
    64: Tiles(keys=64, k_stages=3, v_stages=2),
    128: Tiles(keys=64, k_stages=3, v_stages=2),
    256: Tiles(keys=64, k_stages=2, v_stages=1, buffers=1),
}
no_derivative = forward_only(
    "pallas_kernels.attention.api.attention has a first derivative, by reverse mode, and no other")


class Shared(NamedTuple):
    q: Ref  # and dq on its way out
    do: Ref
    vectors: Ref  # lse, and delta
    seen: Ref  # the first key of each query, then the walk
    k: Ref
    v: Ref
    q_full: Ref
    q_empty: Ref
    k_full: Ref
    k_empty: Ref
    v_full: Ref
    v_empty: Ref


@no_derivative
@functools.partial(jax.jit, static_argnames=("scale", "tiles", "interpret"))
def gradient(
    q: Array, k: Array, v: Array, do: Array, lse: Array, delta: Array, tables: Tables, *, scale: float,
    tiles: Tiles | None, interpret=None,
) -> Array:
    """dq [N, H, d] from q and do [N, H, d], k and v [N, K, d], the forward's lse, in base 2, and delta [H, N]
    float32."""
    tiles = (tiles or TILES[q.shape[-1]]).of(q.shape[1] // k.shape[1])
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return queries.kernel(_kernel, tiles, tables, q, k, scale, like, _shared_memory(tiles, q), interpret)(
        q, k, v, do, lse, delta
    )


def _shared_memory(tiles: Tiles, q: Array) -> Shared:
    slots, d = tiles.buffers * CONSUMERS, q.shape[-1]
    do = plgpu.SMEM((slots, ROWS, d), q.dtype, transforms=swizzled(q.dtype))
    vectors = plgpu.SMEM((2, slots, ROWS), F32)
    return Shared(do=do, vectors=vectors, **queries.shared_memory(tiles, d, q.dtype, copies=6))


def _kernel(plan: Plan, q, k, v, do, lse, delta, first, walks, dq, *shared) -> None:
    shared, plan = Shared(*shared), plan._replace(limits=first)

    def consume(wg):
        works, _ = plan.deal.for_each(lambda work: _consume(plan, wg, work, dq, shared))
        if plan.tiles.buffers > 1:
            give_back(shared.q_empty, buffer_of(works - 1, plan.tiles.buffers, wg))
        plgpu.wait_smem_to_gmem(0)

    def produce():
        matrices, vectors = [(q, shared.q), (do, shared.do)], [(lse, shared.vectors.at[0]),
                                                               (delta, shared.vectors.at[1])]
        queries.produce(plan, matrices, vectors, k, v, first, walks, shared)

    specialise(CONSUMERS, REGISTERS, produce, consume)


def _consume(plan: Plan, wg: Array, work: Work, dq, shared: Shared) -> Array:
    """Store the gradient of this warpgroup's 64 queries. Returns the number of steps."""
    walk = queries.arrived(plan, wg, work, shared)
    lse, delta = (plgpu.load(shared.vectors.at[i, walk.slot], layout=ROW, optimized=False) for i in (0, 1))
    # Queries are held in registers if enough are free: products of 64 keys already use the full bandwidth of
    # shared memory.
    q = shared.q.at[walk.slot]
    q = q if q.shape[-1] == 256 else plgpu.load(q, layout=WGMMA)
    total = Consumer(plan, wg, work, walk, q, lse, delta, shared).sum()
    real = spread(walk.first <= rows() + walk.row, total.shape, 0)
    shared.q[walk.slot] = jnp.where(real, total * plan.scale, 0.0).astype(dq.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared.q.at[walk.slot], dq.at[pl.ds(walk.row, ROWS), walk.head])
    if plan.tiles.buffers == 1:
        give_back(shared.q_empty, walk.slot)
    return walk.steps


class Consumer(NamedTuple):
    """One warpgroup's view of one walk."""

    plan: Plan
    wg: Array
    work: Work
    walk: Walk
    q: Array | Ref
    lse: Array
    delta: Array
    shared: Shared

    def k_slot(self, step: Index) -> Array:
        return slot_of(self.work.before + step, self.plan.tiles.k_stages)

    def v_slot(self, step: Index) -> Array:
        return slot_of(self.work.before + step, self.plan.tiles.v_stages)

    @property
    def ahead(self) -> bool:
        """Whether a step's scores are computed beside the previous step's product with its keys. A third
        block of keys is then in flight, for which there is no room with heads of 256."""
        return self.plan.tiles.k_stages > 2

    def give_back_last(self) -> None:
        """Give back the buffer of the previous work, unless it was given back at once."""
        if self.plan.tiles.buffers > 1:
            before = buffer_of(self.work.number - 1, self.plan.tiles.buffers, self.wg)
            pl.when(self.work.number > 0)(lambda: give_back(self.shared.q_empty, before))

    def sum_in_turn(self) -> Array:
        """`sum`, one step after the other: the other consumer's products hide the exponentials."""

        def step(step: Index, total: Array) -> Array:
            one = functools.partial(multiply, self.plan.simulated, lambda take: take())
            k, v = self.shared.k.at[self.k_slot(step)], self.shared.v.at[self.v_slot(step)]
            self.k_arrived(step)
            p = lax.optimization_barrier(self.probabilities(one((None, self.q, k.transpose((1, 0)))), step))
            self.v_arrived(step)
            dp = one((None, self.shared.do.at[self.walk.slot], v.transpose((1, 0))))
            plgpu.barrier_arrive(self.shared.v_empty.at[self.v_slot(step)])
            ds = (p * (dp - spread(self.delta, dp.shape, 0))).astype(self.shared.q.dtype)
            total = one((total, ds, k))
            plgpu.barrier_arrive(self.shared.k_empty.at[self.k_slot(step)])
            return total

        self.give_back_last()
        return lax.fori_loop(0, self.walk.steps, step, nothing(self.shared.q.shape[-1]))

    def sum(self) -> Array:
        if not self.ahead:
            return self.sum_in_turn()
        self.k_arrived(0), self.v_arrived(0)
        (ds,) = self.differences(0)
        self.give_back_last()
        ds, total = lax.fori_loop(1, self.walk.steps, self.step, (ds, nothing(self.shared.q.shape[-1])))
        last = self.k_slot(self.walk.steps - 1)
        total = multiply(self.plan.simulated, lambda take: take(), (total, ds, self.shared.k.at[last]))
        plgpu.barrier_arrive(self.shared.k_empty.at[last])
        return total

    def step(self, step: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """dS of this step and, beside it, the product of the previous step's dS with its keys."""
        ds, total = carry
        before = self.k_slot(step - 1)
        ds, total = self.differences(step, (total, ds, self.shared.k.at[before]))
        plgpu.barrier_arrive(self.shared.k_empty.at[before])
        return ds, total

    def k_arrived(self, step: Index) -> None:
        pl.when(step < self.walk.steps)(lambda: plgpu.barrier_wait(self.shared.k_full.at[self.k_slot(step)]))

    def v_arrived(self, step: Index) -> None:
        pl.when(step < self.walk.steps)(lambda: plgpu.barrier_wait(self.shared.v_full.at[self.v_slot(step)]))

    def differences(self, step: Index, *more) -> tuple[Array, ...]:
        """dS [queries, keys] of a step, and another product that is computed beside it."""
        shared, v_slot = self.shared, self.v_slot(step)

        def body(take):
            p = lax.optimization_barrier(self.probabilities(take(), step))
            # a barrier to reordering: code above this wait stays above it, and the next wait below
            self.k_arrived(step + 1)
            dp = take()
            plgpu.barrier_arrive(shared.v_empty.at[v_slot])
            ds = lax.optimization_barrier(p * (dp - spread(self.delta, dp.shape, 0)))
            self.v_arrived(step + 1)
            # occupies the other product's registers from here on
            ds, *rest = lax.optimization_barrier((ds, *(take() for _ in more)))
            return ds.astype(shared.q.dtype), *rest

        k, v = (ring.transpose((1, 0)) for ring in (shared.k.at[self.k_slot(step)], shared.v.at[v_slot]))
        return multiply(self.plan.simulated, body, (None, self.q, k), (None, shared.do.at[self.walk.slot], v),
                        *more)

    def probabilities(self, scores: Array, step: Index) -> Array:
        """[queries, keys]; 0 for keys that are not seen. The exponentials come before the mask: with the mask
        first, ptxas would postpone them."""
        p = jnp.exp2(scores * (self.plan.scale * LOG2E) - spread(self.lse, scores.shape, 0))
        return queries.masked(self.plan, p, self.walk, step, 0.0)
