"""Kernels for Hopper GPUs in Pallas, each beside a plain-jnp reference that is always right. Imports nothing
of ours: a library for any program in JAX, which needs jax and numpy alone.

    import jax, jax.numpy as jnp
    from pallas_kernels import fp8_linear

    x, w = jnp.ones((256, 512), jnp.bfloat16), jnp.ones((1024, 512), jnp.bfloat16)  # [T, K] and [N, K]
    y = fp8_linear(x, w)                                                            # x w^T, an FP8 product
    dw = jax.grad(lambda w: fp8_linear(x, w).astype(jnp.float32).mean())(w)         # two more of them

What has a kernel takes `backend`: "auto" is the kernel on a Hopper GPU and the reference elsewhere, "pallas"
the kernel or an error, "reference" plain jnp. Wrong shapes and dtypes are a ValueError when the program is
traced, with what was found and the rule.

    fp8_dot_general, fp8_linear       jax.lax.dot_general and a linear layer in FP8, forward and backward
    quantize_rows, quantize_blocks    numbers to codes with scales; quantize_tokens, for wgrad
    dequantize_rows, dequantize_blocks                                             and back
    blockwise_matmul, wgrad           products of codes; no derivative
    grouped_matmul                    the same for the rows of experts, which plan_groups lays out, pad_rows
                                      brings there and unpad_rows back
    packed_attention                  causal attention over packed sequences, with its derivative
    paged_decode_attention            one query a sequence over a paged cache
    linear_logprobs                   log-probability and entropy of a softmax over a vocabulary, whose logits
                                      never exist

A name is loaded when it is first asked for. `pallas_kernels.testing`, which needs chex and hypothesis too,
has what tests of such functions are written with.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_kernels.attention.api import attention as packed_attention
    from pallas_kernels.blockwise_matmul.api import blockwise_matmul, wgrad
    from pallas_kernels.decode_attention.api import decode_attention as paged_decode_attention
    from pallas_kernels.dot_general.api import fp8_dot_general, fp8_linear
    from pallas_kernels.grouped_matmul.api import grouped_matmul, pad_rows, plan_groups, unpad_rows
    from pallas_kernels.logprob.api import linear_logprob as linear_logprobs
    from pallas_kernels.quantize.api import quantize_blocks, quantize_rows, quantize_tokens
    from pallas_kernels.quantize.reference import dequantize_blocks, dequantize_rows

__all__ = [
    "blockwise_matmul", "dequantize_blocks", "dequantize_rows", "fp8_dot_general", "fp8_linear",
    "grouped_matmul", "linear_logprobs", "packed_attention", "pad_rows", "paged_decode_attention",
    "plan_groups", "quantize_blocks", "quantize_rows", "quantize_tokens", "unpad_rows", "wgrad",
]
_HOMES = {  # of each name its module, and its name there if that is another
    "blockwise_matmul": "blockwise_matmul.api",
    "dequantize_blocks": "quantize.reference",
    "dequantize_rows": "quantize.reference",
    "fp8_dot_general": "dot_general.api",
    "fp8_linear": "dot_general.api",
    "grouped_matmul": "grouped_matmul.api",
    "linear_logprobs": "logprob.api:linear_logprob",
    "packed_attention": "attention.api:attention",
    "pad_rows": "grouped_matmul.api",
    "paged_decode_attention": "decode_attention.api:decode_attention",
    "plan_groups": "grouped_matmul.api",
    "quantize_blocks": "quantize.api",
    "quantize_rows": "quantize.api",
    "quantize_tokens": "quantize.api",
    "unpad_rows": "grouped_matmul.api",
    "wgrad": "blockwise_matmul.api",
}


class _Package(ModuleType):
    """Two functions are named as the folders are that they live in. The name is the function's, whoever loads
    the folder first: Python would bind it to a folder when that is loaded. So of these two folders `from
    pallas_kernels.grouped_matmul import api` finds a module, and `import pallas_kernels.grouped_matmul.api as
    api` does not."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}")
    home, _, there = _HOMES[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{home}"), there or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
