"""The config of a run of 8B on an H200, for the tests of memory."""

from __future__ import annotations

from benchmarks.common import config as shape
from jaxfp8rl.config.schema import Config
from jaxfp8rl.models.config import ModelConfig

H200 = 150_754_820_096  # bytes, by the driver
QWEN3_8B = shape("8b")
MODEL = ModelConfig.from_hf(QWEN3_8B)
FULL = {"master": "float32", "first_moment": "float32", "second_moment": "float32"}


def config(**sections) -> Config:
    base = {
        "run": {"dir": "runs/x", "steps": 1},
        "model": {"config": QWEN3_8B, "tokenizer": "chars:01"},
        "task": {"kind": "arithmetic", "max_prompt_tokens": 32},
        "rollout": {
            "engine": "vllm", "prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 4096,
            "kv_cache": "fp8",
            "kv_cache_gib": 19.0, "sleep": "drop_weights",
        },
        "precision": {"recipe": "fp8_unified"},
        "optim": {"master": "bfloat16", "first_moment": "float8", "second_moment": "bfloat16"},
        "train": {"row_tokens": 16512, "rows_per_microbatch": 1, "remat": "layer"},
    }
    return Config.model_validate({name: {**base.get(name, {}), **sections.get(name, {})} for name in base
                                  | sections})
