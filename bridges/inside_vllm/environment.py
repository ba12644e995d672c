"""Environment variables that vLLM reads when it is imported, and checks of the hardware that it needs."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from pathlib import Path

from bridges.api import BridgeError
from bridges.inside_vllm import device_pool, packed

FP8 = "fp8_e4m3_128x128"
# Unless the environment already sets them: of every engine
OF_ENGINES = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it cannot return log-probabilities of the filtered distribution
    "VLLM_USE_DEEP_GEMM_E8M0": "0",  # use the published float32 scales, not powers of two
    "VLLM_MOE_USE_DEEP_GEMM": "0",
    # no warm-up over all possible shapes: a kernel is compiled, and cached, at its first use
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_CPU_INT4_W4A8": "0",  # on a CPU with AMX, activations beside INT4 weights would be INT8
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would pin JAX's threads as well
}
# and of one in this process, before vLLM is imported
ENVIRONMENT = OF_ENGINES | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine must see this process's JAX buffers
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # a learner's own lines are on standard output
}


# what an engine in this process imports before its model is built, in that order
MODULES = ("vllm.platforms", "vllm.model_executor.model_loader", "vllm.entrypoints.llm",
           "vllm.v1.engine.core",
           "vllm.v1.worker.gpu_worker")


def import_all(fp8_kernel: str = "native") -> None:
    """Import vLLM for an engine in this process. An error is left to whoever builds the engine."""
    with contextlib.suppress(Exception):
        prepare(fp8_kernel)
        for name in MODULES:
            importlib.import_module(name)


def prepare(fp8_kernel: str = "native") -> None:
    """Set the environment for vLLM. Raises BridgeError if the environment contradicts the options, or if nvcc
    is missing for DeepGEMM."""
    device_pool.share()
    require_compiler(fp8_kernel)
    wanted = str(int(fp8_kernel == "deep_gemm"))
    if (found := os.environ.setdefault("VLLM_USE_DEEP_GEMM", wanted)) != wanted:
        raise BridgeError(
            f"fp8_kernel={fp8_kernel!r} contradicts VLLM_USE_DEEP_GEMM={found}, "
            "which vLLM reads once a process",
            "unset it, or use one process for each kernel")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Where torch compiles a program it gives Triton another folder from then on, so that a later start, which
    # compiles none, would not find vLLM's Triton kernels: some 20 s.
    home = os.environ.get("TRITON_HOME") or "~"
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(home, ".triton", "cache").expanduser()))
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise BridgeError(
            "VLLM_ENABLE_V1_MULTIPROCESSING is on: the engine would run in another process, "
            "out of reach of DLPack",
            "unset it or set it to 0",
        )


def use_gpu() -> None:
    """Make the engine's GPU, the first one, this thread's current one: programs of JAX on several GPUs leave
    another. Before torch has used a GPU it does nothing."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.set_device(0)


def on_cpu() -> bool:
    """Whether vLLM computes on a CPU. It is imported."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def cpu_lacks(weights: str, kv_cache: str) -> str | None:
    """The hardware that vLLM's own FP8 kernels need and this CPU lacks, by vLLM's own checks; None if nothing
    is missing, or on a GPU."""
    if not on_cpu():
        return None
    import torch

    amx, avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()
    if weights == FP8 and not amx:
        return "vLLM's blockwise FP8 linears need a CPU with AMX tiles (Sapphire Rapids or newer)"
    if kv_cache == "fp8_e4m3" and not (amx or avx512):
        return "vLLM's FP8 KV cache needs a CPU with AVX-512 or AMX"
    return None


def check_hardware(weights: str, kv_cache: str, fp8_kernel: str, attention: str,
                   routed_experts: bool) -> None:
    """Raise BridgeError for formats and kernels that this machine does not support."""
    if fp8_kernel == "emulated" and not (weights == FP8 and on_cpu()):
        raise BridgeError('fp8_kernel="emulated" is for FP8 weights on a CPU', 'use fp8_kernel="native"')
    if weights in packed.FORMS and weights != packed.ON_CPU and on_cpu():
        raise BridgeError(f"vLLM's build for CPUs has no kernel of {weights.upper()}",
                          'take a GPU, a folder in INT4, or rollout.engine = "jax"')
    if attention == "triton" and on_cpu():
        raise BridgeError('attention="triton" needs a GPU', 'use attention="auto"')
    if routed_experts and on_cpu():
        raise BridgeError("vLLM's CPU build does not return routed experts",
                          'set moe.replay = "R2", or use a GPU')
    if fp8_kernel == "deep_gemm" and weights != FP8:
        raise BridgeError(f'fp8_kernel="deep_gemm" is for FP8 weights, but these are {weights}',
                          'use fp8_kernel="native"')
    if lack := cpu_lacks(weights if fp8_kernel == "native" else "", kv_cache):
        raise BridgeError(lack, 'use --rollout.fp8_kernel emulated (fp8_kernel="emulated") for FP8 weights, '
                                "--rollout.kv_cache auto for the cache, or a GPU")


def require_compiler(fp8_kernel: str) -> None:
    """Raise BridgeError if nvcc is missing for DeepGEMM."""
    if fp8_kernel == "deep_gemm" and not cuda_compiler():
        raise BridgeError('fp8_kernel="deep_gemm" compiles with nvcc, which was not found',
                          'set CUDA_HOME, or use fp8_kernel="native"')


def cuda_compiler() -> str | None:
    """The path of nvcc, searched in the places where DeepGEMM searches; None if it is missing."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc") or shutil.which(
        "/usr/local/cuda/bin/nvcc")
