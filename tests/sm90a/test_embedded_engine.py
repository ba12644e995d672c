"""What XLA makes of the embedded engine's decoding loop for an H100: the cache is written where it lies."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from hopper import compiled, lowered

from benchmarks.common import config
from bridges.api import GenRequest, SamplingParams
from bridges.engines import batch
from bridges.engines.flights import Flight, Flights
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.records import KvFormat, Precision
from jaxfp8rl.rollout.engines import embedded_model


@pytest.mark.parametrize("fp8", [False, True])
def test_a_step_copies_no_cache(fp8):
    cfg = load_config("demo", ["--rollout.max_new_tokens", "2048", "--train.row_tokens", "4096"])
    model = ModelConfig.from_hf(config("1.7b", 2))
    precision = Precision.uniform(2, "bfloat16", kv=KvFormat(fp8=fp8), attention="pallas")
    functions = embedded_model(cfg, model, precision)
    flights = Flights(functions, cfg.max_model_len, 64)
    shape = flights.shape_of([Flight(GenRequest("r", (1,), SamplingParams(2048), 256), i, (0, 0), i)
                              for i in range(256)])
    params = jax.eval_shape(lambda: functions.assemble({m.name: jnp.zeros(m.shape, m.dtype)
                                                        for m in functions.manifest}))
    made = jax.eval_shape(functools.partial(
        batch.empty, functions, rows=shape.rows, sequences=256, pages=shape.pages, row_pages=shape.row_pages,
        max_new=shape.max_new, support=0, width=flights._width(params)))
    like = lambda dtype, *more: jax.ShapeDtypeStruct((256, *more), dtype)
    orders = batch.Orders(*(like(jnp.int32) for _ in range(4)), like(jnp.uint32, 2), like(jnp.float32), like(bool),
                          like(jnp.int32), like(jnp.float32), like(jnp.int32, shape.stops))
    advance = jax.jit(functools.partial(batch.advance, functions, steps=64, filters=shape.filters), donate_argnums=1)
    one = lambda dtype: jax.ShapeDtypeStruct((), dtype)
    program = compiled(lowered("h100", advance, params, made, orders, like(jnp.int32), one(jnp.int32), one(bool)))
    size = ",".join(map(str, jax.tree.leaves(made.pages.cache)[0].shape))
    made_anew = rf"= \w+\[{size}\]\S* (copy|copy-start|select|conditional)\("
    assert not [line for line in program.as_text().splitlines() if re.search(made_anew, line)]
    assert program.memory_analysis().temp_size_in_bytes < 2**28
