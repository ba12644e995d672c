"""The grouped FP8 products of a mixture of experts, by the Hopper kernel or by reference.py: one explicit
choice.

Rows are sorted by expert and padded, so that each expert's rows start at a multiple of 128 (`plan_groups`,
`pad_rows`): P rows. Rows of padding hold zeros and give zeros. For one layer of E experts:

| pass  | call                                                                      |
|-------|---------------------------------------------------------------------------|
| fprop | grouped_matmul(*quantize_rows(x), w_codes, w_scale, groups)               |
| dgrad | grouped_matmul(*quantize_rows(dy), w_codes_t, w_scale_t, groups)          |
| wgrad | grouped_wgrad(*quantize_tokens(dy), *quantize_tokens(x), groups)          |

`backend` is that of `pallas_kernels.quantize.api`. Results differ from the reference's as in
`blockwise_matmul.api`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.blockwise_matmul.tiles import Tiles
from pallas_kernels.forward_only import forward_only
from pallas_kernels.grouped_matmul import reference, sm90
from pallas_kernels.grouped_matmul.groups import Groups, pad_rows, padded_rows, plan_groups, unpad_rows
from pallas_kernels.plgpu_compat import Backend, use_kernel
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize.reference import E4M3, E5M2

__all__ = ["Groups", "grouped_matmul", "grouped_wgrad", "pad_rows", "padded_rows", "plan_groups",
           "unpad_rows"]
no_derivative = forward_only(
    "differentiate jaxfp8rl.precision.experts.grouped_linear, which computes its gradients by these")


@no_derivative
def grouped_matmul(
    x_codes: Array, x_scale: Array, w_codes: Array, w_scale: Array, groups: Groups, *,
    out_dtype: jnp.dtype = jnp.bfloat16,
    backend: Backend = "auto", tiles: Tiles | None = None, interpret=None,
) -> Array:
    """x [P, K] in 1x128 blocks times each row's expert w [E, N, K] in 128x128 blocks, transposed -> [P, N] in
    `out_dtype`.

    x_scale [P, K/128], w_scale [E, ceil(N/128), K/128] float32; codes E4M3 or E5M2; K a multiple of 128, N a
    multiple of 64 and at least 128 (of 32 and 64 for a float32 result). groups: from `plan_groups`. Rows
    without an expert give zeros. tiles: replaces the tuned ones. interpret: runs the kernel on a CPU, for
    tests.

    Raises ValueError, with the shapes and the rule, for anything else, and TypeError if a derivative is
    computed. Source: as `blockwise_matmul`, once for each expert's rows.
    """
    _check_codes("x", x_codes, 2), _check_codes("w", w_codes, 3)
    _check_groups(groups, "x_codes", x_codes, 0), _check_experts(groups, w_codes)
    (e, n, k), p = w_codes.shape, x_codes.shape[0]
    if x_codes.shape[1] != k:
        raise ValueError(
            f"x {x_codes.shape} and w {w_codes.shape} contract over their last axes, which must be equal")
    _check_width("K", k, BLOCK), _check_out(out_dtype), _check_columns("N", n, out_dtype)
    _check_scale("x", x_scale, (p, k // BLOCK)), _check_scale("w", w_scale, (e, -(-n // BLOCK), k // BLOCK))
    if not use_kernel(backend):
        return reference.grouped_matmul(x_codes, x_scale, w_codes, w_scale, groups).astype(out_dtype)
    tiles = tiles or sm90.FORWARD["2x1x192"]
    return sm90.grouped_matmul(
        x_codes, x_scale.T, w_codes, w_scale, groups, tiles, out_dtype=out_dtype, interpret=interpret
    )


@no_derivative
def grouped_wgrad(
    dy_codes: Array, dy_scale: Array, x_codes: Array, x_scale: Array, groups: Groups, *,
    out_dtype: jnp.dtype = jnp.float32,
    backend: Backend = "auto", tiles: Tiles | None = None, interpret=None,
) -> Array:
    """dy^T x over each expert's rows: dy_codes [N, P], x_codes [K, P], both in 1x128 blocks along P -> [E, N,
    K] in `out_dtype`.

    dy_scale [N, P/128], x_scale [K, P/128] float32, as from `quantize_tokens`; N a multiple of 8, K a
    multiple of 32 and at least 64 (of 64 and 128 for a bfloat16 result). An expert without rows gets zeros.
    Everything else is as in `grouped_matmul`.
    """
    _check_codes("dy", dy_codes, 2), _check_codes("x", x_codes, 2)
    _check_groups(groups, "dy_codes", dy_codes, 1), _check_groups(groups, "x_codes", x_codes, 1)
    (n, p), k = dy_codes.shape, x_codes.shape[0]
    _check_out(out_dtype), _check_width("N", n, 8), _check_columns("K", k, out_dtype)
    _check_scale("dy", dy_scale, (n, p // BLOCK)), _check_scale("x", x_scale, (k, p // BLOCK))
    if not use_kernel(backend):
        return reference.grouped_wgrad(dy_codes, dy_scale, x_codes, x_scale, groups).astype(out_dtype)
    tiles = tiles or sm90.WEIGHTS["3x1x128 bands of 2"]
    return sm90.grouped_wgrad(
        dy_codes, dy_scale.T, x_codes, x_scale.T, groups, tiles, out_dtype=out_dtype, interpret=interpret
    )


def _check_codes(name: str, codes: Array, ndim: int) -> None:
    found = f"{name}_codes is {codes.dtype}{list(codes.shape)}"
    if codes.ndim != ndim or codes.dtype not in (E4M3, E5M2):
        raise ValueError(f"{found}: expected float8_e4m3fn or float8_e5m2 of {ndim} axes")
    if not codes.size:
        raise ValueError(f"{found}, empty: there is nothing to multiply")


def _check_groups(groups: Groups, name: str, codes: Array, axis: int) -> None:
    if codes.shape[axis] != groups.source.shape[0]:
        (rows,), (experts,), (padded,) = (x.shape for x in (groups.padded, groups.sizes, groups.source))
        want = f"{rows} rows of {experts} experts are padded to {padded}"
        raise ValueError(
            f"{name} {list(codes.shape)} has {codes.shape[axis]} rows along axis {axis}, but "
            f"{want}: use pad_rows")


def _check_experts(groups: Groups, w_codes: Array) -> None:
    if w_codes.shape[0] != groups.sizes.shape[0]:
        raise ValueError(
            f"w_codes {list(w_codes.shape)} has {w_codes.shape[0]} experts, groups have "
            f"{groups.sizes.shape[0]}")


def _check_width(name: str, size: int, multiple: int) -> None:
    if size % multiple:
        raise ValueError(
            f"{name} = {size}: must be a multiple of {multiple}; pad the weights once, when they are created")


def _check_columns(name: str, size: int, out_dtype: jnp.dtype) -> None:
    """Check the columns of a result, which is stored in boxes of 128 bytes. Mosaic drops the index of a
    single box, so values beyond it would be written there."""
    box = 128 // jnp.dtype(out_dtype).itemsize
    _check_width(name, size, box)
    if size == box:
        raise ValueError(
            f"{name} = {size}: must be at least {2 * box}; pad the weights once, when they are created")


def _check_out(out_dtype: jnp.dtype) -> None:
    if jnp.dtype(out_dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"a result of {jnp.dtype(out_dtype)}: bfloat16 or float32")


def _check_scale(name: str, scale: Array, want: tuple[int, ...]) -> None:
    if scale.shape != want or scale.dtype != jnp.float32:
        raise ValueError(
            f"{name}_scale is {scale.dtype}{list(scale.shape)}: its codes have float32{list(want)}")
