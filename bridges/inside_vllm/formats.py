"""The number formats of a vLLM engine, read off its model and its compilation settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from bridges.api import BridgeError, EngineFormats
from bridges.inside_vllm import fp8_emulation, packed
from bridges.inside_vllm.environment import FP8, on_cpu

# The activation format of each of vLLM's block-scaled kernels; None: activations stay in the compute type
# (W8A16).
ACTIVATIONS = {
    # equal bit for bit to CUTLASS, since it uses the same float32 scales
    "DeepGemmFp8BlockScaledMMKernel": "fp8_e4m3_1x128",
    "CutlassFp8BlockScaledMMKernel": "fp8_e4m3_1x128",
    "TritonFp8BlockScaledMMKernel": "fp8_e4m3_1x128",
    "CPUFp8W8A8BlockScaledMMKernel": "fp8_e4m3_1x128",
    "TRITON experts": "fp8_e4m3_1x128",
    "VLLM_CUTLASS experts": "fp8_e4m3_1x128",
    fp8_emulation.NAME: "fp8_e4m3_1x128",
    "CPUFp8BlockScaledMMKernel": None,
}

# amax floors: of vLLM's CUDA kernels; of its torch implementation and of quantisers fused into other kernels
FLOORS = 1e-10, 2.0**-9
NORMS = "RMSNorm", "GemmaRMSNorm"  # vLLM's classes of norms that add the residual
UNFUSED = {"GemmaRMSNorm", "GeluAndMul"}  # those of its layers that no pass fuses with the quantiser
# The type of the probabilities that multiply the values, by the instruction set of vLLM's CPU attention;
# None: the type of the queries.
PROBABILITIES = {"amx": None} | dict.fromkeys(("vec", "vec16", "neon", "rvv", "vsx", "vxe"), "float32")


def engine_formats(on_model: Callable[[Callable[[Any], Any]], Any], compilation: Any, weights: str,
                   dtype: str,
                   kv_cache: str) -> EngineFormats:
    """The formats of an engine whose model `on_model(function)` shows to `function`.

    compilation: vLLM's CompilationConfig. weights and kv_cache: formats as EngineFormats names them. dtype:
    the float type of everything else. Raises BridgeError for a kernel whose formats are not known here.
    """
    fused, fused_quantizer = fusion(compilation, weights)
    return EngineFormats(
        weights, on_model(lambda model: activations_of(model, weights, dtype)), kv_cache, dtype,
        attention="fp8_e4m3" if on_model(attends_in_fp8) else None,
        logits=dtype,
        fused=fused,
        fused_quantizer=fused_quantizer and on_model(fusable),
        kv_truncated=kv_cache == "fp8_e4m3" and on_cpu(),
        unrounded_sums=not fused and on_model(norms_see_unrounded_sums),
        probabilities=on_model(probabilities),
        amax_floor=on_model(amax_floor),
    )


def activations_of(model: Any, weights: str, dtype: str) -> str:
    """The format in which activations enter the products with `weights`."""
    if weights in packed.FORMS:
        return packed.activations(model, dtype)
    return activations(model, dtype) if weights == FP8 else dtype


def on_hopper(weights: str, dtype: str, kv_cache: str, compiled: bool, fusable: bool) -> EngineFormats:
    """The formats that `engine_formats` reports of a vLLM on a Hopper GPU with its default kernels, known
    before it starts. compiled: by torch.compile. fusable: whether its passes fuse the FP8 quantiser into the
    model's norms and activations."""
    fp8 = weights == FP8
    return EngineFormats(
        weights, "fp8_e4m3_1x128" if fp8 else dtype, kv_cache, dtype,
        attention="fp8_e4m3" if kv_cache == "fp8_e4m3" else None, logits=dtype, fused=compiled,
        fused_quantizer=fp8 and fusable and compiled,
    )


def activations(model: Any, dtype: str) -> str:
    """The format in which activations enter the FP8 products, read off the kernels that vLLM chose."""
    names = block_kernels(model)
    if not names:
        raise BridgeError("no linear of this model is quantised",
                          "use weights='bfloat16', or exclude fewer modules")
    if os.environ.get("VLLM_USE_DEEP_GEMM") == "1" and "DeepGemmFp8BlockScaledMMKernel" not in names:
        raise BridgeError(f"DeepGEMM was requested, but vLLM uses {','.join(sorted(names))}",
                          'use fp8_kernel="native"')
    if unknown := ",".join(sorted(names - ACTIVATIONS.keys())):
        raise BridgeError(
            f"vLLM chose the FP8 kernel {unknown}, whose activation format is not known here",
            f"set VLLM_DISABLED_KERNELS={unknown} so that it uses another "
            f"(known: {', '.join(ACTIVATIONS)})",
        )
    found = {ACTIVATIONS[name] or dtype for name in names}
    if len(found) > 1:
        raise BridgeError(f"vLLM mixes FP8 kernels of different formats: {sorted(names)}",
                          "disable one of them")
    return found.pop()


