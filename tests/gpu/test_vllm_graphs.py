"""vLLM in this process under CUDA graphs, FP8 weights and FP8 KV: publishes reach what the captured graphs
read."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import tiny_vllm

from bridges.conformance import CHECKS, EngineUnderTest
from bridges.sources.array_source import random_source
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.layers import rope_tables

CONFIG = tiny_vllm.CONFIG | {"vocab_size": 512, "intermediate_size": 512}


@pytest.fixture(scope="module")
def under_test():
    from bridges.engines.vllm_engine import VllmEngine
    from bridges.transports.vllm_reload import VllmReload

    engine, transport = VllmEngine(
        CONFIG, weights="fp8_e4m3_128x128", kv_cache="fp8_e4m3", max_model_len=256, max_num_seqs=64,
        gpu_memory_utilization=0.2
    ), VllmReload()
    transport.open(engine)
    yield EngineUnderTest(engine, transport,
                          lambda seed: random_source(engine.expected_manifest(), seed, convert=jnp.asarray))
    engine.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, under_test):
    check(under_test)


def test_it_computes_in_w8a8_and_attends_in_fp8(under_test):
    formats = under_test.engine.capabilities().formats
    assert (formats.weights, formats.activations,
            formats.kv_cache) == ("fp8_e4m3_128x128", "fp8_e4m3_1x128", "fp8_e4m3")
    assert formats.attention == "fp8_e4m3"


def test_the_learner_rounds_ropes_table_as_vllm_keeps_it(under_test):
    table = under_test.engine.on_model(lambda m: next(b.float().cpu().numpy() for n, b in m.named_buffers()
                                                      if "cos_sin" in n))
    model = ModelConfig.from_hf(CONFIG)
    cos, sin = rope_tables(jnp.arange(len(table))[None], model.kinds[0].rope, model.head_dim, "bfloat16")
    mirrored = np.concatenate([cos[0, :, 0], sin[0, :, 0]], axis=-1)
    assert (mirrored == table).mean() > 0.999  # cosines themselves differ by an ulp between libraries
