"""Blockwise FP8 quantisation on Hopper: one read of the input, codes and scales bit-equal to reference.py.

A block of threads is one warpgroup and has one 128x128 tile:

    copy engine  |  load tile  |          | store wave 0 | store wave 1 | ...
    threads      |  wait       | wave 0   | wave 1       | wave 2       | ...

Several blocks share a multiprocessor, so that one computes while others load and store. A wave quantises 64
groups. One quantiser serves both directions: a wave is 64 rows of the tile, or 64 rows of the *transposed*
tile (`ldmatrix.trans`, which costs nothing), so that in both a group of 128 lies in the registers of four
neighbouring threads. A tile is read from memory once, whatever is written. `make` puts the arithmetic of an
activation between the tiles that are read and the one that is quantised (`fused_quantize.sm90`).

Division. `x / scale` has to round as IEEE's division does, or codes at ties move. Given r, the rounded 1 / y,
one product and two fused multiply-adds are exact division (Markstein, "Computation of elementary functions on
the IBM RISC System/6000 processor", 1990; Brisebarre, Muller, Raina, "Accelerating correctly rounded
floating-point division when the divisor is known in advance", 2004): three instructions an element, where the
compiler's own takes about ten.

Scales are written [K/128, T], token-contiguous, as the products read them; `api.py` shows them as [T, K/128].
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import rounding
from pallas_kernels.plgpu_compat import COLUMN, ROW, WGMMA, Ref, plgpu, spread, swizzled
from pallas_kernels.quantize import BLOCK

WAVE = 64  # rows that a warpgroup holds in registers at once
F32 = jnp.float32
Quantized = Any  # (codes, scales), or None for a direction that was not requested


class Format(NamedTuple):
    """The format of a group: the code dtype, whether scales are powers of two, the minimum amax."""

    dtype: jnp.dtype
    power_of_two: bool
    amax_floor: float

    @property
    def max(self) -> float:
        return float(jnp.finfo(self.dtype).max)


def quantize(
    *parts: Array, fmt: Format, rows: bool = True, tokens: bool = False, square: bool = False, interpret=None
) -> tuple[Quantized, Quantized]:
    """x [T, K] bfloat16 or float32, in parts [T, K_i] -> for `rows` codes [T, K], scales [K/128, T]; for
    `tokens` codes [K, T], scales [T/128, K]. With `square`, each 128 scales in a row are equal.

    The copy engine moves boxes of 8 rows by 128 bytes: K_i are multiples of 128, and T is a multiple of 8,
    for tokens of 128. `api.py` pads.
    """
    widths = [part.shape[1] for part in parts]
    by_rows, by_tokens = (fmt if rows else None), (fmt if tokens else None)
    ends = tuple(itertools.accumulate(widths)) if len(widths) > 1 else ()
    plan = Plan(len(parts[0]), sum(widths), by_rows, by_tokens, fused_multiply_add(interpret), square=square,
                beside=ends)
    return quantize_made(plan, parts, interpret=interpret)[:2]


class Plan(NamedTuple):
    """The static parameters of one kernel: its inputs, the computation of a tile, and its outputs.

    `make(values, vectors)` gets 64 rows of every tile and vector that is read, unconverted. It returns
    `parts` arrays, which are quantised and lie side by side in the results, and then others. None: there is
    one tile, quantised unchanged. Values that are quantised along the tokens, or kept, are rounded to
    bfloat16 first. With `rounded`, those quantised by rows are as well; a loop can then process 64x64 at a
    time, in place, with fewer registers and instructions.
    """

    t: int
    k: int  # of each part
    rows: Format | None
    tokens: Format | None
    fused: Callable[[Array, Array, Array], Array]
    reads: tuple[tuple[int, int], ...] = ((0, 0),)  # the array and the first column of each tile
    vectors: tuple[int, ...] = ()  # the axis of the tile that each vector lies along
    make: Callable[[list[Array], list[Array]], list[Array]] | None = None
    rounded: bool = False
    parts: int = 1
    keep: tuple[int, ...] = ()  # the results of `make` that are written in bfloat16
    buffers: int = 2  # buffers for waves of codes that are being stored
    square: bool = False  # along the tokens, a whole tile shares one scale
    beside: tuple[int, ...] = ()  # the ends of the arrays that lie side by side and form the one input

    @property
    def grid(self) -> tuple[int, int]:
        return pl.cdiv(self.t, BLOCK), pl.cdiv(self.k, BLOCK)

    @property
    def formats(self) -> dict[str, Format]:
        """The formats by direction."""
        return {name: fmt for name, fmt in (("rows", self.rows), ("tokens", self.tokens)) if fmt}

    @property
    def stored(self) -> list[int]:
        """The results of `make` that go to shared memory, each in place of the tile of the same number if
        that is bfloat16."""
        return sorted({*range(self.parts if self.make and self.tokens else 0), *self.keep})

    @property
    def out_type(self) -> list[jax.ShapeDtypeStruct]:
        """Codes and scales of each direction, then the kept results."""
        shapes, found = {"rows": (self.t, self.parts * self.k), "tokens": (self.parts * self.k, self.t)}, []
        for name, fmt in self.formats.items():
            m, n = shapes[name]
            # A copy of scales is clipped at the end of the array, not at the end of a row, so rows are
            # whole tiles.
            scale = pl.cdiv(n, BLOCK), pl.cdiv(m, BLOCK) * BLOCK
            found += [jax.ShapeDtypeStruct((m, n), fmt.dtype), jax.ShapeDtypeStruct(scale, F32)]
        return found + [jax.ShapeDtypeStruct((self.t, self.k), jnp.bfloat16) for _ in self.keep]


class Shared(NamedTuple):
    """The shared memory of a block of threads."""

    tiles: tuple[Ref, ...]
    vectors: tuple[Ref, ...]
    made: tuple[Ref, ...]
    codes: Ref
    scales: Ref
    arrived: Ref


def quantize_made(plan: Plan, arrays: tuple[Array, ...], vectors: tuple[Array, ...] = (), interpret=None):
    """(rows, tokens, kept) of the results of `plan.make` for `arrays` [T, ...] and `vectors` float32, [T] or
    [K]: codes and scales, or None, for each direction, and a list of [T, K] bfloat16."""
    shared = _shared(plan, [arrays[i].dtype for i, _ in plan.reads])
    inputs, outputs = len(arrays) + len(vectors), plan.out_type

    def kernel(*refs):
        outs, held = refs[inputs : inputs + len(outputs)], Shared(*refs[inputs + len(outputs) :])
        _quantize_kernel(plan, refs[: len(arrays)], refs[len(arrays) : inputs], outs, held)

    done = plgpu.kernel(
        kernel, out_type=tuple(outputs), grid=(plan.grid[0] * plan.grid[1],), grid_names=("tile",),
        num_threads=1,
        thread_name="wg", scratch_types=shared, interpret=interpret,
    )(*arrays, *vectors)
    found = {name: (c, s[:, : c.shape[0]]) for name, c, s in zip(plan.formats, done[::2], done[1::2])}
    return found.get("rows"), found.get("tokens"), list(done[2 * len(found) :])


def _shared(plan: Plan, dtypes: list[jnp.dtype]) -> Shared:
    code = next(iter(plan.formats.values())).dtype
    return Shared(
        tiles=tuple(_tile(dtype) for dtype in dtypes),
        vectors=tuple(plgpu.SMEM((BLOCK,), F32) for _ in plan.vectors),
        made=tuple(_tile(jnp.bfloat16) for i in plan.stored if dtypes[i] != jnp.bfloat16),
        codes=plgpu.SMEM((plan.buffers, WAVE, BLOCK), code, transforms=swizzled(code)),
        scales=plgpu.SMEM((plan.buffers, WAVE), F32),
        arrived=plgpu.Barrier(num_arrivals=len(dtypes) + len(plan.vectors)),
    )


class Work(NamedTuple):
    """A block's tile, in rows and columns of tiles, the outputs, and the number of waves stored before."""

    plan: Plan
    shared: Shared
    ti: Array
    ki: Array
    outs: dict[str, tuple[Ref, Ref]]
    waves: Iterator[int]