def block_kernels(model: Any) -> set[str]:
    """The class names of the FP8 linear kernels in use, and vLLM's names for the backends of experts, such as
    "TRITON experts"."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    linears = {type(m.fp8_linear).__name__ for m in methods if hasattr(m, "fp8_linear")}
    return linears | {f"{m.fp8_backend.name} experts" for m in methods if hasattr(m, "fp8_backend")}


def fusion(compilation: Any, weights: str) -> tuple[bool, bool]:
    """(whether Inductor fuses the model's operations, whether vLLM's passes fuse the FP8 quantiser into
    RMSNorm and SiLU). Weights of another format have none: of NVFP4 vLLM 0.25 turns one pass on alone."""
    from vllm.config import CompilationMode

    passes = compilation.pass_config
    if compilation.mode != CompilationMode.VLLM_COMPILE:
        return compilation.mode != CompilationMode.NONE and compilation.backend in ("", "inductor"), False
    if weights != FP8:
        return True, False
    if passes.fuse_norm_quant != passes.fuse_act_quant:
        raise BridgeError(
            f"vLLM fuses quantisation only with norms ({passes.fuse_norm_quant}) or only with activations "
            f"({passes.fuse_act_quant})",
            "switch both passes on or both off: the learner can mirror both or neither",
        )
    return True, bool(passes.fuse_norm_quant)


def fusable(model: Any) -> bool:
    """Whether vLLM's passes, where they run, fuse the FP8 quantiser into this model's norms and activations.

    They leave Gemma's norms alone, whose weight is float32, and have no kernel for GELU. Raises BridgeError
    for a model with one of the two.
    """
    left = UNFUSED & {type(module).__name__ for module in model.modules()}
    if left and left != UNFUSED:
        raise BridgeError(
            f"vLLM cannot fuse quantisation with this model's {left.pop()}, but with its other layers",
            "switch off the passes fuse_norm_quant and fuse_act_quant: the learner mirrors both or neither")
    return not left


def attends_in_fp8(model: Any) -> bool:
    """Whether attention runs on E4M3 queries, as FlashAttention 3 over an FP8 cache does, with scale 1 unless
    calibrated."""
    return any(getattr(module, "query_quant", None) is not None for module in model.modules())


def norms_see_unrounded_sums(model: Any) -> bool:
    """Whether norms that are not compiled see the residual sum before it is rounded.

    This is tested on one norm: its output for two random inputs is compared with that for their rounded sum.
    """
    import torch

    norm = next((m for m in model.modules() if type(m).__name__ in NORMS), None)
    if norm is None:
        return False
    draw = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(64, len(norm.weight), generator=draw).to(norm.weight) for _ in range(2))
    rounded, _ = norm(x + residual, torch.zeros_like(x))
    return not torch.equal(norm(x, residual)[0], rounded)


def probabilities(model: Any) -> str | None:
    """The float type in which exp(score - max) enters the product with the values; None: the type of the
    queries."""
    isas = {module.isa for module in model.modules() if hasattr(module, "isa")}
    if unknown := ", ".join(sorted(isas - PROBABILITIES.keys())):
        raise BridgeError(
            f"vLLM's attention on this CPU uses {unknown}, whose rounding is not known here",
            f"use a GPU, or a CPU with one of {', '.join(PROBABILITIES)}",
        )
    return PROBABILITIES[isas.pop()] if isas else None


def amax_floor(model: Any) -> float:
    """The smallest amax with which activations are quantised, found by quantising a row of zeros."""
    import torch

    quantizers = (getattr(getattr(m, "quant_method", None), "fp8_linear", None) for m in model.modules())
    quantize = next((q.quant_fp8 for q in quantizers if q is not None), None)
    if quantize is None:
        return FLOORS[0]
    device = next(model.parameters()).device
    scale = quantize(torch.zeros(1, 128, device=device, dtype=torch.bfloat16))[1].item()
    return min(FLOORS, key=lambda floor: abs(floor / 448 - scale))
