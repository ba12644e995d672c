"""Tile sizes of the Hopper products: the limits that registers set, the candidates compared on an H200, and
the choice between them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jax.experimental import pallas as pl

from pallas_kernels.plgpu_compat import cache_bytes, multiprocessors

ROWS = 64  # rows of one tensor-core instruction, and of a consumer's part of the tile
# Registers per thread of a consumer and of the producer, by the number of consumers.
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 24)}


class Tiles(NamedTuple):
    """The tile sizes of a product; `choose` returns fast ones for a shape."""

    down: int = 3  # consumers along M, 64 rows each
    across: int = 1  # consumers along N
    width: int = 128  # columns per consumer
    stages: int = 4
    cluster: Literal["", "n"] = ""  # two blocks side by side along N share a
    band: int = 8  # tiles are walked in bands of this many,
    band_axis: Literal[0, 1] = 0  # along M (0) or N (1), so that operands of the tiles in flight stay in L2
    buffers: int = 1  # buffers per consumer for results that are being stored
    high: int = 1  # parts of 64 rows per consumer; their products of a stage follow one another
    flight: int = 1  # products of a consumer, from as many stages, that are in flight together
    unroll: int = 1  # stages per iteration of the loop

    @property
    def m(self) -> int:
        return self.down * self.high * ROWS

    @property
    def n(self) -> int:
        return self.across * self.width

    @property
    def consumers(self) -> int:
        return self.down * self.across


def check_tiles(tiles: Tiles, store_width: int, pairs: bool) -> None:
    """Raise ValueError for tiles that exceed the registers, and for `pairs` that are not possible. Pallas
    checks the shared memory and raises a ValueError with the bytes."""
    if tiles.cluster not in (("", "n") if pairs else ("",)):
        raise ValueError(
            f"{tiles}: pairs of blocks lie along N, and only in dense products by 128x128 blocks. One warp "
            "of a consumer releases a stage for both blocks without waiting for the other warps, which may "
            "still be reading scales of 1x128"
        )
    if tiles.consumers not in REGISTERS:
        raise ValueError(
            f"{tiles} has {tiles.consumers} consumers (down x across): 1, 2 or 3 share the registers")
    if tiles.high not in (1, 2) or tiles.high * tiles.consumers > 4:
        raise ValueError(
            f"{tiles}: two consumers have registers for 64 or 2 x 64 rows (high), three only for 64")
    widest = 128 if tiles.high == 2 else {1: 192, 2: 192, 3: 128}[tiles.consumers]
    if tiles.width % 32 or not 0 < tiles.width <= widest:
        raise ValueError(f"{tiles}: the width must be a multiple of 32, at most {widest} for these consumers")
    together = (192 if tiles.consumers == 3 else 256) // tiles.width
    if tiles.flight > 1 and (tiles.high > 1 or tiles.flight > min(tiles.stages, together)):
        raise ValueError(
            f"{tiles}: products in flight have 64 rows each and come from at most "
            f"{min(tiles.stages, together)} stages")
    if tiles.unroll < 1 or tiles.unroll > 1 and tiles.flight > 1:
        raise ValueError(
            f"{tiles}: unroll must be at least 1, and 1 if products are in flight")
    if tiles.stages < 2:
        raise ValueError(f"{tiles}: at least 2 stages, as one is read while the next is written")
    columns = tiles.width // store_width
    if tiles.buffers < 1 or columns % tiles.buffers:
        raise ValueError(
            f"{tiles}: results of 64 rows are stored in {columns} parts, which buffers must divide")


CANDIDATES = {  # compared by benchmarks/gemm.py --tune; names are down x across x width
    "3x1x128": Tiles(buffers=2),
    "3x1x128 pairs along N": Tiles(cluster="n", buffers=2),
    "2x1x128": Tiles(2, buffers=2),
    "2x1x192": Tiles(2, width=192),
    "2x1x128, 2 in flight": Tiles(2, buffers=2, flight=2),
    "2x1x128, twice 64 rows": Tiles(2, high=2, unroll=2),
    "2x1x128, twice 64 rows, pairs along N": Tiles(2, high=2, cluster="n", unroll=2),
}
FOR_WGRAD = {name: tiles._replace(unroll=1) for name, tiles in CANDIDATES.items() if not tiles.cluster}
FEW_ROWS = {  # candidates for up to 64 rows
    "1x1x64, 4 in flight": Tiles(1, 1, 64, stages=12, flight=4),
    "1x1x32, 4 in flight": Tiles(1, 1, 32, stages=16, flight=4),
}


# Relative rates with enough tiles for all multiprocessors (benchmarks/results/gemm_ahead.json,
# gemm_behind.json).
RATES = {
    True: {"3x1x128": 1.0, "2x1x128, twice 64 rows": 0.97, "2x1x128": 0.93},
    False: {"3x1x128": 1.0, "2x1x128, twice 64 rows": 0.95},
}


def choose(m: int, n: int, k: int, *, b_blocks: bool) -> Tiles:
    """The tiles for a product on this machine's GPU, from measurements on an H200 (docs/notebook_kernels.md).

    Large tiles are best, unless they leave many multiprocessors idle in the last wave. Pairs, which read
    less, are used if the operands in flight do not fit into the cache. A product of few rows takes as long as
    reading b, so the tiles are those for which no multiprocessor reads much of it.
    """
    if m <= ROWS:
        return min(FEW_ROWS.values(), key=lambda tiles: _turns(tiles, m, n) * tiles.n)
    rates, candidates = RATES[b_blocks], CANDIDATES if b_blocks else FOR_WGRAD
    tiles = candidates[max(rates, key=lambda name: rates[name] * _busy(candidates[name], m, n))]
    return tiles._replace(cluster="n") if b_blocks and _in_flight(tiles, m, n, k) > cache_bytes() else tiles


def _in_flight(tiles: Tiles, m: int, n: int, k: int) -> int:
    """Bytes of the operands of concurrently computed tiles, over the whole contraction: blocks of threads
    drift apart along it."""
    band, others = tiles.band, pl.cdiv(multiprocessors(), tiles.band)
    rows, columns = (band, others) if tiles.band_axis == 0 else (others, band)
    return (min(m, rows * tiles.m) + min(n, columns * tiles.n)) * k


def _busy(tiles: Tiles, m: int, n: int) -> float:
    """The utilisation: elements of the result over those that all multiprocessors could compute in the same
    number of waves."""
    pair = 2 if tiles.cluster else 1
    return m * n / (_turns(tiles, m, n) * (multiprocessors() // pair) * pair * tiles.m * tiles.n)


def _turns(tiles: Tiles, m: int, n: int) -> int:
    """The number of waves: tiles, or pairs of them, on the busiest multiprocessors."""
    pair = 2 if tiles.cluster else 1
    return pl.cdiv(pl.cdiv(m, tiles.m) * pl.cdiv(n, tiles.n * pair), multiprocessors() // pair)
