"""A tiny Qwen3 for vLLM in this process, and weights for it."""

from __future__ import annotations

import jax.numpy as jnp

from bridges.engines.vllm_engine import FP8, VllmEngine
from bridges.sources.array_source import ArraySource, random_source

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 500, "hidden_size": 256,
    "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "hidden_act": "silu", "attention_bias": False, "eos_token_id": 7,
}
EMULATED = {"weights": FP8, "fp8_kernel": "emulated"}
SHORT = {"max_model_len": 256, "max_num_seqs": 32, "enforce_eager": True}


def source(engine: VllmEngine, seed: int) -> ArraySource:
    return random_source(engine.expected_manifest(), seed, convert=jnp.asarray)
