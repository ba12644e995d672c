"""Engine and learner as one policy: vLLM compiled, W8A8, CUDA graphs, and the learner that mirrors it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import jax
import numpy as np

from benchmarks.mirror import sample
from jaxfp8rl import loop
from jaxfp8rl.build import build
from jaxfp8rl.toml_config import load_config

OPTIONS = [
    "--rollout.engine", "vllm", "--rollout.gpu_memory_utilization", "0.1", "--rollout.kv_cache_gib", "4",
    "--rollout.kv_cache", "auto", "--precision.compute_dtype", "bfloat16", "--model.config.num_hidden_layers", "4",
]  # fmt: skip


def test_every_token_has_the_same_probability_in_both():
    """Random weights, drawn wide so that the distributions are far from uniform. Not one token may be off by a rounding."""
    parts = build(load_config("demo", OPTIONS))
    try:
        params = jax.tree.map(lambda w: 4 * w if w.ndim > 1 and w.shape[-1] > 64 else w, parts.initial_params())
        policy = parts.policy(params)
        loop.publish(parts, policy, 0)
        batch = sample(parts, 1024)
        gaps = np.abs(np.asarray(parts.score(policy, batch)) - np.asarray(batch.rollout_logp))[np.asarray(batch.response_mask)]
    finally:
        parts.close()
    assert np.asarray(batch.rollout_logp)[np.asarray(batch.response_mask)].std() > 0.5
    print(f"{gaps.size} tokens: mean {gaps.mean():.2e}, largest {gaps.max():.2e} nats")
    assert gaps.max() < 1e-5, f"{(gaps > 1e-5).mean():.1%} of {gaps.size} tokens differ, by up to {gaps.max():.2e} nats"
