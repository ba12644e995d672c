"""The product y = x W^T with W [N, K] in high precision or FP8, and its derivative.

FP8 forward: W as E4M3 codes with a scale a 128x128 block, x as E4M3 codes with a scale each 1x128 (W8A8) or left alone
(W8A16). FP8 backward (DeepSeek-V3 section 3.3; Jet-RL): dgrad contracts dy [T, N], quantised 1x128 along N, with the very
same weight codes; wgrad contracts over tokens, so x and dy are both quantised 1x128 along T. For wgrad x is kept as it was
(one rounding) or as the forward's E4M3 codes (half the memory and a second rounding: Jet-RL, arXiv 2601.14243).

`Precision.products` says what computes the FP8 products, here alone. The W8A8 forward has the same operands in all three; sums
differ:

    "float32"      a product of the dequantised operands, which runs anywhere
    "tensor_core"  as the engine's kernels sum it on a GPU, to the bit, by XLA: a pass over the result every 128 products
    "pallas"       the same bits by pallas_kernels (Hopper), and so are quantisation, dgrad and wgrad

The tensor core keeps 14 bits of a sum of 128 products, and the BF16 roundings that this flips are most of what is left of the
mismatch without it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.precision.recipe import Precision
from pallas_kernels.blockwise_matmul import api as matmul
from pallas_kernels.blockwise_matmul import xla
from pallas_kernels.plgpu_compat import HOPPER
from pallas_kernels.quantize import api as quantize
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


@functools.partial(jax.tree_util.register_dataclass, data_fields=["fused", "scale"], meta_fields=["start", "stop"])
@dataclasses.dataclass(frozen=True)
class SharedWeight:
    """A QuantizedWeight in an engine's memory: its codes are rows [start, stop) of `fused` [..., R, K] uint8, where the engine
    holds several linears in one."""

    fused: Array
    scale: Array
    start: int
    stop: int

    @property
    def codes(self) -> Array:
        return jax.lax.bitcast_convert_type(self.fused[..., self.start : self.stop, :], q.E4M3)

    def cut_out(self) -> QuantizedWeight:
        return QuantizedWeight(self.codes, self.scale)


class TrainableWeight(NamedTuple):
    """A weight in a differentiated forward. `handle` [..., N, K]: zeros in the type of the weight's gradient, never read; its
    cotangent is the gradient of the weight that was quantised (straight-through)."""

    quantized: QuantizedWeight | SharedWeight
    handle: Array


def products_of(choice: str) -> str:
    """`precision.products` on this machine: "auto" is "tensor_core" where there are FP8 tensor cores, else "float32". It does not
    take "pallas" yet: its passes are tested on a GPU one by one, a whole run has not been seen.

    Raises ConfigError for a choice that this machine has no hardware for.
    """
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", 0)) if device.platform == "gpu" else "0"
    runs = {"pallas": capability == HOPPER, "tensor_core": float(capability) >= 8.9, "float32": True}
    if choice != "auto" and not runs[choice]:
        needed = {"pallas": f"a Hopper GPU (capability {HOPPER})", "tensor_core": "a GPU with FP8 tensor cores"}[choice]
        raise ConfigError(
            f'precision.products = "{choice}" needs {needed}, this is {device.device_kind}',
            'set precision.products = "auto": the same products by what is here',
        )
    return ("tensor_core" if runs["tensor_core"] else "float32") if choice == "auto" else choice


def round_to(x: Array, dtype: str) -> Array:
    """x rounded to a narrower float type, in its own dtype. Not a pair of casts: XLA may drop those as excess precision."""
    to = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, to.nexp, to.nmant)


def linear(
    x: Array, weight: Array | QuantizedWeight | SharedWeight | TrainableWeight, precision: Precision, fp8: bool,
    amax_floor: float = q.AMAX_FLOOR,
) -> Array:  # fmt: skip
    """x [..., K] times weight [N, K] transposed -> [..., N] in `precision.compute_dtype`.

    `weight` is a TrainableWeight, the learner's case; a QuantizedWeight (or one in an engine's memory), which is not
    differentiated; or a float array, quantised on the fly when `fp8` (straight-through to it). `amax_floor` is that of x's
    quantisation.
    """
    dtype = jnp.dtype(precision.compute_dtype)
    if isinstance(weight, SharedWeight):
        weight = weight.cut_out()
    if isinstance(weight, TrainableWeight) and isinstance(weight.quantized, SharedWeight):
        weight = weight._replace(quantized=weight.quantized.cut_out())
    if isinstance(weight, QuantizedWeight):
        return _fp8_forward(precision, amax_floor, x, weight)[0]
    if isinstance(weight, TrainableWeight):
        return _fp8_linear(precision, amax_floor, x, *weight)
    if fp8:
        return _fp8_linear(precision, amax_floor, x, QuantizedWeight.of(jax.lax.stop_gradient(weight)), weight)
    return _dot(x.astype(dtype), weight.astype(dtype))


def _dot(x: Array, w: Array, dtype: jnp.dtype | None = None) -> Array:
    """x [..., K], w [N, K] -> [..., N], float32 accumulation, in `dtype`, x's by default."""
    exact = HIGHEST if x.dtype == jnp.float32 else None
    y = jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32)
    return y.astype(dtype or x.dtype)


