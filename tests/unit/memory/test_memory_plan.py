"""The memory plan beside what was measured: the learner of benchmarks/step.py at Qwen3-8B's size on an
H200."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.common import config
from bridges.api import GenRequest, SamplingParams
from bridges.engines.flight import Flight
from bridges.sources import sent
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.memory import plan as module
from jaxfp8rl.memory.activations import kept_of_layers
from jaxfp8rl.memory.plan import memory_plan
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.known import KNOWN
from jaxfp8rl.precision.layer_runs import plain_runs
from jaxfp8rl.rollout.engines import build_engine

MEASURED = json.loads((Path(__file__).parents[3] / "benchmarks/results/step_8b.json").read_text())


@pytest.mark.parametrize("recipe", ["bf16", "fp8_unified"])
def test_it_is_within_5_percent_of_the_measured_peak(recipe):
    """vLLM stands for an engine whose memory is not the learner's; uncompiled, it leaves the stream in
    bfloat16."""
    ((case, found),) = MEASURED["each"].items()
    assert case == "Qwen3-8B, 36 layers, 8 x 1 x 16384 tokens"  # one at a time
    settings = {
        "train.remat": MEASURED["settings"]["remat"], "train.row_tokens": 16384,
        "train.rows_per_microbatch": 1,
        "precision.recipe": recipe, "precision.compute_dtype": "bfloat16",
        "precision.weight_dtype": "bfloat16",
        "precision.attention": "pallas", "rollout.engine": "vllm",
        "rollout.enforce_eager": str(recipe == "bf16").lower(),
    } | {f"optim.{key}": value for key, value in MEASURED["settings"]["optim"].items()}
    cfg = load_config("demo", [word for key, value in settings.items() for word in (f"--{key}", str(value))])
    plan = memory_plan(cfg, ModelConfig.from_hf(config("8b", 0)))
    assert sum(size for _, size in plan) == pytest.approx(found[recipe]["peak memory"] * 1e9, rel=0.05)


def test_experts_count_by_the_copies_of_a_token_and_their_width():
    """Two experts a token, each half as wide as the dense MLP, compute as much. More is kept of the token, as
    it is sent out and collected, and of each copy (with train.remat = "none")."""
    dense = config("0.6b", 4)
    half = {"num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": dense["intermediate_size"] // 2}
    sparse = dense | half | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    cfg = load_config("demo", ["--train.remat", "none"])
    kept = [kept_of_layers(cfg, ModelConfig.from_hf(hf), 2) for hf in (dense, sparse)]
    of_token, of_copy = 4 + 2, 4 + 2 * 2
    assert kept[1] - kept[0] == 4 * cfg.train.rows_per_microbatch * cfg.train.row_tokens * dense[
        "hidden_size"] * (of_token + 2 * of_copy)


VLLM = "--rollout.engine vllm --rollout.kv_cache_gib 2 ".split()
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.mark.parametrize("overrides, changed, kept", [
    ([], {}, 90_768), (VLLM, {}, 109_200), ([*VLLM, "--precision.recipe", "fp8_unified"], {}, 54_416),
    (["--precision.recipe", "fp8_unified"], {}, 90_768), ([], LLAMA, 75_312),
    ([*VLLM, "--rollout.enforce_eager", "true"], {}, 90_768)])
def test_without_recomputation_a_token_keeps_what_xla_stacks_for_each_layer(overrides, changed, kept):
    """kept: bytes, added up from the arrays [layers, tokens, ...] that the loop over the layers carries in
    the program that XLA compiles for an H200, for MLPs of this width."""
    cfg = load_config("scratch-140m", ["--train.remat", "none", "--model.config.intermediate_size", "2816",
                                       *overrides])
    model = ModelConfig.from_hf(cfg.model.config | changed)
    tokens = cfg.train.rows_per_microbatch * cfg.train.row_tokens
    assert kept_of_layers(cfg, model, 2) / tokens / model.num_hidden_layers == pytest.approx(kept, rel=1e-3)


GEMMA = ModelConfig.from_hf(KNOWN["gemma-3-270m"])


def test_windows_save_no_memory_because_the_cache_has_slots_for_all_positions():
    """And the plan's cache is the engine's."""
    cfg = load_config("demo", ["--rollout.kv_cache", "auto"])
    rows = min(cfg.rollout.max_num_seqs, cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt)
    engine: Any = build_engine(cfg, GEMMA, plain_runs(GEMMA.sparse_layers))[0]
    request = GenRequest("r", (1,), SamplingParams(cfg.rollout.max_new_tokens), rows)
    shape = engine._flights.shape_of([Flight(request, i, (0, 0), 0) for i in range(rows)])
    cache = jax.eval_shape(lambda: engine._model.init_cache(shape.pages))
    planned = dict(memory_plan(cfg, GEMMA))["engine: keys and values"]
    assert planned == sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache))


@pytest.mark.parametrize("overrides, size", [("--rollout.enforce_eager true", 2), ("", 4)])
def test_gemmas_stream_beside_a_compiled_engine_is_in_float32_between_layers(overrides, size):
    words = "--rollout.engine vllm --train.remat layer --precision.compute_dtype bfloat16".split()
    words += overrides.split()
    cfg = load_config("demo", words)
    tokens = cfg.train.rows_per_microbatch * cfg.train.row_tokens
    assert kept_of_layers(cfg, GEMMA, 2) == tokens * GEMMA.num_hidden_layers * GEMMA.hidden_size * size


def test_the_parts_of_a_publish_are_the_transports():
    """The learner knows of it by this number alone."""
    assert module.PART == sent.PART
