"""The options of `bridges.engines.vllm_engine.VllmEngine` as words and variables of `vllm serve`. vLLM is not
imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bridges.inside_vllm.build import config_folder, engine_arguments, quantized_config
from bridges.inside_vllm.environment import FP8, require_compiler
from bridges.served.serve_process import on_cpu

GUARD = "bridges.vllm_plugin.guard.Guard"
BACKEND = {"backend": "jaxfp8rl"}


def model_folder(hf_config: dict[str, Any], weights: str, high_precision_modules: Sequence[str] = ()) -> str:
    """A folder whose config.json makes vLLM hold `weights`. Raises BridgeError if it cannot be written."""
    return config_folder(hf_config if weights != FP8 else quantized_config(hf_config, high_precision_modules))


def serve_words(*, tensor_parallel_size: int = 1, **options: Any) -> list[str]:
    """The words after `vllm serve MODEL`, the same for all engines of a run. options: those of
    `bridges.inside_vllm.build.engine_arguments`."""
    given = {
        "tokens_only": True, "middleware": GUARD, "weight_transfer_config": json.dumps(BACKEND),
        "load_format": "dummy_stacked", "tensor_parallel_size": tensor_parallel_size,
        "disable_uvicorn_access_log": True, "enable_prompt_tokens_details": True,
        **engine_arguments(on_cpu(), **options),
    }
    return [word for name, value in given.items() if value is not False
            for word in (f"--{name.replace('_', '-')}", *(() if value is True else (_word(value),)))]


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def serve_variables(fp8_kernel: str) -> dict[str, str]:
    """The environment of the engines. Raises BridgeError if nvcc is missing for DeepGEMM."""
    require_compiler(fp8_kernel)
    kernel = "emulated" if fp8_kernel == "emulated" else "native"
    return {"VLLM_USE_DEEP_GEMM": str(int(fp8_kernel == "deep_gemm")), "JAXFP8RL_FP8_KERNEL": kernel}
