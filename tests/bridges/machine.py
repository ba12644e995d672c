"""Properties of vLLM's CPU build that differ between machines."""

from __future__ import annotations


def packs_bfloat16() -> bool:
    """Whether unquantised bfloat16 linears are packed after loading, so that they cannot be overwritten.
    oneDNN does this on CPUs with AVX-512."""
    import torch

    return not torch.cuda.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
