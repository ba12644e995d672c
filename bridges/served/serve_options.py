"""The options of `bridges.engines.vllm_engine.VllmEngine` as words and variables of `vllm serve`. vLLM is not
imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bridges.api import BridgeError
from bridges.inside_vllm.build import NO_SHARE, config_folder, quantized_config
from bridges.inside_vllm.environment import FP8, cuda_compiler
from bridges.served.serve_process import on_cpu

GUARD = "bridges.vllm_plugin.guard.Guard"
BACKEND = {"backend": "jaxfp8rl"}
CPU_CACHE_BYTES = 2**30  # vLLM would take half of the memory


def model_folder(hf_config: dict[str, Any], weights: str, high_precision_modules: Sequence[str] = ()) -> str:
    """A folder whose config.json makes vLLM hold `weights`. Raises BridgeError if it cannot be written."""
    return config_folder(hf_config if weights != FP8 else quantized_config(hf_config, high_precision_modules))


def serve_words(
    *, vocab_size: int, dtype: str, kv_cache: str, max_model_len: int, max_num_seqs: int,
    gpu_memory_utilization: float, kv_cache_bytes: int | None, enforce_eager: bool, routed_experts: bool,
    attention: str, sleep: str = "off", tensor_parallel_size: int = 1,
) -> list[str]:
    """The words after `vllm serve MODEL`, the same for all engines of a run."""
    cpu = on_cpu()
    given: dict[str, Any] = {
        "tokens-only": True, "middleware": GUARD, "weight-transfer-config": json.dumps(BACKEND),
        "load-format": "dummy_stacked", "generation-config": "vllm", "dtype": dtype,
        "kv-cache-dtype": kv_cache, "max-model-len": max_model_len, "max-num-seqs": max_num_seqs,
        "gpu-memory-utilization": gpu_memory_utilization, "enforce-eager": enforce_eager,
        "logprobs-mode": "processed_logprobs", "max-logprobs": vocab_size, "enable-prefix-caching": True,
        "enable-return-routed-experts": routed_experts, "tensor-parallel-size": tensor_parallel_size,
        "disable-uvicorn-access-log": True, "enable-sleep-mode": sleep != "off",
    }
    if attention == "triton":
        given["attention-backend"] = "TRITON_ATTN"
    if kv_cache != "auto" and not cpu:
        given["block-size"] = 64  # as bridges.inside_vllm.environment.page
    if (size := kv_cache_bytes or (CPU_CACHE_BYTES if cpu else None)) is not None:
        given |= {"kv-cache-memory-bytes": size, "gpu-memory-utilization": NO_SHARE}
    return [word for name, value in given.items() if value is not False
            for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]


def serve_variables(fp8_kernel: str) -> dict[str, str]:
    """The environment of the engines. Raises BridgeError if nvcc is missing for DeepGEMM."""
    if fp8_kernel == "deep_gemm" and not cuda_compiler():
        raise BridgeError('fp8_kernel="deep_gemm" compiles with nvcc, which was not found',
                          'set CUDA_HOME, or use fp8_kernel="native"')
    kernel = "emulated" if fp8_kernel == "emulated" else "native"
    return {"VLLM_USE_DEEP_GEMM": str(int(fp8_kernel == "deep_gemm")), "JAXFP8RL_FP8_KERNEL": kernel}
