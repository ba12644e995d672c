"""GRPO on a small mixture of experts from scratch, by the embedded engine: every recipe, every kind of
replay."""

from __future__ import annotations

import json

import numpy as np
import pytest
from micro_run import rewarded

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.distributed.process_group import ALONE
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.training.context import RunContext
from jaxfp8rl.training.loop import train
from jaxfp8rl.training.update_batches import pack_samples

MOE = [word for key, value in {
    "model.config.architectures": '["Qwen3MoeForCausalLM"]', "model.config.model_type": "qwen3_moe",
    "model.config.num_experts": 4, "model.config.num_experts_per_tok": 2,
    "model.config.moe_intermediate_size": 128,
    "model.config.norm_topk_prob": "true", "model.config.num_hidden_layers": 1, "rollout.prompts_per_step": 8,
    "rollout.samples_per_prompt": 4, "run.steps": 2, "run.eval_problems": 8, "sft.steps": 2,
    "sft.examples_per_step": 8,
    "train.rows_per_microbatch": 4,
}.items() for word in (f"--{key}", str(value))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "replay", "more"),
    [
        ("fp8_unified", "R3", ("--moe.measure_every", "1")),
        ("bf16", "R2", ("--rollout.kv_cache", "auto", "--correction.preset", "none", "--moe.balance_coef",
                        "0.01")),
        ("fp8_rollout", "none", ("--moe.freeze_router", "true", "--precision.compute_dtype", "bfloat16")),
    ],
)
def test_a_small_mixture_trains(recipe, replay, more, tmp_path, monkeypatch):
    """By rewards that differ: untrained it would earn none, and not be updated."""
    monkeypatch.setattr(RewardRunner, "score", rewarded)
    run = tmp_path / "run"
    train(load_config("demo", ["--run.dir", str(run), *MOE, "--precision.recipe", recipe, "--moe.replay",
                               replay, *more]))
    steps = [m for m in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if m["step"]]
    assert len(steps) == 2 and all(m["update/applied"] == 1 for m in steps)
    assert ("routing/disagreement/0" in steps[0]) == (replay == "R3") == (
        "mismatch/k3_unreplayed" in steps[0])
    if replay == "R3":  # learner and engine compute the same: so do their routers
        assert steps[0]["routing/disagreement"] < 0.02 and steps[0]["mismatch/k3"] < 1e-3


def test_an_update_without_a_sample_has_the_shape_of_others():
    """Dynamic sampling may find no group to learn from; routes are replayed all the same."""
    ctx = RunContext.__new__(RunContext)
    ctx.cfg = load_config("demo", [*MOE, "--moe.replay", "R3"])
    ctx.model, ctx.group, ctx.layout = model_config(ctx.cfg), ALONE, ONE
    one = Sample((3, 4), (5,), np.zeros(1, np.float32), 0.0, np.zeros((2, 1, 2), np.int64))
    packed = (pack_samples(ctx, samples) for samples in ([], [one]))
    none, some = ([x if x is None else (x.shape, x.dtype) for x in batch] for batch in packed)
    assert none == some
