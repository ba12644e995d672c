"""The parts of a decoding step in plain jnp: what the kernels of `sm90` compute.

Roundings are those of Hugging Face's layers: a norm is rounded to bfloat16 before and after its weight, SiLU before
it is multiplied. Codes and scales are those of `quantize.reference`, but scales lie as products read them, [K/128, T].

Letters: T rows, D model width, F hidden width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.fused_quantize.reference import round_bf16
from pallas_kernels.quantize.reference import quantize_rows

Quantized = tuple[Array, Array]  # codes [T, K], scales [K/128, T]


def add_norm_quantize(x: Array, y: Array, weight: Array, eps: float, amax_floor: float) -> tuple[Array, Quantized]:
    """As `api.add_norm_quantize`."""
    total = round_bf16(x.astype(jnp.float32) + y.astype(jnp.float32))
    inverse = jax.lax.rsqrt(jnp.sum(jnp.square(total), -1, keepdims=True) / x.shape[1] + eps)
    normed = round_bf16(round_bf16(total * inverse) * weight.astype(jnp.float32))
    return total.astype(jnp.bfloat16), quantized(normed, amax_floor)


def swiglu_quantize(gate_up: Array, amax_floor: float) -> Quantized:
    """As `api.swiglu_quantize`."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    return quantized(round_bf16(round_bf16(jax.nn.silu(gate)) * up), amax_floor)


def quantized(x: Array, amax_floor: float) -> Quantized:
    """Codes and scales of x [T, K]."""
    codes, scale = quantize_rows(x, amax_floor=amax_floor)
    return codes, scale.T
