"""Pallas kernels for Hopper GPUs, each with a plain-jnp reference. A library for any JAX program: it needs
only jax and numpy.

    import jax, jax.numpy as jnp
    from pallas_kernels import fp8_linear

    x, w = jnp.ones((256, 512), jnp.bfloat16), jnp.ones((1024, 512), jnp.bfloat16)  # [T, K] and [N, K]
    y = fp8_linear(x, w)                                                            # x w^T, an FP8 product
    dw = jax.grad(lambda w: fp8_linear(x, w).astype(jnp.float32).mean())(w)         # two more FP8 products

Functions with a kernel take `backend`: "auto" is the kernel on a Hopper GPU and the reference elsewhere,
"pallas" the kernel or an error, "reference" plain jnp. Wrong shapes and dtypes raise a ValueError when the
program is traced; it names the operands and the rule.

    fp8_dot_general, fp8_linear       jax.lax.dot_general and a linear layer in FP8, forward and backward
    quantize_rows, quantize_blocks    numbers to codes with scales; quantize_tokens, for wgrad
    dequantize_rows, dequantize_blocks                             codes with scales to numbers
    blockwise_matmul, wgrad           products of codes; no derivative
    grouped_matmul                    the same for the rows of experts: plan_groups computes their layout,
                                      pad_rows and unpad_rows convert to it and back
    packed_attention                  causal attention over packed sequences, with its derivative
    paged_decode_attention            attention of one query per sequence over a paged cache
    linear_logprobs                   log-probability and entropy of a softmax over a vocabulary, without
                                      materialising the logits

A name is imported on first use. `pallas_kernels.testing`, which also needs chex and hypothesis, has inputs,
strategies and assertions for tests of such functions.
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
_HOMES = {  # name -> its module, with ":NAME" if it is named differently there
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
    """The package, in which two function names win over the folders of the same name.

    Python would bind such a name to the folder as soon as the folder is imported. Here the name always means
    the function. For these two folders `from pallas_kernels.grouped_matmul import api` therefore works, and
    `import pallas_kernels.grouped_matmul.api as api` does not.
    """

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
