"""The MLP of a decoder layer on the Hopper kernels, with SwiGLU and its derivative inside the quantisers.

`linear` computes one product at a time. Between its products it writes silu(gate) * up, unrounded in float32,
and d_gate and d_up, in bfloat16. The quantisers read them again. Here only their codes are written, and gate
and up are one product.

The forward equals that of `linear` to the last bit. The backward rounds the inputs of SwiGLU's derivative to
bfloat16, and it computes dx as one sum over gate and up, which it rounds once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.precision.linear import (
    GRADIENT_DTYPES,
    backend_of,
    dgrad,
    flat,
    quantize_both,
    quantize_rows,
    quantize_tokens,
    scaled_product,
    wgrad,
)
from jaxfp8rl.precision.records import Gradients, Precision, Products, SavedActivations, WgradBlocks
from jaxfp8rl.precision.weights import QuantizedWeight, Weight, as_quantized, concat_quantized
from pallas_kernels.fused_quantize import api as fused
from pallas_kernels.quantize.reference import FUSED_AMAX_FLOOR

# Equal calls share a kernel: see linear.py.
swiglu_quantize = jax.jit(fused.swiglu_quantize, static_argnames=("rows", "tokens", "square", "backend"))
swiglu_grad_quantize = jax.jit(fused.swiglu_grad_quantize, static_argnames=("dtype", "backend"))

MLP_MODULES = "gate_proj", "up_proj", "down_proj"


def fuses(p: Precision, fp8: frozenset[str]) -> bool:
    """Whether `swiglu_mlp` computes the MLP of a layer as `p` asks, if the linears `fp8` of it are FP8."""
    kernels = p.products == Products.PALLAS and p.compute_dtype == "bfloat16" and fp8.issuperset(MLP_MODULES)
    engine = p.activations_fp8 and p.rounding.fused_quantizer
    backward = p.gradients != Gradients.HIGH and p.saved_activations == SavedActivations.HIGH
    return kernels and engine and backward


def swiglu_mlp(x: Array, gate: Weight, up: Weight, down: Weight, precision: Precision) -> Array:
    """down(silu(gate(x)) * up(x)): x [..., D], gate and up [F, D], down [D, F] -> [..., D], in bfloat16.

    F is a multiple of 128. The weights have one of the forms that `linear` takes.
    """
    weights, grad_slots = zip(*map(as_quantized, (gate, up, down)))
    if grad_slots[0] is None:
        return _forward(precision, x, weights)[0]
    return _mlp(precision, x, weights, grad_slots)


def _forward(precision: Precision, x: Array, weights: tuple[QuantizedWeight, ...]) -> tuple[Array, Array]:
    """The result [..., D], and the results of gate and up side by side, [T, 2F]."""
    gate, up, down = weights
    backend = backend_of(precision)
    codes, scale = quantize_rows(flat(x), amax_floor=FUSED_AMAX_FLOOR, backend=backend)
    gate_up = scaled_product(precision, codes, scale, concat_quantized((gate, up)))
    codes, scale = swiglu_quantize(gate_up, backend=backend).rows
    y = scaled_product(precision, codes, scale, down)
    return y.reshape(x.shape), gate_up


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(precision: Precision, x: Array, weights: tuple[QuantizedWeight, ...],
         grad_slots: tuple[Array, ...]) -> Array:
    return _forward(precision, x, weights)[0]


def _mlp_fwd(precision: Precision, x: Array, weights: tuple[QuantizedWeight, ...],
             grad_slots: tuple[Array, ...]):
    y, gate_up = _forward(precision, x, weights)
    return y, (x, gate_up, weights, grad_slots[0][:0, :0])


def _mlp_bwd(precision: Precision, saved, dy: Array):
    x, gate_up, (gate, up, down), like = saved
    dtype, backend = GRADIENT_DTYPES[precision.gradients], backend_of(precision)
    by_rows, by_tokens = quantize_both(flat(dy), dtype, backend=backend)
    d_h = dgrad(by_rows, down, jnp.bfloat16, backend)
    square = precision.wgrad_inputs == WgradBlocks.SQUARES
    h = swiglu_quantize(gate_up, rows=False, tokens=True, square=square, backend=backend)
    d_gate_up = swiglu_grad_quantize(d_h, gate_up, dtype, backend=backend)
    dx = dgrad(d_gate_up.rows, concat_quantized((gate, up)), x.dtype, backend)
    x_by_tokens = quantize_tokens(flat(x), square=square, backend=backend)
    d_joint = wgrad(d_gate_up.tokens, x_by_tokens, like.dtype, backend)
    d_down = wgrad(by_tokens, h.tokens, like.dtype, backend)
    return dx.reshape(x.shape), None, (*jnp.split(d_joint, 2), d_down)


_mlp.defvjp(_mlp_fwd, _mlp_bwd)
