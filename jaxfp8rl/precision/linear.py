"""The product y = x W^T with W [N, K] in high precision or FP8, and its derivative.

FP8 forward: W as E4M3 codes with a scale a 128x128 block, x as E4M3 codes with a scale each 1x128 (W8A8) or
left alone (W8A16). FP8 backward (DeepSeek-V3 section 3.3; Jet-RL): dgrad contracts dy [T, N], quantised 1x128
along N, with the very same weight codes; wgrad contracts over tokens, so x and dy are both quantised 1x128
along T, or x in 128x128 (`Precision.wgrad_inputs`): then wgrad is the forward's kind of product, of which the
kernels do more a second. For wgrad x is kept as it was (one rounding) or as the forward's E4M3 codes (half
the memory and a second rounding: Jet-RL, arXiv 2601.14243).

`Precision.products` says what computes the FP8 products, here alone. The W8A8 forward has the same operands
in all three; sums differ:

    "float32"      a product of the dequantised operands, which runs anywhere
    "tensor_core"  as the engine's kernels sum it on a GPU, to the bit, by XLA: a pass over the result every 128 products
    "pallas"       the same bits by pallas_kernels (Hopper), and so are quantisation, dgrad and wgrad

The tensor core keeps 14 bits of a sum of 128 products, and the BF16 roundings that this flips are most of
what is left of the mismatch without it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from jaxfp8rl.precision.recipe import Gradients, Precision, Products, SavedActivations, WgradBlocks
from pallas_kernels.blockwise_matmul import api as matmul
from pallas_kernels.blockwise_matmul import xla
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize import api as quantize
from pallas_kernels.quantize import reference as q

# Functions of their own in a program, so that Mosaic, which numbers a program's kernels, makes one of all
# calls of a shape: it is compiled once, and equal calls, as of q, k and v to quantise their input, are one
# call.
quantize_rows = jax.jit(quantize.quantize_rows, static_argnames=("amax_floor", "backend"))
quantize_tokens = jax.jit(quantize.quantize_tokens, static_argnames=("square", "backend"))
quantize_both = jax.jit(quantize.quantize_both, static_argnames=("dtype", "backend"))
quantize_blocks = jax.jit(quantize.quantize_blocks, static_argnames=("rows", "backend"))
blockwise_matmul = jax.jit(matmul.blockwise_matmul, static_argnames=("out_dtype", "backend"))
strip_wgrad = jax.jit(matmul.wgrad, static_argnames=("out_dtype", "backend"))

GRADIENT_DTYPES = {"e4m3": q.E4M3, "e5m2": q.E5M2}
HIGHEST = jax.lax.Precision.HIGHEST  # else a GPU multiplies float32 as TF32


class QuantizedWeight(NamedTuple):
    """Codes [..., N, K] float8_e4m3fn and scales [..., ceil(N/128), ceil(K/128)] float32: the published
    bytes."""

    codes: Array
    scale: Array

    @classmethod
    def of(cls, weight: Array, layers: tuple[Array, int] | None = None) -> QuantizedWeight:
        """Quantise [..., N, K] bfloat16 or float32 in 128x128 blocks, by the Hopper kernel on a Hopper GPU:
        the bits are the reference's. To it a stack of layers is one matrix of more rows, unless blocks would
        reach over the end of a layer.

        `layers`: of [L, ..., N, K] those from the first number on, int32 [] on the device, as many as the
        second.
        """
        *lead, n, k = weight.shape
        if lead and n % BLOCK:
            return jax.lax.map(cls.of,
                               weight if layers is None else jax.lax.dynamic_slice_in_dim(weight, *layers))
        first = rows = None
        if layers is not None:
            each = math.prod(lead[1:]) * n  # rows of a layer: of all its experts
            first, rows, lead = layers[0] * (each // BLOCK), layers[1] * each, [layers[1], *lead[1:]]
        codes, scale = quantize_blocks(weight.reshape(-1, k), first=first, rows=rows, backend="auto")
        return cls(codes.reshape(*lead, n, k), scale.reshape(*lead, -(-n // BLOCK), -(-k // BLOCK)))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["fused", "scale"],
                   meta_fields=["start", "stop"])
@dataclasses.dataclass(frozen=True)
class EngineWeight:
    """A QuantizedWeight in an engine's memory: its codes are rows [start, stop) of `fused` [..., R, K] uint8,
    where the engine holds several linears in one."""

    fused: Array
    scale: Array
    start: int
    stop: int

    @property
    def codes(self) -> Array:
        return jax.lax.bitcast_convert_type(self.fused[..., self.start : self.stop, :], q.E4M3)

    def cut_out(self) -> QuantizedWeight:
        return QuantizedWeight(self.codes, self.scale)


class WeightWithGradSlot(NamedTuple):
    """A weight in a differentiated forward. `grad_slot` [..., N, K]: zeros in the type of the weight's gradient,
    never read; its cotangent is the gradient of the weight that was quantised (straight-through)."""

    quantized: QuantizedWeight | EngineWeight
    grad_slot: Array


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedWeight | EngineWeight)


def grad_slots_of(weights: Any, dtype: str) -> Any:
    """What a loss is differentiated by: float weights themselves, and zeros of `dtype` for quantised ones."""
    zeros_or_leaf = lambda w: jnp.zeros(w.codes.shape, dtype) if is_quantized(w) else w
    return jax.tree.map(zeros_or_leaf, weights, is_leaf=is_quantized)


def trainable(weights: dict, grad_slots: dict) -> dict:
    """The weights of which there are grad_slots, differentiable by these."""
    attach = lambda h, w: WeightWithGradSlot(w, h) if is_quantized(w) else h
    return jax.tree.map(attach, grad_slots, {name: weights[name] for name in grad_slots})


def round_to(x: Array, dtype: str) -> Array:
    """x rounded to a narrower float type, in its own dtype. Not a pair of casts: XLA may drop those as excess
    precision."""
    to = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, to.nexp, to.nmant)  # which has no subnormal numbers
    # whose smallest normal one is 6e-5, where weights are; of the others they are nothing
    if dtype != "float16":
        return rounded
    step = 2.0 ** (to.minexp - to.nmant)
    return jnp.where(jnp.abs(x) < 2.0**to.minexp, jnp.round(x / step) * step, rounded)


Weight = Array | QuantizedWeight | EngineWeight | WeightWithGradSlot


def linear(x: Array, weight: Weight, precision: Precision, fp8: bool,
           amax_floor: float = q.AMAX_FLOOR) -> Array:
    """x [..., K] times weight [N, K] transposed -> [..., N] in `precision.compute_dtype`.

    `weight` is a WeightWithGradSlot, the learner's case; a QuantizedWeight (or one in an engine's memory), which
    is not differentiated; or a float array, quantised on the fly when `fp8` (straight-through to it).
    `amax_floor` is that of x's quantisation.
    """
    if not (fp8 or isinstance(weight, QuantizedWeight | EngineWeight | WeightWithGradSlot)):
        dtype = jnp.dtype(precision.compute_dtype)
        return _high_linear(x.astype(dtype), weight.astype(dtype))
    return fused_linears(x, [weight], precision, amax_floor)[0]


def fused_linears(x: Array, weights: Sequence[Weight], precision: Precision,
            amax_floor: float = q.AMAX_FLOOR) -> tuple[Array, ...]:
    """FP8 `linear` of x by each of `weights`, [N_i, K] -> [..., N_i]. Backwards they are one, unless blocks
    of scales would reach over the end of a weight: x's gradient is one sum, rounded once, and the weights'
    are one product of many rows."""
    pairs = [as_quantized(weight) for weight in weights]
    quantized = tuple(weight for weight, _ in pairs)
    grad_slots = tuple(grad_slot for _, grad_slot in pairs if grad_slot is not None)
    if not grad_slots:
        return tuple(_fp8_forward(precision, amax_floor, x, w)[0] for w in quantized)
    if any(len(w.codes) % BLOCK for w in quantized[:-1]):
        each = zip(quantized, grad_slots)
        # partial hides that each is a tuple of one
        return tuple(_fp8_linears(precision, amax_floor, x, (w,), (slot,))[0]  # pyright: ignore[reportIndexIssue]
                     for w, slot in each)
    return _fp8_linears(precision, amax_floor, x, quantized, grad_slots)


def concat_quantized(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """[N_i, K] each -> [sum of N_i, K]. Where layers are a stack, to lay them side by side is no more than to
    take them out."""
    return QuantizedWeight(*map(jnp.concatenate, zip(*weights))) if len(weights) > 1 else weights[0]


def as_quantized(weight: Weight) -> tuple[QuantizedWeight, Array | None]:
    """What a product computes with, and what its gradient is of: None where that is not asked for."""
    quantized, grad_slot = weight if isinstance(weight, WeightWithGradSlot) else (weight, None)
    if isinstance(quantized, EngineWeight):
        quantized = quantized.cut_out()
    if isinstance(quantized, QuantizedWeight):
        return quantized, grad_slot
    return QuantizedWeight.of(jax.lax.stop_gradient(quantized)), quantized


def _dot(x: Array, w: Array, dtype: DTypeLike | None = None) -> Array:
    """x [..., K], w [N, K] -> [..., N] in `dtype`, x's by default: summed in float32 and rounded once, by the
    product itself where that is its operands' type. (Rounded apart, all of it is written and read once more.)
    """
    dtype, exact = jnp.dtype(dtype or x.dtype), HIGHEST if x.dtype == jnp.float32 else None
    made = dtype if dtype == x.dtype else jnp.float32
    y = jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=exact,
                            preferred_element_type=made)
    return y.astype(dtype)


@jax.custom_vjp
def _high_linear(x: Array, w: Array) -> Array:
    """`_dot`, with a backward in the operands' type. Autodiff's would multiply the cotangent of the float32
    sum, which a GPU does at less than half the rate of bfloat16, by operands that are no more exact.

    It is rounded before anything is added to it, in every program: XLA for GPUs would let cuBLAS add what
    follows, a residual, to the float32 sum, unless the result is kept for a backward pass."""
    return jax.lax.optimization_barrier(_dot(x, w))


def _high_linear_bwd(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    return _dot(dy, w.T), _dot(flat(dy).T, flat(x).T)


_high_linear.defvjp(lambda x, w: (_high_linear(x, w), (x, w)), _high_linear_bwd)


def _round_rows(x: Array, dtype: jnp.dtype = q.E4M3) -> Array:
    """x [..., K] rounded through FP8 in 1x128 blocks, float32."""
    return q.dequantize_rows(*q.quantize_rows(x, dtype))


def _fp8_forward(precision: Precision, amax_floor: float, x: Array,
                 weight: QuantizedWeight) -> tuple[Array, tuple]:
    """The product in `precision.compute_dtype`, and x as codes and scales, for whoever keeps them."""
    quantized = quantize_rows(x, amax_floor=amax_floor, backend=backend_of(precision))
    if precision.activations_fp8:
        codes, scale = quantized
        return scaled_product(precision, codes, scale, weight), quantized
    # W8A16 kernels make the weight a BF16 one (vLLM's on AMX, for more than 4 tokens)
    w = round_to(q.dequantize_blocks(*weight), precision.compute_dtype)
    return _dot(x.astype(jnp.float32), w, precision.compute_dtype), quantized


def backend_of(precision: Precision) -> str:
    """Of what quantises."""
    return "pallas" if precision.products == Products.PALLAS else "reference"


def scaled_product(precision: Precision, codes: Array, scale: Array, weight: QuantizedWeight) -> Array:
    """x [..., K] as codes and scales times `weight` [N, K] transposed -> [..., N] in
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
    # unrounded where the engine's quantiser is fused: not worth twice the memory
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


