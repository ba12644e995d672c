"""Weights in four bits, in plain jnp: NVFP4, MXFP4 and INT4, as compressed-tensors checkpoints store them.

| format | code | scale | weight |
|---|---|---|---|
| "nvfp4" | E2M1 | E4M3 for each 16 along K, and one float32 divisor | code * scale / divisor |
| "mxfp4" | E2M1 | E8M0, a power of two, for each 32 along K | code * 2^(scale - 127) |
| "int4" | -8 to 7 | bfloat16 for each 32 along K | code * scale, rounded to bfloat16 |

E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 (OCP Microscaling Formats v1.0, section 5.3.3). Two
codes share a byte, the even column in the low half. INT4 stores code + 8.

The product of an E2M1 code and its scale has at most 6 bits: it is a bfloat16 number exactly. Kernels for
Hopper (Marlin) multiply by these numbers and divide by the divisor after the sum. If the divisor is a power
of two, as `global_scale` makes it, the quotient is a bfloat16 number too, and an engine that divides first
computes with the same weights.

Relative RMS errors of Gaussian weights: NVFP4 0.095, MXFP4 0.112, INT4 0.095.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.forward_only import forward_only
from pallas_kernels.quantize import reference as q

GROUPS: dict[str, int] = {"nvfp4": 16, "mxfp4": 32, "int4": 32}  # columns that share a scale
E2M1_MAX = 6.0
LEAST_SCALE = 2.0**-6  # the least normal E4M3 number; Marlin reads smaller scales as 0
LARGEST = E2M1_MAX * q.E4M3_MAX  # what an NVFP4 weight is at most, times its divisor
_FORMATS: dict[str, str] = {"float8_e4m3fn": "nvfp4", "uint8": "mxfp4", "bfloat16": "int4"}
no_derivative = forward_only(
    "differentiate jaxfp8rl.precision.linear.linear by its input; a weight in four bits does not learn")


class FourBits(NamedTuple):
    """A weight [..., N, K]; the type of `scale` tells the format.

    packed: [..., N, K/2] uint8. scale: [..., N, K/16] float8_e4m3fn (NVFP4), [..., N, K/32] uint8 (MXFP4) or
    bfloat16 (INT4). global_scale: [...] float32, the divisor of NVFP4; None in the other formats.
    """

    packed: Array
    scale: Array
    global_scale: Array | None = None

    @property
    def format(self) -> str:
        return _FORMATS[str(self.scale.dtype)]

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K] of the weight."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])


@no_derivative
def e2m1_codes(x: Array) -> Array:
    """x [...] float32 -> uint8 codes 0 to 15 of the nearest E2M1 numbers; ties go to the code that is even,
    magnitudes above 6 to 6. Bit 3 is the sign, also of a zero. NaN is not representable: its code is 7 or 15.
    """
    a = jnp.abs(x)
    # a tie to an even code stays below the bound: between 0.5 (code 1) and 1 (code 2) it goes up
    up = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0]
    code = sum((b.astype(jnp.uint8) for b in up), jnp.zeros(x.shape, jnp.uint8))
    code = jnp.where(jnp.isnan(x), jnp.uint8(7), code)
    return code | (jnp.signbit(x).astype(jnp.uint8) << 3)


def e2m1_values(codes: Array) -> Array:
    """uint8 codes 0 to 15 -> the E2M1 numbers, float32. Source: see the module."""
    c = codes.astype(jnp.int32)
    exponent, mantissa = (c >> 1) & 3, c & 1
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    magnitude = doubled.astype(jnp.float32) * 0.5
    return jnp.where(c & 8 != 0, -magnitude, magnitude)


@no_derivative
def e4m3(x: Array) -> Array:
    """x [...] float32 -> the nearest float8_e4m3fn, ties to even; magnitudes above 448 become 448."""
    return jnp.clip(x, -q.E4M3_MAX, q.E4M3_MAX).astype(q.E4M3)


def pack(codes: Array) -> Array:
    """Codes 0 to 15 [..., K] uint8 -> [..., K/2] uint8, the even column in the low half."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(packed: Array) -> Array:
    """Inverse of `pack`."""
    halves = (packed[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15
    return halves.reshape(*packed.shape[:-1], -1)


@no_derivative
def global_scale(*parts: Array) -> Array:
    """The divisor of NVFP4 for weights [..., N_i, K] that an engine multiplies as one: float32 [...], the
    largest power of two of which the largest scale is still an E4M3 number, 2^floor(log2(2688 / amax)).

    A power of two (rather than 2688 / amax, as NVIDIA's and compressed-tensors' observers take) costs no
    accuracy, since E4M3 is a floating-point format, and makes every weight a bfloat16 number.
    """
    # amax is bounded so that quotient and divisor stay finite, normal numbers
    amax = [jnp.max(jnp.abs(w.astype(jnp.float32)), (-2, -1)) for w in parts]
    bounded = jnp.clip(jnp.max(jnp.stack(amax), 0), 2.0**-100, 2.0**120)
    bits = jax.lax.bitcast_convert_type(q.divide(jnp.float32(LARGEST), bounded), jnp.int32)
    return jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)


@no_derivative
def quantize(w: Array, form: str, divisor: Array | None = None) -> FourBits:
    """w [..., N, K] of finite numbers -> its codes and scales in the format `form`.

    divisor: NVFP4's, float32 [...]; that of `w` alone if None. The parts of a fused product (q, k, v; gate
    and up) must have one, of `global_scale` of all of them.

    NVFP4: scale = e4m3(amax / 6 * divisor), at least 2^-6, below which vLLM's Marlin kernel takes it for 0.
    MXFP4: the exponent of amax, less 2, where a mantissa of 1.75 or more counts as the next exponent; 7 would
    otherwise become 6. It is compressed-tensors' `generate_mx_scales`. INT4: scale = bfloat16(amax / 7.5),
    its `calculate_qparams`. Raises ValueError if the groups do not divide K.
    """
    if w.shape[-1] % GROUPS[form]:
        raise ValueError(f"{form} has groups of {GROUPS[form]} along K, which do not divide {list(w.shape)}")
    groups = w.astype(jnp.float32).reshape(*w.shape[:-1], -1, GROUPS[form])
    amax = jnp.max(jnp.abs(groups), -1)
    if form == "nvfp4":
        divisor = global_scale(w) if divisor is None else divisor
        whole = divisor[..., None, None]
        scale = e4m3(jnp.maximum(q.divide(amax, jnp.float32(E2M1_MAX)) * whole, LEAST_SCALE))
        codes = e2m1_codes(q.divide(groups * whole[..., None], q.read_codes(scale)[..., None]))
    elif form == "mxfp4":
        biased = (jax.lax.bitcast_convert_type(amax, jnp.int32) + (1 << 21)) >> 23
        # of 2 at least: half of 2^(2 - 127) is the least normal number
        scale = jnp.clip(biased - 2, 2, 252).astype(jnp.uint8)
        codes = e2m1_codes(q.divide(groups, _power(scale)[..., None]))
    else:
        scale = _bfloat16(jnp.maximum(q.divide(amax, jnp.float32(7.5)), 2.0**-100))
        near = jnp.round(q.divide(groups, scale.astype(jnp.float32)[..., None]))
        codes = (jnp.clip(near, -8, 7) + 8).astype(jnp.uint8)
    return FourBits(pack(codes.reshape(w.shape)), scale, divisor if form == "nvfp4" else None)


@no_derivative
def decode(weight: FourBits) -> Array:
    """The numbers [..., N, K] that a kernel multiplies by, bfloat16: without NVFP4's divisor, by which it
    divides the sum. Those of INT4 are rounded to bfloat16. Source: see the module."""
    codes, group = unpack(weight.packed), GROUPS[weight.format]
    each = codes.reshape(*codes.shape[:-1], -1, group)
    if weight.format == "int4":
        made = (each.astype(jnp.float32) - 8) * weight.scale.astype(jnp.float32)[..., None]
    else:
        scale = q.read_codes(weight.scale) if weight.format == "nvfp4" else _power(weight.scale)
        made = e2m1_values(each) * scale[..., None]
    return _bfloat16(made).reshape(codes.shape)


@no_derivative
def values(weight: FourBits) -> Array:
    """The weight [..., N, K], float32: what `decode` gives, divided by NVFP4's divisor."""
    made = decode(weight).astype(jnp.float32)
    return made if weight.global_scale is None else q.divide(made, weight.global_scale[..., None, None])


def _power(scale: Array) -> Array:
    """2^(scale - 127) of uint8 1 to 254, float32."""
    return jax.lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)


def _bfloat16(x: Array) -> Array:
    """x rounded once; XLA may drop a cast that another one follows."""
    return jax.lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16)
