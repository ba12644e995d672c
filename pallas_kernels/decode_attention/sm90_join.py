"""The running state of a softmax over tiles or pieces, and the kernel that joins a row's pieces."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.decode_attention.deal import Deal, pieces_of
from pallas_kernels.plgpu_compat import ROW, WGMMA, plgpu, spread, store

F32 = jnp.float32
ROWS = 64  # rows of a tensor-core instruction: queries that are computed at once
LOWEST = -1e30  # the maximum of an empty set of scores: finite, so that -inf minus it is not NaN
HALF = 64  # columns of d that a block of threads has
JOINED = 4  # pieces that it reads at a time


class Softmax(NamedTuple):
    """The running state: o [ROWS, d] not yet divided by the sums [ROWS], and the maxima [ROWS]."""

    o: Array
    maximum: Array
    total: Array


def nothing(d: int) -> Softmax:
    maximum, total = (plgpu.layout_cast(jnp.full((ROWS,), x, F32), ROW) for x in (LOWEST, 0.0))
    return Softmax(plgpu.layout_cast(jnp.zeros((ROWS, d), F32), WGMMA), maximum, total)


def join(o: Array, lse: Array, deal: Deal, factor: Array, dtype: jnp.dtype,
         interpret=None) -> tuple[Array, Array]:
    """The pieces of each row joined: o [rows, ROWS, d] times factor [passes, ROWS] in `dtype`, and log2 of
    the sum of exponentials [rows, ROWS]; 0 and -inf for a row without pieces."""
    d, rows = o.shape[-1], len(deal.begins) - 1
    out = jax.ShapeDtypeStruct((rows, ROWS, d), dtype), jax.ShapeDtypeStruct((rows, ROWS), F32)
    return plgpu.kernel(
        functools.partial(_join, len(deal.first) - 1), out_type=out, grid=(rows, d // HALF),
        grid_names=("row", "part"),
        num_threads=1, thread_name="wg", interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(o, lse, deal.begins, factor)


def _join(workers: int, o, lse, begins, factor, joined, joined_lse) -> None:
    row, part = lax.axis_index("row"), pl.ds(lax.axis_index("part") * HALF, HALF)
    first, count = pieces_of(begins, row, workers)

    def some_more(i: Array, state: Softmax) -> Softmax:
        """JOINED pieces, all read before the first is used."""
        numbers = [i * JOINED + j for j in range(JOINED)]
        places = [first + lax.min(number, count - 1) for number in numbers]
        sums = [plgpu.load(lse.at[at], layout=ROW, optimized=False) for at in places]
        parts = [plgpu.load(o.at[at, :, part], layout=WGMMA, optimized=False) for at in places]
        sums = [x + jnp.where(number < count, 0.0, -jnp.inf) for number, x in zip(numbers, sums)]
        maximum = functools.reduce(jnp.maximum, sums, state.maximum)
        alpha = jnp.exp2(state.maximum - maximum)
        result, total = state.o * spread(alpha, state.o.shape, 0), state.total * alpha
        for x, y in zip(sums, parts):
            weight = jnp.exp2(x - maximum)
            result, total = result + y * spread(weight, y.shape, 0), total + weight
        return Softmax(result, maximum, total)

    state = lax.fori_loop(0, pl.cdiv(count, JOINED), some_more, nothing(HALF))
    some, turn = state.total > 0, lax.rem(row, jnp.int32(factor.shape[0]))
    inverse = jnp.where(some, plgpu.load(factor.at[turn], layout=ROW, optimized=False) / state.total, 0.0)
    store(joined.at[row, :, part], (state.o * spread(inverse, state.o.shape, 0)).astype(joined.dtype))

    @pl.when(lax.axis_index("part") == 0)
    def _():
        joined_lse[row] = jnp.where(some, state.maximum + jnp.log2(state.total), -jnp.inf)
