"""Learner and embedded engine on a GPU: the same tokens, the same weights, the same log-probabilities."""

from __future__ import annotations

import pytest

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.training import gate, publishing
from jaxfp8rl.training.context import build_run

COMMON = ["--rollout.engine", "jax", "--gate.completions", "64", "--gate.max_gap", "20",
          "--gate.max_mean_gap", "20"]
BF16, HALF = ["--precision.recipe", "bf16", "--rollout.kv_cache",
              "auto"], ["--precision.compute_dtype", "bfloat16"]
CASES = {
    "bf16-float32": (BF16, 1e-5, 1e-4),
    "fp8-float32": ([], 5e-4, 0.05),  # flipped roundings alone; a lost one moves the mean by 1e-2
    "bf16-bfloat16": ([*BF16, *HALF], 0.01, 0.1),
    "fp8-bfloat16": (HALF, 0.01, 0.2),
    "fp8-bfloat16-pallas": ([*HALF, "--precision.products", "pallas"], 0.01, 0.2),
}


@pytest.mark.parametrize("case", CASES)
def test_engine_and_learner_agree(case):
    """Mean and largest gap in nats. A flipped E4M3 rounding moves single tokens; a lost one would move the
    mean."""
    options, mean, largest = CASES[case]
    ctx = build_run(load_config("demo", [*COMMON, *options]))
    policy = ctx.policy(ctx.initial_params())
    publishing.publish(ctx, policy, 0)
    gaps = gate.gate(ctx, policy, 0)
    ctx.close()
    assert gaps["gate/mean_gap"] <= mean and gaps["gate/max_gap"] <= largest, gaps