def _round_rows(x: Array, dtype: jnp.dtype = q.E4M3) -> Array:
    """x [..., K] rounded through FP8 in 1x128 blocks, float32."""
    return q.dequantize_rows(*q.quantize_rows(x, dtype))


def _fp8_forward(precision: Precision, amax_floor: float, x: Array, weight: QuantizedWeight) -> tuple[Array, tuple]:
    """The product in `precision.compute_dtype`, and x as codes and scales, for whoever keeps them."""
    backend = "pallas" if precision.products == "pallas" else "reference"
    quantized = quantize.quantize_rows(x, amax_floor=amax_floor, backend=backend)
    if precision.activations_fp8:
        return _scaled_product(precision, *quantized, weight), quantized
    # W8A16 kernels make the weight a BF16 one (vLLM's on AMX, for more than 4 tokens)
    w = round_to(q.dequantize_blocks(*weight), precision.compute_dtype)
    return _dot(x.astype(jnp.float32), w, precision.compute_dtype), quantized


def _scaled_product(precision: Precision, codes: Array, scale: Array, weight: QuantizedWeight) -> Array:
    """x [..., K] as codes and scales times `weight` [N, K] transposed -> [..., N] in `precision.compute_dtype`."""
    dtype = precision.compute_dtype
    if precision.products == "float32":
        return _dot(q.dequantize_rows(codes, scale), q.dequantize_blocks(*weight), dtype)
    if precision.products == "tensor_core":
        return xla.blockwise_matmul(codes, scale, *weight).astype(dtype)
    y = matmul.blockwise_matmul(_flat(codes), _flat(scale), *weight, out_dtype=dtype, backend="pallas")
    return y.reshape(*codes.shape[:-1], -1)


def _flat(x: Array) -> Array:
    """[..., K] -> [T, K]."""
    return x.reshape(-1, x.shape[-1])


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
    if precision.gradients == "high":
        backward = _high_backward
    else:
        backward = _pallas_backward if precision.products == "pallas" else _float32_backward
    dx, dw = backward(precision, _flat(dy), _flat(x), weight, like_x.dtype, like_w.dtype)
    return dx.reshape(x.shape), None, dw


_fp8_linear.defvjp(_fp8_linear_fwd, _fp8_linear_bwd)


def _high_backward(precision: Precision, dy: Array, x: Array, weight: QuantizedWeight, *dtypes) -> tuple[Array, Array]:
    """dy [T, N], x [T, K] -> dx [T, K], dw [N, K] in `dtypes`: operands in `compute_dtype`, the weight the forward's."""
    dy, x, w = (a.astype(precision.compute_dtype) for a in (dy, x, q.dequantize_blocks(*weight)))
    return _dot(dy, w.T, dtypes[0]), _dot(dy.T, x.T, dtypes[1])


def _float32_backward(precision: Precision, dy: Array, x: Array, weight: QuantizedWeight, *dtypes) -> tuple[Array, Array]:
    """As `_high_backward`, with FP8 operands, dequantised and multiplied in float32."""
    fp8 = GRADIENT_DTYPES[precision.gradients]
    dx = _dot(_round_rows(dy, fp8), q.dequantize_blocks(*weight).T, dtypes[0])
    return dx, _dot(_round_rows(dy.T, fp8), _round_rows(x.T.astype(jnp.float32)), dtypes[1])


def _pallas_backward(precision: Precision, dy: Array, x: Array, weight: QuantizedWeight, *dtypes) -> tuple[Array, Array]:
    """As `_float32_backward` by the Hopper kernels. Both want their operands contiguous along the contraction: dgrad takes the
    weight's codes transposed, a copy of 2 bytes a weight."""
    by_rows, by_tokens = quantize.quantize_both(dy, GRADIENT_DTYPES[precision.gradients], backend="pallas")
    turned = weight.codes.T, weight.scale.T
    dx = matmul.blockwise_matmul(*by_rows, *turned, out_dtype=dtypes[0], backend="pallas")
    return dx, matmul.wgrad(*by_tokens, *quantize.quantize_tokens(x, backend="pallas"), out_dtype=dtypes[1], backend="pallas")
