"""The conformance suite on the embedded engine, built as the registry builds it: high precision, and FP8 with
FP8 KV."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from bridges.api import EngineFormats, ParamMeta, PublishFailed
from bridges.conformance import CHECKS, EngineUnderTest
from bridges.engines.embedded_engine import EmbeddedEngine, EngineModel
from bridges.sources.array_source import ArraySource, random_source
from bridges.transports.embedded import EmbeddedTransport
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.rollout.engines import build_engine

pytestmark = pytest.mark.usefixtures("quick_compile")
COMMON = ["--precision.compute_dtype", "float32", "--task.max_prompt_tokens", "48", "--train.row_tokens",
          "64",
          "--rollout.max_new_tokens", "16", "--model.config.max_position_embeddings", "128"]
ENGINES = {
    "float32": ["--precision.recipe", "bf16", "--rollout.kv_cache", "auto"],
    "fp8-kv8": ["--precision.recipe", "fp8_unified", "--rollout.kv_cache", "fp8",
                "--precision.first_layers_bf16", "1"],
}


@pytest.fixture(scope="module", params=["fp8-kv8", pytest.param("float32", marks=pytest.mark.slow)])
def under_test(request):
    cfg = check(load_config("demo", [*COMMON, *ENGINES[request.param]]))
    model = model_config(cfg)
    engine, transport = build_engine(cfg, model, engine_runs(cfg, model))
    yield EngineUnderTest(
        engine, transport, lambda seed: random_source(engine.expected_manifest(), seed, convert=jnp.asarray)
    )
    engine.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, under_test):
    check(under_test)


def test_buffers_of_other_libraries_are_taken():
    """As the contract has it: whatever has __dlpack__."""
    torch, metas = pytest.importorskip("torch"), (ParamMeta("w", "bfloat16", (4, 8)),
                                                  ParamMeta("s", "float32", ()))
    formats = EngineFormats(*["float32"] * 4)
    engine = EmbeddedEngine(EngineModel(metas, dict, None, None, None, None, formats, 8),
                       max_model_len=8)
    (transport := EmbeddedTransport()).open(engine)
    weight = torch.arange(32.0).reshape(4, 8).bfloat16()
    transport.publish(ArraySource(metas, {"w": weight, "s": np.float32(2)}), 1)
    weight.zero_()
    params = engine._params
    assert params["w"].dtype == jnp.bfloat16 and params["w"].astype(jnp.float32).ravel().tolist() == list(
        range(32))
    with pytest.raises(PublishFailed, match="but its manifest says"):
        transport.publish(ArraySource(metas, {"w": weight.float(), "s": np.float32(2)}), 2)
