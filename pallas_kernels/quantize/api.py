"""Blockwise FP8 quantisation, by the Hopper kernels or by reference.py: bit-equal results, one explicit
choice.

    backend: "auto"       the kernels on a Hopper GPU, the reference elsewhere (on another GPU with a warning)
             "pallas"     the kernels, or an error
             "reference"  plain jnp

The kernels need K to be a multiple of 128 and T a multiple of 8 (of 128 for transposed results). Other sizes
are padded, which costs a copy. A dtype that no kernel takes is an error with every backend.

The kernels write scales in the transposed layout that the products read. The functions here transpose them to
the public layout; inside one `jit` the two transposes cancel.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.forward_only import forward_only
from pallas_kernels.plgpu_compat import Backend, pad_to, use_kernel
from pallas_kernels.quantize import BLOCK, reference, sm90
from pallas_kernels.quantize.reference import AMAX_FLOOR, E4M3, E5M2

INPUTS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
no_derivative = forward_only(
    "differentiate pallas_kernels.fp8_dot_general, or in the learner jaxfp8rl.precision.linear.linear")


@no_derivative
def quantize_rows(
    x: Array, dtype: jnp.dtype = E4M3, *, power_of_two: bool = False, amax_floor: float = AMAX_FLOOR,
    backend: Backend = "auto", interpret=None,
) -> tuple[Array, Array]:
    """1x128 blocks along the last axis: x [..., K] bfloat16 or float32 -> codes [..., K], scales [...,
    ceil(K/128)] float32.

    dtype: the dtype of the codes, float8_e4m3fn or float8_e5m2. A number is approximately its code times its
    block's scale, which is the block's largest magnitude over the largest code. amax_floor: the minimum of
    that magnitude. power_of_two: scales are rounded up to powers of two. A block with a NaN or an infinity
    has a scale that is not finite. interpret: runs the kernel on a CPU, for tests.

    Raises ValueError for other dtypes and for an array without elements. Source: DeepSeek-V3 (2024), section
    3.3.2, with the floor and the divisions of vLLM's `per_token_group_fp8_quant`.
    """
    _check(x, dtype)
    if not use_kernel(backend):
        return reference.quantize_rows(x, dtype, power_of_two=power_of_two, amax_floor=amax_floor)
    lead, k = x.shape[:-1], x.shape[-1]
    flat = x.reshape(-1, k)
    fmt = sm90.Format(dtype, power_of_two, amax_floor)
    (codes, scale), _ = sm90.quantize(pad_to(flat, 8, BLOCK), fmt=fmt, interpret=interpret)
    t = flat.shape[0]
    return codes[:t, :k].reshape(*lead, k), scale[:, :t].T.reshape(*lead, -1)


@no_derivative
def quantize_tokens(
    x: Array, dtype: jnp.dtype = E4M3, *, square: bool = False, power_of_two: bool = False,
    backend: Backend = "auto",
    interpret=None,
) -> tuple[Array, Array]:
    """1x128 blocks along the tokens, for wgrad: x [T, K] bfloat16 or float32 -> codes [K, T], scales [K,
    ceil(T/128)] float32. With `square` (E4M3 only) the blocks are 128x128 and the scales [ceil(K/128),
    ceil(T/128)], which `blockwise_matmul` takes for its weight.

    Raises the errors of `quantize_rows`, and is otherwise the same. In its source these are 128x1 tiles of x.
    """
    _check(x, dtype, ndim=2)
    if square and jnp.dtype(dtype) != E4M3:
        raise ValueError(f"codes of type {jnp.dtype(dtype)} in 128x128 blocks: float8_e4m3fn")
    if not use_kernel(backend):
        return reference.quantize_tokens(x, dtype, square=square, power_of_two=power_of_two)
    fmt = sm90.Format(dtype, power_of_two, AMAX_FLOOR)
    codes, scale = _both(x, fmt, rows=False, square=square, interpret=interpret)[1]
    return codes, scale[::BLOCK] if square else scale


@no_derivative
def quantize_both(
    x: Array, dtype: jnp.dtype = E4M3, *, beside: Sequence[Array] = (), power_of_two: bool = False,
    backend: Backend = "auto",
    interpret=None,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """`quantize_rows(x)` and `quantize_tokens(x)` of x [T, K], which is read once.

    beside: more columns, [T, K_i] each, as if they were concatenated to x; then all widths but the last are
    multiples of 128. Raises ValueError for other shapes and dtypes.
    """
    for part in (x, *beside):
        _check(part, dtype, ndim=2)
    if beside:
        _check_beside(x, *beside)
    if not use_kernel(backend):
        x = jnp.concatenate((x, *beside), -1)
        by_rows = reference.quantize_rows(x, dtype, power_of_two=power_of_two)
        return by_rows, reference.quantize_tokens(x, dtype, power_of_two=power_of_two)
    return _both(x, sm90.Format(dtype, power_of_two, AMAX_FLOOR), beside, rows=True, interpret=interpret)


def _both(
    x: Array, fmt: sm90.Format, beside: Sequence[Array] = (), *, rows: bool, square: bool = False, interpret
) -> tuple[sm90.Quantized, tuple[Array, Array]]:
    """Run the kernel on padded tokens. A padded token is a zero in its groups, which changes none of them."""
    t, k = len(x), sum(part.shape[1] for part in (x, *beside))
    parts = [pad_to(part, BLOCK, BLOCK) for part in (x, *beside)]
    by_rows, (codes, scale) = sm90.quantize(*parts, fmt=fmt, rows=rows, tokens=True, square=square,
                                            interpret=interpret)
    tokens = codes[:k, :t], scale[:, :k].T
    return (by_rows[0][:t, :k], by_rows[1][:, :t].T) if rows else None, tokens


@no_derivative
def quantize_blocks(
    w: Array, *, first: Array | None = None, rows: int | None = None, transposed: bool = False,
    power_of_two: bool = False,
    backend: Backend = "auto", interpret=None,
) -> tuple[Array, ...]:
    """128x128 blocks: w [N, K] bfloat16 or float32 -> codes [N, K] E4M3, scales [ceil(N/128), ceil(K/128)]
    float32.

    first, rows: quantise only `rows` rows from 128 * `first` on; `first` is an int32 scalar that need not be
    known at trace time. The kernel reads these rows in place, whereas XLA would copy them. transposed: adds a
    third result, the same codes as [K, N], which dgrad contracts over N; their scales are the transpose.

    Raises the errors of `quantize_rows`, and is otherwise the same. Source: DeepSeek-V3 (2024), section
    3.3.2.
    """
    _check(w, E4M3, ndim=2)
    if first is not None and rows is None:
        raise ValueError("first without rows: give the number of rows to read as well")
    if first is not None and rows is not None and (not use_kernel(backend) or w.shape[1] % BLOCK
                                                   or rows % BLOCK):
        w, first = lax.dynamic_slice_in_dim(w, first * BLOCK, rows), None  # a copy
    if not use_kernel(backend):
        codes, scale = reference.quantize_blocks(w, power_of_two=power_of_two)
        return (codes, scale, codes.T) if transposed else (codes, scale)
    n, k = w.shape if first is None else (rows, w.shape[1])
    padded = pad_to(w, BLOCK if transposed else 8, BLOCK) if first is None else w
    fmt = sm90.Format(E4M3, power_of_two, AMAX_FLOOR)
    codes, scale, *more = sm90.quantize_blocks(padded, fmt, first, rows, transposed=transposed,
                                               interpret=interpret)
    return codes[:n, :k], scale, *(c[:k, :n] for c in more)


def _check_beside(*parts: Array) -> None:
    shapes = [part.shape for part in parts]
    if len({(t, part.dtype) for (t, _), part in zip(shapes, parts)}) > 1 or any(
            k % BLOCK for _, k in shapes[:-1]):
        raise ValueError(
            f"{', '.join(map(str, shapes))} side by side: as many tokens each, of one dtype, and widths that "
            f"are multiples of {BLOCK}, but for the last")


def _check(x: Array, dtype: jnp.dtype, ndim: int | None = None) -> None:
    if x.dtype not in INPUTS:
        raise ValueError(f"x {x.shape} is {x.dtype}: bfloat16 or float32 is quantised")
    if jnp.dtype(dtype) not in (E4M3, E5M2):
        raise ValueError(f"codes of type {jnp.dtype(dtype)}: float8_e4m3fn or float8_e5m2")
    if x.ndim < 1 or (ndim and x.ndim != ndim):
        raise ValueError(
            f"x {x.shape} has {x.ndim} axes, expected {ndim or 'one or more'}: map over leading axes")
    if not x.size:
        raise ValueError(f"x {x.shape} is empty: there is nothing to quantise")
