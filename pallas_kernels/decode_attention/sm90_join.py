"""The running state of a softmax over tiles or chunks, and the kernel that joins a row's chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.decode_attention.deal import Deal
from pallas_kernels.few_rows.sm90 import WARPS, out_type, quantize
from pallas_kernels.plgpu_compat import ROW, WGMMA, Ref, plgpu, spread, store

F32 = jnp.float32
ROWS = 64  # rows of a tensor-core instruction: queries that are computed at once
LOWEST = -1e30  # the maximum of an empty set of scores: finite, so that -inf minus it is not NaN
MOST = 4096  # elements of a result that a block of threads has
NARROW = 64  # columns that it has of larger ones
JOINED = 4  # chunks that it reads at a time


class Softmax(NamedTuple):
    """The running state: o [rows, d] not yet divided by the sums [rows], and the maxima [rows]."""

    o: Array
    maximum: Array
    total: Array


def nothing(d: int, rows: int = ROWS, layout: Any = WGMMA, by_row: Any = ROW) -> Softmax:
    maximum, total = (plgpu.layout_cast(jnp.full((rows,), x, F32), by_row) for x in (LOWEST, 0.0))
    return Softmax(plgpu.layout_cast(jnp.zeros((rows, d), F32), layout), maximum, total)


def join(o: Array, lse: Array, deal: Deal, factor: Array, dtype: jnp.dtype,
         interpret=None) -> tuple[Array, Array]:
    """The chunks of each row joined: o [rows, queries, d] times factor [passes, ROWS] in `dtype`, and log2 of
    the sum of exponentials [rows, queries]; 0 and -inf for a row without chunks. o [places, queries, d], lse
    [places, ROWS]; queries are a multiple of 4."""
    (_, queries, d), rows = o.shape, len(deal.begins) - 1
    width = d if queries * d <= MOST else NARROW

    def kernel(o, lse, begins, factor, joined, joined_lse):
        row, part = lax.axis_index("row"), pl.ds(lax.axis_index("part") * width, width)
        state = _joined((queries, width), o.at[:, :, part], lse, begins, row)
        result, some = _divided(state, factor, row)
        store(joined.at[row, :, part], result.astype(joined.dtype))

        @pl.when(lax.axis_index("part") == 0)
        def _():
            store(joined_lse.at[row], jnp.where(some, state.maximum + jnp.log2(state.total), -jnp.inf))

    out = jax.ShapeDtypeStruct((rows, queries, d), dtype), jax.ShapeDtypeStruct((rows, queries), F32)
    return _call("join", kernel, (rows, d // width), out, interpret)(o, lse, deal.begins, factor)


def join_and_quantize(o: Array, lse: Array, deal: Deal, factor: Array, live: int, dtype: jnp.dtype,
                      amax_floor: float,
                      interpret=None) -> tuple[Array, Array]:
    """`join` for heads of 128: the first `live` queries of each row, rounded to `dtype`, as codes [B, H * d]
    E4M3 and scales [H, B]. live is a multiple of 4."""
    (*_, d), passes = o.shape, len(factor)
    batch = (len(deal.begins) - 1) // passes

    def kernel(o, lse, begins, factor, codes, scales):
        row = lax.axis_index("row")
        result, _ = _divided(_joined((live, d), o.at[:, pl.ds(0, live)], lse, begins, row), factor, row)
        sequence, heads = lax.div(row, jnp.int32(passes)), pl.ds(lax.rem(row, jnp.int32(passes)) * live, live)
        quantize(result.astype(dtype).astype(F32), codes.at[sequence, heads], scales.at[heads, sequence],
                 amax_floor=amax_floor, interpret=interpret)

    codes, scales = _call("join_and_quantize", kernel, (batch * passes,), out_type(batch, passes * live * d),
                          interpret)(
        o, lse, deal.begins, factor)
    return codes.reshape(batch, -1), scales


def layout_of(d: int):
    """Of a matrix [rows, d]: a warp has whole rows."""
    tiling = plgpu.Tiling(((WARPS, d), (d // 32,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _joined(shape: tuple[int, int], o: Ref, lse: Ref, begins: Ref, row: Array) -> Softmax:
    """The state after all chunks of a row, in order."""
    queries, d = shape
    layout, by_row = layout_of(d), layout_of(d).reduce(1)
    first, count = begins[row], begins[row + 1] - begins[row]

    def some_more(i: Array, state: Softmax) -> Softmax:
        """JOINED chunks, all read before the first is used."""
        numbers = [i * JOINED + j for j in range(JOINED)]
        places = [first + lax.min(number, count - 1) for number in numbers]
        sums = [plgpu.load(lse.at[at, pl.ds(0, queries)], layout=by_row, optimized=False) for at in places]
        parts = [plgpu.load(o.at[at], layout=layout, optimized=False) for at in places]
        sums = [x + jnp.where(number < count, 0.0, -jnp.inf) for number, x in zip(numbers, sums)]
        maximum = functools.reduce(jnp.maximum, sums, state.maximum)
        alpha = jnp.exp2(state.maximum - maximum)
        result, total = state.o * spread(alpha, state.o.shape, 0), state.total * alpha
        for x, y in zip(sums, parts):
            weight = jnp.exp2(x - maximum)
            result, total = result + y * spread(weight, y.shape, 0), total + weight
        return Softmax(result, maximum, total)

    return lax.fori_loop(0, pl.cdiv(count, JOINED), some_more, nothing(d, queries, layout, by_row))


def _divided(state: Softmax, factor: Ref, row: Array) -> tuple[Array, Array]:
    """(o times factor over the sums, whether there was any key)."""
    (queries, d), some = state.o.shape, state.total > 0
    factors = plgpu.load(factor.at[lax.rem(row, jnp.int32(factor.shape[0])), pl.ds(0, queries)],
                         layout=layout_of(d).reduce(1), optimized=False)
    inverse = jnp.where(some, factors / state.total, 0.0)
    return state.o * spread(inverse, state.o.shape, 0), some


def _call(name: str, kernel: Callable, grid: tuple[int, ...], out: tuple, interpret) -> Callable:
    return plgpu.kernel(kernel, out_type=out, kernel_name=name, grid=grid,
                        grid_names=("row", "part")[: len(grid)],
                        num_threads=1, thread_name="wg", interpret=interpret,
                        compiler_params=plgpu.CompilerParams(approx_math=True))
