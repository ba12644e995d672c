"""The parts of a decoding step in plain jnp: what the kernels of `sm90` compute.

Roundings are those of Hugging Face's layers: a norm is rounded to bfloat16 before and after its weight, SiLU
before it is multiplied. Codes and scales are those of `quantize.reference`, but scales lie as products read
them, [K/128, T].

Letters: T rows, D model width, F hidden width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.fused_quantize.reference import round_bf16
from pallas_kernels.quantize.reference import E4M3, E4M3_MAX, quantize_rows

Quantized = tuple[Array, Array]  # codes [T, K], scales [K/128, T]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """As `api.rms_norm`."""
    return _normed(x.astype(jnp.float32), weight, eps).astype(jnp.bfloat16)


def add_norm_quantize(x: Array, y: Array, weight: Array, eps: float,
                      amax_floor: float) -> tuple[Array, Quantized]:
    """As `api.add_norm_quantize`."""
    total = round_bf16(x.astype(jnp.float32) + y.astype(jnp.float32))
    return total.astype(jnp.bfloat16), quantized(_normed(total, weight, eps), amax_floor)


def swiglu_quantize(gate_up: Array, amax_floor: float) -> Quantized:
    """As `api.swiglu_quantize`."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    return quantized(round_bf16(round_bf16(jax.nn.silu(gate)) * up), amax_floor)


def _normed(x: Array, weight: Array, eps: float) -> Array:
    """In float32, rounded to bfloat16 before and after the weight."""
    inverse = jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) / x.shape[1] + eps)
    return round_bf16(round_bf16(x * inverse) * weight.astype(jnp.float32))


def rotate_and_write(qkv: Array, cos: Array, sin: Array, at: Array, k_cache: Array, v_cache: Array,
                     q_norm: Array | None, k_norm: Array | None, eps: float) -> tuple[Array, Array, Array]:
    """As `api.rotate_and_write`."""
    K = k_cache.shape[1]
    q, k, v = jnp.split(qkv, (qkv.shape[1] - 2 * K, qkv.shape[1] - K), axis=1)
    q, k = (_rotated(x, cos[:, None], sin[:, None], w, eps).astype(qkv.dtype)
            for x, w in ((q, q_norm), (k, k_norm)))
    at = jnp.where(at < 0, len(k_cache), at)
    store = lambda cache, x: cache.at[at].set(
        (jnp.clip(x, -E4M3_MAX, E4M3_MAX) if cache.dtype == E4M3 else x).astype(cache.dtype), mode="drop")
    return q, store(k_cache, k), store(v_cache, v)


def _rotated(x: Array, cos: Array, sin: Array, norm: Array | None, eps: float) -> Array:
    """x [B, heads, d] in float32, normed and rotated; cos and sin [B, 1, d/2]."""
    x = x.astype(jnp.float32)
    if norm is not None:
        inverse = jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) / x.shape[-1] + eps)
        x = round_bf16(round_bf16(x * inverse) * norm.astype(jnp.float32))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def quantized(x: Array, amax_floor: float) -> Quantized:
    """Codes and scales of x [T, K]."""
    codes, scale = quantize_rows(x, amax_floor=amax_floor)
    return codes, scale.T
