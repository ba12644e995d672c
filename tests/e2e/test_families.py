"""Every family through a whole run: from a folder, three steps in FP8, resumed for a fourth, exported, and
read by transformers; with either engine."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from micro_run import rewarded

from jaxfp8rl.cli.main import main
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import load_params, save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.training.loop import train

SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}
MODELS = {
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 4, "_sliding_window_pattern": 2,
               "final_logit_softcapping": 3.0},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 4},
}
RUN = {
    "run.steps": 3, "run.eval_problems": 8, "run.save_every": 3, "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 4, "train.rows_per_microbatch": 2, "sft.steps": 2,
    "sft.examples_per_step": 8, "model.config": "{}", "optim.schedule": "constant",
}
VLLM = {"rollout.engine": "vllm", "rollout.fp8_kernel": "emulated", "precision.compute_dtype": "bfloat16",
        "rollout.kv_cache": "auto"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jax", "vllm"])
@pytest.mark.parametrize("name", MODELS)
def test_a_family_is_loaded_trained_resumed_and_exported(name, engine, tmp_path, monkeypatch):
    """By rewards that differ: untrained it would earn none, and not be updated."""
    if engine == "vllm":
        pytest.importorskip("vllm")
    monkeypatch.setattr(RewardRunner, "score", rewarded)
    model, start, run = ModelConfig.from_hf(SIZES | MODELS[name]), tmp_path / "start", tmp_path / "run"
    save_params(start, model, jax.tree.map(np.asarray, init_params(model, jax.random.key(0))), "float32")
    settings = RUN | (VLLM if engine == "vllm" else {}) | {"run.dir": run, "model.path": start}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    train(load_config("demo", words))
    train(load_config("demo", [*words, "--run.steps", "4"]), resume=True)
    steps = [m for m in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if m["step"]]
    assert [m["step"] for m in steps] == [1, 2, 3, 4] and all(m["update/applied"] == 1 for m in steps)
    assert max(m["mismatch/k3"] for m in steps) < (1e-5 if engine == "jax" else 0.05)
    read_by_transformers(run, tmp_path / "out", start)


def read_by_transformers(run: Path, out: Path, start: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert main(["export", str(run), str(out)]) in (None, 0)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype="float32").state_dict()
    cfg, ours = load_params(out)
    first = load_params(start)[1]
    assert cfg == ModelConfig.from_hf(out)
    for norm in cfg.family.norms.names:
        np.testing.assert_array_equal(theirs[f"model.layers.1.{norm}.weight"].numpy(),
                                      ours["layers"][norm]["weight"][1])
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), ours, first)
    assert all(jax.tree.leaves(moved)), moved
