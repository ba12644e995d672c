"""Arrays in few bits between updates, as FP8-LM keeps those of an optimiser (Peng et al. 2023, arXiv
2310.18313, section 2.2): in a narrower float type, and if its range is narrow too, with a scale for each
block of 128 along the last axis.

    "float32"   unchanged                                   4 bytes an element
    "bfloat16"  float32's range: no scale                   2
    "float16"   8 times bfloat16's digits, with scales      2 + 4/128
    "float8"    E4M3, with scales                           1 + 4/128

Scales are powers of two. Multiplying by them is exact, so a number that the format can represent is kept to
the bit, on any device and however XLA fuses. FP8-LM has one scale for each tensor and rounds to nearest. Here
rounding is stochastic: otherwise a number that moves by less than half a digit an update would never move,
like a master at a learning rate of 1e-6, or an average with b2 = 0.999.
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
}
CODES = {"float16": jnp.dtype(jnp.float16), "float8": jnp.dtype(jnp.uint8)}  # of the formats with scales
# of float32: exponents are stored with 127 added, above 23 bits; the least normal one
BIAS, FRACTION, SMALLEST = 127, 23, -126


class Scaled(NamedTuple):
    """codes [..., K] float16, or uint8, the bytes of E4M3; scale [..., ceil(K/128)] float32, powers of two.
    The number is codes * scale. E4M3 is kept as bytes because XLA for CPUs converts a whole float8 stack
    there and back to write one layer of it."""

    codes: Array
    scale: Array


Stored = Array | Scaled


def is_scaled(x: Any) -> bool:
    return isinstance(x, Scaled)


def encode(
    x: Array, kept_as: Format, bits: Array | None = None, faint: Faint = "stochastic",
    amax: Array | None = None
) -> Stored:
    """Round x [..., K] float32, finite, to a format: stochastically with `bits` [..., K] uint32, to nearest
    without.

    faint: how to round numbers that are too small for the type's full digits, in their block. amax [...,
    ceil(K/128)]: an upper bound of each block, if the caller knows one without looking at x.
    """
    dtype = DTYPES[kept_as]
    narrow = lambda x: x.astype(dtype) if bits is None else round_stochastically(x, dtype, bits, faint)
    if kept_as == "float32":
        return x
    if kept_as not in CODES:
        return narrow(x)
    exponent = _exponent(block_amax(x) if amax is None else amax, dtype)
    codes = narrow(x * _spread(_power_of_two(-exponent), x.shape[-1]))
    return Scaled(jax.lax.bitcast_convert_type(codes, CODES[kept_as]), _power_of_two(exponent))


def decode(kept: Stored) -> Array:
    """The float32 numbers, exactly."""
    if not isinstance(kept, Scaled):
        return kept.astype(jnp.float32)
    numbers = _e4m3(kept.codes) if kept.codes.dtype == jnp.uint8 else kept.codes.astype(jnp.float32)
    return numbers * _spread(kept.scale, numbers.shape[-1])


def _e4m3(codes: Array) -> Array:
    """Bytes of E4M3, none NaN -> float32. Shifted, they are float16 of an exponent less by 8, which one
    instruction converts."""
    shifted = (jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int16) << 7) & ~0x4000
    return jax.lax.bitcast_convert_type(shifted, jnp.float16).astype(jnp.float32) * 2.0**8


def zeros(shape: Sequence[int], kept_as: Format) -> Stored:
    """Zeros whose bytes are all 0, even those of the scales, which `encode` never makes."""
    like = jax.eval_shape(lambda: encode(jnp.zeros(shape), kept_as))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def nbytes(shape: Sequence[int], kept_as: Format) -> int:
    """Bytes of an array of this shape, its scales included."""
    size = math.prod(shape) * DTYPES[kept_as].itemsize
    if kept_as not in CODES:
        return size
    return size + math.prod(shape[:-1]) * -(-shape[-1] // BLOCK) * DTYPES["float32"].itemsize


def round_stochastically(x: Array, dtype: jnp.dtype, bits: Array, faint: Faint = "stochastic") -> Array:
    """x float32 -> one of its two neighbours in `dtype`, each with the chance that makes the mean x; x itself
    if it is one.

    bits: uint32 of x's shape, of which as many upper ones are used as x has more digits than `dtype`: added
    to the digits that go, they carry over with just that chance. So over all bits the mean is x exactly, down
    to the type's least normal number, and to 2^-13 of the spacing below it, unless `faint` numbers go towards
    zero or away from it. |x| must not exceed the largest number of `dtype`. bfloat16 has float32's exponents:
    nothing is faint in it.

    By integers throughout: XLA's own conversion to E4M3 alone takes more instructions than all of this.
    """
    to = jnp.finfo(dtype)
    spare, unsigned = FRACTION - to.nmant, jnp.dtype(f"uint{to.bits}")
    digits, extra = _as_int(x), (bits >> (32 - spare)).astype(jnp.int32)
    magnitude = digits & 0x7FFFFFFF
    code = (magnitude + extra >> spare) - (to.minexp - SMALLEST << to.nmant)
    if to.minexp > SMALLEST:  # the codes of multiples of the least spacing are 0, 1, 2, ...
        steps = jnp.abs(x) * 2.0 ** (to.nmant - to.minexp)
        steps = {"stochastic": lambda: steps + extra * 2.0**-spare, "down": lambda: steps,
                 "up": lambda: jnp.ceil(steps)}[faint]()
        code = jnp.where(magnitude < to.minexp + BIAS << FRACTION, steps.astype(jnp.int32), code)
    code |= digits >> (32 - to.bits) & 1 << (to.bits - 1)
    return jax.lax.bitcast_convert_type(code.astype(unsigned), dtype)


def add_to(total: Array, x: Array) -> Array:
    """total + x, summed in float32 and rounded to the type of `total`, float32 or bfloat16: to bfloat16
    stochastically, so that the sum of many has the right mean.

    The bits that round are a hash of both numbers and of the element's place. They need no state, and the
    same sums give the same bytes. Numbers that are not finite stay so.
    """
    sum_ = total.astype(jnp.float32) + x.astype(jnp.float32)
    if total.dtype == jnp.float32:
        return sum_
    *lead, width = total.shape
    place = jax.lax.broadcasted_iota(jnp.uint32, total.shape, len(lead))
    for axis in range(len(lead)):
        place += jax.lax.broadcasted_iota(jnp.uint32, total.shape, axis) * np.uint32(
            math.prod(lead[axis + 1 :]) * width % 2**32)
    digits = jax.lax.bitcast_convert_type(total, jnp.uint16).astype(jnp.uint32) << 16
    numbers = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return round_stochastically(sum_, total.dtype, _mix(_mix(digits ^ numbers) ^ place))


def random_bits(salt: Array, first: Array | int, shape: Sequence[int]) -> tuple[Array, Array, Array]:
    """Three uint32 for each element: a hash of `salt` [2] uint32 and the element's index along the first of
    several axes, counted from `first`. The quality suffices for rounding, at a tenth of jax.random's
    instructions, so that XLA may fuse it anywhere. The bits do not depend on how the array is sharded or
    split."""
    *lead, width = shape
    index = lambda axis: jax.lax.broadcasted_iota(jnp.uint32, (*lead, 1), axis)
    row = sum((index(a) * np.uint32(math.prod(lead[a + 1 :])) for a in range(len(lead))), jnp.uint32(0))
    row += jnp.uint32(first) * np.uint32(math.prod(lead[1:]))
    row = jax.lax.optimization_barrier(_mix(_mix(row + salt[0]) ^ salt[1]))  # once a row, not once an element
    word = _mix(row ^ jnp.arange(width, dtype=jnp.uint32))
    # each bit depends on all of word's below it
    return word, word * np.uint32(0x9E3779B9), word * np.uint32(0x85EBCA6B)


def _mix(x: Array) -> Array:
    """lowbias32 (C. Wellons, "Prospecting for hash functions", 2018): every bit of the result depends on
    every bit of x."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def blocks(x: Array) -> Array:
    """[..., K] -> [..., ceil(K/128), 128], with zeros at the end of the last."""
    missing = -x.shape[-1] % BLOCK
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
    return padded.reshape(*x.shape[:-1], -1, BLOCK)


def block_amax(x: Array) -> Array:
    """The largest |x| of each block, [..., ceil(K/128)]."""
    return jnp.max(blocks(jnp.abs(x)), -1)


def _exponent(amax: Array, dtype: jnp.dtype) -> Array:
    """The least k with amax <= MAX * 2^k, int32. Bits of float32 are ordered as the numbers are, and an
    exponent more adds 2^23 to them."""
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
