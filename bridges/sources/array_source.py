"""A WeightSource over a dictionary of arrays, and random weights that fit any manifest: for tests and
benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from bridges.api import ParamMeta


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """A WeightSource that yields `arrays`, by HF name, in the order of `metas`. Reading raises KeyError for a
    name without an array."""

    metas: tuple[ParamMeta, ...]
    arrays: Mapping[str, Any]

    def manifest(self) -> tuple[ParamMeta, ...]:
        return self.metas

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((m.name, self.arrays[m.name]) for m in self.metas)


def random_source(
    metas: tuple[ParamMeta, ...], seed: int, scale: float = 0.1,
    convert: Callable[[np.ndarray], Any] = np.asarray
) -> ArraySource:
    """A source of random weights: normal with standard deviation `scale`, and vectors (norms) of 1. Pass
    `convert=jnp.asarray` for JAX arrays.

    An FP8 weight gets codes with standard deviation 64 and block scales around scale / 64. The scales of
    blocks differ by up to a factor of 4, so that a scale on the wrong block shows. Scales of FP8 attention
    are powers of two from 1/8 to 8.
    """
    rng = np.random.default_rng(seed)
    return ArraySource(metas, {m.name: convert(_random(m, rng, scale)) for m in metas})


def _random(m: ParamMeta, rng: np.random.Generator, scale: float) -> np.ndarray:
    import ml_dtypes

    if m.role == "block_scale":
        x = scale / 64 * rng.uniform(0.5, 2, m.shape)
    elif m.role == "kv_scale":
        x = 2.0 ** rng.integers(-3, 4)
    elif len(m.shape) == 1:
        x = np.ones(m.shape)
    else:
        x = rng.standard_normal(m.shape) * (64 if m.dtype == "float8_e4m3fn" else scale)
    return np.clip(x, -448, 448).astype(np.dtype(getattr(ml_dtypes, m.dtype, m.dtype)))
