"""The grouped FP8 products in plain jnp, one block of 128 rows after another: the reference for the
kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.blockwise_matmul import reference
from pallas_kernels.grouped_matmul.groups import Groups, by_block
from pallas_kernels.quantize import BLOCK


def grouped_matmul(x_codes: Array, x_scale: Array, w_codes: Array, w_scale: Array, groups: Groups) -> Array:
    """Each padded row of x [P, K] times its expert's w [E, N, K], transposed -> [P, N] float32, zeros for
    rows without an expert.

    x_scale [P, K/128], w_scale [E, N/128, K/128] float32; `groups` from `plan_groups`. Each expert's rows are
    summed in the order of `blockwise_matmul.reference`.
    """
    return by_block(reference.blockwise_matmul, (x_codes, x_scale), (w_codes, w_scale), groups)


def grouped_wgrad(dy_codes: Array, dy_scale: Array, x_codes: Array, x_scale: Array, groups: Groups) -> Array:
    """dy^T x over each expert's rows: dy_codes [N, P], x_codes [K, P], 1x128 along P -> [E, N, K] float32,
    zeros for an expert without rows.

    dy_scale [N, P/128], x_scale [K, P/128] float32.
    """
    total = jnp.zeros((groups.sizes.size, dy_codes.shape[0], x_codes.shape[0]), jnp.float32)

    def add_block(total: Array, block: tuple[Array, ...]) -> tuple[Array, None]:
        dy, dy_scale, x, x_scale, e = block
        one = reference.wgrad(dy, dy_scale[:, None], x, x_scale[:, None])
        return total.at[e].add(one, mode="drop"), None

    codes = (jnp.moveaxis(c.reshape(c.shape[0], -1, BLOCK), 1, 0) for c in (dy_codes, x_codes))
    (dy, x) = codes
    return jax.lax.scan(add_block, total, (dy, dy_scale.T, x, x_scale.T, groups.expert))[0]