def _quantize_kernel(plan: Plan, arrays, vectors, outs, shared: Shared) -> None:
    ti, ki = _raster(lax.axis_index("tile"), plan.grid)
    work = Work(plan, shared, ti, ki, dict(zip(plan.formats, zip(outs[::2], outs[1::2]))), itertools.count())
    at = pl.ds(ti * BLOCK, BLOCK), pl.ds(ki * BLOCK, BLOCK)
    if plan.beside:
        _read_beside(plan, arrays, at[0], ki, shared)
    else:
        for tile, (array, first) in zip(shared.tiles, plan.reads):
            plgpu.copy_gmem_to_smem(arrays[array].at[at[0], pl.ds(first + ki * BLOCK, BLOCK)], tile,
                                    shared.arrived)
    for vector, array, axis in zip(shared.vectors, vectors, plan.vectors):
        plgpu.copy_gmem_to_smem(array.at[at[axis]], vector, shared.arrived)
    plgpu.barrier_wait(shared.arrived)
    stored = _by_rows(work) if plan.make or plan.rows else {}
    for i, out in zip(plan.keep, outs[2 * len(work.outs) :]):
        plgpu.copy_smem_to_gmem(stored[i], out.at[at])
    for part in range(plan.parts if plan.tokens else 0):
        tile = stored[part] if plan.make else shared.tiles[part]
        columns = {start: tile.at[:, pl.ds(start, WAVE)].transpose((1, 0)) for start in (0, WAVE)}
        read = lambda start, columns=columns: plgpu.load(columns[start], layout=WGMMA)
        amax = functools.reduce(jnp.maximum, map(_amax, map(read, columns))) if plan.square else None
        for start in columns:
            _send(work, "tokens", part, start, read(start), amax)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _read_beside(plan: Plan, arrays, rows, ki: Array, shared: Shared) -> None:
    """Read the tile from the one of `arrays` that has its columns."""
    for array, start, end in zip(arrays, (0, *plan.beside), plan.beside):

        @pl.when((start <= ki * BLOCK) & (ki * BLOCK < end))
        def _(array=array, start=start):
            columns = pl.ds(ki * BLOCK - start, BLOCK)
            plgpu.copy_gmem_to_smem(array.at[rows, columns], shared.tiles[0], shared.arrived)


