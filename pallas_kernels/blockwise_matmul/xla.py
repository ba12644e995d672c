"""The blockwise product on a GPU's FP8 tensor cores through XLA: one FP8 product for each 128 of the
contraction.

Each block of 128 is summed inside the tensor core, whose accumulator keeps about 14 bits, and is then added
to a float32 sum. CUTLASS's and DeepGEMM's kernels do the same in the same order, so the result equals the
engine's bit for bit (on Hopper, checked by tests/gpu/test_vllm_quantizers.py). This requires that XLA uses
cuBLASLt's FP8 product and not its own, which sums differently: compile with `xla_gpu_enable_triton_gemm` off,
as `jaxfp8rl.precision.jit.rounding_exact_jit` does. It costs a pass over the output for every block, which
our kernel avoids.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.forward_only import forward_only
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize.reference import pad_to_blocks
from pallas_kernels.rounding import fused_multiply_add

ROWS = 16  # cuBLASLt takes FP8 operands in multiples of it; XLA multiplies others in a wider format
no_derivative = forward_only(
    "differentiate pallas_kernels.fp8_dot_general, or in the learner jaxfp8rl.precision.linear.linear")


@no_derivative
def blockwise_matmul(x_codes: Array, x_scale: Array, w_codes: Array, w_scale: Array) -> Array:
    """x [..., K] in 1x128 blocks times w [N, K] in 128x128 blocks, transposed -> [..., N] float32.

    x_scale [..., ceil(K/128)], w_scale [ceil(N/128), ceil(K/128)] float32; codes of any FP8 type.
    """
    lead, n = x_codes.shape[:-1], w_codes.shape[0]
    x, w = (_pad_rows(pad_to_blocks(c, -1)) for c in (x_codes.reshape(-1, x_codes.shape[-1]), w_codes))
    x_scale = _pad_rows(x_scale.reshape(-1, x_scale.shape[-1]))
    w_scale = jnp.repeat(w_scale, BLOCK, 0)[: w.shape[0]]
    total = jnp.zeros((x.shape[0], w.shape[0]), jnp.float32)
    for g in range(x.shape[1] // BLOCK):
        block = slice(g * BLOCK, (g + 1) * BLOCK)
        partial = jax.lax.dot_general(x[:, block], w[:, block], (((1,), (1,)), ((), ())),
                                      preferred_element_type=jnp.float32)
        total = fused_multiply_add(partial, x_scale[:, g, None] * w_scale[None, :, g], total)
    return total[: x_codes.size // x_codes.shape[-1], :n].reshape(*lead, n)


def _pad_rows(a: Array) -> Array:
    return jnp.pad(a, ((0, -a.shape[0] % ROWS), (0, 0)))
