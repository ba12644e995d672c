"""Blockwise E4M3 quantisation in plain jnp: the oracle of every quantise kernel, and what runs where there is none.

An element is stored as an E4M3 code; a block of elements shares one float32 scale:

    scale = max(amax(block), AMAX_FLOOR) / 448        code = cast(clip(x / scale, -448, 448))        x ~ code * scale

Weights use 128x128 blocks, activations and gradients 1x128 along the contraction. The floor, the true division and the
clip before the cast are vLLM's (csrc/quantization/fp8, per_token_group_quant): codes and scales must equal the engine's
bit for bit. The clip is needed: JAX's cast to float8_e4m3fn does not saturate (above 464 it gives NaN). A zero block gets
the floor's scale, so a scale is always positive and finite for finite input.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.quantize import BLOCK

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10


def _divide(x: Array, y: Array) -> Array:
    """x / y, correctly rounded to float32 everywhere. XLA's float32 division is not: on GPUs it is 2 ulp off, and division by a
    broadcast becomes multiplication by its reciprocal (the barrier hides it). So it is done in float64, whose rounding
    to float32 is that of the exact quotient (Figueroa 1995: 53 >= 2 * 24 + 2 bits).
    """
    with jax.enable_x64(True):
        x, y = (jax.lax.convert_element_type(a, jnp.float64) for a in (x, y))
        quotient = x / jax.lax.optimization_barrier(jnp.broadcast_to(y, x.shape))
        return jax.lax.convert_element_type(quotient, jnp.float32)


def _codes(x: Array, scale: Array) -> Array:
    return jnp.clip(_divide(x, scale), -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def _read(codes: Array) -> Array:
    """Codes as float32. The barrier keeps the rounding: XLA for GPUs drops a cast to E4M3 and back as "excess precision"."""
    return jax.lax.optimization_barrier(codes).astype(jnp.float32)


def _scale(amax: Array) -> Array:
    return _divide(jnp.maximum(amax, AMAX_FLOOR), jnp.float32(E4M3_MAX))


def _pad_to_blocks(x: Array, axis: int) -> Array:
    missing = -x.shape[axis] % BLOCK
    if not missing:
        return x
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, missing)
    return jnp.pad(x, pads)


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """1x128 blocks along the last axis: x [..., K] -> codes [..., K] e4m3, scales [..., ceil(K/128)] float32."""
    k = x.shape[-1]
    blocks = _pad_to_blocks(x.astype(jnp.float32), -1).reshape(*x.shape[:-1], -1, BLOCK)
    scale = _scale(jnp.max(jnp.abs(blocks), -1))
    codes = _codes(blocks, scale[..., None])
    return codes.reshape(*x.shape[:-1], -1)[..., :k], scale


def dequantize_rows(codes: Array, scale: Array) -> Array:
    """Inverse of `quantize_rows` in float32: [..., K]."""
    return _read(codes) * jnp.repeat(scale, BLOCK, -1)[..., : codes.shape[-1]]


def quantize_blocks(w: Array) -> tuple[Array, Array]:
    """128x128 blocks: w [..., N, K] -> codes [..., N, K] e4m3, scales [..., ceil(N/128), ceil(K/128)] float32."""
    n, k = w.shape[-2:]
    padded = _pad_to_blocks(_pad_to_blocks(w.astype(jnp.float32), -1), -2)
    lead, (np_, kp) = w.shape[:-2], padded.shape[-2:]
    blocks = padded.reshape(*lead, np_ // BLOCK, BLOCK, kp // BLOCK, BLOCK)
    scale = _scale(jnp.max(jnp.abs(blocks), (-3, -1)))
    codes = _codes(blocks, scale[..., :, None, :, None]).reshape(*lead, np_, kp)
    return codes[..., :n, :k], scale


def dequantize_blocks(codes: Array, scale: Array) -> Array:
    """Inverse of `quantize_blocks` in float32: [..., N, K]."""
    n, k = codes.shape[-2:]
    spread = jnp.repeat(jnp.repeat(scale, BLOCK, -1), BLOCK, -2)
    return _read(codes) * spread[..., :n, :k]
