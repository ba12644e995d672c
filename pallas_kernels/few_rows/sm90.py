"""The parts of a decoding step on Hopper: a warpgroup has a row, or a part of one, in registers.

There are few rows, so that what a kernel takes is little more than a read, a sum over a row, and a write. A
warp holds whole groups of 128, so that the amax of a group, too, is a matter of one warp. The order of sums
depends on the row's width alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.few_rows.reference import Quantized
from pallas_kernels.plgpu_compat import Ref, plgpu, spread, store
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize.sm90 import Format, _codes, _scale, fused_multiply_add

BF16, F32 = jnp.bfloat16, jnp.float32
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
WARPS = 4  # of a warpgroup: numbers of groups are multiples of it
PART = 16  # groups of a row that a warpgroup has at most
# a matrix [groups, 128]: a warp has whole rows, a thread 4 neighbours of each; and one [heads, 64], likewise
HALVES = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, BLOCK // 2), (2,))), warp_dims=(-3,), lane_dims=(-2,),
                            vector_dim=-1)
GROUPS = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, BLOCK), (4,))), warp_dims=(-3,), lane_dims=(-2,),
                            vector_dim=-1)


def rms_norm(x: Array, weight: Array, eps: float, interpret=None) -> Array:
    """x [T, D], weight [D] bfloat16; D a multiple of 512."""
    def kernel(x, weight, out):
        row = lax.axis_index("row")
        store(out.at[row], _normed(read(x.at[row]), weight, eps))

    out = jax.ShapeDtypeStruct(grouped(x).shape, BF16)
    return call("rms_norm", kernel, (len(x),), out, interpret)(
        grouped(x), weight.reshape(-1, BLOCK)).reshape(x.shape)


def add_norm_quantize(x: Array, y: Array, weight: Array, eps: float, amax_floor: float,
                      interpret=None) -> tuple[Array, Quantized]:
    """x, y [T, D], weight [D] bfloat16; D a multiple of 512."""
    def kernel(x, y, weight, total, codes, scales):
        row = lax.axis_index("row")
        sums = (read(x.at[row]) + read(y.at[row])).astype(BF16)
        store(total.at[row], sums)
        send(_normed(sums.astype(F32), weight, eps).astype(F32), codes.at[row], scales.at[:, row])

    send = functools.partial(quantize, amax_floor=amax_floor, interpret=interpret)
    (T, D), out = x.shape, jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // BLOCK, BLOCK), BF16)
    total, codes, scales = call("add_norm_quantize", kernel, (T,), (out, *out_type(T, D)), interpret)(
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
        quantize((active * up).astype(BF16).astype(F32), codes.at[row, at], scales.at[at, row],
                 amax_floor=amax_floor,
                 interpret=interpret)

    codes, scales = call("swiglu_quantize", kernel, (T, groups // part), out_type(T, F),
                          interpret)(grouped(gate_up))
    return codes.reshape(T, F), scales


def rotate_and_write(qkv: Array, cos: Array, sin: Array, at: Array, k_cache: Array, v_cache: Array,
                     q_norm: Array | None, k_norm: Array | None, eps: float,
                     interpret=None) -> tuple[Array, Array, Array]:
    """As `api.rotate_and_write`. The caches are written where they lie."""
    (B, N, d), K = qkv.shape, k_cache.shape[1]
    norms = () if q_norm is None else (q_norm, k_norm)

    def kernel(qkv, cos, sin, at, k_cache, v_cache, *refs):
        *weights, q = refs
        row = lax.axis_index("row")
        heads = _Heads(row, N - 2 * K, K, eps, qkv, (cos, sin), weights)
        heads.queries(q.at[row])
        pl.when(at[row] >= 0)(lambda: heads.keys_and_values(k_cache.at[at[row]], v_cache.at[at[row]]))

    mesh = plgpu.Mesh(grid=(B,), grid_names=("row",), num_threads=1, thread_name="wg",
                      kernel_name="rotate_and_write")
    caches = jax.new_ref(k_cache), jax.new_ref(v_cache)
    out = jax.ShapeDtypeStruct((B, N - 2 * K, d), qkv.dtype)
    run: Callable = pl.kernel(kernel, out_type=out, mesh=mesh, interpret=interpret)
    q = run(qkv, cos, sin, at, *caches, *norms)
    return q, caches[0][...], caches[1][...]


def rotate(qkv: Array, cos: Array, sin: Array, K: int, dtype: jnp.dtype, q_norm: Array | None,
           k_norm: Array | None,
           eps: float, interpret=None) -> tuple[Array, Array, Array]:
    """As `api.rotate`."""
    (B, N, d), norms = qkv.shape, () if q_norm is None else (q_norm, k_norm)

    def kernel(qkv, cos, sin, *refs):
        *weights, q, k, v = refs
        row = lax.axis_index("row")
        heads = _Heads(row, N - 2 * K, K, eps, qkv, (cos, sin), weights)
        heads.queries(q.at[row])
        heads.keys_and_values(k.at[row], v.at[row])

    out = tuple(jax.ShapeDtypeStruct((B, n, d), t)
                for n, t in ((N - 2 * K, qkv.dtype), (K, dtype), (K, dtype)))
    return call("rotate", kernel, (B,), out, interpret)(qkv, cos, sin, *norms)


class _Heads(NamedTuple):
    """The heads of a token in a kernel: H queries, then K keys and K values, [rows, H + 2K, d]."""

    row: Array
    H: int
    K: int
    eps: float
    qkv: Ref
    tables: tuple[Ref, Ref]
    weights: Sequence[Ref]  # of the norms of queries and of keys, or none

    def rotated(self, heads, weight: Ref | None) -> tuple:
        """(columns of a half, the half) of heads, normed and rotated."""
        d = self.qkv.shape[2]
        halves = pl.ds(0, d // 2), pl.ds(d // 2, d // 2)
        a, b = (plgpu.load(self.qkv.at[self.row, heads, at], layout=HALVES, optimized=False).astype(F32)
                for at in halves)
        if weight is not None:
            inverse = spread(lax.rsqrt((jnp.sum(a * a, axis=1) + jnp.sum(b * b, axis=1)) * (1 / d)
                                       + self.eps), a.shape, 0)
            a, b = (_weighted(x * inverse, weight.at[at]) for x, at in zip((a, b), halves))
        c, s = (spread(plgpu.load(x.at[self.row], layout=HALVES.reduce(0), optimized=False), a.shape, 1)
                for x in self.tables)
        return tuple(zip(halves, (a * c - b * s, b * c + a * s)))

    def queries(self, out: Ref) -> None:
        for into, part in self.rotated(pl.ds(0, self.H), self.weights[0] if self.weights else None):
            store(out.at[:, into], part.astype(out.dtype))

    def keys_and_values(self, k: Ref, v: Ref) -> None:
        for into, part in self.rotated(pl.ds(self.H, self.K), self.weights[1] if self.weights else None):
            store(k.at[:, into], _stored(part.astype(BF16).astype(F32), k.dtype))
        store(v, _stored(read(self.qkv.at[self.row, pl.ds(self.H + self.K, self.K)]), v.dtype))


def _normed(x: Array, weight: Ref, eps: float) -> Array:
    """The RMSNorm of a row [groups, 128] float32 in bfloat16, rounded before and after its weight."""
    inverse = lax.rsqrt(jnp.sum(jnp.sum(x * x, axis=1)) * (1 / x.size) + eps)
    return ((x * inverse).astype(BF16).astype(F32) * read(weight)).astype(BF16)


def _weighted(normed: Array, weight: Ref) -> Array:
    """A norm rounded before and after its weight."""
    by_column = plgpu.load(weight, layout=HALVES.reduce(0), optimized=False).astype(F32)
    return (normed.astype(BF16).astype(F32) * spread(by_column, normed.shape, 1)).astype(BF16).astype(F32)


def _stored(x: Array, dtype: jnp.dtype) -> Array:
    """x as a cache holds it; in E4M3 saturated."""
    most = 448.0
    return jnp.maximum(jnp.minimum(x, most), -most).astype(dtype) if dtype == E4M3 else x.astype(dtype)


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


def call(name: str, kernel: Callable, grid: tuple[int, ...], out: Any, interpret) -> Callable:
    return plgpu.kernel(
        kernel, out_type=out, kernel_name=name, grid=grid, grid_names=("row", "part")[: len(grid)],
        num_threads=1,
        thread_name="wg", interpret=interpret,
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=1024))
