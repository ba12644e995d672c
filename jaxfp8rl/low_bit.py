"""Arrays that are kept in few bits between updates, as FP8-LM keeps an optimiser's (Peng et al. 2023, arXiv 2310.18313, section
2.2): in a narrower float type, with a scale a block of 128 along the last axis where the type's range is narrow, too.

    "float32"   as it is                                    4 bytes an element
    "bfloat16"  float32's range: no scale                   2
    "float16"   8 times bfloat16's digits, with scales      2 + 4/128
    "float8"    E4M3, with scales                           1 + 4/128

Scales are powers of two: multiplying by them is exact, so that what can be stood for is stood for to the bit, on any device and
however XLA fuses. FP8-LM has one scale a tensor and rounds to nearest. Here rounding is stochastic, for a number that moves by
less than half a digit an update would otherwise never move: a master at a learning rate of 1e-6, or an average with b2 = 0.999.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.quantize import BLOCK

Format = Literal["float32", "bfloat16", "float16", "float8"]
Faint = Literal["stochastic", "down", "up"]
DTYPES = {
    "float32": jnp.dtype(jnp.float32), "bfloat16": jnp.dtype(jnp.bfloat16),
    "float16": jnp.dtype(jnp.float16), "float8": jnp.dtype(jnp.float8_e4m3fn),
}  # fmt: skip
CODES = {"float16": jnp.dtype(jnp.float16), "float8": jnp.dtype(jnp.uint8)}  # of the formats with scales
BIAS, FRACTION, SMALLEST = 127, 23, -126  # of float32: exponents are stored with 127 added, above 23 bits; the least normal one


class Scaled(NamedTuple):
    """codes [..., K] float16, or uint8, the bytes of E4M3; scale [..., ceil(K/128)] float32, powers of two. The number is codes *
    scale. Bytes, because to write one layer of a float8 stack XLA for CPUs converts the whole stack there and back."""

    codes: Array
    scale: Array


Kept = Array | Scaled


def is_scaled(x: Any) -> bool:
    return isinstance(x, Scaled)


def encode(x: Array, kept_as: Format, bits: Array | None = None, faint: Faint = "stochastic") -> Kept:
    """x [..., K] float32, finite, rounded to a format: with `bits` [..., K] uint32 stochastically, without to nearest.

    faint: how numbers are rounded that are too small for the type's full digits, in its block.
    """
    dtype = DTYPES[kept_as]
    narrow = lambda x: x.astype(dtype) if bits is None else round_stochastically(x, dtype, bits, faint)
    if kept_as == "float32":
        return x
    if kept_as not in CODES:
        return narrow(x)
    exponent = _block_exponent(x, dtype)
    codes = narrow(x * _spread(_power_of_two(-exponent), x.shape[-1]))
    return Scaled(jax.lax.bitcast_convert_type(codes, CODES[kept_as]), _power_of_two(exponent))


def decode(kept: Kept) -> Array:
    """The float32 numbers, exactly."""
    if is_scaled(kept):
        dtype = next(DTYPES[name] for name, stored in CODES.items() if stored == kept.codes.dtype)
        codes = jax.lax.bitcast_convert_type(kept.codes, dtype)
        return codes.astype(jnp.float32) * _spread(kept.scale, codes.shape[-1])
    return kept.astype(jnp.float32)


def zeros(shape: Sequence[int], kept_as: Format) -> Kept:
    """All bytes 0, scales too, which no `encode` makes."""
    like = jax.eval_shape(lambda: encode(jnp.zeros(shape), kept_as))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def nbytes(shape: Sequence[int], kept_as: Format) -> int:
    """Bytes of an array of this shape, its scales included."""
    size = math.prod(shape) * DTYPES[kept_as].itemsize
    if kept_as not in CODES:
        return size
    return size + math.prod(shape[:-1]) * -(-shape[-1] // BLOCK) * DTYPES["float32"].itemsize


def round_stochastically(x: Array, dtype: jnp.dtype, bits: Array, faint: Faint = "stochastic") -> Array:
    """x float32 -> one of its two neighbours in `dtype`, each with the chance that makes the mean x; x itself if it is one.

    bits: uint32 of x's shape, of which as many upper ones are used as x has more digits than `dtype`, so that over all bits the
    mean is x exactly, down to the type's least normal number, and to 2^-13 of the spacing below it, unless `faint` numbers go
    towards zero or away from it. |x| must not exceed the largest number of `dtype`. bfloat16 is spaced 2^-126 below 2^-119.
    """
    to = jnp.finfo(dtype)
    exponent, least = (_as_int(jnp.abs(x)) >> FRACTION) - BIAS, max(int(to.minexp), SMALLEST + to.nmant)
    spacing = jnp.maximum(exponent, least) - to.nmant
    spare = FRACTION - to.nmant
    chance = (bits >> (32 - spare)).astype(jnp.float32) * 2.0**-spare  # in [0, 1)
    steps = jnp.abs(x) * _power_of_two(-spacing)
    rounded = jnp.floor(steps + chance)
    if faint != "stochastic":
        rounded = jnp.where(exponent < least, jnp.floor(steps) if faint == "down" else jnp.ceil(steps), rounded)
    return jnp.copysign(rounded * _power_of_two(spacing), x).astype(dtype)


def random_words(salt: Array, layer: Array, shape: Sequence[int]) -> tuple[Array, Array, Array]:
    """Three uint32 for each element: a hash of `salt` [2] uint32, `layer` and the element's place. It is as good as rounding
    needs, a tenth of jax.random's instructions, so that XLA may fuse it anywhere, and the same however the array is sharded."""
    strides = [math.prod(shape[axis + 1 :]) % 2**32 for axis in range(len(shape))]
    place = sum(jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(n) for axis, n in enumerate(strides))
    salt = _mix(salt + jnp.uint32(layer))
    word = _mix(_mix(place + salt[0]) ^ salt[1])
    return word, word * np.uint32(0x9E3779B9), word * np.uint32(0x85EBCA6B)  # each bit depends on all of word's below it


def _mix(x: Array) -> Array:
    """lowbias32 (C. Wellons, "Prospecting for hash functions", 2018): every bit of the result depends on every bit of x."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _block_exponent(x: Array, dtype: jnp.dtype) -> Array:
    """The least k with amax <= MAX * 2^k of each block, [..., ceil(K/128)] int32. Bits of float32 are ordered as the numbers are,
    and an exponent more adds 2^23 to them."""
    missing = -x.shape[-1] % BLOCK
    padded = jnp.pad(jnp.abs(x), [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else jnp.abs(x)
    amax = jnp.max(padded.reshape(*x.shape[:-1], -1, BLOCK), -1)
    largest = int(np.float32(jnp.finfo(dtype).max).view(np.int32))
    return jnp.maximum((_as_int(amax) - largest + 2**FRACTION - 1) >> FRACTION, SMALLEST)


def _spread(scale: Array, width: int) -> Array:
    """A scale a block -> one an element."""
    return jnp.repeat(scale, BLOCK, -1)[..., :width]


def _as_int(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _power_of_two(exponent: Array) -> Array:
    """2^exponent in float32, for exponents of normal numbers."""
    return jax.lax.bitcast_convert_type((exponent + BIAS) << FRACTION, jnp.float32)
