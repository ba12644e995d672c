"""The product y = x W^T with W [N, K] in high precision or FP8, and its derivative.

FP8 forward: W as E4M3 codes with a scale a 128x128 block, x as E4M3 codes with a scale each 1x128 (W8A8) or left alone
(W8A16). FP8 backward (DeepSeek-V3 section 3.3; Jet-RL): dgrad contracts dy [T, N], quantised 1x128 along N, with the very
same weight codes; wgrad contracts over tokens, so x and dy are both quantised 1x128 along T. For wgrad x is kept as it was
(one rounding) or as the forward's E4M3 codes (half the memory and a second rounding: Jet-RL, arXiv 2601.14243).

The products run here as float32 dots of the dequantised operands: every code times scale is exact in float32 to 2^-24, so
this differs from a tensor-core FP8 product only in the order of the float32 sum. It is the reference and, until the Hopper
kernels land, the only backend.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.precision.recipe import Precision
from pallas_kernels.quantize import reference as q

GRADIENT_DTYPES = {"e4m3": q.E4M3, "e5m2": q.E5M2}
HIGHEST = jax.lax.Precision.HIGHEST  # else a GPU multiplies float32 as TF32


class QuantizedWeight(NamedTuple):
    """Codes [..., N, K] float8_e4m3fn and scales [..., ceil(N/128), ceil(K/128)] float32: the published bytes."""

    codes: Array
    scale: Array

    @classmethod
    def of(cls, weight: Array) -> QuantizedWeight:
        """Quantise [..., N, K] in 128x128 blocks."""
        return cls(*q.quantize_blocks(weight))


class TrainableWeight(NamedTuple):
    """A QuantizedWeight in a differentiated forward. `handle` [..., N, K]: zeros in the type of the weight's gradient, never
    read; its cotangent is the gradient of the weight that was quantised (straight-through)."""

    quantized: QuantizedWeight
    handle: Array


def round_to(x: Array, dtype: str) -> Array:
    """x rounded to a narrower float type, in its own dtype. Not a pair of casts: XLA may drop those as excess precision."""
    to = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, to.nexp, to.nmant)


def linear(x: Array, weight: Array | QuantizedWeight | TrainableWeight, precision: Precision, fp8: bool) -> Array:
    """x [..., K] times weight [N, K] transposed -> [..., N] in `precision.compute_dtype`.

    `weight` is a TrainableWeight, the learner's case; a QuantizedWeight, the engine's, which is not differentiated; or a float
    array, quantised on the fly when `fp8` (straight-through to it).
    """
    dtype = jnp.dtype(precision.compute_dtype)
    if isinstance(weight, QuantizedWeight):
        return _fp8_forward(x, weight, precision.activations_fp8).astype(dtype)
    if isinstance(weight, TrainableWeight):
        return _fp8_linear(precision, x, *weight).astype(dtype)
    if fp8:
        return _fp8_linear(precision, x, QuantizedWeight.of(jax.lax.stop_gradient(weight)), weight).astype(dtype)
    return _dot(x.astype(dtype), weight.astype(dtype))


def _dot(x: Array, w: Array) -> Array:
    """x [..., K], w [N, K] -> [..., N], float32 accumulation, in x's dtype."""
    exact = HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
    ).astype(x.dtype)


def _round_rows(x: Array, dtype: jnp.dtype = q.E4M3) -> Array:
    """x [..., K] rounded through FP8 in 1x128 blocks, float32."""
    return q.dequantize_rows(*q.quantize_rows(x, dtype))


def _fp8_forward(x: Array, weight: QuantizedWeight, activations_fp8: bool) -> Array:
    x = _round_rows(x) if activations_fp8 else x.astype(jnp.float32)
    return _dot(x, q.dequantize_blocks(*weight))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fp8_linear(precision: Precision, x: Array, weight: QuantizedWeight, handle: Array) -> Array:
    return _fp8_forward(x, weight, precision.activations_fp8)


def _fp8_linear_fwd(precision: Precision, x: Array, weight: QuantizedWeight, handle: Array):
    kept = q.quantize_rows(x) if precision.saved_activations == "fp8" else x
    like = jnp.zeros((), x.dtype), handle[:0, :0]
    return _fp8_forward(x, weight, precision.activations_fp8), (kept, weight, like)


def _fp8_linear_bwd(precision: Precision, saved, dy: Array):
    kept, weight, (like_x, like_w) = saved
    x = q.dequantize_rows(*kept) if precision.saved_activations == "fp8" else kept
    w = q.dequantize_blocks(*weight)  # the same codes as the forward's, in either backward
    dy_nt, x_kt = dy.reshape(-1, w.shape[0]).T, x.reshape(-1, w.shape[1]).T.astype(jnp.float32)
    if precision.gradients != "high":
        dtype = GRADIENT_DTYPES[precision.gradients]
        dy, dy_nt, x_kt = _round_rows(dy, dtype), _round_rows(dy_nt, dtype), _round_rows(x_kt)
    dx = _dot(dy.astype(jnp.float32), w.T)
    dw = _dot(dy_nt.astype(jnp.float32), x_kt)
    return dx.astype(like_x.dtype), None, dw.astype(like_w.dtype)


_fp8_linear.defvjp(_fp8_linear_fwd, _fp8_linear_bwd)
