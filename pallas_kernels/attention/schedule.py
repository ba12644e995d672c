"""Shared by the attention kernels: the distribution of walks over blocks of threads, the launch, and
masks."""

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
ROWS = 64  # rows of one tensor-core instruction: the queries or keys of a consumer
CONSUMERS = 2  # warpgroups that compute
BLOCK = CONSUMERS * ROWS  # queries or keys that a block of threads processes at a time
REGISTERS = 240, 24  # registers per thread of a consumer, and of the producer
COLUMNS = 8  # columns of scores that are masked at a time
LOG2E = math.log2(math.e)
Seen = Callable[[int], Array]  # maps the first of COLUMNS columns to a mask [64, COLUMNS] bool


class Work(NamedTuple):
    """One unit of work of a block of threads: a walk and a head, its number in the block, and the number of
    steps before it."""

    walk: Array
    head: Array
    number: Array
    before: Array


class Deal(NamedTuple):
    """The distribution of work. Walks come longest first, and all heads of a walk before the next walk. They
    are dealt to the blocks of threads in alternating order, so that all blocks get nearly as many steps."""

    walks: int
    heads: int
    blocks: int

    def work(self, number: Array, before: Array) -> Work:
        place, heads = self._place(number), jnp.int32(self.heads)
        return Work(lax.div(place, heads), lax.rem(place, heads), number, before)

    def own_count(self) -> Array:
        """The number of work units of this block of threads."""
        total = self.walks * self.heads
        rounds = pl.cdiv(total, self.blocks)
        return rounds - (self._place(jnp.int32(rounds - 1)) >= total).astype(jnp.int32)

    def _place(self, number: Array) -> Array:
        me = lax.axis_index("block")
        return number * self.blocks + jnp.where(lax.rem(number, jnp.int32(2)) == 0, me, self.blocks - 1 - me)

    def for_each(self, body: Callable[[Work], Array]) -> tuple[Array, Array]:
        """Run body(work), which returns its number of steps, for all work of this block of threads. Returns
        (number of work units, number of steps)."""
        count = self.own_count()
        return count, lax.fori_loop(0, count, lambda i, before: before + body(self.work(i, before)),
                                    jnp.int32(0))


def launch(body, plan: Callable, out_type, scratch, works: int, interpret) -> Callable:
    """The persistent kernel body(plan(blocks=...), *operands, *results, *scratch), with `works` units of
    work."""
    blocks = min(2 if interpret else multiprocessors(), works)
    return plgpu.kernel(
        functools.partial(body, plan(blocks=blocks)), out_type=out_type, scratch_types=scratch,
        interpret=interpret,
        grid=(blocks,), grid_names=("block",), num_threads=CONSUMERS + 1, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


def steps_of(walk: Array, size: int) -> Array:
    """The number of steps of `size` in a walk that is counted in steps of STEP."""
    return lax.div(walk + (size // STEP - 1), jnp.int32(size // STEP))


def buffer_of(number: Array, buffers: int, wg: Array | int) -> Array:
    """The buffer of consumer `wg` for its work unit `number`."""
    return slot_of(number, buffers) * CONSUMERS + wg


def give_back(empty, slot: Array) -> None:
    """Give a buffer back once the results in it have been copied out."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(empty.at[slot])


def nothing(d: int) -> Array:
    """An accumulator [64, d] of zeros."""
    return plgpu.layout_cast(jnp.zeros((ROWS, d), F32), WGMMA)


def rows() -> Array:
    """The row numbers of a consumer: [64]."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)


def keep(some: Array, x: Array, seen: Callable[[], Seen], other: float) -> Array:
    """x with `other` where seen() is False. The mask is computed only if `some` says that it is False
    anywhere."""

    def mask() -> Array:
        where, columns = seen(), range(0, x.shape[1], COLUMNS)
        return jnp.concatenate([jnp.where(where(at), x[:, at : at + COLUMNS], other) for at in columns], 1)

    return lax.cond(some, mask, lambda: x)


def since(first: Array) -> Seen:
    """In each row, the columns from `first` [64] on."""
    ahead = _from_column(first)
    return lambda at: ahead <= at


def up_to(last: Array) -> Seen:
    """In each row, the columns up to `last` [64]."""
    ahead = _from_column(last)
    return lambda at: ahead >= at


def _from_column(vector: Array) -> Array:
    """`vector` [64] minus the numbers of the first COLUMNS columns: [64, COLUMNS]. It is then compared with a
    constant. An index for every element took more instructions, and more registers than there are."""
    shape = ROWS, COLUMNS
    return spread(vector, shape, 0) - plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)


def drain(used: Array, slots: int, *empty) -> None:
    """Wait for the slots given back last: no barrier may be left with a phase that nobody has waited for."""

    @pl.loop(lax.max(used - slots, 0), used)
    def _(i):
        for barrier in empty:
            plgpu.barrier_wait(barrier.at[slot_of(i, slots)])
