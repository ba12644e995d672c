"""The parts of a decoding step on Hopper: a warpgroup has a row, or a part of one, in registers.

There are few rows, so that what a kernel takes is little more than a read, a sum over a row, and a write. A warp
holds whole groups of 128, so that the amax of a group, too, is a matter of one warp. The order of sums depends on the
row's width alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.few_rows.reference import Quantized
from pallas_kernels.plgpu_compat import Ref, plgpu, store
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize.sm90 import Format, _codes, _scale, fused_multiply_add

BF16, F32 = jnp.bfloat16, jnp.float32
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
WARPS = 4  # of a warpgroup: numbers of groups are multiples of it
PART = 16  # groups of a row that a warpgroup has at most
# a matrix [groups, 128]: a warp has whole rows, a thread 4 neighbours of each
GROUPS = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, BLOCK), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def add_norm_quantize(x: Array, y: Array, weight: Array, eps: float, amax_floor: float,
                      interpret=None) -> tuple[Array, Quantized]:
    """x, y [T, D], weight [D] bfloat16; D a multiple of 512."""
    def kernel(x, y, weight, total, codes, scales):
        row = lax.axis_index("row")
        sums = (read(x.at[row]) + read(y.at[row])).astype(BF16)
        store(total.at[row], sums)
        sums = sums.astype(F32)
        inverse = lax.rsqrt(jnp.sum(jnp.sum(sums * sums, axis=1)) * (1 / sums.size) + eps)
        normed = (sums * inverse).astype(BF16).astype(F32) * read(weight)
        send(normed.astype(BF16).astype(F32), codes.at[row], scales.at[:, row])

    send = functools.partial(quantize, amax_floor=amax_floor, interpret=interpret)
    (T, D), out = x.shape, jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // BLOCK, BLOCK), BF16)
    total, codes, scales = _call(kernel, (T,), (out, *out_type(T, D)), interpret)(
        grouped(x), grouped(y), weight.reshape(-1, BLOCK))
    return total.reshape(T, D), (codes.reshape(T, D), scales)


def swiglu_quantize(gate_up: Array, amax_floor: float, interpret=None) -> Quantized:
    """gate_up [T, 2F] bfloat16; F a multiple of 512."""
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    groups, part = F // BLOCK, next(n for n in range(PART, 0, -WARPS) if F // BLOCK % n == 0)

    def kernel(gate_up, codes, scales):
        row, first = lax.axis_index("row"), lax.axis_index("part") * part
        at = pl.ds(first, part)
        gate, up = read(gate_up.at[row, at]), read(gate_up.at[row, pl.ds(groups + first, part)])
        active = (gate * jax.nn.sigmoid(gate)).astype(BF16).astype(F32)
        quantize((active * up).astype(BF16).astype(F32), codes.at[row, at], scales.at[at, row], amax_floor=amax_floor,
                 interpret=interpret)

    codes, scales = _call(kernel, (T, groups // part), out_type(T, F), interpret)(grouped(gate_up))
    return codes.reshape(T, F), scales


def read(ref: Ref) -> Array:
    """[groups, 128] from global memory, in float32."""
    return plgpu.load(ref, layout=GROUPS, optimized=False).astype(F32)


def quantize(x: Array, codes: Ref, scales: Ref, *, amax_floor: float, interpret) -> None:
    """Write the codes and scales of x [groups, 128]."""
    fmt, fused = Format(E4M3, False, amax_floor), fused_multiply_add(interpret)
    scale = _scale(jnp.max(jnp.abs(x), axis=1), fmt, fused)
    store(codes, _codes(x, scale, fmt, fused))
    store(scales, scale)


def grouped(x: Array) -> Array:
    """[T, K] -> [T, K/128, 128]."""
    return x.reshape(x.shape[0], -1, BLOCK)


def out_type(T: int, K: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Codes and scales."""
    return jax.ShapeDtypeStruct((T, K // BLOCK, BLOCK), E4M3), jax.ShapeDtypeStruct((K // BLOCK, T), F32)




def _call(kernel: Callable, grid: tuple[int, ...], out: tuple, interpret) -> Callable:
    return plgpu.kernel(
        kernel, out_type=out, grid=grid, grid_names=("row", "part")[: len(grid)], num_threads=1, thread_name="wg",
        interpret=interpret, compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=1024))