def _by_rows(work: Work) -> dict[int, Ref]:
    """Compute the tile and quantise it by rows. Returns the results that are now in shared memory, and their
    places."""
    plan, tiles, spare = work.plan, work.shared.tiles, iter(work.shared.made)
    stored = {i: tiles[i] if tiles[i].dtype == jnp.bfloat16 else next(spare) for i in plan.stored}
    if plan.rounded:
        _make_in_place(work, stored)
    for start in (0, WAVE):
        half = pl.ds(start, WAVE)
        if plan.rounded:
            values = [plgpu.load(stored[part].at[half], layout=WGMMA) for part in range(plan.parts)]
        else:
            values = _made(work, half, pl.ds(0, BLOCK))
            for i, tile in stored.items():
                tile[half] = values[i].astype(jnp.bfloat16)
        for part in range(plan.parts if plan.rows else 0):
            _send(work, "rows", part, start, values[part])
    plgpu.commit_smem()  # other threads read the values next
    return stored


def _make_in_place(work: Work, stored: dict[int, Ref]) -> None:
    @pl.loop(0, (BLOCK // WAVE) ** 2)
    def _(quarter):
        rows, columns = (pl.ds(f(quarter, BLOCK // WAVE) * WAVE, WAVE) for f in (lax.div, lax.rem))
        values = _made(work, rows, columns)
        for i, tile in stored.items():
            tile[rows, columns] = values[i].astype(jnp.bfloat16)

    plgpu.commit_smem()


def _made(work: Work, rows, columns) -> list[Array]:
    """A part of the tile: the arrays that are quantised by rows, and the others."""
    plan, shared = work.plan, work.shared
    values = [plgpu.load(tile.at[rows, columns], layout=WGMMA) for tile in shared.tiles]
    if not plan.make:
        return values
    layouts = (rows, ROW), (columns, COLUMN)
    chosen = [(v, *layouts[axis]) for v, axis in zip(shared.vectors, plan.vectors)]
    return plan.make(values,
                     [plgpu.load(v.at[at], layout=layout, optimized=False) for v, at, layout in chosen])


def _amax(values: Array) -> Array:
    """The maximum of each group of 128: [64]."""
    return jnp.max(jnp.abs(values), axis=1).astype(F32)


def _of_all(amax: Array) -> Array:
    """The maximum of all groups, for each group: [64]."""
    return plgpu.layout_cast(jnp.broadcast_to(jnp.max(amax), (WAVE,)), ROW)


def _send(work: Work, direction: str, part: int, start: int, values: Array,
          amax: Array | None = None) -> None:
    """Quantise 64 groups of 128, `values` [64, 128], and store them. If `amax` [64] is given, all groups
    share one scale, from its maximum."""
    plan, wave, fmt = work.plan, next(work.waves), work.plan.formats[direction]
    codes, scales = (buffer.at[wave % plan.buffers] for buffer in (work.shared.codes, work.shared.scales))
    scale = _scale(_amax(values) if amax is None else _of_all(amax), fmt, plan.fused)
    quantized = _codes(values.astype(F32), scale, fmt, plan.fused)
    if wave >= plan.buffers:
        plgpu.wait_smem_to_gmem(2 * (plan.buffers - 1), wait_read_only=True)  # two copies a wave
    codes[...], scales[...] = quantized, scale
    plgpu.commit_smem()
    ki = part * plan.grid[1] + work.ki
    row, column = (work.ti, ki) if direction == "rows" else (ki, work.ti)
    groups, out = pl.ds(row * BLOCK + start, WAVE), work.outs[direction]
    plgpu.copy_smem_to_gmem(codes, out[0].at[groups, pl.ds(column * BLOCK, BLOCK)])
    plgpu.copy_smem_to_gmem(scales, out[1].at[column, groups])


def _raster(tile: Array, grid: tuple[int, int]) -> tuple[Array, Array]:
    """Tiles in order along the rows, so that concurrent reads, and writes by rows, are neighbours in
    memory."""
    columns = jnp.asarray(grid[1], tile.dtype)
    return lax.div(tile, columns), lax.rem(tile, columns)


def _scale(amax: Array, fmt: Format, fused) -> Array:
    amax = jnp.maximum(amax, fmt.amax_floor)
    scale = jnp.where(amax < jnp.inf, _divide(amax, F32(fmt.max), F32(1 / fmt.max), fused), amax)
    return _next_power_of_two(scale) if fmt.power_of_two else scale


def _next_power_of_two(x: Array) -> Array:
    """As in the reference: 2^ceil(log2(x)) from the exponent's bits."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    up = lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, F32)
    return jnp.where(x < jnp.inf, up, x)


def _codes(values: Array, scales: Array, fmt: Format, fused) -> Array:
    """The codes of `values`. The cast saturates, which clips, and keeps NaN. In a group with an infinity,
    finite numbers divided by the infinite scale are 0."""
    y = jnp.where(scales == jnp.inf, 0.0, scales)
    r = jnp.where(scales == jnp.inf, 0.0, _reciprocal(scales, fused))
    y, r = (spread(v, values.shape, 0) for v in (y, r))
    return _divide(values, y, r, fused).astype(fmt.dtype)


def _divide(x: Array, y: Array, r: Array, fused) -> Array:
    """x / y rounded to nearest, given r = 1 / y rounded to nearest. The sign of a zero is preserved."""
    q = x * r
    return fused(-fused(q, y, -x), r, q)


def _reciprocal(y: Array, fused) -> Array:
    """1 / y rounded to nearest: one Newton step from the hardware's approximation, which is off by at most
    one ulp.

    If the remainder is exactly 2^-24, y's significand is all ones and the step would be half an ulp: a tie,
    which rounds the wrong way.
    """
    r = 1 / y
    e = fused(-y, r, F32(1))
    e = jnp.where(e == 2.0**-24, F32(2.0**-24 + 2.0**-47), e)
    return fused(e, r, r)


def fused_multiply_add(interpret):
    """a * b + c with one rounding. The GPU's compiler fuses a product and a sum by itself; on a CPU it is
    computed explicitly."""
    return rounding.fused_multiply_add if interpret else lambda a, b, c: a * b + c


def quantize_blocks(
    w: Array, fmt: Format, first: Array | None = None, rows: int | None = None, *, transposed: bool,
    interpret=None
) -> tuple[Array, ...]:
    """w [N, K] bfloat16 or float32 -> codes [N, K], scales [N/128, K/128] and, if `transposed`, the same
    codes [K, N].

    K is a multiple of 128, and N is a multiple of 8, for the transposed codes of 128. `api.py` pads. first,
    rows: quantise only `rows` rows from 128 * `first` on, instead of all N.
    """
    n, k = (w.shape[0] if first is None or rows is None else rows), w.shape[1]
    grid = pl.cdiv(n, BLOCK), pl.cdiv(k, BLOCK)
    out_type = [jax.ShapeDtypeStruct((n, k), fmt.dtype), jax.ShapeDtypeStruct(grid, F32)]
    out_type += [jax.ShapeDtypeStruct((k, n), fmt.dtype)] if transposed else []
    scratch = [_tile(w.dtype), plgpu.Barrier(), *(_tile(fmt.dtype) for _ in range(1 + transposed))]
    kernel = functools.partial(_blocks_kernel, fmt=fmt, grid=grid, transposed=transposed,
                               fused=fused_multiply_add(interpret))
    whole = lambda w, *refs: kernel(w, None, *refs)  # noqa: E731
    return plgpu.kernel(
        whole if first is None else kernel, out_type=tuple(out_type), grid=(grid[0] * grid[1],),
        grid_names=("tile",),
        num_threads=1, thread_name="wg", scratch_types=scratch, interpret=interpret,
    )(w, *([] if first is None else [first[None]]))


def _tile(dtype: jnp.dtype) -> Ref:
    return plgpu.SMEM((BLOCK, BLOCK), dtype, transforms=swizzled(dtype))


def _blocks_kernel(w, first, codes, scale, *refs, fmt: Format, grid: tuple[int, int], transposed: bool,
                   fused) -> None:
    """One tile by one warpgroup: 64 rows at a time for the maximum, then again for the codes."""
    outs, (tile, arrived), tiles = (codes, *refs[:transposed]), refs[transposed : transposed + 2], refs[
        transposed + 2 :]
    ni, ki = _raster(lax.axis_index("tile"), grid)
    rows, columns = pl.ds(ni * BLOCK, BLOCK), pl.ds(ki * BLOCK, BLOCK)
    source = rows if first is None else pl.ds((first[0] + ni) * BLOCK, BLOCK)
    plgpu.copy_gmem_to_smem(w.at[source, columns], tile, arrived)
    plgpu.barrier_wait(arrived)
    halves = [pl.ds(i, WAVE) for i in range(0, BLOCK, WAVE)]
    amax = functools.reduce(jnp.maximum, (_amax(_read(tile.at[h])) for h in halves))
    scales = _scale(_of_all(amax), fmt, fused)
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
