"""The products of a mixture of experts, in high precision or FP8, and their derivatives: `linear` for rows
grouped by expert.

Every token has k copies, one for each of its experts. Copies are sorted by expert and padded, so that an
expert's begin at a multiple of 128: P rows (pallas_kernels.grouped_matmul). No copy is dropped. Each has one
row and each row one copy at most, so all that moves between tokens and rows is gathered, forwards and
backwards: nothing is added in an order that may change.

In FP8 a token is quantised once, for all its experts and for gate and up, and its codes are copied. wgrad
contracts over the rows of an expert, so there every copy is quantised again, with its neighbours. Formats and
their backward are those of `jaxfp8rl.precision.linear`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.precision.linear import (
    GRADIENT_DTYPES,
    EngineWeight,
    QuantizedWeight,
    Weight,
    WeightWithGradSlot,
    as_quantized,
    backend_of,
    quantize_both,
    quantize_rows,
    quantize_tokens,
    round_to,
    scaled_product,
)
from jaxfp8rl.precision.recipe import Gradients, Precision, Products, SavedActivations
from pallas_kernels.grouped_matmul import api, high
from pallas_kernels.grouped_matmul.groups import Groups, by_block, plan_groups
from pallas_kernels.quantize import reference as q

# one kernel of all calls: see linear.py
grouped_matmul = jax.jit(api.grouped_matmul, static_argnames=("out_dtype", "backend"))
grouped_wgrad = jax.jit(api.grouped_wgrad, static_argnames=("out_dtype", "backend"))
high_matmul = jax.jit(high.grouped_matmul, static_argnames=("out_dtype", "backend"))
high_wgrad = jax.jit(high.grouped_wgrad, static_argnames=("out_dtype", "backend"))


class Dispatch(NamedTuple):
    """Where the k copies of T tokens lie among P padded rows sorted by expert; all int32.

    groups: the rows of each expert. copy [P]: which of the T * k copies a row is, T * k for padding. row [T,
    k]: a copy's row, P for a copy of no expert.
    """

    groups: Groups
    copy: Array
    row: Array


def is_expert(ids: Array, experts: int) -> Array:
    return (ids >= 0) & (ids < experts)


def dispatch(ids_Tk: Array, experts: int) -> Dispatch:
    """ids [T, k] int32, the experts of each token. The copy of a number of no expert, below 0 or `experts`
    and more, is not computed."""
    # indices below 0 would count from the end
    flat = jnp.where(is_expert(ids_Tk, experts), ids_Tk, experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    groups = plan_groups(jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop"), flat.size)
    copy = order.astype(jnp.int32).at[groups.source].get(mode="fill", fill_value=flat.size)
    return Dispatch(groups, copy, groups.padded[jnp.argsort(order)].reshape(ids_Tk.shape))


def _take(x: Array, at: Array) -> Array:
    """x[at], zeros where there is none; codes as bytes, which no compiler widens on their way."""
    if x.dtype.itemsize > 1:
        return x.at[at].get(mode="fill", fill_value=0)
    taken = jax.lax.bitcast_convert_type(x, jnp.uint8).at[at].get(mode="fill", fill_value=0)
    return jax.lax.bitcast_convert_type(taken, x.dtype)


def dispatch_tokens(x_TD: Array, d: Dispatch) -> Array:
    """The rows [P, D] of the copies of tokens, zeros where there is padding."""
    return _take(x_TD, d.copy // d.row.shape[1])


@jax.custom_vjp
def combine_tokens(y_PD: Array, d: Dispatch) -> Array:
    """The copies [T, k, D] from their rows, zeros for a copy of no expert."""
    return _take(y_PD, d.row)


def _collect_bwd(d: Dispatch, dy: Array) -> tuple[Array, None]:
    return _take(dy.reshape(-1, dy.shape[-1]), d.copy), None


combine_tokens.defvjp(lambda y, d: (combine_tokens(y, d), d), _collect_bwd)


def _sum_copies(dx_PD: Array, d: Dispatch) -> Array:
    """[T, D]: what `spread` passes back, summed in float32 in the order of a token's experts."""
    return jnp.sum(_take(dx_PD, d.row), 1, dtype=jnp.float32).astype(dx_PD.dtype)


class _How(NamedTuple):
    """of_tokens: x is the tokens [T, K], of which the rows are copies; else the rows [P, K] themselves."""

    precision: Precision
    of_tokens: bool

    def rows(self, x: Array, d: Dispatch) -> Array:
        return dispatch_tokens(x, d) if self.of_tokens else x

    def passed_back(self, dx_PK: Array, d: Dispatch) -> Array:
        return _sum_copies(dx_PK, d) if self.of_tokens else dx_PK


def grouped_linear(x: Array, weight: Weight, d: Dispatch, precision: Precision, fp8: bool,
                   of_tokens: bool = False) -> Array:
    """Rows times their experts' `weight` [E, N, K] transposed -> [P, N] in `precision.compute_dtype`; zeros
    for padding.

    x: the rows [P, K], or if `of_tokens` the tokens [T, K], of which the rows are copies. `weight` as
    `linear` takes it, with an axis of experts before.
    """
    how = _How(precision, of_tokens)
    if not (fp8 or isinstance(weight, QuantizedWeight | EngineWeight | WeightWithGradSlot)):
        dtype = jnp.dtype(precision.compute_dtype)
        return _high(how, x.astype(dtype), weight.astype(dtype), d)
    quantized, grad_slot = as_quantized(weight)
    if grad_slot is None:
        return _fp8_forward(how, x, quantized, d)[0]
    return _fp8(how, x, quantized, grad_slot, d)


