"""The products of a mixture of experts in high precision or FP8, and their derivatives: `linear` for rows
that are grouped by expert.

Every token has k copies, one for each of its experts. The copies are sorted by expert and padded, so that the
rows of each expert begin at a multiple of 128: P rows (pallas_kernels.grouped_matmul). No copy is dropped.
Each copy has one row, and each row has at most one copy. So forward and backward only gather between tokens
and rows. Neither adds anything in an order that could change.

In FP8 each token is quantised once, for all its experts and for both gate and up. Its codes are then copied.
wgrad contracts over the rows of an expert, so it quantises every copy again, together with its neighbours.
The formats and the backward are those of `jaxfp8rl.precision.linear`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.precision.linear import (
    GRADIENT_DTYPES,
    backend_of,
    quantize_both,
    quantize_rows,
    quantize_tokens,
    round_to,
    scaled_product,
)
from jaxfp8rl.precision.records import Gradients, Precision, Products, SavedActivations
from jaxfp8rl.precision.weights import EngineWeight, QuantizedWeight, Weight, WeightWithGradSlot, as_quantized
from pallas_kernels.grouped_matmul import api, high
from pallas_kernels.grouped_matmul.groups import Groups, by_block, plan_groups
from pallas_kernels.quantize import reference as q

# All calls with one shape share a kernel: see linear.py.
grouped_matmul = jax.jit(api.grouped_matmul, static_argnames=("out_dtype", "backend"))
grouped_wgrad = jax.jit(api.grouped_wgrad, static_argnames=("out_dtype", "backend"))
high_matmul = jax.jit(high.grouped_matmul, static_argnames=("out_dtype", "backend"))
high_wgrad = jax.jit(high.grouped_wgrad, static_argnames=("out_dtype", "backend"))


class Dispatch(NamedTuple):
    """The places of the k copies of T tokens among P padded rows that are sorted by expert. All are int32.

    groups: the rows of each expert.
    copy [P]: the copy, of T * k, that a row holds. T * k for padding.
    row [T, k]: the row that holds a copy. P for a copy without an expert.
    """

    groups: Groups
    copy: Array
    row: Array


def is_expert(ids: Array, experts: int) -> Array:
    """Whether each id names one of `experts` experts."""
    return (ids >= 0) & (ids < experts)


def dispatch(ids_Tk: Array, experts: int) -> Dispatch:
    """The Dispatch of tokens whose experts are `ids_Tk` [T, k] int32.

    An id below 0, or of `experts` or more, names no expert, and its copy is not computed.
    """
    # an index below 0 would count from the end
    flat = jnp.where(is_expert(ids_Tk, experts), ids_Tk, experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    groups = plan_groups(jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop"), flat.size)
    copy = order.astype(jnp.int32).at[groups.source].get(mode="fill", fill_value=flat.size)
    return Dispatch(groups, copy, groups.padded[jnp.argsort(order)].reshape(ids_Tk.shape))


def _take(x: Array, at: Array) -> Array:
    """x[at], with zeros for an index past the end. FP8 codes move as bytes, which no compiler widens."""
    if x.dtype.itemsize > 1:
        return x.at[at].get(mode="fill", fill_value=0)
    taken = jax.lax.bitcast_convert_type(x, jnp.uint8).at[at].get(mode="fill", fill_value=0)
    return jax.lax.bitcast_convert_type(taken, x.dtype)


def dispatch_tokens(x_TD: Array, d: Dispatch) -> Array:
    """Tokens [T, D] -> the rows [P, D] of their copies, with zeros for padding."""
    return _take(x_TD, d.copy // d.row.shape[1])


@jax.custom_vjp
def combine_tokens(y_PD: Array, d: Dispatch) -> Array:
    """Rows [P, D] -> the copies [T, k, D] that they hold, with zeros for a copy without an expert."""
    return _take(y_PD, d.row)


def _collect_bwd(d: Dispatch, dy: Array) -> tuple[Array, None]:
    return _take(dy.reshape(-1, dy.shape[-1]), d.copy), None


combine_tokens.defvjp(lambda y, d: (combine_tokens(y, d), d), _collect_bwd)


def _sum_copies(dx_PD: Array, d: Dispatch) -> Array:
    """The gradient [T, D] of tokens from that of their rows: a float32 sum in the order of a token's
    experts."""
    return jnp.sum(_take(dx_PD, d.row), 1, dtype=jnp.float32).astype(dx_PD.dtype)


class _How(NamedTuple):
    """The static arguments of a product.

    of_tokens: x holds the tokens [T, K], and the product copies them into rows. If False, x holds the rows
    [P, K].
    """

    precision: Precision
    of_tokens: bool

    def rows(self, x: Array, d: Dispatch) -> Array:
        return dispatch_tokens(x, d) if self.of_tokens else x

    def passed_back(self, dx_PK: Array, d: Dispatch) -> Array:
        return _sum_copies(dx_PK, d) if self.of_tokens else dx_PK


def grouped_linear(x: Array, weight: Weight, d: Dispatch, precision: Precision, fp8: bool,
                   of_tokens: bool = False) -> Array:
    """Each row times the `weight` [E, N, K] of its expert, transposed -> [P, N] in `precision.compute_dtype`,
    with zeros for padding.

    x: the rows [P, K]. If `of_tokens`, the tokens [T, K], which are copied into rows.
    weight: as for `linear`, with a leading axis of experts.
    """
    how = _How(precision, of_tokens)
    if not (fp8 or isinstance(weight, QuantizedWeight | EngineWeight | WeightWithGradSlot)):
        dtype = jnp.dtype(precision.compute_dtype)
        return _high(how, x.astype(dtype), weight.astype(dtype), d)
    quantized, grad_slot = as_quantized(weight)
    if grad_slot is None:
        return _frozen_fp8(how, x, quantized, d)
    return _fp8(how, x, quantized, grad_slot, d)


def _high_backend(precision: Precision) -> str:
    """The backend of products in high precision. "auto" is JAX's kernels, or XLA for widths that they do not
    take."""
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
    """The product, and the codes and scales of x."""
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
    """Each row, given as codes and scales, times its expert's weight. XLA computes 128 rows at a time."""
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
    saves_fp8 = how.precision.saved_activations == SavedActivations.FP8
    kept = quantized if saves_fp8 else x.astype(how.precision.compute_dtype)
    like = jnp.zeros((), x.dtype), grad_slot[:0, :0, :0]
    return y, (kept, weight, like, d)


