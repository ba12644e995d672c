"""precision.exact = "engine" compiled for an H100 without one: the learner's score, and the engine's
prompts."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from engine_step import engine_step
from hopper import SITE, compiled, lowered
from machine_code import kernels_of

from benchmarks.common import config
from benchmarks.engine_rollout import config_of
from benchmarks.step import OPTIMIZERS, batch_of, rows_of
from bridges.engines.flights import Flights
from jaxfp8rl.config.correction import Correction
from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.models import transformer
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.policy.policy import partition
from jaxfp8rl.policy.shapes import engine_runs
from jaxfp8rl.rollout.embedded import embedded_model
from jaxfp8rl.rollout.engines import expected_formats
from jaxfp8rl.training import programs
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step
from pallas_kernels.logprob import api as logprob
from pallas_kernels.logprob import parts

ARGS = argparse.Namespace(size="1.7b", layers=2, rows=64, queue=4, new_tokens=2048, recipe="fp8",
                          fp8_kernel="native",
                          row_tokens=4096, segments=8, microbatches=2, data=1, fsdp=1, tensor=1)


def test_score_and_prompts_compile_and_an_update_lowers():
    cfg = config_of("embedded", ARGS)
    cfg = cfg.model_copy(update={"precision": cfg.precision.model_copy(update={"exact": "engine"})})
    model = ModelConfig.from_hf(config(ARGS.size, ARGS.layers))
    runs = engine_runs(cfg, model)
    precision = programs.learner_precision(cfg, model, runs, expected_formats(cfg, model))
    precision = dataclasses.replace(precision, products="pallas", attention="pallas")
    functions = embedded_model(cfg, model, precision)
    params = jax.eval_shape(lambda: functions.assemble({m.name: jnp.zeros(m.shape, m.dtype)
                                                        for m in functions.manifest}))
    logprobs, batch = make_logprobs(model, precision, 1.0, "layer"), batch_of(rows_of(ARGS, model), ARGS)
    score, optimizer = make_score(logprobs), make_optimizer(Optim(**OPTIMIZERS["low"]), 10)
    update = make_train_step(logprobs, precision, Loss(), Correction().resolve(), optimizer).__wrapped__
    state = jax.eval_shape(lambda key: init_state(init_params(model, key), optimizer, "bfloat16"),
                           jax.random.key(0))
    policy = jax.eval_shape(make_policy(precision), state.params)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    cache = jax.eval_shape(lambda: transformer.empty_pages(model, 256, 64, precision))
    with pytest.MonkeyPatch.context() as patch:
        for module in logprob, parts:  # there is no Hopper GPU for "auto" to find
            patch.setattr(module, "use_kernel", lambda backend: True)
        program = compiled(lowered("h100", score, params, batch))
        lowered("h100", update, state, *partition(policy), batch, jax.eval_shape(score, policy, batch))
    found = program.as_text()
    assert all(name in found for name in ("rotate", "add_norm_quantize", "attend", "join"))
    flights = Flights(functions, cfg.max_model_len, ARGS.rows)
    step = compiled(lowered("h100", *engine_step(functions, flights, params, ARGS.rows, ARGS.new_tokens)))
    assert "add_norm_quantize" in step.as_text()
    prompts = compiled(lowered("h100", jax.jit(functions.prefill), params, *(ints(1, 4096) for _ in range(4)),
                               cache))
    assert "rotate" in prompts.as_text()


def test_a_rows_statistics_are_multiplied_and_added_alike_beside_any_number_of_rows():
    """A product that is fused with a sum is not rounded in between: 1% of the tokens had another last bit in
    batches of up to 128."""
    assert SITE

    def arithmetic(rows: int, *targets: jax.ShapeDtypeStruct) -> dict[str, int]:
        like = jax.ShapeDtypeStruct
        f = jax.jit(functools.partial(parts.statistics, backend="pallas"))
        traced = f.trace(like((rows, 2048), jnp.bfloat16), like((151936, 2048), jnp.bfloat16),
                         like((rows,), jnp.float32), *targets)
        (kernel,) = kernels_of(traced.lower(lowering_platforms=("cuda",)), Path(SITE))
        return collections.Counter(re.findall(r"\b(FFMA|FMUL|MUFU\.EX2)\b", kernel.sass))

    found = [arithmetic(8), arithmetic(256), arithmetic(2048, jax.ShapeDtypeStruct((2048,), jnp.int32))]
    assert found[0]["MUFU.EX2"] == 128 and found[0] == found[1] == found[2], found