def _high_backward(precision: Precision, dys: list[Array], x: Array, weight: QuantizedWeight,
                   *dtypes) -> tuple[Array, Array]:
    """dys [T, N_i], x [T, K], weight [sum of N_i, K] -> dx [T, K], dw in `dtypes`: operands in
    `compute_dtype`."""
    dy, x, w = (a.astype(precision.compute_dtype) for a in (jnp.concatenate(dys, -1), x,
                                                            q.dequantize_blocks(*weight)))
    return _dot(dy, w.T, dtypes[0]), _dot(dy.T, x.T, dtypes[1])


def _float32_backward(precision: Precision, dys: list[Array], x: Array, weight: QuantizedWeight,
                      *dtypes) -> tuple[Array, Array]:
    """As `_high_backward`, with FP8 operands, dequantised and multiplied in float32."""
    fp8, dy = GRADIENT_DTYPES[precision.gradients], jnp.concatenate(dys, -1)
    dx = _dot(_round_rows(dy, fp8), q.dequantize_blocks(*weight).T, dtypes[0])
    by_tokens, square = x.T.astype(jnp.float32), precision.wgrad_inputs == WgradBlocks.SQUARES
    rounded = q.dequantize_blocks(*q.quantize_blocks(by_tokens)) if square else _round_rows(by_tokens)
    return dx, _dot(_round_rows(dy.T, fp8), rounded, dtypes[1])


