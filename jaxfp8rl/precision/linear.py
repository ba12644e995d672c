"""The product y = x W^T with W [N, K] in high precision or FP8, and its derivative.

The FP8 forward takes W as E4M3 codes with a scale for each 128x128 block. It takes x as E4M3 codes with a
scale for each 1x128 block (W8A8), or leaves x alone (W8A16).

The FP8 backward follows DeepSeek-V3 (section 3.3) and Jet-RL (arXiv 2601.14243). dgrad contracts dy [T, N]
over N. It quantises dy in 1x128 along N and takes the weight codes of the forward. wgrad contracts over
tokens. It quantises dy in 1x128 along T, and x likewise or in 128x128 (`Precision.wgrad_inputs`). With
128x128, wgrad is the same kind of product as the forward, and the kernels run that kind faster. The forward
keeps x for wgrad as it was, which rounds x once, or as E4M3 codes, which takes half the memory and rounds x
twice, as Jet-RL does (`Precision.saved_activations`).

`Precision.products` names one of three ways to compute FP8 products. In the W8A8 forward all three have the
same operands. They sum differently:

    "float32"      XLA dequantises the operands and multiplies them. It runs on any device.
    "tensor_core"  XLA sums as the engine's kernels on a GPU do, to the bit. It passes over the result once
                   for every 128 products.
    "pallas"       The Hopper kernels compute the same bits. They also compute quantisation, dgrad and wgrad.

The tensor core keeps 14 bits of a sum of 128 products. Sums in float32 therefore flip some BF16 roundings,
and these flips are most of the mismatch that "float32" leaves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from jaxfp8rl.precision.four_bits import FourBits, four_bit_linear
from jaxfp8rl.precision.records import Gradients, Precision, Products, SavedActivations, WgradBlocks
from jaxfp8rl.precision.weights import (
    EngineWeight,
    QuantizedWeight,
    Weight,
    WeightWithGradSlot,
    as_quantized,
    concat_quantized,
)
from pallas_kernels.blockwise_matmul import api as matmul
from pallas_kernels.blockwise_matmul import xla
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize import api as quantize
from pallas_kernels.quantize import reference as q

# Mosaic numbers the kernels of a program. A jitted function stays a function of its own in the program, and
# all calls with one shape share its kernel, which compiles once. Equal calls also become one call: q, k and v
# quantise the same input.
quantize_rows = jax.jit(quantize.quantize_rows, static_argnames=("dtype", "amax_floor", "backend"))
quantize_tokens = jax.jit(quantize.quantize_tokens, static_argnames=("square", "backend"))
quantize_both = jax.jit(quantize.quantize_both, static_argnames=("dtype", "backend"))
blockwise_matmul = jax.jit(matmul.blockwise_matmul, static_argnames=("out_dtype", "backend"))
strip_wgrad = jax.jit(matmul.wgrad, static_argnames=("out_dtype", "backend"))

GRADIENT_DTYPES = {"e4m3": q.E4M3, "e5m2": q.E5M2}
HIGHEST = jax.lax.Precision.HIGHEST  # by default a GPU multiplies float32 as TF32


def round_to(x: Array, dtype: str) -> Array:
    """x rounded to a narrower float type, in its own dtype.

    XLA may drop a pair of casts as excess precision, but it keeps `reduce_precision`. That flushes subnormal
    numbers to zero. Only float16 needs them: its smallest normal number is 6e-5, and weights are as small.
    """
    to = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, to.nexp, to.nmant)
    if dtype != "float16":
        return rounded
    step = 2.0 ** (to.minexp - to.nmant)
    return jnp.where(jnp.abs(x) < 2.0**to.minexp, jnp.round(x / step) * step, rounded)


def linear(x: Array, weight: Weight | FourBits, precision: Precision, fp8: bool,
           amax_floor: float = q.AMAX_FLOOR, bias: Array | None = None) -> Array:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N] in `precision.compute_dtype`.

    `weight` has one of four forms. A learner passes a WeightWithGradSlot. A QuantizedWeight or EngineWeight
    gets no gradient, nor does a FourBits. A float array is quantised here if `fp8`, and its gradient passes
    straight through. `amax_floor` is the smallest amax by which x is quantised. An FP8 product is rounded
    before it gets its bias, any other is not, as in engines.
    """
    if isinstance(weight, FourBits):
        return plus_bias(four_bit_linear(precision.compute_dtype, x.astype(precision.compute_dtype), weight),
                         bias)
    if not (fp8 or isinstance(weight, QuantizedWeight | EngineWeight | WeightWithGradSlot)):
        dtype = jnp.dtype(precision.compute_dtype)
        x, weight = x.astype(dtype), weight.astype(dtype)
        return _high_linear(x, weight, None if bias is None else bias.astype(dtype))
    return plus_bias(fused_linears(x, [weight], precision, amax_floor)[0], bias)


