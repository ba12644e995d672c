"""The scaled FP8 products of a linear layer in plain jnp: the reference for the GEMM kernels.

Along the contraction, each group of 128 products of codes is summed separately. The partial sum is multiplied
by the two scales of its blocks and added to a float32 sum, the promotion of DeepSeek-V3 (2024), section
3.3.2:

    y[t, n] = sum_g  sx[t, g] * sw[n / 128, g] * sum_{k in group g} x_codes[t, k] * w_codes[n, k]

| pass  | call                                                        | operands                                   |
|-------|-------------------------------------------------------------|--------------------------------------------|
| fprop | blockwise_matmul(*quantize_rows(x), *weight)                | x 1x128 along K, weight 128x128            |
| dgrad | blockwise_matmul(*quantize_rows(dy), w_codes.T, w_scale.T)  | dy 1x128 along N, the same weight's bytes  |
| wgrad | wgrad(*quantize_tokens(dy), *quantize_tokens(x))            | both 1x128 along T                         |

Widths that are not a multiple of 128 are padded with zeros. A block of zeros adds exactly nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize.reference import pad_to_blocks, read_codes

FRACTION_BITS = 13  # bits that Hopper's FP8 accumulator keeps below the leading bit: 14 bits in all
PRODUCTS_A_STEP = 32  # products that one tensor-core step adds at once


def blockwise_matmul(
    x_codes: Array, x_scale: Array, w_codes: Array, w_scale: Array, *, short_accumulator: bool = False
) -> Array:
    """x [T, K] in 1x128 blocks times w [N, K] in 128x128 blocks, transposed -> [T, N] float32.

    x_scale [T, ceil(K/128)], w_scale [ceil(N/128), ceil(K/128)] float32; codes of any FP8 type. With
    `short_accumulator` each partial is summed as Hopper's tensor cores do (`short_dot`), which takes T * N *
    32 floats at once: for tests.
    """
    spread = jnp.repeat(w_scale, BLOCK, 0)[: w_codes.shape[0]]
    return _promoted(x_codes, x_scale, w_codes, spread, short_accumulator)


def wgrad(dy_codes: Array, dy_scale: Array, x_codes: Array, x_scale: Array, *,
          short_accumulator: bool = False) -> Array:
    """dy^T x over the tokens: dy_codes [N, T] and x_codes [K, T], both in 1x128 blocks along T -> [N, K]
    float32.

    dy_scale [N, ceil(T/128)], x_scale [K, ceil(T/128)] float32, as `quantize_tokens` gives them.
    """
    return _promoted(dy_codes, dy_scale, x_codes, x_scale, short_accumulator)


def _promoted(a: Array, a_scale: Array, b: Array, b_scale: Array, short_accumulator: bool) -> Array:
    """a [M, C] and b [N, C] with a scale each 1x128 along C -> a b^T [M, N], group by group in order."""
    dot = short_dot if short_accumulator else _dot

    def add_group(total: Array, group: tuple[Array, ...]) -> tuple[Array, None]:
        a, a_scale, b, b_scale = group
        return total + dot(a, b) * (a_scale[:, None] * b_scale[None, :]), None

    groups = _groups(a, BLOCK), a_scale.T, _groups(b, BLOCK), b_scale.T
    return jax.lax.scan(add_group, jnp.zeros((a.shape[0], b.shape[0]), jnp.float32), groups)[0]


def _groups(codes: Array, size: int) -> Array:
    """[M, C] -> [ceil(C / size), M, size], for a size that divides 128."""
    padded = pad_to_blocks(codes, -1)
    return jnp.moveaxis(padded.reshape(codes.shape[0], -1, size), 1, 0)


def _dot(a: Array, b: Array) -> Array:
    """[M, C], [N, C] -> [M, N] in float32. The barriers keep XLA from substituting the GPU's FP8 product."""
    a, b = (jax.lax.optimization_barrier(read_codes(c)) for c in (a, b))
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)


def short_dot(a: Array, b: Array) -> Array:
    """Codes [M, C] and [N, C] -> their product [M, N] as Hopper's FP8 tensor cores accumulate it, for any C.

    The model is that of DeepSeek-V3 (2024), sections 3.3.2 and 3.5.2: a step adds 32 products to the running
    sum; all 33 are aligned to the largest of them and cut to its 14 leading bits, and the new sum is cut to
    14 bits of its own. Cutting is towards zero, so errors grow with C. Relative l2 error on normal data:
    1.2e-4 at C = 128, 1.4e-3 at C = 4096, but 1.3e-4 at any C when promoted every 128; on positive data,
    where cuts cannot cancel, 7e-4 and 7e-2. The order inside a step and how products are aligned are not
    documented: bit equality with the hardware is not claimed.
    """
    start = jnp.zeros((a.shape[0], b.shape[0]), jnp.float32)
    steps = _groups(a, PRODUCTS_A_STEP), _groups(b, PRODUCTS_A_STEP)
    return jax.lax.scan(lambda total, step: (_short_step(total, *step), None), start, steps)[0]


def _short_step(total: Array, a: Array, b: Array) -> Array:
    products = read_codes(a)[:, None, :] * read_codes(b)[None, :, :]  # exact: 4-bit times 4-bit significands
    terms = jnp.concatenate([products, total[..., None]], -1)
    # exact: 33 whole numbers under 2^14
    total = _cut(terms, jnp.max(jnp.abs(terms), -1, keepdims=True)).sum(-1)
    return _cut(total, jnp.abs(total))


def _cut(x: Array, largest: Array) -> Array:
    """x without the bits below the FRACTION_BITS-th after the leading bit of `largest` >= |x|, truncated
    towards zero."""
    _, exponent = jnp.frexp(largest)  # largest < 2^exponent
    shift = FRACTION_BITS + 1 - exponent
    return jnp.ldexp(jnp.trunc(jnp.ldexp(x, shift)), -shift)
