"""`jax.lax.dot_general` in FP8: the product and both gradients are FP8 products of activations and a kernel
of weights.

`lhs` is the activations, `rhs` the kernel. The operands keep their float dtype; each call quantises them
(DeepSeek-V3, 2024, section 3.3): the kernel in blocks of 128x128, everything else in blocks of 1x128 along
the contraction, all as E4M3.

| product  | contracts over | first operand      | second operand                             |
|----------|----------------|--------------------|--------------------------------------------|
| result   | K              | lhs, 1x128 along K | the kernel's codes                         |
| d lhs    | N              | dy, 1x128 along N  | the same codes and scales, transposed      |
| d kernel | tokens         | dy, 1x128 along T  | lhs, 1x128 along T, quantised again        |

T stands for the axes that only lhs has, N for those that only rhs has, K for the contracted ones. The
gradient is straight-through: that of the unrounded product, evaluated at the rounded kernel. Only first-order
reverse mode is supported.

`backend` is that of `pallas_kernels.quantize.api`: the three products run as Hopper kernels, or as the
references that the kernels are tested against.
A NaN or an infinity gives its block a scale that is not finite: the result is NaN wherever that block enters,
and nowhere else. A block whose largest magnitude is below 1e-10 is quantised as if it were 1e-10: numbers
below 2e-16 become 0.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import sequential_vmap
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.blockwise_matmul import api as matmul
from pallas_kernels.forward_only import forward_only
from pallas_kernels.plgpu_compat import Backend, device, use_kernel
from pallas_kernels.quantize import api as quantize

Axes = Sequence[int]
DimensionNumbers = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]
DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))
AS_IT_COMES = (None, lax.Precision.DEFAULT, "default", "fastest", "bfloat16")  # all mean the default
PLAIN = "jax.lax.dot_general"
once = forward_only("pallas_kernels.fp8_dot_general has a first derivative, by reverse mode, and no other")

# Separate functions in a program, so that Mosaic compiles one kernel for all equal calls.
quantize_rows = jax.jit(quantize.quantize_rows, static_argnames=("backend", "interpret"))
quantize_tokens = jax.jit(quantize.quantize_tokens, static_argnames=("backend", "interpret"))
quantize_both = jax.jit(quantize.quantize_both, static_argnames=("backend", "interpret"))
quantize_blocks = jax.jit(quantize.quantize_blocks, static_argnames=("transposed", "backend", "interpret"))
blockwise_matmul = jax.jit(matmul.blockwise_matmul, static_argnames=("out_dtype", "backend", "interpret"))
wgrad = jax.jit(matmul.wgrad, static_argnames=("out_dtype", "backend", "interpret"))


class How(NamedTuple):
    """The static arguments of a product of x [T, K] and the kernel w."""

    turned: bool  # w is [K, N] instead of [N, K]
    out_dtype: jnp.dtype
    w_dtype: jnp.dtype
    backend: Backend
    interpret: Any = None

    @property
    def by(self) -> dict[str, Any]:
        return {"backend": self.backend, "interpret": self.interpret}


def fp8_dot_general(
    lhs: ArrayLike, rhs: ArrayLike, dimension_numbers: DimensionNumbers, precision: Any = None,
    preferred_element_type: DTypeLike | None = None, *, out_sharding: Any = None, backend: Backend = "auto",
    interpret: Any = None,
) -> Array:
    """`jax.lax.dot_general(lhs, rhs, dimension_numbers)` in FP8, differentiable in FP8: see the module's
    table.

    lhs: activations, rhs: the kernel; bfloat16, float16 or float32, of any shape without a zero.

    dimension_numbers: ((axes contracted in lhs, in rhs), (batch axes of lhs, of rhs)), as in
    `jax.lax.dot_general`. Kernels [N, K] and [K, N] are both read without a transpose. A batch is computed
    product by product.

    preferred_element_type: the result's dtype, bfloat16, float16 or float32; by default that of
    `jax.lax.dot_general`. Sums are float32 and are rounded once. Gradients have their operands' dtypes.

    precision: None or `jax.lax.Precision.DEFAULT`, the only one supported.

    out_sharding: None. A kernel is not split over devices automatically: call this inside `jax.shard_map`
    with `check_vma=False`; gradients of replicated operands are summed over devices, as usual.

    backend: "auto" is the kernels on a Hopper GPU and elsewhere the reference, with a warning; "pallas" is
    the kernels or an error; "reference" is plain jnp on any device, slowly.

    interpret: runs the kernels on a CPU, for tests.

    Returns an array [*batch, *axes of lhs alone, *axes of rhs alone]. Raises ValueError, with the operands
    found and the remedy, for other dtypes and for an operand without elements, and the errors of
    `jax.lax.dot_general` for axes that do not fit. Source: DeepSeek-V3 (2024), section 3.3.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    _check("lhs", lhs), _check("rhs", rhs), _check_options(precision, preferred_element_type, out_sharding)
    like = jax.eval_shape(_plain(dimension_numbers, preferred_element_type), lhs, rhs)  # also checks the axes
    _say_once_where_no_kernel_is(backend)
    x, w, turned = _as_matrices(lhs, rhs, dimension_numbers)
    product = functools.partial(_product, How(turned, like.dtype, rhs.dtype, backend, interpret))
    y = product(x, w) if x.ndim == 2 else jax.vmap(product)(x, w)
    return y.reshape(like.shape)


