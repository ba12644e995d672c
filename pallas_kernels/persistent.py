"""Parts that persistent kernels share: a warp that copies, consumers that compute, and the walk over tiles
that both follow.

A `plan` here has `grid`, the number of tiles (or pairs of tiles) along M and N; `k_blocks`, the stages per
tile; `blocks`, the number of blocks of threads; and `tiles`, with `cluster`, `band`, `band_axis` and
`stages`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.plgpu_compat import Ref, plgpu


def specialise(
    consumers: int, registers: tuple[int, int], produce: Callable[[], None], consume: Callable[[Array], None],
    again: Callable[[], Array] | None = None,
) -> None:
    """Run `produce` in the first warp of the last warpgroup, and `consume` with their number in the other
    warpgroups. `registers`: registers per thread of a consumer and of the producer. `again`: whether to
    produce a second time; called by the producer's warpgroup after the first time."""
    wg = lax.axis_index("wg")

    @pl.when(wg == consumers)
    def _():
        plgpu.set_max_registers(registers[1], action="decrease")
        _in_first_warp(produce)
        if again is not None:
            pl.when(again())(lambda: _in_first_warp(produce))

    @pl.when(wg < consumers)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        consume(wg)


def _in_first_warp(run: Callable[[], None]) -> None:
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(run))


def slot_of(step: Array | int, slots: int) -> Array:
    """The slot of a ring that a step uses."""
    return lax.rem(jnp.int32(step), jnp.int32(slots))


def for_each_tile(plan, body: Callable[..., Any], state: Any = None) -> Any:
    """body(row of tiles, column of tiles, number of stages used before) for every tile of this block of
    threads. If there is a `state`, body takes it as its last argument and returns the next one; the last is
    returned."""

    @plgpu.nd_loop((math.prod(plan.grid),), collective_axes="block", init_carry=state)
    def last(loop, carry=None):
        mi, ni = plgpu.planar_snake(loop.index[0], plan.grid, plan.tiles.band_axis, plan.tiles.band)
        if plan.tiles.cluster == "m":
            mi = 2 * mi + lax.axis_index("cluster")
        if plan.tiles.cluster == "n":
            ni = 2 * ni + lax.axis_index("cluster")
        before = loop.local_index * plan.k_blocks
        return body(mi, ni, before) if state is None else body(mi, ni, before, carry)

    return last


def drain(plan, empty: Ref) -> None:
    """Wait until every stage is free again: the partner in the cluster may still write to a block that has
    exited."""
    mine = (math.prod(plan.grid) - lax.axis_index("block") + plan.blocks - 1) // plan.blocks * plan.k_blocks
    left = lax.min(mine, jnp.asarray(plan.tiles.stages, mine.dtype))
    pl.loop(0, left)(lambda i: plgpu.barrier_wait(empty.at[slot_of(mine - left + i, plan.tiles.stages)]))