def _pallas_backward(precision: Precision, dys: list[Array], x: Array, weight: QuantizedWeight,
                     *dtypes) -> tuple[Array, Array]:
    """As `_float32_backward` by the Hopper kernels."""
    by_rows, by_tokens = quantize_both(dys[0], GRADIENT_DTYPES[precision.gradients], beside=tuple(dys[1:]),
                                       backend="pallas")
    dx = dgrad(by_rows, weight, dtypes[0], "pallas")
    square = precision.wgrad_inputs == WgradBlocks.SQUARES
    return dx, wgrad(by_tokens, quantize_tokens(x, square=square, backend="pallas"), dtypes[1], "pallas")


def wgrad(dy: tuple[Array, Array], x: tuple[Array, Array], dtype: jnp.dtype, backend: str) -> Array:
    """dy^T x [N, K] of codes [N, T] and [K, T] with their scales, dy's in 1x128 along the tokens, x's
    likewise or in 128x128."""
    product = strip_wgrad if len(x[1]) == len(x[0]) else blockwise_matmul
    return product(*dy, *x, out_dtype=dtype, backend=backend)


def dgrad(by_rows: tuple[Array, Array], weight: QuantizedWeight, dtype: jnp.dtype, backend: str) -> Array:
    """dy [T, N] as codes and scales times `weight` [N, K] -> [T, K]. The kernel wants both contiguous along
    the contraction: the weight's codes are turned, a copy of 2 bytes a weight. Told where they lie, XLA turns
    a layer's; else it would turn the whole stack ahead of the loop over layers, hold that, and turn each
    layer's back where it is computed again."""
    codes = with_layout_constraint(weight.codes, Layout((0, 1)))
    return blockwise_matmul(*by_rows, codes.T, weight.scale.T, out_dtype=dtype, backend=backend)