def fp8_linear(
    x: ArrayLike, w: ArrayLike, *, preferred_element_type: DTypeLike | None = None, backend: Backend = "auto",
    interpret: Any = None,
) -> Array:
    """x [..., K] times w [N, K] transposed -> [..., N]: `fp8_dot_general` of a linear layer, differentiable
    in FP8.

    The dtypes, options and source are those of `fp8_dot_general`. Raises the same errors.
    """
    if jnp.ndim(x) < 1 or jnp.ndim(w) != 2:
        raise ValueError(
            f"x {list(jnp.shape(x))}, w {list(jnp.shape(w))}: expected x [..., K] and w [N, K]"
        )
    axes = ((jnp.ndim(x) - 1,), (1,)), ((), ())
    return fp8_dot_general(
        x, w, axes, preferred_element_type=preferred_element_type, backend=backend, interpret=interpret
    )


def _plain(axes: DimensionNumbers, dtype: DTypeLike | None) -> Callable[[Array, Array], Array]:
    return lambda lhs, rhs: lax.dot_general(lhs, rhs, axes, preferred_element_type=dtype)


def _as_matrices(lhs: Array, rhs: Array, axes: DimensionNumbers) -> tuple[Array, Array, bool]:
    """lhs as [T, K], and rhs as [N, K], or as [K, N] if K comes first in it; with a leading axis for the
    batch if there is one."""
    (contracted, of_rhs), (batch, batch_of_rhs) = axes
    pairs = sorted(zip(of_rhs, contracted))  # in the kernel's order, so that the kernel needs no transpose
    of_rhs, contracted = [r for r, _ in pairs], [l for _, l in pairs]
    tokens = _others(lhs, batch, contracted)
    columns = _others(rhs, batch_of_rhs, of_rhs)
    turned = bool(of_rhs and columns and of_rhs[0] < columns[0])
    sides = (of_rhs, columns) if turned else (columns, of_rhs)
    return _folded(lhs, batch, tokens, contracted), _folded(rhs, batch_of_rhs, *sides), turned


def _others(x: Array, *named: Axes) -> list[int]:
    return [axis for axis in range(x.ndim) if not any(axis in axes for axes in named)]


def _folded(x: Array, *groups: Axes) -> Array:
    """x with each group of axes folded into one; without the first axis if that group, the batch's, is
    empty."""
    sizes = [math.prod(x.shape[axis] for axis in axes) for axes in groups]
    return x.transpose([axis for axes in groups for axis in axes]).reshape(sizes if groups[0] else sizes[1:])


def _in_turn(rule: Callable) -> Callable:
    """A function of (how, arrays) that `vmap` runs one element after another: the kernels have no batch
    axis."""

    @functools.wraps(rule)
    def run(how: How, *arrays: Any) -> Any:
        return sequential_vmap(functools.partial(rule, how))(*arrays)

    return run


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: How, x: Array, w: Array) -> Array:
    """x [T, K] times w [N, K] transposed, or w [K, N] if `how.turned` -> [T, N]."""
    return only_forward(how, x, w)


