"""Products z = x w^T on Hopper, where N is a vocabulary, with an epilogue that computes the numbers that
log-probabilities need: z itself is not written.

One persistent kernel has two epilogues. A block of threads computes tiles of z, 128 tokens by 256 words, one
after the other. One warp, the *producer*, walks all its tiles and keeps the copy engine ahead of the
products, across the borders of tiles too. Two warpgroups, the *consumers*, have 64 tokens of the tile each,
with its float32 sum in registers:

    tensor cores |  stage i-1  |  stage i                        |  stage i+1  ...
    threads      |             |  wait for i-1 and release it    |

At the end of a tile comes the epilogue:

- `statistics` stores four numbers per token and tile: the maximum, the sum of exponentials, the sum of
  exponentials times logits, and the target's logit if it is among the words;
- `d_logits` reads each token's statistics over all words, and stores the gradient of the logits in the dtype
  of x.

M is a multiple of two tiles, because the numbers of each row are read without padding. K and N are multiples
of 64, the copy engine's box, but not necessarily of a tile: the copy engine reads zeros beyond the edge and
writes nothing there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.forward_only import forward_only
from pallas_kernels.logprob.softcap import soft_cap
from pallas_kernels.persistent import drain, for_each_tile, slot_of, specialise
from pallas_kernels.plgpu_compat import ACC, ROW, WGMMA, Ref, multiprocessors, plgpu, spread, swizzled

F32 = jnp.float32
ROWS = 64  # rows of one tensor-core instruction, and of a consumer's part of the tile
CONSUMERS = 2
DEPTH = 64  # depth of a stage along the contraction: 128 bytes, the swizzled row
REGISTERS = 240, 24  # registers per thread of a consumer, and of the producer
LOG2_E = math.log2(math.e)
NEVER = -1e30  # the logit of a word beyond the vocabulary: finite, so that 0 times it is 0
STATISTICS = 4
BUFFERS = 2  # buffers per consumer for results that are being stored
no_derivative = forward_only(
    "pallas_kernels.logprob.api.linear_logprob has a first derivative, by reverse mode, and no other")


class Tiles(NamedTuple):
    """The tile sizes of the product."""

    n: int = 256
    stages: int = 4
    cluster: Literal["", "m"] = "m"  # two blocks side by side along the tokens share w
    band: int = 8  # tiles are walked in bands of this many,
    # along tokens (0) or words (1), so that operands of the tiles in flight stay in L2
    band_axis: Literal[0, 1] = 0

    m: int = ROWS * CONSUMERS


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static parameters of one kernel."""

    tiles: Tiles
    m: int
    n: int
    k: int
    temperature: float
    logits_dtype: jnp.dtype
    softcap: float | None
    blocks: int  # blocks of threads, or clusters of two

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles, or pairs of them, along M, and tiles along N."""
        return pl.cdiv(self.m, self.tiles.m * (1 + bool(self.tiles.cluster))), pl.cdiv(self.n, self.tiles.n)

    @property
    def k_blocks(self) -> int:
        return pl.cdiv(self.k, DEPTH)


class Shared(NamedTuple):
    """Shared memory: a ring of stages, and buffers for results that are being stored."""

    x: Ref
    w: Ref
    out: Ref
    full: Ref
    empty: Ref


@no_derivative
def statistics(
    x: Array, w: Array, targets: Array, temperature: float, logits_dtype: jnp.dtype, tiles: Tiles,
    interpret=None, *,
    softcap: float | None = None, words: int | None = None,
) -> Array:
    """x [M, K], w [N, K] bfloat16 or float16, targets [M] int32 -> [4, P, M] float32 for P parts of tiles.n
    words each: max z, sum exp(z - max), sum exp(z - max) (z - max), and the sum of z at the target. z = x w^T
    / temperature, with x w^T first rounded to `logits_dtype` and then capped, unless `softcap` is None.
    words: the number of rows of w that are words, the rest being padding; None means all."""
    plan = _plan(x, w, temperature, logits_dtype, tiles, interpret, softcap)
    plan = dataclasses.replace(plan, n=words or w.shape[0])
    parts = plan.grid[1]
    out = jax.ShapeDtypeStruct((parts * STATISTICS, x.shape[0]), F32)
    buffer = plgpu.SMEM((CONSUMERS, STATISTICS, ROWS), F32)
    return _call(plan, _Statistics, x, w, (targets,), out, buffer,
                 interpret).reshape(parts, STATISTICS, -1).swapaxes(0, 1)


@no_derivative
def d_logits(
    x: Array, w: Array, targets: Array, lse: Array, at_target: Array, constant: Array, slope: Array,
    temperature: float,
    logits_dtype: jnp.dtype, tiles: Tiles, interpret=None, *, softcap: float | None = None,
) -> Array:
    """[M, N] in the dtype of x: p (constant + slope log p), plus at_target at the target, all times the
    derivative of the soft cap, with log p = z - lse and z as in `statistics`; lse, at_target, constant and
    slope are [M] float32. If the target is not among the words, `targets` is any number out of range."""
    plan = _plan(x, w, temperature, logits_dtype, tiles, interpret, softcap)
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), x.dtype)
    buffer = plgpu.SMEM((CONSUMERS, BUFFERS, ROWS, DEPTH), x.dtype, transforms=swizzled(x.dtype))
    return _call(plan, _Gradient, x, w, (targets, lse, at_target, constant, slope), out, buffer, interpret)


def _plan(x: Array, w: Array, temperature: float, logits_dtype: jnp.dtype, tiles: Tiles, interpret,
          softcap: float | None) -> Plan:
    if tiles.n not in (128, 256):
        raise ValueError(f"{tiles}: a tile has 128 or 256 words")
    if tiles.cluster not in ("", "m"):
        raise ValueError(f"{tiles}: pairs are along the tokens")
    if tiles.stages < 2:
        raise ValueError(f"{tiles}: 2 stages or more, one being read while the next is written")
    pair = 1 + bool(tiles.cluster)
    blocks = (2 * pair if interpret else multiprocessors()) // pair
    return Plan(tiles, x.shape[0], w.shape[0], x.shape[1], temperature, jnp.dtype(logits_dtype), softcap,
                blocks)


def _call(plan: Plan, epilogue: type, x: Array, w: Array, vectors: tuple[Array, ...], out, buffer,
          interpret) -> Array:
    t = plan.tiles
    if t.cluster:
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    else:
        barrier = plgpu.Barrier
    scratch = Shared(
        x=plgpu.SMEM((t.stages, t.m, DEPTH), x.dtype, transforms=swizzled(x.dtype)),
        w=plgpu.SMEM((t.stages, t.n, DEPTH), w.dtype, transforms=swizzled(w.dtype)),
        out=buffer,
        full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
        empty=barrier(num_arrivals=CONSUMERS, num_barriers=t.stages),
    )
    return plgpu.kernel(
        functools.partial(_kernel, plan, epilogue, len(vectors)), out_type=out, grid=(plan.blocks,),
        grid_names=("block",), cluster=(2,) if t.cluster else (),
        cluster_names=("cluster",) if t.cluster else (),
        num_threads=CONSUMERS + 1, thread_name="wg", scratch_types=scratch, interpret=interpret,
    )(x, w, *vectors)


def _kernel(plan: Plan, epilogue: type, count: int, x, w, *refs) -> None:
    vectors, out, shared = refs[:count], refs[count], Shared(*refs[count + 1 :])
    make = functools.partial(epilogue, plan, vectors, out)
    consume = lambda wg: _consume(plan, wg, functools.partial(make, shared.out.at[wg]), shared)
    specialise(CONSUMERS, REGISTERS, functools.partial(_produce, plan, x, w, shared), consume)


def _produce(plan: Plan, x, w, shared: Shared) -> None:
    """Copy the operands of every tile, block by block of the contraction, as stages become free."""
    t = plan.tiles

    def tile(mi, ni, before):
        @pl.loop(0, plan.k_blocks)
        def _(ki):
            slot = slot_of(before + ki, plan.tiles.stages)
            pl.when(before + ki >= t.stages)(lambda: plgpu.barrier_wait(shared.empty.at[slot]))
            ks, full = pl.ds(ki * DEPTH, DEPTH), shared.full.at[slot]
            plgpu.copy_gmem_to_smem(x.at[pl.ds(mi * t.m, t.m), ks], shared.x.at[slot], full)
            plgpu.copy_gmem_to_smem(w.at[pl.ds(ni * t.n, t.n), ks], shared.w.at[slot], full,
                                    collective_axes="cluster" if t.cluster else None)

    for_each_tile(plan, tile)
    drain(plan, shared.empty)


def _consume(plan: Plan, wg: Array, epilogue: Callable, shared: Shared) -> None:
    """Compute this warpgroup's rows of every tile. The epilogue's numbers by row are read before the product,
    which hides the reads."""
    rows = pl.ds(wg * ROWS, ROWS)

    def tile(mi, ni, before):
        finish = epilogue(mi * plan.tiles.m + wg * ROWS, ni)
        slot = lambda ki: slot_of(before + ki, plan.tiles.stages)

        def product(z):
            @pl.loop(0, plan.k_blocks)
            def _(ki):
                plgpu.barrier_wait(shared.full.at[slot(ki)])
                plgpu.wgmma(z, shared.x.at[slot(ki), rows], shared.w.at[slot(ki)].transpose((1, 0)))
                plgpu.wgmma_wait(1)  # wait for the previous product
                pl.when(ki >= 1)(lambda: plgpu.barrier_arrive(shared.empty.at[slot(ki - 1)]))

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(shared.empty.at[slot(plan.k_blocks - 1)])
            return z[...]

        finish(pl.run_scoped(product, ACC((ROWS, plan.tiles.n), F32)))

    for_each_tile(plan, tile)
    plgpu.wait_smem_to_gmem(0)


class _Epilogue:
    """The epilogue of one tile: it reads `vectors` by row when it is created, and is called with the sums."""

    def __init__(self, plan: Plan, vectors, out, buffer, row: Array, ni: Array):
        self.plan, self.out, self.buffer, self.row, self.ni = plan, out, buffer, row, ni
        self.targets, *self.vectors = (
            plgpu.load(v.at[pl.ds(row, ROWS)], layout=ROW, optimized=False) for v in vectors
        )

    def columns(self) -> Array:
        return plgpu.broadcasted_iota(jnp.int32, (ROWS, self.plan.tiles.n), 1, layout=WGMMA)

    def is_target(self) -> Array:
        return self.columns() == spread(self.targets - self.ni * self.plan.tiles.n, (ROWS, self.plan.tiles.n),
                                        0)

    def logits(self, z: Array) -> tuple[Array, Array | None]:
        """z as the softmax sees it, and the derivative of the soft cap, if there is one."""
        rounded, t = lambda z: z.astype(self.plan.logits_dtype).astype(F32), self.plan.temperature
        z, of_cap = rounded(z), None
        if self.plan.softcap is not None:
            z, of_cap = soft_cap(z, self.plan.softcap, rounded)
        return z if t == 1 else z * (1 / t), of_cap


class _Statistics(_Epilogue):
    def __call__(self, z: Array) -> None:
        n, width = self.plan.n, self.plan.tiles.n
        z, _ = self.logits(z)
        at_target = jnp.sum(jnp.where(self.is_target(), z, 0.0), axis=1)
        if n % width:
            z = jnp.where(self.columns() < n - self.ni * width, z, NEVER)
        highest = jnp.max(z, axis=1)
        below = z - spread(highest, z.shape, 0)
        exponential = jnp.exp2(below * LOG2_E)
        found = highest, jnp.sum(exponential, axis=1), jnp.sum(exponential * below, axis=1), at_target
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, statistic in enumerate(found):
            self.buffer[i] = statistic
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.buffer,
                                self.out.at[pl.ds(self.ni * STATISTICS, STATISTICS), pl.ds(self.row, ROWS)])


class _Gradient(_Epilogue):
    def __call__(self, z: Array) -> None:
        lse, at_target, constant, slope = (spread(v, z.shape, 0) for v in self.vectors)
        z, of_cap = self.logits(z)
        logp = lax.min(z - lse, jnp.zeros_like(z))  # computed for padding too, so all finite
        d = jnp.exp2(logp * LOG2_E) * (constant + slope * logp)
        d = jnp.where(self.is_target(), d + at_target, d)
        d = (d if of_cap is None else d * of_cap).astype(self.out.dtype)
        at = self.out.at[pl.ds(self.row, ROWS)]
        for i in range(0, z.shape[1], DEPTH):
            buffer = self.buffer.at[i // DEPTH % BUFFERS]
            plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
            buffer[...] = d[:, i : i + DEPTH]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, at.at[:, pl.ds(self.ni * z.shape[1] + i, DEPTH)])
