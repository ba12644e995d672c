"""The product y = x W^T with W [N, K] in high precision or FP8, and its derivative.

FP8 forward: W as E4M3 codes with a scale a 128x128 block, x as E4M3 codes with a scale each 1x128 (W8A8) or left alone
(W8A16). FP8 backward (DeepSeek-V3 section 3.3; Jet-RL): dgrad contracts dy [T, N], quantised 1x128 along N, with the very
same weight codes; wgrad contracts over tokens, so x and dy are both quantised 1x128 along T. For wgrad x is kept as it was
(one rounding) or as the forward's E4M3 codes (half the memory and a second rounding: Jet-RL, arXiv 2601.14243).

`Precision.products` says how the W8A8 forward is summed, in `_scaled_product` alone: "float32", a product of the dequantised
operands, which runs anywhere; or "tensor_core", as the engine's kernels sum it on a GPU, to the bit. The tensor core keeps 14
bits of a sum of 128 products, and the BF16 roundings that this flips are most of what is left of the mismatch without it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.precision.recipe import Precision
from pallas_kernels.blockwise_matmul import xla
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


def products_of(choice: str) -> str:
    """`precision.products` on this machine: "auto" is "tensor_core" where there are FP8 tensor cores, else "float32".

    Raises ConfigError for "tensor_core" where there are none.
    """
    device = jax.devices()[0]
    has = device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) >= 8.9
    if choice == "tensor_core" and not has:
        raise ConfigError(
            f'precision.products = "tensor_core" needs a GPU with FP8 tensor cores, this is {device.device_kind}',
            'set precision.products = "float32": the same products, summed otherwise',
        )
    return ("tensor_core" if has else "float32") if choice == "auto" else choice


def round_to(x: Array, dtype: str) -> Array:
    """x rounded to a narrower float type, in its own dtype. Not a pair of casts: XLA may drop those as excess precision."""
    to = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, to.nexp, to.nmant)


def linear(
    x: Array, weight: Array | QuantizedWeight | TrainableWeight, precision: Precision, fp8: bool, amax_floor: float = q.AMAX_FLOOR
) -> Array:  # fmt: skip
    """x [..., K] times weight [N, K] transposed -> [..., N] in `precision.compute_dtype`.

    `weight` is a TrainableWeight, the learner's case; a QuantizedWeight, the engine's, which is not differentiated; or a float
    array, quantised on the fly when `fp8` (straight-through to it). `amax_floor` is that of x's quantisation.
    """
    dtype = jnp.dtype(precision.compute_dtype)
    if isinstance(weight, QuantizedWeight):
        return _fp8_forward(precision, amax_floor, x, weight)[0].astype(dtype)
    if isinstance(weight, TrainableWeight):
        return _fp8_linear(precision, amax_floor, x, *weight).astype(dtype)
    if fp8:
        return _fp8_linear(precision, amax_floor, x, QuantizedWeight.of(jax.lax.stop_gradient(weight)), weight).astype(dtype)
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


def _fp8_forward(precision: Precision, amax_floor: float, x: Array, weight: QuantizedWeight) -> tuple[Array, tuple]:
    """The product in float32, and x as codes and scales, for whoever keeps them."""
    quantized = q.quantize_rows(x, amax_floor=amax_floor)
    if precision.activations_fp8:
        return _scaled_product(precision.products, *quantized, weight), quantized
    # W8A16 kernels make the weight a BF16 one (vLLM's on AMX, for more than 4 tokens)
    w = round_to(q.dequantize_blocks(*weight), precision.compute_dtype)
    return _dot(x.astype(jnp.float32), w), quantized


def _scaled_product(products: str, codes: Array, scale: Array, weight: QuantizedWeight) -> Array:
    """x [..., K] as codes and scales times `weight` [N, K] transposed -> [..., N] float32."""
    if products == "tensor_core":
        return xla.blockwise_matmul(codes, scale, *weight)
    return _dot(q.dequantize_rows(codes, scale), q.dequantize_blocks(*weight))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fp8_linear(precision: Precision, amax_floor: float, x: Array, weight: QuantizedWeight, handle: Array) -> Array:
    return _fp8_forward(precision, amax_floor, x, weight)[0]


def _fp8_linear_fwd(precision: Precision, amax_floor: float, x: Array, weight: QuantizedWeight, handle: Array):
    y, quantized = _fp8_forward(precision, amax_floor, x, weight)
    high = x.astype(precision.compute_dtype)  # unrounded where the engine's quantiser is fused: not worth twice the memory
    like = jnp.zeros((), x.dtype), handle[:0, :0]
    return y, (quantized if precision.saved_activations == "fp8" else high, weight, like)


def _fp8_linear_bwd(precision: Precision, amax_floor: float, saved, dy: Array):
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
