"""The fused producers in plain jnp: the activation as an engine's fused kernels compute it, then its codes.

vLLM's `rms_norm_per_block_quant` quantises the norm of the unrounded residual sum, which is rounded to
bfloat16 before and after the weight. Its `silu_and_mul_per_block_quant` quantises the unrounded float32
silu(gate) * up. Both use the floor `FUSED_AMAX_FLOOR`. For wgrad the same activations are rounded to bfloat16
and quantised along the tokens with the plain floor.

Letters: T tokens, D model width, F hidden width. Codes and scales are those of `quantize.reference`: (codes
[T, D], scales [T, D/128]) by rows, (codes [D, T], scales [D, ceil(T/128)]) by tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.quantize.reference import E4M3, FUSED_AMAX_FLOOR, quantize_rows, quantize_tokens

Codes = tuple[Array, Array]  # codes and scales


class Quantized(NamedTuple):
    """An activation [T, K] as codes by rows, by tokens and in bfloat16; None for a form that was not
    requested."""

    rows: Codes | None
    tokens: Codes | None = None
    kept: Array | None = None


def round_bf16(x: Array) -> Array:
    """x rounded to bfloat16, in float32. It is not a pair of casts, which XLA may drop as excess
    precision."""
    return jax.lax.reduce_precision(x.astype(jnp.float32), 8, 7)


def residual_sum(x: Array, residual: Array | None) -> Array:
    """x [T, D], rounded to bfloat16, plus `residual` [T, D], as unrounded float32; without a residual, x in
    float32."""
    return x.astype(jnp.float32) if residual is None else round_bf16(x) + residual.astype(jnp.float32)


def inverse_rms(total: Array, eps: float) -> Array:
    """1 / sqrt(mean of squares + eps) of each token, [T, 1] float32 (Zhang and Sennrich 2019, equation 4)."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(total), axis=-1, keepdims=True) + eps)


def rms_norm(x: Array, weight: Array, eps: float, residual: Array | None = None) -> Array:
    """The norm of the unrounded sum, [T, D] float32. It is rounded to bfloat16 before and after it is
    multiplied by the weight [D], itself bfloat16."""
    total = residual_sum(x, residual)
    return round_bf16(round_bf16(total * inverse_rms(total, eps)) * round_bf16(weight))


def swiglu(gate_up: Array) -> Array:
    """silu(gate) * up of gate_up [T, 2F], gate and up side by side: [T, F] float32, unrounded (Shazeer
    2020)."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return jax.nn.silu(gate) * up


def swiglu_grad(d_h: Array, gate_up: Array) -> Array:
    """The cotangent of gate_up [T, 2F], rounded to bfloat16, in float32, from the cotangent d_h [T, F] of the
    result."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    d_h, s = d_h.astype(jnp.float32), jax.nn.sigmoid(gate)
    d_silu = d_h * up
    d_gate = d_silu * s + d_silu * gate * (1 - s) * s
    return round_bf16(jnp.concatenate([d_gate, d_h * (gate * s)], -1))


def _quantized(value: Array, tokens: bool, keep: bool, rows: bool = True, square: bool = False) -> Quantized:
    rounded = round_bf16(value)
    by_rows = quantize_rows(value, amax_floor=FUSED_AMAX_FLOOR) if rows else None
    by_tokens = quantize_tokens(rounded, square=square) if tokens else None
    return Quantized(by_rows, by_tokens, rounded.astype(jnp.bfloat16) if keep else None)


def rms_norm_quantize(
    x: Array, weight: Array, eps: float, residual: Array | None = None, *, tokens: bool = False,
    keep: bool = False
) -> tuple[Quantized, Array | None]:
    """`rms_norm`, quantised, and the sum in bfloat16 [T, D], the next residual stream; None without
    `residual`."""
    total = None if residual is None else residual_sum(x, residual).astype(jnp.bfloat16)
    return _quantized(rms_norm(x, weight, eps, residual), tokens, keep), total


def swiglu_quantize(
    gate_up: Array, *, rows: bool = True, tokens: bool = False, keep: bool = False, square: bool = False
) -> Quantized:
    """`swiglu`, quantised by rows without rounding, and by tokens after rounding to bfloat16."""
    return _quantized(swiglu(gate_up), tokens, keep, rows, square)


def swiglu_grad_quantize(d_h: Array, gate_up: Array, dtype: jnp.dtype = E4M3) -> Quantized:
    """`swiglu_grad` as codes by rows [T, 2F], for dgrad, and by tokens [2F, T], for wgrad, in `dtype`."""
    grad = swiglu_grad(d_h, gate_up)
    return Quantized(quantize_rows(grad, dtype), quantize_tokens(grad, dtype))
