"""Blockwise FP8 quantisation on Hopper: one read of the input, codes and scales bit-equal to reference.py.

One block of threads a multiprocessor walks over 128x128 tiles. A producer warp keeps a ring of tiles in shared memory full. One
quantiser serves both directions: a warpgroup reads 64 rows of a tile, or 64 rows of the *transposed* tile (`ldmatrix.trans`,
free), so that in both a group of 128 lies in the registers of four neighbouring threads. A tile is read from memory once
whatever is written, and results leave through the copy engine while the next tile is quantised.

Division. `x / scale` has to round as IEEE's division does, or codes at ties move. Given r, the rounded 1 / y, one product and
two fused multiply-adds are exact division (Markstein, "Computation of elementary functions on the IBM RISC System/6000
processor", 1990; Brisebarre, Muller, Raina, "Accelerating correctly rounded floating-point division when the divisor is known
in advance", 2004): three instructions an element, where the compiler's own takes about ten.

Scales are written [K/128, T], token-contiguous, as the products read them; `api.py` shows them as [T, K/128].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.plgpu_compat import ROW, WGMMA, multiprocessors, plgpu, spread, swizzled
from pallas_kernels.quantize import BLOCK

WAVE = 64  # rows that a warpgroup holds in registers at once
F32 = jnp.float32


class Format(NamedTuple):
    """What a group becomes: the code type, whether scales are powers of two, the least amax."""

    dtype: jnp.dtype
    power_of_two: bool
    amax_floor: float

    @property
    def max(self) -> float:
        return float(jnp.finfo(self.dtype).max)


def quantize(
    x: Array, fmt: Format, *, rows: bool = True, tokens: bool = False, interpret=None
) -> tuple[tuple[Array, Array] | None, tuple[Array, Array] | None]:
    """x [T, K] bfloat16 or float32 -> for `rows` codes [T, K], scales [K/128, T]; for `tokens` codes [K, T], scales [T/128, K].

    The copy engine moves boxes of 8 rows by 128 bytes: K is a multiple of 128 and T of 8, for tokens of 128. `api.py` pads.
    """
    names = [name for name, wanted in (("rows", rows), ("tokens", tokens)) if wanted]
    plan = Plan(tuple(names), *x.shape, fmt, 2 if interpret else multiprocessors(), _fused(interpret))
    stages = 6 // x.dtype.itemsize
    shared = [plgpu.SMEM((stages, BLOCK, BLOCK), x.dtype, transforms=swizzled(x.dtype)), plgpu.Barrier(num_barriers=stages)]
    shared += [plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=stages)]
    shared += [plgpu.SMEM((plan.consumers, 2, WAVE, BLOCK), fmt.dtype, transforms=swizzled(fmt.dtype))]
    shared += [plgpu.SMEM((plan.consumers, 2, WAVE), F32)]
    done = plgpu.kernel(
        functools.partial(_quantize_kernel, plan), out_type=plan.out_type, grid=(plan.blocks,), grid_names=("block",),
        num_threads=plan.consumers + 1, thread_name="wg", scratch_types=shared, interpret=interpret,
    )(x)  # fmt: skip
    pairs = {name: (c, s[:, : c.shape[0]]) for name, c, s in zip(names, done[::2], done[1::2])}
    return pairs.get("rows"), pairs.get("tokens")


class Plan(NamedTuple):
    """All that is static in one kernel."""

    names: tuple[str, ...]
    t: int
    k: int
    fmt: Format
    blocks: int  # of threads
    fused: Callable[[Array, Array, Array], Array]

    @property
    def consumers(self) -> int:
        """Two warpgroups a direction, each with one half of every tile."""
        return 2 * len(self.names)

    @property
    def grid(self) -> tuple[int, int]:
        return pl.cdiv(self.t, BLOCK), pl.cdiv(self.k, BLOCK)

    @property
    def out_type(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        shapes = {"rows": (self.t, self.k), "tokens": (self.k, self.t)}
        # A copy of scales is clipped at the end of the array and not of its rows, which therefore are whole tiles.
        pairs = ((shapes[n], (pl.cdiv(shapes[n][1], BLOCK), pl.cdiv(shapes[n][0], BLOCK) * BLOCK)) for n in self.names)
        return sum(((jax.ShapeDtypeStruct(c, self.fmt.dtype), jax.ShapeDtypeStruct(s, F32)) for c, s in pairs), ())


def _quantize_kernel(plan: Plan, x, *refs) -> None:
    outs, (tiles, full, empty, codes, scales) = refs[: plan.consumers], refs[plan.consumers :]
    wg = lax.axis_index("wg")
    registers = {2: (232, 40), 4: (112, 24)}[plan.consumers]

    @pl.when(wg == plan.consumers)
    def _():
        plgpu.set_max_registers(registers[1], action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(functools.partial(_produce, plan, x, tiles, full, empty))

    for i, name in enumerate(plan.names):

        @pl.when(lax.div(wg, 2) == i)
        def _(i=i, name=name):
            plgpu.set_max_registers(registers[0], action="increase")
            _consume(plan, name, outs[2 * i : 2 * i + 2], tiles, full, empty, codes.at[wg], scales.at[wg])


def _for_each_tile(plan: Plan, body: Callable[[Array, Array, Array], None]) -> None:
    """body(tile's row, tile's column, number of tiles before) for each of this block's."""

    @plgpu.nd_loop((plan.grid[0] * plan.grid[1],), collective_axes="block")
    def _(loop):
        ti, ki = _raster(loop.index[0], plan.grid)
        body(ti, ki, loop.local_index)


