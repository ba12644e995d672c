"""The scaled FP8 products, by the Hopper kernel or by reference.py: one explicit choice.

`backend` is that of `pallas_kernels.quantize.api`. The kernel sums each 128 products in the tensor cores,
which keep about 14 bits (`reference.short_dot`). It therefore differs from the reference by about 1e-4 before
the result is rounded.

The kernel supports a contraction that is a multiple of 128, an M that is a multiple of 8 or below 8, and an N
that is a multiple of 64, at least 128 (of 32 and 64 for a float32 result). Other sizes are padded, which
costs a copy. The widths of language models and packed rows of tokens need no padding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.blockwise_matmul import reference, sm90
from pallas_kernels.blockwise_matmul.tiles import Tiles, choose
from pallas_kernels.forward_only import forward_only
from pallas_kernels.plgpu_compat import Backend, pad_to, use_kernel
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize.reference import E4M3, E5M2

OUTPUTS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
no_derivative = forward_only(
    "differentiate pallas_kernels.fp8_dot_general, or in the learner jaxfp8rl.precision.linear.linear")


@no_derivative
def blockwise_matmul(
    x_codes: Array, x_scale: Array, w_codes: Array, w_scale: Array, *, out_dtype: jnp.dtype = jnp.bfloat16,
    backend: Backend = "auto", tiles: Tiles | None = None, interpret=None,
) -> Array:
    """x [T, K] in 1x128 blocks times w [N, K] in 128x128 blocks, transposed -> [T, N] in `out_dtype`: fprop
    and dgrad.

    x_scale [T, ceil(K/128)], w_scale [ceil(N/128), ceil(K/128)] float32; codes E4M3 or E5M2. tiles: replaces
    the tuned ones. interpret: runs the kernel on a CPU, for tests. Raises ValueError, with the shapes and the
    rule, for anything else, and TypeError if a derivative is computed (`pallas_kernels.fp8_dot_general` has
    one).

    Source: DeepSeek-V3 (2024), section 3.3.2: each 128 products are summed in the tensor cores, scaled, and
    added in float32.
    """
    _check(("x", x_codes, x_scale, False), ("w", w_codes, w_scale, True), out_dtype)
    if not use_kernel(backend):
        return reference.blockwise_matmul(x_codes, x_scale, w_codes, w_scale).astype(out_dtype)
    return _kernel(x_codes, x_scale, w_codes, w_scale, True, out_dtype, tiles, interpret)


@no_derivative
def matmul_beside(
    x_codes: Array, x_scale: Array, weights: tuple[Array, ...], w_scale: Array, *,
    out_dtype: jnp.dtype = jnp.bfloat16,
    backend: Backend = "auto", tiles: Tiles | None = None, interpret=None,
) -> Array:
    """`blockwise_matmul` by several weights [N_i, K], which lie where they are, as one product -> [T, sum of
    N_i].

    x_scale [K/128, T], as `few_rows` makes it; w_scale [sum of N_i / 128, K/128], those of the weights one
    after the other. T is a multiple of 8, each N_i and K of 128. Raises the same errors.
    """
    (T, K), widths = x_codes.shape, [len(w) for w in weights]
    if T % 8 or K % BLOCK or any(n % BLOCK for n in widths):
        raise ValueError(f"x_codes {list(x_codes.shape)} by weights of {widths} rows: multiples of 8, "
                         f"and of {BLOCK}")
    whole = jax.ShapeDtypeStruct((sum(widths), K), weights[0].dtype)
    _check(("x", x_codes, x_scale.T, False), ("w", whole, w_scale, True), out_dtype)
    if not use_kernel(backend):
        w = jnp.concatenate(weights)
        return reference.blockwise_matmul(x_codes, x_scale.T, w, w_scale).astype(out_dtype)
    tiles = tiles or choose(T, sum(widths), K, b_blocks=True)
    return sm90.matmul(x_codes, x_scale, weights, w_scale, tiles._replace(cluster=""), b_blocks=True,
                       out_dtype=out_dtype, interpret=interpret)


@no_derivative
def wgrad(
    dy_codes: Array, dy_scale: Array, x_codes: Array, x_scale: Array, *, out_dtype: jnp.dtype = jnp.float32,
    backend: Backend = "auto", tiles: Tiles | None = None, interpret=None,
) -> Array:
    """dy^T x over the tokens: dy_codes [N, T], x_codes [K, T], both in 1x128 blocks along T -> [N, K] in
    `out_dtype`.

    dy_scale [N, ceil(T/128)], x_scale [K, ceil(T/128)] float32, as from `quantize_tokens`. Options and source
    are those of `blockwise_matmul`. Raises the same errors.
    """
    _check(("dy", dy_codes, dy_scale, False), ("x", x_codes, x_scale, False), out_dtype)
    if not use_kernel(backend):
        return reference.wgrad(dy_codes, dy_scale, x_codes, x_scale).astype(out_dtype)
    return _kernel(dy_codes, dy_scale, x_codes, x_scale, False, out_dtype, tiles, interpret)


def _kernel(a, a_scale, b, b_scale, b_blocks: bool, out_dtype, tiles: Tiles | None, interpret) -> Array:
    """Pad the operands to the copy engine's boxes and transpose row scales to [K/128, M]. Padding with zeros
    adds nothing, whatever the scale."""
    m, n = a.shape[0], b.shape[0]
    columns = 128 // jnp.dtype(out_dtype).itemsize
    # Mosaic drops an axis of one box from a copy, and with it the bounds check of its columns.
    if n <= columns:
        columns *= 2
    tiles = tiles or choose(m, n, a.shape[1], b_blocks=b_blocks)
    rows = min(m, 8)  # a copy of fewer than 8 rows is also one box
    b_scale = b_scale if b_blocks else pad_to(b_scale.T, 1, columns)
    a_scale = a_scale.T if sm90.reads_scalars(m, b_blocks) else pad_to(a_scale.T, 1, 8)
    y = sm90.matmul(
        pad_to(a, rows, BLOCK), a_scale, pad_to(b, columns, BLOCK), b_scale, tiles,
        b_blocks=b_blocks, out_dtype=out_dtype, interpret=interpret,
    )
    return y[:m, :n]


def _check(a: tuple, b: tuple, out_dtype: jnp.dtype) -> None:
    (a_name, a_codes, *_), (b_name, b_codes, *_) = a, b
    for operand in (a, b):
        _check_operand(*operand)
    if a_codes.shape[1] != b_codes.shape[1]:
        raise ValueError(
            f"{a_name} {a_codes.shape} and {b_name} {b_codes.shape} contract over their second axes, "
            f"which must be equal"
        )
    if jnp.dtype(out_dtype) not in OUTPUTS:
        raise ValueError(f"a result of {jnp.dtype(out_dtype)}: bfloat16 or float32")


def _check_operand(name: str, codes: Array, scale: Array, blocks: bool) -> None:
    if codes.ndim != 2 or codes.dtype not in (E4M3, E5M2):
        found = f"{name}_codes is {codes.dtype}{list(codes.shape)}"
        raise ValueError(f"{found}: expected float8_e4m3fn or float8_e5m2 of two axes")
    if not codes.size:
        raise ValueError(f"{name}_codes {list(codes.shape)} is empty: there is nothing to multiply")
    rows, width = codes.shape
    want = (-(-rows // BLOCK) if blocks else rows, -(-width // BLOCK))
    if scale.shape != want or scale.dtype != jnp.float32:
        kind = "128x128" if blocks else "1x128"
        found = f"{name}_scale is {scale.dtype}{list(scale.shape)}"
        raise ValueError(
            f"{found}: {name}_codes {list(codes.shape)} in {kind} blocks has float32{list(want)}")
