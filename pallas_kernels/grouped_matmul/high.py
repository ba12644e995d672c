"""Grouped products of a mixture of experts in high precision, by JAX's own Hopper kernels or block by block
by XLA.

Rows have the layout of the FP8 products (`groups.plan_groups`), so that both serve the same layer. JAX's
kernels take bfloat16 and widths in multiples of 128, and round results to bfloat16 even for a wider
`out_dtype`. `backend`: "auto" uses JAX's kernels on a Hopper GPU if they fit and XLA otherwise, "pallas" uses
JAX's kernels or raises a ValueError, "reference" uses XLA.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.forward_only import forward_only
from pallas_kernels.grouped_matmul.groups import Groups, by_block
from pallas_kernels.plgpu_compat import Backend, device, use_kernel
from pallas_kernels.quantize import BLOCK

# Options of JAX's kernels.
TILES: dict[str, Any] = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4}
no_derivative = forward_only(
    "differentiate jaxfp8rl.precision.experts.grouped_linear, which computes its gradients by these")


@no_derivative
def grouped_matmul(
    x: Array, w: Array, groups: Groups, *, out_dtype: jnp.dtype | None = None, backend: Backend = "auto"
) -> Array:
    """Each padded row of x [P, K] times its expert's w [E, N, K], transposed -> [P, N] in `out_dtype`, by
    default x's dtype; summed in float32. Rows without an expert give zeros."""
    out_dtype = out_dtype or x.dtype
    if _shipped(backend, x, w):
        return _shipped_matmul(x, w, groups).astype(out_dtype)
    return by_block(lambda rows, w: _product(rows, w, 1).astype(out_dtype), (x,), (w,), groups)


@no_derivative
def grouped_wgrad(
    dy: Array, x: Array, groups: Groups, *, out_dtype: jnp.dtype | None = None, backend: Backend = "auto"
) -> Array:
    """dy^T x over each expert's rows: dy [P, N], x [P, K] -> [E, N, K] in `out_dtype`, by default x's dtype;
    summed in float32. An expert without rows gets zeros."""
    out_dtype = out_dtype or x.dtype
    if _shipped(backend, dy, x):
        return _shipped_wgrad(dy, x, groups).astype(out_dtype)
    total = jnp.zeros((groups.sizes.size, dy.shape[1], x.shape[1]), jnp.float32)

    def add_block(total: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
        dy, x, e = block
        return total.at[e].add(_product(dy.T, x, 0), mode="drop"), None

    dy_blocks, x_blocks = (a.reshape(-1, BLOCK, a.shape[1]) for a in (dy, x))
    return lax.scan(add_block, total, (dy_blocks, x_blocks, groups.expert))[0].astype(out_dtype)


def why_reference(dtype: jnp.dtype, *widths: int) -> str:
    """The reason why JAX's kernels do not take operands of this dtype and these widths on any GPU; "" if they
    do."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"takes bfloat16, not {jnp.dtype(dtype)}"
    odd = [str(n) for n in widths if n % BLOCK]
    return f"takes widths in multiples of {BLOCK}, not {', '.join(odd)}" if odd else ""


def _shipped(backend: Backend, a: Array, b: Array) -> bool:
    """Whether JAX's kernels compute the product: bfloat16, on Hopper, in whole tiles."""
    why = why_reference(a.dtype if a.dtype == b.dtype else jnp.float32, *a.shape[1:], *b.shape[1:])
    if backend == "pallas" and why:
        found = f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
        raise ValueError(f'{found}: backend = "pallas" {why}: use "auto"')
    return use_kernel(backend) and not why


def _whole_sizes(groups: Groups) -> Array:
    """[E] the number of each expert's rows with their padding."""
    return (groups.sizes + BLOCK - 1) // BLOCK * BLOCK


def _shipped_matmul(x: Array, w: Array, groups: Groups) -> Array:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    y = ragged_dot(x, w, group_sizes=_whole_sizes(groups), transpose_rhs=True, **TILES, grid_block_n=8)
    of_someone = jnp.repeat(groups.expert < w.shape[0], BLOCK)  # the kernel does not write other rows
    return jnp.where(of_someone[:, None], y, 0)


def _shipped_wgrad(dy: Array, x: Array, groups: Groups) -> Array:
    if device().platform != "gpu":
        raise ValueError(
            'backend = "pallas": JAX\'s kernel needs a GPU when it is traced, and there is none: use "auto"')
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    dw = transposed_ragged_dot(dy, x, group_sizes=_whole_sizes(groups), **TILES, grid_block_n=1)
    return jnp.where((groups.sizes > 0)[:, None, None], dw, 0)


def _product(a: Array, b: Array, axis: int) -> Array:
    """a [M, K] by b, contracted over its axis `axis` -> [M, N] float32."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None  # a GPU would multiply it as TF32
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), precision=exact,
                           preferred_element_type=jnp.float32)