def linear_in(dtype: str, x: Array, weight: Array) -> Array:
    """x [..., K] times weight [N, K] transposed, both in `dtype`, summed in float32 -> [..., N]."""
    return _high_linear(x.astype(dtype), weight.astype(dtype))


def plus_bias(y: Array, bias: Array | None) -> Array:
    """y [..., N] + bias [N] in y's type; y without one."""
    return y if bias is None else y + bias.astype(y.dtype)


def fused_linears(x: Array, weights: Sequence[Weight], precision: Precision,
            amax_floor: float = q.AMAX_FLOOR) -> tuple[Array, ...]:
    """The FP8 `linear` of x [..., K] by each of `weights` [N_i, K] -> [..., N_i].

    The backward pass joins them: it sums the gradient of x once and rounds it once, and it computes the
    gradients of the weights as one product of many rows. It keeps them apart if a block of scales would
    reach over the end of a weight.
    """
    pairs = [as_quantized(weight) for weight in weights]
    quantized = tuple(weight for weight, _ in pairs)
    grad_slots = tuple(grad_slot for _, grad_slot in pairs if grad_slot is not None)
    apart = any(len(w.codes) % BLOCK for w in quantized[:-1])
    if not grad_slots and apart:
        return tuple(
            _frozen_fp8_linears(precision, amax_floor, x, (w,))[0]  # pyright: ignore[reportIndexIssue]
            for w in quantized)
    if not grad_slots:
        return _frozen_fp8_linears(precision, amax_floor, x, quantized)
    if apart:
        each = zip(quantized, grad_slots)
        # functools.partial hides from the type checker that each result is a tuple
        return tuple(
            _fp8_linears(precision, amax_floor, x, (w,), (slot,))[0]  # pyright: ignore[reportIndexIssue]
            for w, slot in each)
    return _fp8_linears(precision, amax_floor, x, quantized, grad_slots)


def _dot(x: Array, w: Array, dtype: DTypeLike | None = None) -> Array:
    """x [..., K], w [N, K] -> [..., N] in `dtype` (default: the type of x), summed in float32, rounded once.

    The product itself rounds if `dtype` is the type of its operands. A separate rounding would write and read
    the whole result once more.
    """
    dtype, exact = jnp.dtype(dtype or x.dtype), HIGHEST if x.dtype == jnp.float32 else None
    made = dtype if dtype == x.dtype else jnp.float32
    y = jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=exact,
                            preferred_element_type=made)
    return y.astype(dtype)


