"""Blockwise FP8 linears for vLLM on a CPU without AMX, where vLLM itself has no kernel for them.

The arithmetic is that of the Hopper kernels, W8A8: vLLM's own quantiser quantises activations in 1x128
blocks, and the dequantised operands are multiplied in float32. It is slow and meant for tests and small
demonstrations, so that an FP8 recipe runs end to end in the real engine on any machine. It is used only if it
is requested: `VllmEngine(fp8_kernel="emulated")`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NAME = "EmulatedFp8BlockScaledMMKernel"


@functools.cache
def kernel_class() -> type:
    """The kernel class for vLLM's registry. It is defined inside a function because its base class is
    vLLM's."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
        Fp8BlockScaledMMLinearKernel,
    )
    from vllm.platforms import current_platform

    class EmulatedFp8BlockScaledMMKernel(Fp8BlockScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return (True, None) if current_platform.is_cpu() else (False, "is only for CPUs")

        def apply_block_scaled_mm(self, A, B, As, Bs):
            """A [T, K] and B [N, K] e4m3, As [T, K/128] and Bs [N/128, K/128] float32 -> [T, N] in the output
            dtype."""
            rows, columns = self.weight_group_shape
            a = A.float() * _spread(As, 1, columns, A.shape)
            b = B.float() * _spread(Bs, rows, columns, B.shape)
            return torch.matmul(a, b.T).to(self.config.out_dtype)

    return EmulatedFp8BlockScaledMMKernel


def _spread(scale: torch.Tensor, rows: int, columns: int, shape: torch.Size) -> torch.Tensor:
    """One scale a block -> one scale an element; the last block may be cut off."""
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def prefer() -> list[type]:
    """From here on vLLM's CPU build picks the emulated kernel first for block-scaled FP8 linears -> its
    table.

    vLLM's public `register_linear_kernel` has no kind for block-scaled FP8, hence its table.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    table = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if kernel_class() not in table:
        table.insert(0, kernel_class())
    return table


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """It does so while this is open."""
    table = prefer()
    try:
        yield
    finally:
        table.remove(kernel_class())
