"""Blockwise FP8 quantisation in plain jnp: the reference for every quantise kernel, and the implementation
where there is none.

An element is stored as an FP8 code; a block of elements shares one float32 scale (the descale, HF's
`weight_scale_inv`):

    scale = max(amax(block), floor) / MAX      code = cast(clip(x / scale, -MAX, MAX))      x ~ code * scale

MAX is the largest code: 448 in E4M3, 57344 in E5M2 (Micikevicius et al., "FP8 Formats for Deep Learning",
2022). Weights use 128x128 blocks, activations and gradients 1x128 along the contraction (DeepSeek-V3 section
3.3.2).

The floor, both true divisions and the clip before the cast are those of vLLM's `per_token_group_fp8_quant`:
codes and scales equal the engine's bit for bit. The clip is only a guard, since amax is the block's own and x
/ scale exceeds MAX by at most a rounding error; without it JAX's cast to float8_e4m3fn gives NaN above 464.

If the width is not a multiple of 128, the last block is shorter. For finite input, scales are positive and
finite and codes finite; a zero block has the floor's scale. A block with a NaN gets a NaN scale, and one with
an infinity an infinite scale, so that checking the scales finds both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.forward_only import forward_only
from pallas_kernels.quantize import BLOCK

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
E4M3_MAX = 448.0
# vLLM's CUDA kernel; its kernels fused with RMSNorm and SiLU, and its torch version, use the next one
AMAX_FLOOR = 1e-10
FUSED_AMAX_FLOOR = 2.0**-9
no_derivative = forward_only(
    "differentiate pallas_kernels.fp8_dot_general, or in the learner jaxfp8rl.precision.linear.linear")


def divide(x: Array, y: Array) -> Array:
    """x / y, correctly rounded to float32 everywhere, except that results below 2^-126 become 0.

    XLA's float32 division is not correctly rounded: on GPUs it is off by up to 2 ulp, and division by a
    broadcast becomes multiplication by its reciprocal. In float64 neither matters. A quotient of float32
    numbers has a relative distance of at least 2^-49 from every midpoint of two neighbouring float32 numbers,
    and even a reciprocal and a product stay within 2^-51. `reduce_precision` does the rounding because XLA
    may drop one done by a pair of casts.
    """
    with jax.enable_x64(True):
        x, y = (jax.lax.convert_element_type(a, jnp.float64) for a in (x, y))
        return jax.lax.convert_element_type(jax.lax.reduce_precision(x / y, 8, 23), jnp.float32)


def _max(dtype: jnp.dtype) -> float:
    return float(jnp.finfo(dtype).max)


def _codes(x: Array, scale: Array, dtype: jnp.dtype) -> Array:
    return jnp.clip(divide(x, scale), -_max(dtype), _max(dtype)).astype(dtype)


@no_derivative
def read_codes(codes: Array) -> Array:
    """Codes as float32. The barrier preserves the rounding: XLA for GPUs drops a cast to FP8 and back as
    "excess precision"."""
    return jax.lax.optimization_barrier(codes).astype(jnp.float32)


def _scale(blocks: Array, axes: int | tuple[int, ...], dtype: jnp.dtype, power_of_two: bool,
           amax_floor: float) -> Array:
    """One scale per block. amax is the maximum of the bits, which are ordered like the numbers with NaN on
    top: XLA's CPU max drops NaNs."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    amax = jnp.maximum(jnp.max(bits, axes), np.float32(amax_floor).view(np.int32))
    scale = divide(jax.lax.bitcast_convert_type(amax, jnp.float32), jnp.float32(_max(dtype)))
    return _next_power_of_two(scale) if power_of_two else scale


