"""What XLA makes of the embedded engine's decoding loop for an H100: the cache is written where it lies."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from engine_step import engine_step
from hopper import compiled, lowered

from benchmarks.common import config
from bridges.engines.flights import Flights
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.records import KvFormat, Precision
from jaxfp8rl.rollout.embedded import embedded_model


@pytest.mark.parametrize("fp8", [False, True])
def test_a_step_copies_no_cache(fp8):
    cfg = load_config("demo", ["--rollout.max_new_tokens", "2048", "--train.row_tokens", "4096"])
    model = ModelConfig.from_hf(config("1.7b", 2))
    precision = Precision.uniform(2, "bfloat16", kv=KvFormat(fp8=fp8), attention="pallas")
    functions = embedded_model(cfg, model, precision)
    flights = Flights(functions, cfg.max_model_len, 64)
    params = jax.eval_shape(lambda: functions.assemble({m.name: jnp.zeros(m.shape, m.dtype)
                                                        for m in functions.manifest}))
    step, *shapes = engine_step(functions, flights, params, 256, 2048)
    program = compiled(lowered("h100", step, *shapes))
    size = ",".join(map(str, jax.tree.leaves(shapes[1].pages.cache)[0].shape))
    made_anew = rf"= \w+\[{size}\]\S* (copy|copy-start|select|conditional)\("
    assert not [line for line in program.as_text().splitlines() if re.search(made_anew, line)]
    assert program.memory_analysis().temp_size_in_bytes < 2**28