@jax.custom_vjp
def _high_linear(x: Array, w: Array, bias: Array | None = None) -> Array:
    """`_dot`, plus the bias before the rounding, with a backward in the type of its operands.

    Autodiff would multiply the float32 cotangent of the sum. A GPU does that at less than half the rate of
    bfloat16, and the operands would be no more exact.

    The barrier has every program round the result before it adds anything to it. Without it, XLA for GPUs
    lets cuBLAS add a residual that follows to the float32 sum, unless a backward pass needs the result.
    """
    y = _dot(x, w) if bias is None else (_dot(x, w, jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
    return jax.lax.optimization_barrier(y)


def _high_linear_bwd(saved: tuple[Array, Array, Array | None],
                     dy: Array) -> tuple[Array, Array, Array | None]:
    x, w, bias = saved
    d_bias = None if bias is None else jnp.sum(flat(dy), 0, dtype=jnp.float32).astype(bias.dtype)
    return _dot(dy, w.T), _dot(flat(dy).T, flat(x).T), d_bias


_high_linear.defvjp(lambda x, w, bias: (_high_linear(x, w, bias), (x, w, bias)), _high_linear_bwd)


def _round_rows(x: Array, dtype: jnp.dtype = q.E4M3) -> Array:
    """x [..., K] rounded through FP8 in 1x128 blocks, as float32."""
    return q.dequantize_rows(*q.quantize_rows(x, dtype))


def _fp8_forward(precision: Precision, amax_floor: float, x: Array,
                 weight: QuantizedWeight) -> tuple[Array, tuple]:
    """The product in `precision.compute_dtype`, and the codes and scales of x."""
    quantized = quantize_rows(x, amax_floor=amax_floor, backend=backend_of(precision))
    if precision.activations_fp8:
        codes, scale = quantized
        return scaled_product(precision, codes, scale, weight), quantized
    # W8A16 kernels round the weight to BF16: vLLM's do on AMX, for more than 4 tokens
    w = round_to(q.dequantize_blocks(*weight), precision.compute_dtype)
    return _dot(x.astype(jnp.float32), w, precision.compute_dtype), quantized


def backend_of(precision: Precision) -> str:
    """The backend of the quantisers: "pallas" or "reference"."""
    return "pallas" if precision.products == Products.PALLAS else "reference"


def scaled_product(precision: Precision, codes: Array, scale: Array, weight: QuantizedWeight) -> Array:
    """x [..., K], given as codes and scales, times `weight` [N, K] transposed -> [..., N] in
    `precision.compute_dtype`."""
    dtype = precision.compute_dtype
    if precision.products == Products.FLOAT32:
        return _dot(q.dequantize_rows(codes, scale), q.dequantize_blocks(*weight), dtype)
    if precision.products == Products.TENSOR_CORE:
        return xla.blockwise_matmul(codes, scale, *weight).astype(dtype)
    y = blockwise_matmul(flat(codes), flat(scale), *weight, out_dtype=dtype, backend="pallas")
    return y.reshape(*codes.shape[:-1], -1)


def flat(x: Array) -> Array:
    """[..., K] -> [T, K]."""
    return x.reshape(-1, x.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fp8_linears(
    precision: Precision, amax_floor: float, x: Array, weights: tuple[QuantizedWeight, ...],
    grad_slots: tuple[Array, ...]
) -> tuple[Array, ...]:
    return tuple(_fp8_forward(precision, amax_floor, x, w)[0] for w in weights)


def _fp8_linears_fwd(precision: Precision, amax_floor: float, x: Array, weights: tuple, grad_slots: tuple):
    ys, (quantized, *_) = zip(*(_fp8_forward(precision, amax_floor, x, w) for w in weights))
    # x is float32 if the engine's quantiser is fused: those digits are not worth twice the memory
    high = x.astype(precision.compute_dtype)
    like = jnp.zeros((), x.dtype), grad_slots[0][:0, :0]
    return ys, (quantized if precision.saved_activations == SavedActivations.FP8 else high, weights, like)


def _fp8_linears_bwd(precision: Precision, amax_floor: float, saved, dys: tuple[Array, ...]):
    kept, weights, (like_x, like_w) = saved
    x = q.dequantize_rows(*kept) if precision.saved_activations == SavedActivations.FP8 else kept
    if precision.gradients == Gradients.HIGH:
        backward = _high_backward
    else:
        backward = _pallas_backward if precision.products == Products.PALLAS else _float32_backward
    dx, dw = backward(precision, [*map(flat, dys)], flat(x), concat_quantized(weights), like_x.dtype,
                      like_w.dtype)
    ends = list(itertools.accumulate(len(w.codes) for w in weights))
    return dx.reshape(x.shape), None, tuple(jnp.split(dw, ends[:-1]))


_fp8_linears.defvjp(_fp8_linears_fwd, _fp8_linears_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _frozen_fp8_linears(precision: Precision, amax_floor: float, x: Array,
                        weights: tuple[QuantizedWeight, ...]) -> tuple[Array, ...]:
    """`_fp8_linears` of weights that do not learn. Its backward pass is dgrad alone: it keeps no input and
    quantises nothing along the tokens."""
    return tuple(_fp8_forward(precision, amax_floor, x, w)[0] for w in weights)


def _frozen_fp8_linears_bwd(precision: Precision, amax_floor: float, saved: tuple,
                            dys: tuple[Array, ...]) -> tuple[Array, None]:
    weights, like = saved
    weight, parts = concat_quantized(weights), [*map(flat, dys)]
    if precision.gradients == Gradients.HIGH:
        w = q.dequantize_blocks(*weight).astype(precision.compute_dtype)
        dx = _dot(jnp.concatenate(parts, -1).astype(precision.compute_dtype), w.T, like.dtype)
    else:
        fp8, backend = GRADIENT_DTYPES[precision.gradients], backend_of(precision)
        by_rows = quantize_rows(jnp.concatenate(parts, -1), dtype=fp8, backend=backend)
        if precision.products == Products.PALLAS:
            dx = dgrad(by_rows, weight, like.dtype, backend)
        else:
            dx = _dot(q.dequantize_rows(*by_rows), q.dequantize_blocks(*weight).T, like.dtype)
    return dx.reshape(*dys[0].shape[:-1], -1), None


_frozen_fp8_linears.defvjp(
    lambda precision, amax_floor, x, weights: (_frozen_fp8_linears(precision, amax_floor, x, weights),
                                               (weights, jnp.zeros((), x.dtype))),
    _frozen_fp8_linears_bwd)


def _high_backward(precision: Precision, dys: list[Array], x: Array, weight: QuantizedWeight,
                   *dtypes) -> tuple[Array, Array]:
    """dys [T, N_i], x [T, K], weight [sum of N_i, K] -> (dx [T, K], dw [sum of N_i, K]) in the types
    `dtypes`. The operands of both products are in `compute_dtype`."""
    dy, x, w = (a.astype(precision.compute_dtype) for a in (jnp.concatenate(dys, -1), x,
                                                            q.dequantize_blocks(*weight)))
    return _dot(dy, w.T, dtypes[0]), _dot(dy.T, x.T, dtypes[1])


def _float32_backward(precision: Precision, dys: list[Array], x: Array, weight: QuantizedWeight,
                      *dtypes) -> tuple[Array, Array]:
    """`_high_backward` with operands rounded through FP8. XLA multiplies them in float32."""
    fp8, dy = GRADIENT_DTYPES[precision.gradients], jnp.concatenate(dys, -1)
    dx = _dot(_round_rows(dy, fp8), q.dequantize_blocks(*weight).T, dtypes[0])
    by_tokens, square = x.T.astype(jnp.float32), precision.wgrad_inputs == WgradBlocks.SQUARES
    rounded = q.dequantize_blocks(*q.quantize_blocks(by_tokens)) if square else _round_rows(by_tokens)
    return dx, _dot(_round_rows(dy.T, fp8), rounded, dtypes[1])


def _pallas_backward(precision: Precision, dys: list[Array], x: Array, weight: QuantizedWeight,
                     *dtypes) -> tuple[Array, Array]:
    """`_float32_backward` by the Hopper kernels."""
    by_rows, by_tokens = quantize_both(dys[0], GRADIENT_DTYPES[precision.gradients], beside=tuple(dys[1:]),
                                       backend="pallas")
    dx = dgrad(by_rows, weight, dtypes[0], "pallas")
    square = precision.wgrad_inputs == WgradBlocks.SQUARES
    return dx, wgrad(by_tokens, quantize_tokens(x, square=square, backend="pallas"), dtypes[1], "pallas")


def wgrad(dy: tuple[Array, Array], x: tuple[Array, Array], dtype: jnp.dtype, backend: str) -> Array:
    """dy^T x [N, K] in `dtype`, of dy as codes [N, T] with scales and x as codes [K, T] with scales.

    The blocks of dy are 1x128 along the tokens. The blocks of x are the same, or 128x128.
    """
    product = strip_wgrad if len(x[1]) == len(x[0]) else blockwise_matmul
    return product(*dy, *x, out_dtype=dtype, backend=backend)


def dgrad(by_rows: tuple[Array, Array], weight: QuantizedWeight, dtype: jnp.dtype, backend: str) -> Array:
    """dy [T, N], given as codes and scales, times `weight` [N, K] -> [T, K] in `dtype`.

    The kernel needs both operands contiguous along the contraction. The weight's codes are therefore
    transposed, which moves 2 bytes for each weight. The layout constraint has XLA transpose one layer at a
    time. Without it, XLA transposes the whole stack before the loop over layers, holds that copy, and
    transposes each layer back for its recomputation.
    """
    codes = with_layout_constraint(weight.codes, Layout((0, 1)))
    return blockwise_matmul(*by_rows, codes.T, weight.scale.T, out_dtype=dtype, backend=backend)
