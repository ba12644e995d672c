"""What the kernels of attention share: walks dealt out to blocks of threads, a warp that copies, and products
in flight."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.segments import STEP
from pallas_kernels.persistent import slot_of
from pallas_kernels.plgpu_compat import ROW, WGMMA, multiprocessors, plgpu, spread

F32 = jnp.float32
ROWS = 64  # of one tensor-core instruction: queries or keys of a consumer
CONSUMERS = 2  # warpgroups that compute
BLOCK = CONSUMERS * ROWS  # of queries or keys, that a block of threads has at a time
REGISTERS = 240, 24  # a thread of a consumer, of the producer's
COLUMNS = 8  # of scores that are masked at a time
LOG2E = math.log2(math.e)
Seen = Callable[[int], Array]  # of the first of COLUMNS columns: bool [64, COLUMNS]


class Work(NamedTuple):
    """The next of a block of threads: a walk and a head, its number here, and how many steps came before."""

    walk: Array
    head: Array
    number: Array
    before: Array


class Deal(NamedTuple):
    """How work is shared out: walks come longest first, all heads of one before the next, dealt there and
    back over blocks of threads, so that all get nearly as many steps."""

    walks: int
    heads: int
    blocks: int

    def work(self, number: Array, before: Array) -> Work:
        place, heads = self._place(number), jnp.int32(self.heads)
        return Work(lax.div(place, heads), lax.rem(place, heads), number, before)

    def own_count(self) -> Array:
        """How much work this block of threads has."""
        total = self.walks * self.heads
        rounds = pl.cdiv(total, self.blocks)
        return rounds - (self._place(jnp.int32(rounds - 1)) >= total).astype(jnp.int32)

    def _place(self, number: Array) -> Array:
        me = lax.axis_index("block")
        return number * self.blocks + jnp.where(lax.rem(number, jnp.int32(2)) == 0, me, self.blocks - 1 - me)

    def for_each(self, body: Callable[[Work], Array]) -> tuple[Array, Array]:
        """body(work) -> its steps, for all work of this block of threads -> how many there were, of work and
        of steps."""
        count = self.own_count()
        return count, lax.fori_loop(0, count, lambda i, before: before + body(self.work(i, before)),
                                    jnp.int32(0))


def launch(body, plan: Callable, out_type, scratch, works: int, interpret) -> Callable:
    """The persistent kernel body(plan(blocks=...), *operands, *results, *scratch)."""
    blocks = min(2 if interpret else multiprocessors(), works)
    return plgpu.kernel(
        functools.partial(body, plan(blocks=blocks)), out_type=out_type, scratch_types=scratch,
        interpret=interpret,
        grid=(blocks,), grid_names=("block",), num_threads=CONSUMERS + 1, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


def steps_of(walk: Array, size: int) -> Array:
    """Of a walk in steps of STEP, in steps of `size`."""
    return lax.div(walk + (size // STEP - 1), jnp.int32(size // STEP))


def buffer_of(number: Array, buffers: int, wg: Array | int) -> Array:
    """Of a consumer, for its work of that number."""
    return slot_of(number, buffers) * CONSUMERS + wg


def give_back(empty, slot: Array) -> None:
    """A buffer, when the results that were put there have left."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(empty.at[slot])


def nothing(d: int) -> Array:
    return plgpu.layout_cast(jnp.zeros((ROWS, d), F32), WGMMA)


def rows() -> Array:
    """Of a consumer: [64]."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)


def keep(some: Array, x: Array, seen: Callable[[], Seen], other: float) -> Array:
    """`other` where seen() is false, which is asked only if `some` says that it is anywhere."""

    def mask() -> Array:
        where, columns = seen(), range(0, x.shape[1], COLUMNS)
        return jnp.concatenate([jnp.where(where(at), x[:, at : at + COLUMNS], other) for at in columns], 1)

    return lax.cond(some, mask, lambda: x)


def since(first: Array) -> Seen:
    """Of each row, columns from `first` [64] on."""
    ahead = _from_column(first)
    return lambda at: ahead <= at


def up_to(last: Array) -> Seen:
    """Of each row, columns up to `last` [64]."""
    ahead = _from_column(last)
    return lambda at: ahead >= at


def _from_column(vector: Array) -> Array:
    """How far [64] is from the first COLUMNS columns: [64, COLUMNS]. What that is compared with is then known
    to the compiler; an index made of every element instead took more instructions, and registers that there
    were not."""
    shape = ROWS, COLUMNS
    return spread(vector, shape, 0) - plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)


def drain(used: Array, slots: int, *empty) -> None:
    """Wait for what has been given back last: no barrier may be left with a phase that nobody waited for."""

    @pl.loop(lax.max(used - slots, 0), used)
    def _(i):
        for barrier in empty:
            plgpu.barrier_wait(barrier.at[slot_of(i, slots)])