@once
@_in_turn
def only_forward(how: How, x: Array, w: Array) -> Array:
    codes = quantize_blocks(_readable(w), transposed=how.turned, **how.by)
    return _result(how, x, (codes[2], codes[1].T) if how.turned else codes)


@once
@_in_turn
def forward(how: How, x: Array, w: Array) -> tuple[Array, tuple]:
    """The product, and the residuals for `backward`: x, and the kernel's codes [K, N] with their scales."""
    codes, scale, transposed = quantize_blocks(_readable(w), transposed=True, **how.by)
    pairs = (codes, scale), (transposed, scale.T)
    for_result, for_dgrad = reversed(pairs) if how.turned else pairs
    return _result(how, x, for_result), (x, for_dgrad)


def _result(how: How, x: Array, w: tuple[Array, Array]) -> Array:
    """x [T, K] times codes [N, K] and scales."""
    return _rounded(blockwise_matmul, (quantize_rows(_readable(x), **how.by), w), how.out_dtype, how)


@once
@_in_turn
def backward(how: How, saved: tuple, dy: Array) -> tuple[Array, Array]:
    """dx [T, K], and dw in the layout of w."""
    x, w = saved
    by_rows, dy_by_tokens = quantize_both(_readable(dy), **how.by)
    x_by_tokens = quantize_tokens(_readable(x), **how.by)
    operands = (x_by_tokens, dy_by_tokens) if how.turned else (dy_by_tokens, x_by_tokens)
    return _rounded(blockwise_matmul, (by_rows, w), x.dtype, how), _rounded(wgrad, operands, how.w_dtype, how)


_product.defvjp(forward, backward)


def _readable(x: Array) -> Array:
    """x in a dtype that the quantisers accept. bfloat16 has less precision than float16, so float16 becomes
    float32."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _rounded(product: Callable, operands: tuple, dtype: jnp.dtype, how: How) -> Array:
    """The product of two pairs of codes and scales in `dtype`, through float32 if the kernels do not write
    that dtype."""
    (a, b), written = operands, jnp.float32 if dtype == jnp.float16 else dtype
    return product(*a, *b, out_dtype=jnp.dtype(written), **how.by).astype(dtype)


def _check(name: str, x: Array) -> None:
    found = f"{name} is {x.dtype}{list(x.shape)}"
    if x.dtype not in DTYPES:
        if x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"{found}: these are codes already; pallas_kernels.blockwise_matmul takes them, with scales"
            )
        raise ValueError(f"{found}: bfloat16, float16 or float32 is quantised; cast it, or use {PLAIN}")
    if not x.size:
        raise ValueError(f"{found}, empty: there is nothing to multiply; leave the call out, or use {PLAIN}")


def _check_options(precision: Any, dtype: DTypeLike | None, out_sharding: Any) -> None:
    given = precision if isinstance(precision, tuple) else (precision,)
    if any(p not in AS_IT_COMES for p in given):
        raise ValueError(f"precision = {precision}: the products are FP8; leave it out, or use {PLAIN}")
    if dtype is not None and jnp.dtype(dtype) not in DTYPES:
        found = f"preferred_element_type = {jnp.dtype(dtype)}"
        raise ValueError(f"{found}: bfloat16, float16 or float32; cast the result to others")
    if out_sharding is not None:
        raise ValueError(f"out_sharding = {out_sharding}: no kernel is split; call it inside a shard_map")


def _say_once_where_no_kernel_is(backend: Backend) -> None:
    platform = device().platform
    if backend == "auto" and not use_kernel(backend) and platform != "gpu":  # on another GPU use_kernel warns
        _warn_once(platform)


@functools.cache
def _warn_once(platform: str) -> None:
    warnings.warn(
        f'fp8_dot_general on the backend "{platform}", which has no Hopper GPU: the reference computes the '
        'FP8 products, slowly; backend="reference" asks for it without this warning',
        RuntimeWarning,
        stacklevel=4,
    )
