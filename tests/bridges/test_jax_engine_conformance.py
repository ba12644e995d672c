"""The conformance suite on the embedded engine, built as the registry builds it: high precision, and FP8 with FP8 KV."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from bridges.conformance import CHECKS, EngineUnderTest
from bridges.weights.array_source import random_source
from jaxfp8rl.build import engine_runs, model_config
from jaxfp8rl.registry import build_engine
from jaxfp8rl.toml_config import load_config

pytestmark = pytest.mark.usefixtures("quick_compile")
COMMON = ["--precision.compute_dtype", "float32", "--task.max_prompt_tokens", "48", "--train.row_tokens", "64",
          "--rollout.max_new_tokens", "16", "--model.config.max_position_embeddings", "128"]  # fmt: skip
ENGINES = {
    "float32": ["--precision.recipe", "bf16", "--rollout.kv_cache", "auto"],
    "fp8-kv8": ["--precision.recipe", "fp8_unified", "--rollout.kv_cache", "fp8", "--precision.first_layers_bf16", "1"],
}


@pytest.fixture(scope="module", params=["fp8-kv8", pytest.param("float32", marks=pytest.mark.slow)])
def under_test(request):
    cfg = load_config("demo", [*COMMON, *ENGINES[request.param]]).check()
    model = model_config(cfg)
    engine, transport = build_engine(cfg, model, engine_runs(cfg, model))
    yield EngineUnderTest(
        engine, transport, lambda seed: random_source(engine.expected_manifest(), seed, convert=jnp.asarray)
    )
    engine.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, under_test):
    check(under_test)
