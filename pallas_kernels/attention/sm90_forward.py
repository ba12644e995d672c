"""Packed causal attention on Hopper, forward: FlashAttention-3's schedule (Shah et al., 2024) over ranges of
keys.

Blocks of queries walk over the keys they see (`queries.py`), a block of keys in each step. The timeline of a
consumer, for step i of a walk:

    tensor cores |  scores of i   |  P V of i-1                                |              | scores of i+1
    threads      |                |  release K of i; exponentials P of i,      |  release V   |
                 |                |  maxima and sums; wait for K of i+1        |  of i-1      |

The product of the last step, and the store of o, hide behind the first scores of the next walk (`end`).

Scores are kept in units of log 2, so that the scale, the change of base and the maximum are one fused
multiply-add. Each thread sums its own exponentials; the sums of a row's threads are added once per walk.

A masked exponential is 0, but 0 times NaN or infinity is NaN. So a value that is not finite reaches all
queries of a walk, also those that do not see it. The kernel therefore looks at the results of each walk's
first query. If a block of threads finds NaN or infinity there, it does all of its work again with care: see
`repair`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention import queries
from pallas_kernels.attention.queries import Plan, Tiles, Walk
from pallas_kernels.attention.schedule import (
    COLUMNS,
    CONSUMERS,
    F32,
    LOG2E,
    REGISTERS,
    ROWS,
    Deal,
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
from pallas_kernels.plgpu_compat import COLUMN, ROW, WGMMA, Index, Ref, plgpu, spread

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
    sums: Ref  # for each consumer: the sums of the rows of o, over all walks
    done: Ref  # the first attempt is over
    marks: Ref  # with care: NaN for keys whose values are not finite, 0 for others
    repaired: Ref  # with care: the values are finite, and the marks are set


@no_derivative
@functools.partial(jax.jit, static_argnames=("scale", "fp8", "tiles", "interpret"))
def forward(
    q: Array, k: Array, v: Array, tables: Tables, *, scale: float, fp8: bool, tiles: Tiles | None,
    interpret=None
) -> tuple[Array, Array]:
    """q [N, H, d], k and v [N, K, d] -> o [N, H, d], and log2 of the sums of exponentials, [H, N] float32.

    N is a multiple of 128, d a key of TILES. Padding gets o = 0 and +inf. A query gets NaN if one of its
    scores is NaN or +inf, or one of its values is not finite. `fp8`: exponentials enter their product as
    E4M3.
    """
    n, heads, d = q.shape
    tiles = (tiles or TILES[d]).of(heads // k.shape[1])
    out = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((heads, n), F32)
    shared = Shared(
        **queries.shared_memory(tiles, d, q.dtype, copies=3),
        sums=plgpu.SMEM((CONSUMERS, ROWS), F32), done=plgpu.Barrier(num_arrivals=CONSUMERS),
        marks=plgpu.SMEM((tiles.v_stages, tiles.keys), F32),
        repaired=plgpu.Barrier(num_barriers=tiles.v_stages),
    )
    return queries.kernel(functools.partial(_forward, fp8), tiles, tables, q, k, scale * LOG2E, out, shared,
                          interpret)(q, k, v)


def _forward(fp8: bool, plan: Plan, q, k, v, first, walks, o, lse, *shared) -> None:
    shared, plan = Shared(*shared), plan._replace(limits=first)

    def consume(wg):
        shared.sums[wg] = plgpu.layout_cast(jnp.zeros((ROWS,), F32), ROW)
        attempt(wg, False)
        plgpu.barrier_arrive(shared.done)
        pl.when(_spoiled(shared))(lambda: attempt(lax.optimization_barrier(wg), True))

    def attempt(wg, careful):
        def arrived(work: Work, more: Array | bool = True) -> Consumer:
            walk = queries.arrived(plan, wg, work, shared, more)
            return Consumer(plan, fp8, careful, wg, shared, work, walk)

        if careful or plan.tiles.buffers == 1:
            plan.deal.for_each(lambda work: _consume_alone(arrived(work), o, lse))
        else:
            works = _consume(arrived, plan.deal, o, lse)
            give_back(shared.q_empty, buffer_of(works - 1, plan.tiles.buffers, wg))
        plgpu.wait_smem_to_gmem(0)

    def produce():
        queries.produce(plan, [(q, shared.q)], [], k, v, first, walks, shared)

    specialise(CONSUMERS, REGISTERS, produce, consume, again=lambda: _spoiled(shared))


def _spoiled(shared: Shared) -> Array:
    """Whether the first attempt found a result that is not finite. The first row stands for all: each row
    gets every value of its walk, times 0 if masked."""
    plgpu.barrier_wait(shared.done)
    total = shared.sums[0, 0] + shared.sums[1, 0]
    return total - total != 0.0


class Softmax(NamedTuple):
    """The running state of 64 queries: o [64, d] not yet divided by the sums, and the maxima [64]."""

    o: Array
    maximum: Array
    total: Array  # [64, COLUMNS]: the sums of every COLUMNS-th exponential


class Begun(NamedTuple):
    """A walk whose first step is in progress."""

    work: Work
    walk: Walk
    p: Array  # exponentials of that step, not yet used in a product
    softmax: Softmax


def _consume(arrived: Callable[..., Consumer], deal: Deal, o, lse) -> Array:
    """Do all work of this warpgroup, 64 queries at a time. Returns the number of work units."""
    first, count = arrived(deal.work(jnp.int32(0), jnp.int32(0))), deal.own_count()

    def one(number: Array, begun: Begun) -> Begun:
        me, more = first._replace(work=begun.work, walk=begun.walk), number + 1 < count
        p, softmax = lax.fori_loop(1, me.walk.steps, me.step, (begun.p, begun.softmax))
        following = arrived(deal.work(number + 1, me.work.before + me.walk.steps), more)
        p, softmax = me.end(p, softmax, following, more, o, lse)
        return Begun(following.work, following.walk, p, softmax)

    p, softmax = first.begin()
    lax.fori_loop(0, count, one, Begun(first.work, first.walk, p, softmax))
    return count


def _consume_alone(me: Consumer, o, lse) -> Array:
    """Do one work unit, from the first step to the store. Returns the number of steps. Nothing overlaps with
    the scores of the next queries, which have no buffer yet."""
    p, state = lax.fori_loop(1, me.walk.steps, me.step, me.begin())
    last = me.walk.steps - 1
    total = multiply(me.plan.simulated, lambda take: take(), me.values(last, p, state.o))
    plgpu.barrier_arrive(me.shared.v_empty.at[me.v_slot(last)])
    me.store(state._replace(o=total), o, lse)
    give_back(me.shared.q_empty, me.walk.slot)
    return me.walk.steps


class Consumer(NamedTuple):
    """One warpgroup's view of one walk."""

    plan: Plan
    fp8: bool
    careful: bool  # whether this is the attempt with care
    wg: Array
    shared: Shared
    work: Work
    walk: Walk

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
        if not self.careful:  # else `repair` has waited
            plgpu.barrier_wait(self.shared.v_full.at[slot])
        return o, p, self.shared.v.at[slot]

    def repair(self, step: Index) -> None:
        """With care: wait until the values of a step are finite. The first consumer puts 0 in place of others
        and marks their keys, whose scores become NaN."""
        if self.careful:
            slot = self.v_slot(step)
            plgpu.barrier_wait(self.shared.v_full.at[slot])
            pl.when(self.wg == 0)(lambda: self._repair(slot))
            plgpu.barrier_wait(self.shared.repaired.at[slot])

    def _repair(self, slot: Array) -> None:
        values = self.shared.v.at[slot]

        @pl.loop(0, values.shape[0] // ROWS)
        def _(i):
            keys = pl.ds(i * ROWS, ROWS)
            marks = plgpu.layout_cast(jnp.zeros((ROWS,), F32), ROW)
            for part in (values.at[keys, pl.ds(at, ROWS)] for at in range(0, values.shape[1], ROWS)):
                x = plgpu.load(part, layout=WGMMA).astype(F32)
                good = (x > -jnp.inf) & (x < jnp.inf)
                part[...] = jnp.where(good, x, 0.0).astype(values.dtype)
                marks += jnp.where(good, 0.0, jnp.nan).sum(axis=1)
            self.shared.marks[slot, keys] = marks

        plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared.repaired.at[slot])

    def begin(self) -> tuple[Array, Softmax]:
        """The exponentials of the first step of the first work."""
        self.keys_arrived(0)
        self.repair(0)
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
        lowest, o = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, F32), ROW), nothing(self.shared.q.shape[-1])
        p, _, maximum, total = self.softmax(scores, 0, Softmax(o, lowest, nothing(COLUMNS)))
        pl.when(more)(lambda: self.keys_arrived(1))
        return p.astype(self.shared.v.dtype), Softmax(o, maximum, total)

    def store(self, state: Softmax, o, lse) -> None:
        walk, shape, total = self.walk, state.o.shape, state.total.sum(axis=1)
        if not self.careful:
            sums = self.shared.sums.at[self.wg]
            sums[...] = plgpu.load(sums, layout=ROW, optimized=False) + state.o.sum(axis=1)
        real = walk.first <= rows() + walk.row
        result = jnp.where(spread(real, shape, 0), state.o * spread(1.0 / total, shape, 0), 0.0)
        self.shared.q[walk.slot] = result.astype(self.shared.q.dtype)
        plgpu.commit_smem()
        mine = pl.ds(self.plan.row(walk.block, self.wg), ROWS)  # visibly a multiple of ROWS, unlike walk.row
        plgpu.copy_smem_to_gmem(self.shared.q.at[walk.slot], o.at[mine, walk.head])
        shift = E4M3_SHIFT if self.fp8 else 0
        lse[walk.head, mine] = jnp.where(real, state.maximum - shift + jnp.log(total) * LOG2E, jnp.inf)

    def step(self, step: Index, carry: tuple[Array, Softmax]) -> tuple[Array, Softmax]:
        """The scores of this step and, beside its exponentials, the product of the previous step's
        exponentials with their values."""
        (p, state), shared = carry, self.shared
        self.repair(step)

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
        shape, scale = scores.shape, self.plan.scale
        if self.careful:
            marks = plgpu.load(self.shared.marks.at[self.v_slot(step)], layout=COLUMN, optimized=False)
            scores += spread(marks, shape, 1)
        scores = queries.masked(self.plan, scores, self.walk, step, -jnp.inf)
        maximum = jnp.maximum(state.maximum, scores.max(axis=1) * scale)
        alpha = jnp.exp2(state.maximum - maximum)
        p = jnp.exp2(scores * scale - spread(maximum - E4M3_SHIFT if self.fp8 else maximum, shape, 0))
        total = state.total * spread(alpha, (ROWS, COLUMNS), 0)
        for at in range(0, shape[1], COLUMNS):
            total += p[:, at : at + COLUMNS]
        return p.astype(jnp.float8_e4m3fn).astype(F32) if self.fp8 else p, alpha, maximum, total