def _fp8_bwd(how: _How, saved: tuple, dy: Array):
    kept, weight, (like_x, like_w), d = saved
    x = q.dequantize_rows(*kept) if how.precision.saved_activations == SavedActivations.FP8 else kept
    backward = _high_backward if how.precision.gradients == Gradients.HIGH else _fp8_backward
    dx, dw = backward(how.precision, dy, how.rows(x, d), weight, d, like_x.dtype, like_w.dtype)
    return how.passed_back(dx, d), None, dw, None


_fp8.defvjp(_fp8_fwd, _fp8_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _frozen_fp8(how: _How, x: Array, weight: QuantizedWeight, d: Dispatch) -> Array:
    """`_fp8` of weights that do not learn. Its backward pass is dgrad alone: it keeps no input and quantises
    nothing along the tokens."""
    return _fp8_forward(how, x, weight, d)[0]


def _frozen_fp8_fwd(how: _How, x: Array, weight: QuantizedWeight, d: Dispatch):
    return _frozen_fp8(how, x, weight, d), (weight, jnp.zeros((), x.dtype), d)


def _frozen_fp8_bwd(how: _How, saved: tuple, dy: Array):
    (weight, like, d), precision = saved, how.precision
    if precision.gradients == Gradients.HIGH:
        dx = _high_dgrad(precision, dy.astype(precision.compute_dtype), weight, d, like.dtype)
    else:
        by_rows = quantize_rows(dy, dtype=GRADIENT_DTYPES[precision.gradients], backend=backend_of(precision))
        dx = _fp8_dgrad(precision, by_rows, weight, d, like.dtype)
    return how.passed_back(dx, d), None, None


_frozen_fp8.defvjp(_frozen_fp8_fwd, _frozen_fp8_bwd)


def _high_backward(precision: Precision, dy: Array, x: Array, weight: QuantizedWeight, d: Dispatch, *dtypes):
    """dy [P, N], x [P, K] -> (dx [P, K], dw [E, N, K]) in the types `dtypes`. The operands are in
    `compute_dtype`, and the weight is the forward's."""
    dy, x = (a.astype(precision.compute_dtype) for a in (dy, x))
    dx = _high_dgrad(precision, dy, weight, d, dtypes[0])
    return dx, high_wgrad(dy, x, d.groups, out_dtype=dtypes[1], backend=_high_backend(precision))


def _high_dgrad(precision: Precision, dy: Array, weight: QuantizedWeight, d: Dispatch, dtype) -> Array:
    w = q.dequantize_blocks(*weight).astype(precision.compute_dtype)
    return high_matmul(dy, jnp.swapaxes(w, 1, 2), d.groups, out_dtype=dtype, backend=_high_backend(precision))


def _fp8_backward(precision: Precision, dy: Array, x: Array, weight: QuantizedWeight, d: Dispatch, *dtypes):
    """`_high_backward` with FP8 operands.

    For dgrad, dy is quantised along each row. For wgrad, dy and x are quantised along the rows of an expert.
    """
    backend = backend_of(precision)
    by_rows, by_tokens = quantize_both(dy, GRADIENT_DTYPES[precision.gradients], backend=backend)
    dx = _fp8_dgrad(precision, by_rows, weight, d, dtypes[0])
    x_by_tokens = quantize_tokens(x, backend=backend)
    return dx, grouped_wgrad(*by_tokens, *x_by_tokens, d.groups, out_dtype=dtypes[1], backend=backend)


def _fp8_dgrad(precision: Precision, by_rows: tuple[Array, Array], weight: QuantizedWeight, d: Dispatch,
               dtype) -> Array:
    turned = (jnp.swapaxes(w, 1, 2) for w in weight)
    return grouped_matmul(*by_rows, *turned, d.groups, out_dtype=dtype, backend=backend_of(precision))