def _high_backend(precision: Precision) -> str:
    """Of products in high precision: JAX's kernels where they take the widths, and XLA."""
    return "auto" if precision.products == Products.PALLAS else "reference"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _high(how: _How, x: Array, w: Array, d: Dispatch) -> Array:
    return high_matmul(how.rows(x, d), w, d.groups, out_dtype=x.dtype, backend=_high_backend(how.precision))


def _high_fwd(how: _How, x: Array, w: Array, d: Dispatch):
    return _high(how, x, w, d), (x, w, d)


def _high_bwd(how: _How, saved: tuple, dy: Array):
    (x, w, d), backend = saved, _high_backend(how.precision)
    dx = high_matmul(dy, jnp.swapaxes(w, 1, 2), d.groups, out_dtype=x.dtype, backend=backend)
    dw = high_wgrad(dy, how.rows(x, d), d.groups, out_dtype=w.dtype, backend=backend)
    return how.passed_back(dx, d), dw, None


_high.defvjp(_high_fwd, _high_bwd)


def _fp8_forward(how: _How, x: Array, weight: QuantizedWeight,
                 d: Dispatch) -> tuple[Array, tuple[Array, Array]]:
    """The product, and x as codes and scales."""
    precision, backend = how.precision, backend_of(how.precision)
    quantized = quantize_rows(x, backend=backend)
    if precision.activations_fp8:
        codes, scale = (how.rows(a, d) for a in quantized)
        return _scaled_product(precision, codes, scale, weight, d), quantized
    dtype = jnp.dtype(precision.compute_dtype)
    w = round_to(q.dequantize_blocks(*weight), precision.compute_dtype).astype(dtype)
    y = high_matmul(how.rows(x.astype(dtype), d), w, d.groups, out_dtype=dtype,
                    backend=_high_backend(precision))
    return y, quantized


def _scaled_product(precision: Precision, codes: Array, scale: Array, weight: QuantizedWeight,
                    d: Dispatch) -> Array:
    """Rows as codes and scales times their experts' weights, block of 128 rows by block where no kernel does
    it."""
    if precision.products == Products.PALLAS:
        dtype = jnp.dtype(precision.compute_dtype)
        return grouped_matmul(codes, scale, *weight, d.groups, out_dtype=dtype, backend="pallas")
    product = lambda codes, scale, *of_expert: scaled_product(
        precision, codes, scale, QuantizedWeight(*of_expert))
    return by_block(product, (codes, scale), weight, d.groups)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fp8(how: _How, x: Array, weight: QuantizedWeight, grad_slot: Array, d: Dispatch) -> Array:
    return _fp8_forward(how, x, weight, d)[0]


def _fp8_fwd(how: _How, x: Array, weight: QuantizedWeight, grad_slot: Array, d: Dispatch):
    y, quantized = _fp8_forward(how, x, weight, d)
    kept = quantized if how.precision.saved_activations == SavedActivations.FP8 else x.astype(how.precision.compute_dtype)
    like = jnp.zeros((), x.dtype), grad_slot[:0, :0, :0]
    return y, (kept, weight, like, d)


def _fp8_bwd(how: _How, saved: tuple, dy: Array):
    kept, weight, (like_x, like_w), d = saved
    x = q.dequantize_rows(*kept) if how.precision.saved_activations == SavedActivations.FP8 else kept
    backward = _high_backward if how.precision.gradients == Gradients.HIGH else _fp8_backward
    dx, dw = backward(how.precision, dy, how.rows(x, d), weight, d, like_x.dtype, like_w.dtype)
    return how.passed_back(dx, d), None, dw, None


_fp8.defvjp(_fp8_fwd, _fp8_bwd)


def _high_backward(precision: Precision, dy: Array, x: Array, weight: QuantizedWeight, d: Dispatch, *dtypes):
    """dy [P, N], x [P, K] -> dx [P, K], dw [E, N, K]: operands in `compute_dtype`, the weight the
    forward's."""
    dy, x, w = (a.astype(precision.compute_dtype) for a in (dy, x, q.dequantize_blocks(*weight)))
    backend = _high_backend(precision)
    dx = high_matmul(dy, jnp.swapaxes(w, 1, 2), d.groups, out_dtype=dtypes[0], backend=backend)
    return dx, high_wgrad(dy, x, d.groups, out_dtype=dtypes[1], backend=backend)


def _fp8_backward(precision: Precision, dy: Array, x: Array, weight: QuantizedWeight, d: Dispatch, *dtypes):
    """As `_high_backward`, with FP8 operands: dy by rows for dgrad, dy and x along the rows of an expert for
    wgrad."""
    backend, dtype = backend_of(precision), GRADIENT_DTYPES[precision.gradients]
    by_rows, by_tokens = quantize_both(dy, dtype, backend=backend)
    turned = (jnp.swapaxes(w, 1, 2) for w in weight)
    dx = grouped_matmul(*by_rows, *turned, d.groups, out_dtype=dtypes[0], backend=backend)
    x_by_tokens = quantize_tokens(x, backend=backend)
    return dx, grouped_wgrad(*by_tokens, *x_by_tokens, d.groups, out_dtype=dtypes[1], backend=backend)
