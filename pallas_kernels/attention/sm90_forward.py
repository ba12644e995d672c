"""Packed causal attention on Hopper, forward: FlashAttention-3's schedule (Shah et al., 2024) over ranges of
keys.

Blocks of queries walk over the keys they see (`queries.py`), a block of keys in each step. The timeline of a
consumer, for step i of a walk:

    tensor cores |  scores of i   |  P V of i-1                                |              | scores of i+1
    threads      |                |  release K of i; exponentials P of i,      |  release V   |
                 |                |  maxima and sums; wait for K of i+1        |  of i-1      |

The product of the last step, and the store of o, hide behind the first scores of the next walk (`end`).

Scores are kept in units of log 2, so that the scale, the change of base and the maximum are one fused
multiply-add.
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
from pallas_kernels.plgpu_compat import ROW, Index, Ref, plgpu, spread

TILES = {  # by head size
    64: Tiles(keys=128, k_stages=2, v_stages=2),
    128: Tiles(keys=128, k_stages=2, v_stages=2),
    256: Tiles(keys=64, k_stages=2, v_stages=2, buffers=1),
}
# log2 of the factor of exponentials before they are rounded to E4M3, as in FlashAttention 3
E4M3_SHIFT = 8
LOWEST = -1e30  # the maximum of an empty set of scores: finite, so that -inf minus it is not NaN
no_derivative = forward_only(
    "pallas_kernels.attention.api.attention has a first derivative, by reverse mode, and no other")


class Shared(NamedTuple):
    q: Ref  # and o on its way out
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
@functools.partial(jax.jit, static_argnames=("scale", "fp8", "tiles", "interpret"))
def forward(
    q: Array, k: Array, v: Array, tables: Tables, *, scale: float, fp8: bool, tiles: Tiles | None,
    interpret=None
) -> tuple[Array, Array]:
    """q [N, H, d], k and v [N, K, d] -> o [N, H, d], and log2 of the sums of exponentials, [H, N] float32.

    N is a multiple of 128, d a key of TILES; k and v are finite. Padding gets o = 0 and +inf; a query whose
    `first` is BAD gets NaN. `fp8`: exponentials enter their product as E4M3.
    """
    n, heads, d = q.shape
    tiles = (tiles or TILES[d]).of(heads // k.shape[1])
    out = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((heads, n), F32)
    shared = Shared(**queries.shared_memory(tiles, d, q.dtype, copies=3))
    return queries.kernel(functools.partial(_forward, fp8), tiles, tables, q, k, scale * LOG2E, out, shared,
                          interpret)(q, k, v)


def _forward(fp8: bool, plan: Plan, q, k, v, first, walks, o, lse, *shared) -> None:
    shared = Shared(*shared)

    def consume(wg):
        if plan.tiles.buffers == 1:
            plan.deal.for_each(lambda work: _consume_alone(plan, fp8, wg, work, o, lse, shared))
        else:
            works = _consume(plan, fp8, wg, o, lse, shared)
            give_back(shared.q_empty, buffer_of(works - 1, plan.tiles.buffers, wg))
        plgpu.wait_smem_to_gmem(0)

    def produce():
        queries.produce(plan, [(q, shared.q)], [], k, v, first, walks, shared)

    specialise(CONSUMERS, REGISTERS, produce, consume)


class Softmax(NamedTuple):
    """The running state of 64 queries: o [64, d] not yet divided by the sums [64], and the maxima [64]."""

    o: Array
    maximum: Array
    total: Array


class Begun(NamedTuple):
    """A walk whose first step is in progress."""

    work: Work
    walk: Walk
    p: Array  # exponentials of that step, not yet used in a product
    softmax: Softmax


def _consume(plan: Plan, fp8: bool, wg: Array, o, lse, shared: Shared) -> Array:
    """Do all work of this warpgroup, 64 queries at a time. Returns the number of work units."""
    deal, count = plan.deal, plan.deal.own_count()

    def consumer(number: Array, before: Array) -> Consumer:
        work = deal.work(number, before)
        return Consumer(plan, fp8, wg, work, queries.arrived(plan, wg, work, shared, number < count), shared)

    def one(number: Array, begun: Begun) -> Begun:
        me = Consumer(plan, fp8, wg, begun.work, begun.walk, shared)
        p, softmax = lax.fori_loop(1, me.walk.steps, me.step, (begun.p, begun.softmax))
        following = consumer(number + 1, me.work.before + me.walk.steps)
        p, softmax = me.end(p, softmax, following, number + 1 < count, o, lse)
        return Begun(following.work, following.walk, p, softmax)

    first = consumer(jnp.int32(0), jnp.int32(0))
    p, softmax = first.begin()
    lax.fori_loop(0, count, one, Begun(first.work, first.walk, p, softmax))
    return count


def _consume_alone(plan: Plan, fp8: bool, wg: Array, work: Work, o, lse, shared: Shared) -> Array:
    """Do one work unit, from the first step to the store. Returns the number of steps. Nothing overlaps with
    the scores of the next queries, which have no buffer yet."""
    me = Consumer(plan, fp8, wg, work, queries.arrived(plan, wg, work, shared), shared)
    p, state = lax.fori_loop(1, me.walk.steps, me.step, me.begin())
    last = me.walk.steps - 1
    total = multiply(plan.simulated, lambda take: take(), me.values(last, p, state.o))
    plgpu.barrier_arrive(shared.v_empty.at[me.v_slot(last)])
    me.store(state._replace(o=total), o, lse)
    give_back(shared.q_empty, me.walk.slot)
    return me.walk.steps


class Consumer(NamedTuple):
    """One warpgroup's view of one walk."""

    plan: Plan
    fp8: bool
    wg: Array
    work: Work
    walk: Walk
    shared: Shared

    def k_slot(self, step: Index) -> Array:
        return slot_of(self.work.before + step, self.plan.tiles.k_stages)

    def v_slot(self, step: Index) -> Array:
        return slot_of(self.work.before + step, self.plan.tiles.v_stages)

    def keys_arrived(self, step: Index) -> None:
        pl.when(step < self.walk.steps)(lambda: plgpu.barrier_wait(self.shared.k_full.at[self.k_slot(step)]))

    def scores(self, step: Index):
        """The operands of the product for a step's scores."""
        return None, self.shared.q.at[self.walk.slot], self.shared.k.at[self.k_slot(step)].transpose((1, 0))

    def values(self, step: Index, p: Array, o: Array):
        """The operands of the product that is added to o, once the values of a step have arrived."""
        slot = self.v_slot(step)
        plgpu.barrier_wait(self.shared.v_full.at[slot])
        return o, p, self.shared.v.at[slot]

    def begin(self) -> tuple[Array, Softmax]:
        """The exponentials of the first step of the first work."""
        self.keys_arrived(0)
        scores = multiply(self.plan.simulated, lambda take: take(), self.scores(0))
        plgpu.barrier_arrive(self.shared.k_empty.at[self.k_slot(0)])
        return self.first(scores)

    def end(self, p: Array, state: Softmax, following: Consumer, more: Array, o,
            lse) -> tuple[Array, Softmax]:
        """Add the values of the last step and store the result, while the tensor cores compute the scores of
        the next work's first step. Returns the exponentials of that step and their state."""
        shared, last = self.shared, self.v_slot(self.walk.steps - 1)
        pl.when(more)(lambda: following.keys_arrived(0))

        def body(take):
            total = take()
            plgpu.barrier_arrive(shared.v_empty.at[last])
            self.store(state._replace(o=total), o, lse)
            scores = take()
            pl.when(more)(lambda: plgpu.barrier_arrive(shared.k_empty.at[following.k_slot(0)]))
            return scores

        scores = multiply(self.plan.simulated, body, self.values(self.walk.steps - 1, p, state.o),
                          following.scores(0))
        made = following.first(scores, more)
        pl.when(more)(lambda: give_back(shared.q_empty, self.walk.slot))
        return made

    def first(self, scores: Array, more: Array | bool = True) -> tuple[Array, Softmax]:
        maximum, total = (plgpu.layout_cast(jnp.full((ROWS,), x, F32), ROW) for x in (LOWEST, 0.0))
        o = nothing(self.shared.q.shape[-1])
        p, _, maximum, total = self.softmax(scores, 0, Softmax(o, maximum, total))
        pl.when(more)(lambda: self.keys_arrived(1))
        return p.astype(self.shared.v.dtype), Softmax(o, maximum, total)

    def store(self, state: Softmax, o, lse) -> None:
        walk, shape = self.walk, state.o.shape
        real = walk.first <= rows() + walk.row
        inverse = jnp.where(real, 1.0 / state.total, 0.0)
        other = jnp.where(walk.first == queries.BAD, jnp.nan, 0.0)
        result = jnp.where(spread(real, shape, 0), state.o * spread(inverse, shape, 0),
                           spread(other, shape, 0))
        self.shared.q[walk.slot] = result.astype(self.shared.q.dtype)
        plgpu.commit_smem()
        mine = pl.ds(self.plan.row(walk.block, self.wg), ROWS)  # visibly a multiple of ROWS, unlike walk.row
        plgpu.copy_smem_to_gmem(self.shared.q.at[walk.slot], o.at[mine, walk.head])
        shift = E4M3_SHIFT if self.fp8 else 0
        lse[walk.head, mine] = jnp.where(real, state.maximum - shift + jnp.log(state.total) * LOG2E,
                                         other + jnp.inf)

    def step(self, step: Index, carry: tuple[Array, Softmax]) -> tuple[Array, Softmax]:
        """The scores of this step and, beside its exponentials, the product of the previous step's
        exponentials with their values."""
        (p, state), shared = carry, self.shared

        def body(take):
            scores = take()
            plgpu.barrier_arrive(shared.k_empty.at[self.k_slot(step)])
            p_next, alpha, maximum, total = lax.optimization_barrier(self.softmax(scores, step, state))
            # a barrier to reordering: code above this wait stays above it, and the following wait below
            self.keys_arrived(step + 1)
            o = take()
            p_next, o = lax.optimization_barrier((p_next, o))  # until here the product uses p's registers
            plgpu.barrier_arrive(shared.v_empty.at[self.v_slot(step - 1)])
            return p_next.astype(p.dtype), Softmax(o * spread(alpha, o.shape, 0), maximum, total)

        return multiply(self.plan.simulated, body, self.scores(step), self.values(step - 1, p, state.o))

    def softmax(self, scores: Array, step: Index, state: Softmax) -> tuple[Array, Array, Array, Array]:
        """The block's exponentials, the factor of earlier sums, the maxima, and the sums of exponentials."""
        scores, scale = queries.masked(scores, self.walk, step, -jnp.inf), self.plan.scale
        maximum = jnp.maximum(state.maximum, scores.max(axis=1) * scale)
        alpha = jnp.exp2(state.maximum - maximum)
        p = jnp.exp2(scores * scale - spread(maximum - E4M3_SHIFT if self.fp8 else maximum, scores.shape, 0))
        total = state.total * alpha + p.sum(axis=1)
        return p.astype(jnp.float8_e4m3fn).astype(F32) if self.fp8 else p, alpha, maximum, total