def _next_power_of_two(x: Array) -> Array:
    """2^ceil(log2(x)) of positive normal x, exactly: a nonzero fraction adds one to the exponent's bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(exponent << 23, jnp.float32), x)


def pad_to_blocks(x: Array, axis: int) -> Array:
    """x with zeros after the end of `axis`, up to the next multiple of 128."""
    missing = -x.shape[axis] % BLOCK
    if not missing:
        return x
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, missing)
    return jnp.pad(x, pads)


@no_derivative
def quantize_rows(
    x: Array, dtype: jnp.dtype = E4M3, *, power_of_two: bool = False, amax_floor: float = AMAX_FLOOR
) -> tuple[Array, Array]:
    """1x128 blocks along the last axis: x [..., K] -> codes [..., K] in `dtype`, scales [..., ceil(K/128)]
    float32.

    power_of_two: scales are rounded up to a power of two, 2^ceil(log2(amax / MAX)), as DeepGEMM's UE8M0 and
    NeMo's option. amax_floor: the minimum amax, `FUSED_AMAX_FLOOR` if the engine fuses the quantisation with
    the operation before it.
    """
    k = x.shape[-1]
    blocks = pad_to_blocks(x.astype(jnp.float32), -1).reshape(*x.shape[:-1], -1, BLOCK)
    scale = _scale(blocks, -1, dtype, power_of_two, amax_floor)
    codes = _codes(blocks, scale[..., None], dtype)
    return codes.reshape(*x.shape[:-1], -1)[..., :k], scale


def dequantize_rows(codes: Array, scale: Array) -> Array:
    """Inverse of `quantize_rows`: FP8 codes [..., K] times float32 scales [..., ceil(K/128)] -> [..., K]
    float32. Raises ValueError for other shapes and dtypes. Source: see the module."""
    _check_pair(codes, scale, 1)
    return read_codes(codes) * jnp.repeat(scale, BLOCK, -1)[..., : codes.shape[-1]]


def quantize_tokens(
    x: Array, dtype: jnp.dtype = E4M3, *, square: bool = False, power_of_two: bool = False
) -> tuple[Array, Array]:
    """1x128 blocks along the tokens, for wgrad: x [..., T, K] -> codes [..., K, T], scales [..., K,
    ceil(T/128)] float32. With `square` (E4M3 only) the blocks are 128x128 and the scales [..., ceil(K/128),
    ceil(T/128)].

    The result is transposed and contiguous along the tokens, which wgrad contracts: the rows of x^T
    (DeepSeek-V3 section 3.3.2, where they are 128x1 tiles of x).
    """
    turned = jnp.swapaxes(x, -1, -2)
    if square:
        return quantize_blocks(turned, power_of_two=power_of_two)
    return quantize_rows(turned, dtype, power_of_two=power_of_two)


@no_derivative
def quantize_blocks(w: Array, *, power_of_two: bool = False) -> tuple[Array, Array]:
    """128x128 blocks: w [..., N, K] -> codes [..., N, K] e4m3, scales [..., ceil(N/128), ceil(K/128)]
    float32."""
    n, k = w.shape[-2:]
    padded = pad_to_blocks(pad_to_blocks(w.astype(jnp.float32), -1), -2)
    lead, (np_, kp) = w.shape[:-2], padded.shape[-2:]
    blocks = padded.reshape(*lead, np_ // BLOCK, BLOCK, kp // BLOCK, BLOCK)
    scale = _scale(blocks, (-3, -1), E4M3, power_of_two, AMAX_FLOOR)
    codes = _codes(blocks, scale[..., :, None, :, None], E4M3).reshape(*lead, np_, kp)
    return codes[..., :n, :k], scale


def dequantize_blocks(codes: Array, scale: Array) -> Array:
    """Inverse of `quantize_blocks`: FP8 codes [..., N, K] times float32 scales [..., ceil(N/128),
    ceil(K/128)] -> [..., N, K] float32. Raises ValueError for other shapes and dtypes. Source: see the
    module."""
    _check_pair(codes, scale, 2)
    n, k = codes.shape[-2:]
    spread = jnp.repeat(jnp.repeat(scale, BLOCK, -1), BLOCK, -2)
    return read_codes(codes) * spread[..., :n, :k]


def _check_pair(codes: Array, scale: Array, axes: int) -> None:
    """Check codes in blocks of 128 along the last `axes` axes, and their scales."""
    found = f"codes {codes.dtype}{list(codes.shape)}, scale {scale.dtype}{list(scale.shape)}"
    if codes.ndim < axes or codes.dtype not in (E4M3, E5M2):
        raise ValueError(f"{found}: expected codes of float8_e4m3fn or float8_e5m2, of {axes} or more axes")
    want = (*codes.shape[:-axes], *(-(-size // BLOCK) for size in codes.shape[-axes:]))
    if scale.shape != want or scale.dtype != jnp.float32:
        raise ValueError(f"{found}: these codes have scales float32{list(want)}")
