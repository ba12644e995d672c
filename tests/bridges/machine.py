"""What tests of vLLM's CPU build find different from machine to machine."""

from __future__ import annotations


def packs_bfloat16() -> bool:
    """Whether unquantised bfloat16 linears are packed once they are loaded, so that nothing can be written
    into them: where oneDNN has kernels for them, on a CPU with AVX-512."""
    import torch

    return not torch.cuda.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
