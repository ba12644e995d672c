"""Mixtures of experts inside vLLM, whose reload does not pack them again."""

from __future__ import annotations

from typing import Any

from bridges.inside_vllm.environment import on_cpu


def repack(model: Any) -> None:
    """Pack the experts of vLLM's CPU build again, after vLLM's own reload.

    vLLM 0.32 packs unquantised experts for its CPU kernels only when they are first loaded. A reload silently
    copies checkpoint layout into the packed tensors.
    """
    if not on_cpu():
        return
    for module in model.modules():
        kernel: Any = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        if hasattr(module, "w13_weight") and hasattr(experts, "isa"):
            experts.process_weights_after_loading(module)