def _raster(tile: Array, grid: tuple[int, int]) -> tuple[Array, Array]:
    """In bands, so that both what is written along the rows and what is along the tokens is near what was written just before."""
    return plgpu.planar_snake(tile, grid, 1, 8)


def _produce(plan: Plan, x, tiles, full, empty) -> None:
    stages = tiles.shape[0]

    def tile(ti, ki, before):
        slot = lax.rem(before, stages)
        pl.when(before >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
        at = pl.ds(ti * BLOCK, BLOCK), pl.ds(ki * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(x.at[at], tiles.at[slot], full.at[slot])

    _for_each_tile(plan, tile)
    mine = (plan.grid[0] * plan.grid[1] - lax.axis_index("block") + plan.blocks - 1) // plan.blocks
    left = lax.min(mine, stages)
    pl.loop(0, left)(lambda i: plgpu.barrier_wait(empty.at[lax.rem(mine - left + i, stages)]))


def _consume(plan: Plan, name: str, outs, tiles, full, empty, codes, scales) -> None:
    """Quantise this warpgroup's half of every tile, its rows or its columns."""
    start = lax.rem(lax.axis_index("wg"), 2) * WAVE
    half = pl.ds(start, WAVE)

    def tile(ti, ki, before):
        slot, buffer = lax.rem(before, tiles.shape[0]), lax.rem(before, 2)
        plgpu.barrier_wait(full.at[slot])
        x = tiles.at[slot]
        plgpu.wait_smem_to_gmem(2, wait_read_only=True)  # the two copies of the last tile may still be under way
        _quantize_groups(
            x.at[half] if name == "rows" else x.at[:, half].transpose((1, 0)), codes.at[buffer], scales.at[buffer],
            plan.fmt, plan.fused,
        )  # fmt: skip
        plgpu.barrier_arrive(empty.at[slot])
        plgpu.commit_smem()
        row, column = (ti, ki) if name == "rows" else (ki, ti)
        at = pl.ds(row * BLOCK + start, WAVE)
        plgpu.copy_smem_to_gmem(codes.at[buffer], outs[0].at[at, pl.ds(column * BLOCK, BLOCK)])
        plgpu.copy_smem_to_gmem(scales.at[buffer], outs[1].at[column, at])

    _for_each_tile(plan, tile)
    plgpu.wait_smem_to_gmem(0)


def _quantize_groups(x, codes, scale, fmt: Format, fused) -> None:
    """x [64, 128] in shared memory, a group a row."""
    values = plgpu.load(x, layout=WGMMA).astype(F32)
    scales = _scale(jnp.max(jnp.abs(values), axis=1), fmt, fused)
    codes[...] = _codes(values, scales, fmt, fused)
    scale[...] = scales


def _scale(amax: Array, fmt: Format, fused) -> Array:
    scale = _divide(jnp.maximum(amax, fmt.amax_floor), F32(fmt.max), F32(1 / fmt.max), fused)
    return _next_power_of_two(scale) if fmt.power_of_two else scale


def _next_power_of_two(x: Array) -> Array:
    """As the reference's: 2^ceil(log2(x)) by the exponent's bits."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    up = lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, F32)
    return jnp.where(x < jnp.inf, up, x)


def _codes(values: Array, scales: Array, fmt: Format, fused) -> Array:
    """The cast saturates, which clips, and keeps NaN. A group with an infinity: its numbers over infinity are 0."""
    y = jnp.where(scales == jnp.inf, 0.0, scales)
    r = jnp.where(scales == jnp.inf, 0.0, _reciprocal(scales, fused))
    y, r = (spread(v, values.shape, 0) for v in (y, r))
    return _divide(values, y, r, fused).astype(fmt.dtype)


def _divide(x: Array, y: Array, r: Array, fused) -> Array:
    """x / y rounded to nearest, r being 1 / y rounded to nearest. The signs keep that of a zero."""
    q = x * r
    return fused(-fused(q, y, -x), r, q)


def _reciprocal(y: Array, fused) -> Array:
    """1 / y rounded to nearest: one Newton step from the hardware's, which is an ulp off at most.

    A remainder of just 2^-24 means that y ends in ones and that the step would be half an ulp: a tie, which rounds the wrong way.
    """
    r = 1 / y
    e = fused(-y, r, F32(1))
    e = jnp.where(e == 2.0**-24, F32(2.0**-24 + 2.0**-47), e)
    return fused(e, r, r)


def _fused(interpret):
    """a * b + c with one rounding: what the GPU's compiler makes of a product and a sum, and what a CPU needs told."""
    return _fused_by_float64 if interpret else lambda a, b, c: a * b + c


def _fused_by_float64(a: Array, b: Array, c: Array) -> Array:
    with jax.enable_x64(True):
        a, b, c = (lax.convert_element_type(v, jnp.float64) for v in (a, b, c))
        return lax.convert_element_type(a * b + c, jnp.float32)


def quantize_blocks(w: Array, fmt: Format, *, transposed: bool, interpret=None) -> tuple[Array, ...]:
    """w [N, K] bfloat16 or float32 -> codes [N, K], scales [N/128, K/128] and, if `transposed`, the same codes [K, N].

    K is a multiple of 128 and N of 8, for the transposed codes of 128. `api.py` pads.
    """
    n, k = w.shape
    grid = pl.cdiv(n, BLOCK), pl.cdiv(k, BLOCK)
    out_type = [jax.ShapeDtypeStruct((n, k), fmt.dtype), jax.ShapeDtypeStruct(grid, F32)]
    out_type += [jax.ShapeDtypeStruct((k, n), fmt.dtype)] if transposed else []
    scratch = [_tile(w.dtype), plgpu.Barrier(), *(_tile(fmt.dtype) for _ in range(1 + transposed))]
    return plgpu.kernel(
        functools.partial(_blocks_kernel, fmt=fmt, grid=grid, transposed=transposed, fused=_fused(interpret)),
        out_type=tuple(out_type), grid=(grid[0] * grid[1],), grid_names=("tile",), num_threads=1, thread_name="wg",
        scratch_types=scratch, interpret=interpret,
    )(w)  # fmt: skip


def _tile(dtype: jnp.dtype) -> plgpu.SMEM:
    return plgpu.SMEM((BLOCK, BLOCK), dtype, transforms=swizzled(dtype))


def _blocks_kernel(w, codes, scale, *refs, fmt: Format, grid: tuple[int, int], transposed: bool, fused) -> None:
    """One tile by one warpgroup: 64 rows at a time for the largest, then for the codes."""
    outs, (tile, arrived), tiles = (codes, *refs[:transposed]), refs[transposed : transposed + 2], refs[transposed + 2 :]
    ni, ki = _raster(lax.axis_index("tile"), grid)
    rows, columns = pl.ds(ni * BLOCK, BLOCK), pl.ds(ki * BLOCK, BLOCK)
    plgpu.copy_gmem_to_smem(w.at[rows, columns], tile, arrived)
    plgpu.barrier_wait(arrived)
    halves = [pl.ds(i, WAVE) for i in range(0, BLOCK, WAVE)]
    amax = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(_read(tile.at[h])), axis=1) for h in halves))
    scales = _scale(plgpu.layout_cast(jnp.broadcast_to(jnp.max(amax), (WAVE,)), ROW), fmt, fused)
    for view, out in zip((tile, tile.transpose((1, 0))), tiles):
        for h in halves:
            out[h] = _codes(_read(view.at[h]), scales, fmt, fused)
    plgpu.commit_smem()
    for out, at, made in zip(outs, ((rows, columns), (columns, rows)), tiles):
        plgpu.copy_smem_to_gmem(made, out.at[at])
    scale[ni, ki] = jnp.max(scales)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _read(ref) -> Array:
    return plgpu.load(ref, layout=WGMMA).astype(F32)
