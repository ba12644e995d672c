"""A mixture of experts in a compiled vLLM: written in place, and its routes replayed by the learner."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import jax
import numpy as np

from benchmarks.mirror import sample
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.models.moe import no_route
from jaxfp8rl.training import publishing
from jaxfp8rl.training.context import build_run

OPTIONS = [word for key, value in {
    "rollout.engine": "vllm", "rollout.gpu_memory_utilization": 0.1, "rollout.kv_cache_gib": 4,
    "rollout.kv_cache": "auto",
    "rollout.publish": "in_place", "precision.compute_dtype": "bfloat16", "run.dir": "unused",
    "moe.replay": "R3",
    "model.config.architectures": '["Qwen3MoeForCausalLM"]', "model.config.model_type": "qwen3_moe",
    "model.config.num_experts": 16, "model.config.num_experts_per_tok": 4,
    "model.config.moe_intermediate_size": 256,
    "model.config.norm_topk_prob": "true", "model.config.num_hidden_layers": 4,
    "model.config.num_attention_heads": 4,
}.items() for word in (f"--{key}", str(value))]

COUNT = 512


def widened(weight: jax.Array, by: float) -> jax.Array:
    return by * weight if weight.ndim > 1 and weight.shape[-1] > 64 else weight


@pytest.mark.parametrize("recipe", ["fp8_unified", "bf16"])
def test_three_publishes_in_place_and_the_engines_routes(recipe):
    """Random weights, drawn wide: the routers of both sides differ here and there, and replay takes what that
    costs away."""
    ctx = build_run(load_config("demo", [*OPTIONS, "--precision.recipe", recipe]))
    try:
        first = ctx.initial_params()
        for version in range(3):
            wide = functools.partial(widened, by=2.0 + version / 2)
            policy = ctx.policy(jax.tree.map(wide, first))
            receipt = publishing.publish(ctx, policy, version)
            assert receipt.content, "every byte was read back from the engine"
            batch = sample(ctx, COUNT, version)
            mask, rollout = np.asarray(batch.response_mask), np.asarray(batch.rollout_logp)
            scored = {"R3": ctx.score(policy, batch),
                      "none": ctx.score(policy, batch._replace(routes=None))}
            d = {name: (np.asarray(logp) - rollout)[mask].astype(np.float64) for name, logp in scored.items()}
            k3 = {name: (np.expm1(x) - x).mean() for name, x in d.items()}
            routed = np.asarray(batch.routes[..., 0, 0] != no_route(batch.routes.dtype))
            print(f"{recipe}, version {version}, {mask.sum()} tokens, {routed.sum()} with routes: k3 {k3}, "
                  f"largest {({n: np.abs(x).max() for n, x in d.items()})}")
            assert routed.sum() == np.asarray(batch.segment_ids > 0).sum(
                ) - COUNT, "all but the last token of each"
            assert k3["R3"] < 1e-2 and k3["R3"] <= k3["none"]
    finally:
        ctx.close()
