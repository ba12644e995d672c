"""The memory plan beside XLA's own, of an update compiled for an H100 or an H200."""

from __future__ import annotations

import json

import preset_memory
import pytest

from benchmarks.common import config
from benchmarks.step import OPTIMIZERS
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.memory.plan import memory_plan, scoring
from jaxfp8rl.models.config import ModelConfig

CASES = [("8b", "fp8_unified", "mlp"), ("8b", "bf16", "mlp"), ("8b", "bf16", "layer"),
         ("1.7b", "fp8_unified", "products"), ("1.7b", "bf16", "none")]


@pytest.mark.parametrize(("size", "recipe", "remat"), CASES)
def test_the_plan_is_within_5_percent_of_xlas(size, recipe, remat, compiled_step):
    """As in tests/unit/memory/test_memory_plan.py, which compares one case with what was measured."""
    programs = compiled_step(size, recipe, 16384, remat=remat)
    m = programs["update"].memory_analysis()
    needed = m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    settings = {
        "train.remat": remat, "train.row_tokens": 16384, "train.rows_per_microbatch": 1,
        "precision.recipe": recipe,
        "precision.compute_dtype": "bfloat16", "precision.weight_dtype": "bfloat16",
        "precision.attention": "pallas",
        "rollout.engine": "vllm", "rollout.enforce_eager": str(recipe == "bf16").lower(),
    } | {f"optim.{key}": value for key, value in OPTIMIZERS["low"].items()}
    cfg = load_config("demo", [word for key, value in settings.items() for word in (f"--{key}", str(value))])
    model = ModelConfig.from_hf(config(size))
    plan = sum(size for _, size in memory_plan(cfg, model))
    print(
        f"{size}, {recipe}, {remat}: plan {plan / 1e9:.1f} GB, XLA's {needed / 1e9:.1f} GB, "
        f"{plan / needed:.3f}")
    assert plan == pytest.approx(needed, rel=0.05)
    score = programs["score"].memory_analysis().temp_size_in_bytes
    print(f"score: plan {scoring(cfg, model) / 1e9:.2f} GB, XLA's {score / 1e9:.2f} GB")
    assert 0.5 * scoring(cfg, model) < score < scoring(cfg, model)


def test_an_update_needs_what_was_committed_for_its_preset():
    """Compiled anew, as python tests/sm90a/preset_memory.py does for all of them."""
    committed = json.loads(preset_memory.FILE.read_text())["presets"]["qwen3-0.6b-h100"]
    with preset_memory.without_a_gpu():
        found = preset_memory.memory_of("qwen3-0.6b-h100")
    assert found.device == pytest.approx(committed["device"], rel=0.01)
