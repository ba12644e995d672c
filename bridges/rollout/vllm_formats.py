"""What a vLLM engine computes in, read off the model and the compilation that it chose."""

from __future__ import annotations

from typing import Any

from bridges.api import BridgeError


def block_kernels(model: Any) -> set[str]:
    """Class names of the FP8 linear kernels in use, and of those of experts what vLLM calls their backend: "TRITON experts"."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    linears = {type(m.fp8_linear).__name__ for m in methods if hasattr(m, "fp8_linear")}
    return linears | {f"{m.fp8_backend.name} experts" for m in methods if hasattr(m, "fp8_backend")}


def fusion(compilation: Any) -> tuple[bool, bool]:
    """Whether Inductor fuses what it compiles, and whether vLLM's passes put the FP8 quantiser inside RMSNorm and SiLU."""
    from vllm.config import CompilationMode

    passes = compilation.pass_config
    if compilation.mode != CompilationMode.VLLM_COMPILE:
        return compilation.mode != CompilationMode.NONE and compilation.backend in ("", "inductor"), False
    if passes.fuse_norm_quant != passes.fuse_act_quant:
        raise BridgeError(
            f"vLLM fuses quantisation with norms ({passes.fuse_norm_quant}) or activations ({passes.fuse_act_quant}) alone",
            "switch both passes on or both off: the learner mirrors one or the other",
        )
    return True, bool(passes.fuse_norm_quant)


def attends_in_fp8(model: Any) -> bool:
    """Whether attention runs on E4M3 queries, as FlashAttention 3 over an FP8 cache does, with scale 1 unless calibrated."""
    return any(getattr(module, "query_quant", None) is not None for module in model.modules())
