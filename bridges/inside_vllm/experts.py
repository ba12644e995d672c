"""Mixtures of experts inside vLLM: repack experts after a reload, and check that routes are reported."""

from __future__ import annotations

from typing import Any

from bridges.api import BridgeError


def repack(model: Any) -> None:
    """Pack the experts of vLLM's CPU build again, after vLLM's own reload.

    vLLM 0.32 packs unquantised experts for its CPU kernels only when they are first loaded. A reload silently
    copies checkpoint layout into the packed tensors.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        kernel: Any = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        if hasattr(module, "w13_weight") and hasattr(experts, "isa"):
            experts.process_weights_after_loading(module)


def check_routes() -> None:
    """Raise BridgeError if vLLM does not report the experts to which a token was routed."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        raise BridgeError("vLLM's CPU build does not return routed experts",
                          'set moe.replay = "R2", or use a GPU')
