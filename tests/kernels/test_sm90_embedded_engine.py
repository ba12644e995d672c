"""The embedded engine's programs lower for a Hopper GPU: prompts by the packed kernel, decoding by the paged
one."""

import jax.numpy as jnp
import numpy as np
import pytest

from bridges.api import GenRequest, SamplingParams
from bridges.engines.flights import Flights
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import empty_params
from jaxfp8rl.precision.records import KvFormat, Precision
from jaxfp8rl.rollout.embedded import embedded_model


@pytest.mark.parametrize("fp8", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_prompts_enter_by_the_packed_kernel_and_rows_advance_by_the_paged_one(fp8, monkeypatch):
    cfg = load_config("demo", [])
    model = ModelConfig("Qwen3ForCausalLM", 97, 256, 512, 2, 8, 2, 64, 256)
    precision = Precision.uniform(2, "bfloat16", kv=KvFormat(fp8=fp8), attention="pallas")
    functions = embedded_model(cfg, model, precision)
    params = empty_params(model, jnp.bfloat16)
    flights = Flights(functions, cfg.max_model_len, 8)
    flights.submit(GenRequest("r", (1, 2, 3), SamplingParams(4), 8), [(0, i) for i in range(8)])
    lowered = {}

    def lower(name, program):
        def call(*args, **static):
            traced = program.trace(*args, **static)
            lowered[name] = traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2")
            raise StopIteration

        return call

    monkeypatch.setattr(flights, "_enter", lower("enter", flights._enter))
    with pytest.raises(StopIteration):
        flights.advance(params, 1, 4)
    batch = flights._batch
    queue = np.zeros(8, np.int32)
    monkeypatch.setattr(flights, "_advance", lower("advance", flights._advance))
    with pytest.raises(StopIteration):
        flights._advance(params, batch, flights._orders, queue, np.int32(8), np.bool_(False),
                         steps=np.int32(4),
                         filters=flights._shape.filters)
    # in the body of the loop over the layers; decoding by pieces, and what joins them
    assert lowered == {"enter": 1, "advance": 2}
