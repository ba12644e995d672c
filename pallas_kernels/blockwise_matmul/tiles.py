"""How the products on Hopper are cut up: what registers allow, what was compared on an H200, and what is
chosen by it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jax.experimental import pallas as pl

from pallas_kernels.plgpu_compat import cache_bytes, multiprocessors

ROWS = 64  # of one tensor-core instruction, and of a consumer's part of the tile
# a thread of a consumer, of the producer's, by number of consumers
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 24)}


class Tiles(NamedTuple):
    """How a product is cut up; `choose` knows what is fast for which shape."""

    down: int = 3  # consumers along M, 64 rows each
    across: int = 1  # consumers along N
    width: int = 128  # columns of a consumer
    stages: int = 4
    cluster: Literal["", "n"] = ""  # two blocks side by side along N share a
    band: int = 8  # tiles are walked in bands of this many,
    band_axis: Literal[0, 1] = 0  # along M (0) or N (1), so that the operands of those in flight stay in L2
    buffers: int = 1  # of a consumer's results on their way to memory
    high: int = 1  # times 64 rows of a consumer, one product after the other of every stage
    flight: int = 1  # products of a consumer that are computed together, of as many stages
    unroll: int = 1  # stages read in a turn of the loop

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
    """What registers allow, and whether there may be `pairs`; shared memory is counted by Pallas, which
    raises a ValueError with the bytes."""
    if tiles.cluster not in (("", "n") if pairs else ("",)):
        raise ValueError(
            f"{tiles}: pairs of blocks are along N, and in dense products by 128x128 blocks alone. One warp of a consumer tells "
            "both of a pair that a stage is read, and does not wait for the others: these may be reading scales of 1x128"
        )
    if tiles.consumers not in REGISTERS:
        raise ValueError(
            f"{tiles} has {tiles.consumers} consumers (down x across): 1, 2 or 3 share the registers")
    if tiles.high not in (1, 2) or tiles.high * tiles.consumers > 4:
        raise ValueError(
            f"{tiles}: two consumers have the registers for 64 rows or twice 64 (high), three for 64")
    widest = 128 if tiles.high == 2 else {1: 192, 2: 192, 3: 128}[tiles.consumers]
    if tiles.width % 32 or not 0 < tiles.width <= widest:
        raise ValueError(f"{tiles}: the width is a multiple of 32, {widest} at most with so many consumers")
    together = (192 if tiles.consumers == 3 else 256) // tiles.width
    if tiles.flight > 1 and (tiles.high > 1 or tiles.flight > min(tiles.stages, together)):
        raise ValueError(
            f"{tiles}: products in flight are of 64 rows each, and of {min(tiles.stages, together)} stages or fewer")
    if tiles.unroll < 1 or tiles.unroll > 1 and tiles.flight > 1:
        raise ValueError(
            f"{tiles}: a turn of the loop reads 1 stage or more (unroll), and those in flight alone where some are")
    if tiles.stages < 2:
        raise ValueError(f"{tiles}: one stage is read while the next is written, so 2 or more")
    columns = tiles.width // store_width
    if tiles.buffers < 1 or columns % tiles.buffers:
        raise ValueError(f"{tiles}: results of 64 rows leave in {columns} parts, which buffers must divide")


CANDIDATES = {  # what benchmarks/gemm.py --tune compares; names are down x across x width
    "3x1x128": Tiles(buffers=2),
    "3x1x128 pairs along N": Tiles(cluster="n", buffers=2),
    "2x1x128": Tiles(2, buffers=2),
    "2x1x192": Tiles(2, width=192),
    "2x1x128, 2 in flight": Tiles(2, buffers=2, flight=2),
    "2x1x128, twice 64 rows": Tiles(2, high=2, unroll=2),
    "2x1x128, twice 64 rows, pairs along N": Tiles(2, high=2, cluster="n", unroll=2),
}
FOR_WGRAD = {name: tiles._replace(unroll=1) for name, tiles in CANDIDATES.items() if not tiles.cluster}
FEW_ROWS = {  # the same of up to 64 rows
    "1x1x64, 4 in flight": Tiles(1, 1, 64, stages=12, flight=4),
    "1x1x32, 4 in flight": Tiles(1, 1, 32, stages=16, flight=4),
}


RATES = {  # relative, where there are tiles enough (benchmarks/results/gemm_ahead.json, gemm_behind.json)
    True: {"3x1x128": 1.0, "2x1x128, twice 64 rows": 0.97, "2x1x128": 0.93},
    False: {"3x1x128": 1.0, "2x1x128, twice 64 rows": 0.95},
}


def choose(m: int, n: int, k: int, *, b_blocks: bool) -> Tiles:
    """The tiles for a product on the GPU here, by measurements on an H200 (docs/notebook_kernels.md): big ones,
    unless they would leave many multiprocessors without work in the last turn, and in pairs, which read less,
    where the cache does not hold what is in flight; for few rows, which take as long as reading b, those with
    which no multiprocessor reads much of it."""
    if m <= ROWS:
        return min(FEW_ROWS.values(), key=lambda tiles: _turns(tiles, m, n) * tiles.n)
    rates, candidates = RATES[b_blocks], CANDIDATES if b_blocks else FOR_WGRAD
    tiles = candidates[max(rates, key=lambda name: rates[name] * _busy(candidates[name], m, n))]
    return tiles._replace(cluster="n") if b_blocks and _in_flight(tiles, m, n, k) > cache_bytes() else tiles


def _in_flight(tiles: Tiles, m: int, n: int, k: int) -> int:
    """Bytes of the operands of tiles that are computed at once, the whole contraction: blocks of threads
    drift apart along it."""
    band, others = tiles.band, pl.cdiv(multiprocessors(), tiles.band)
    rows, columns = (band, others) if tiles.band_axis == 0 else (others, band)
    return (min(m, rows * tiles.m) + min(n, columns * tiles.n)) * k


def _busy(tiles: Tiles, m: int, n: int) -> float:
    """Elements of the result over those that all multiprocessors could compute in the turns it takes."""
    pair = 2 if tiles.cluster else 1
    return m * n / (_turns(tiles, m, n) * (multiprocessors() // pair) * pair * tiles.m * tiles.n)


def _turns(tiles: Tiles, m: int, n: int) -> int:
    """Tiles, or pairs of them, that the busiest multiprocessors compute."""
    pair = 2 if tiles.cluster else 1
    return pl.cdiv(pl.cdiv(m, tiles.m) * pl.cdiv(n, tiles.n * pair), multiprocessors() // pair)
