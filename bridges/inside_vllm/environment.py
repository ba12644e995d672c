"""What vLLM is told by its environment before it is imported, and what of a machine it needs."""

from __future__ import annotations

import os
import shutil

from bridges.api import BridgeError
from bridges.inside_vllm import device_pool

FP8 = "fp8_e4m3_128x128"
# Set before vLLM is imported, where the environment does not say otherwise.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine must see this process's JAX buffers
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it cannot return the log-probabilities of the filtered distribution
    "VLLM_USE_DEEP_GEMM_E8M0": "0",  # it multiplies by the published float32 scales, not by powers of two
    "VLLM_MOE_USE_DEEP_GEMM": "0",
    # of all shapes that there may be: a kernel is compiled, and kept, when first needed
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would pin JAX's threads as well
}


def prepare(fp8_kernel: str = "native") -> None:
    """Raises BridgeError where the environment, or what is installed, stands against what is asked for."""
    device_pool.share()
    if fp8_kernel == "deep_gemm" and not cuda_compiler():
        raise BridgeError('fp8_kernel="deep_gemm" compiles with nvcc: none is found',
                          'set CUDA_HOME, or use fp8_kernel="native"')
    wanted = str(int(fp8_kernel == "deep_gemm"))
    if (found := os.environ.setdefault("VLLM_USE_DEEP_GEMM", wanted)) != wanted:
        raise BridgeError(
            f"fp8_kernel={fp8_kernel!r} beside VLLM_USE_DEEP_GEMM={found}, which vLLM reads once a process",
            "unset it, or use a process for each")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise BridgeError(
            "VLLM_ENABLE_V1_MULTIPROCESSING is on: the engine would run in another process, out of reach of DLPack",
            "unset it or set it to 0",
        )


def cpu_lacks(weights: str, kv_cache: str) -> str | None:
    """What this CPU lacks for vLLM's own FP8 kernels, by vLLM's own checks; None on a GPU or when nothing is
    missing."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    amx, avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()
    if weights == FP8 and not amx:
        return "vLLM's blockwise FP8 linears need a CPU with AMX tiles (Sapphire Rapids or newer)"
    if kv_cache == "fp8_e4m3" and not (amx or avx512):
        return "vLLM's FP8 KV cache needs a CPU with AVX-512 or AMX"
    return None


def check_hardware(weights: str, kv_cache: str, fp8_kernel: str, attention: str) -> None:
    """Raises BridgeError for formats that this machine cannot compute in."""
    from vllm.platforms import current_platform

    if fp8_kernel == "emulated" and not (weights == FP8 and current_platform.is_cpu()):
        raise BridgeError('fp8_kernel="emulated" is for FP8 weights on a CPU', 'use fp8_kernel="native"')
    if attention == "triton" and current_platform.is_cpu():
        raise BridgeError('attention="triton" needs a GPU', 'use attention="auto"')
    if fp8_kernel == "deep_gemm" and weights != FP8:
        raise BridgeError(f'fp8_kernel="deep_gemm" is for FP8 weights, these are {weights}',
                          'use fp8_kernel="native"')
    if lack := cpu_lacks(weights if fp8_kernel == "native" else "", kv_cache):
        raise BridgeError(lack, '--rollout.fp8_kernel emulated (fp8_kernel="emulated") for FP8 weights, '
                                "--rollout.kv_cache auto for the cache, or a GPU")


def cache_bytes(wanted: int | None) -> int | None:
    """Of the KV cache; None has vLLM measure what a GPU has left. Of a CPU's memory it would take half, hence
    1 GiB, unless the environment says otherwise."""
    from vllm.platforms import current_platform

    if wanted is None and current_platform.is_cpu() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        return 2**30
    return wanted


def page(kv_cache: str) -> int | None:
    """Tokens of a page of the cache, where vLLM's own choice is not the best: FlashAttention 3 reads pages of
    64 in FP8 at 2.94 TB/s, of vLLM's 16 at 2.74, of 256 no faster; in BF16 it reads those of 16 as fast as
    memory gives them (benchmarks/results/decode_pages.json). The prompt that completions share is shared in
    whole pages."""
    from vllm.platforms import current_platform

    return 64 if kv_cache == "fp8_e4m3" and current_platform.is_cuda() else None


def cuda_compiler() -> str | None:
    """nvcc, where DeepGEMM looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc") or shutil.which(
        "/usr/local/cuda/bin/nvcc")
