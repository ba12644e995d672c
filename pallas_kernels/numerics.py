"""Distances between results, and inputs on which a wrong scale is visible. numpy, for tests and
benchmarks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

LEVELS = 13  # magnitudes of `tile_distinct`, 3 octaves apart: 2^-18 to 2^18
FAR = np.iinfo(np.int64).max


def relative_l2(got: ArrayLike, want: ArrayLike) -> float:
    """|got - want| / |want| in float64; 0 if both are zero.
    """
    got, want = _float64(got), _float64(want)
    norm, error = np.linalg.norm(want), np.linalg.norm(got - want)
    return float(error / norm) if norm else float(error and np.inf)


def worst_tile(got: ArrayLike, want: ArrayLike, block: tuple[int, int]) -> float:
    """The largest `relative_l2` of any tile of size `block` in [M, N], so that small tiles count as much as
    large ones."""
    got, want = _float64(got), _float64(want)
    tiles = [np.s_[i : i + block[0], j : j + block[1]] for i in range(0, want.shape[0], block[0])
             for j in range(0, want.shape[1], block[1])]
    return max(relative_l2(got[at], want[at]) for at in tiles)


def cosine(a: ArrayLike, b: ArrayLike) -> float:
    """The cosine of the angle between two arrays as vectors, in float64; NaN if either is zero."""
    a, b = _float64(a).ravel(), _float64(b).ravel()
    with np.errstate(invalid="ignore"):
        return float(np.float64(a @ b) / (np.linalg.norm(a) * np.linalg.norm(b)))


def ulp_distance(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    """The number of representable values from a to b, elementwise, int64. Both arrays must have the same
    float dtype.

    It is 0 between the two zeros and between two NaNs; a NaN is FAR from any number. Raises TypeError for
    different dtypes.
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != b.dtype:
        raise TypeError(f"ulps are counted within one float dtype, not between {a.dtype} and {b.dtype}")
    one_nan, both_nan = np.isnan(a) != np.isnan(b), np.isnan(a) & np.isnan(b)
    return np.select([both_nan, one_nan], [0, FAR], np.abs(_ordinal(a) - _ordinal(b)))


def max_ulp(a: ArrayLike, b: ArrayLike) -> int:
    """The largest `ulp_distance`."""
    return int(ulp_distance(a, b).max(initial=0))


def spacing(x: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    """The distance between neighbouring values of `dtype` at |x|, float64; below the smallest normal number,
    the subnormal spacing."""
    info = ml_dtypes.finfo(dtype)
    least = float(info.smallest_normal)
    _, exponent = np.frexp(np.maximum(np.abs(_float64(x)), least))
    return np.ldexp(1.0, exponent - 1 - info.nmant)


def tile_distinct(shape: tuple[int, int], block: tuple[int, int], seed: int = 0,
                  octaves: float = 3.0) -> np.ndarray:
    """Normal float32 numbers [M, N] with a different magnitude, 8^-6 to 8^6, for every tile of size `block`
    and its neighbours.

    Magnitudes repeat after 13 tiles. They do not repeat among tiles less than 3 rows and 3 columns of tiles
    apart, nor between one of the first 13 and its mirror image across the diagonal. A scale read from such a
    wrong tile is about 8 times too large or too small. The error (`worst_tile`) then exceeds 0.5, while that
    of E4M3 is 0.03.
    """
    i, j = (np.arange(size) // b for size, b in zip(shape, block))
    level = (i[:, None] + 5 * j[None, :] + seed) % LEVELS
    return (np.random.default_rng(seed).normal(size=shape)
            * np.exp2(octaves * (level - LEVELS // 2))).astype(np.float32)


def _float64(x: ArrayLike) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _ordinal(x: np.ndarray) -> np.ndarray:
    """The rank of every number among all numbers of its dtype, counted from zero."""
    bits = x.view(f"u{x.itemsize}").astype(np.int64)
    sign = np.int64(1) << (8 * x.itemsize - 1)
    return np.where(bits & sign, -(bits & (sign - 1)), bits)
