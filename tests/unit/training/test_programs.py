"""A learner's programs: compiled from shapes, before there is data, and not again when there is."""

from __future__ import annotations

import contextlib

import chex
import jax
import numpy as np
import pytest

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.errors import ModelError
from jaxfp8rl.models.loading import save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.rollout.engines import expected_formats
from jaxfp8rl.training import context, loop
from jaxfp8rl.training.programs import compile_ahead, has_known_shapes, lowered, shapes_of

pytestmark = pytest.mark.usefixtures("quick_compile")
SMALL = ["--run.dir", "unused", "--rollout.prompts_per_step", "4", "--rollout.samples_per_prompt", "2",
         "--model.config.num_hidden_layers", "1"]
MAIN = {"jit_on_weights", "jit_score", "jit_update"}
CASES = {
    "fp8": [], "bf16": ["--precision.recipe", "bf16", "--rollout.kv_cache", "auto"],
    "offload": ["--optim.offload", "true", "--optim.first_moment", "float8", "--precision.recipe", "bf16",
                "--rollout.kv_cache", "auto"],
    "calibrated": ["--rollout.kv_scales", "calibrated"],
}


@pytest.fixture
def compiled(monkeypatch):
    """The names of the programs that XLA has compiled, in their order."""
    names, compile_ = [], jax._src.compiler.compile_or_get_cached

    def recorded(backend, computation, *args, **kwargs):
        names.append(computation.operation.attributes["sym_name"].value)
        return compile_(backend, computation, *args, **kwargs)

    monkeypatch.setattr(jax._src.compiler, "compile_or_get_cached", recorded)
    return names


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c in ("bf16", "offload") else c for c in CASES])
def test_what_was_compiled_ahead_is_not_compiled_again(case, compiled):
    cfg = load_config("demo", [*SMALL, *CASES[case]])
    with contextlib.closing(context.build_run(cfg)) as ctx:
        programs = context.Programs(
            ctx.engine.capabilities().formats, ctx.precision, ctx.optimizer, ctx.logprobs, ctx.policy,
            ctx.score, ctx.train_step, ctx.kv_scales)
        batch = loop.pack_samples(ctx, [])
        shapes = shapes_of(programs, cfg, ctx.model, batch, ctx.layout)
        for thread in compile_ahead(lowered(programs, cfg, shapes)):
            thread.join()
        assert set(compiled) >= MAIN
        compiled.clear()
        state = ctx.fresh_state(ctx.initial_params())
        policy = loop.with_scales(ctx, ctx.policy(state.params))
        sample = [loop.Sample(p.token_ids, (1, 2, 3), np.full(3, -2.0, np.float32), 1.0)
                  for p in ctx.train[:8]]
        for _ in range(2):
            batch = loop.pack_samples(ctx, sample)
            ctx.score(policy, batch)
            old = (ctx.kv_scales or ctx).score(policy, batch)
            state, policy, _ = ctx.train_step(state, policy, batch, old, None, None)
            policy = loop.with_scales(ctx, policy)
        assert not MAIN & set(compiled), [n for n in compiled if n in MAIN]


def of_folder(folder, change, *words):
    """The demo's config, to begin with the weights of `folder`: random ones after `change`."""
    model = model_config(load_config("demo", SMALL))
    params = init_params(model, jax.random.key(1))
    change(params)
    save_params(folder, model, params)
    load_tokenizer("chars:0123456789+-*=").save(str(folder))
    return load_config("demo", [*SMALL, "--model.config", "{}", "--model.tokenizer", '""', "--model.path",
                                str(folder), "--sft.steps", "0", *words])


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_the_weights_of_a_folder_load_while_the_engine_starts(master, tmp_path, monkeypatch):
    """As they are stored, and to the very bits that come of float32."""
    names, submit = [], context.in_thread
    monkeypatch.setattr(context, "compile_for", lambda *_: None)
    monkeypatch.setattr(context, "in_thread", lambda load: names.append("loads") or submit(load))
    build = context.build_engine
    monkeypatch.setattr(context, "build_engine", lambda *a: names.append("starts") or build(*a))
    cfg = of_folder(tmp_path / "model", lambda params: None, "--optim.master", master)
    with contextlib.closing(context.build_run(cfg, fresh=True, ahead=True)) as ctx:
        assert names == ["loads", "starts"] and ctx.loading
        early = ctx.first_state()
        assert ctx.loading is None
        chex.assert_trees_all_equal(early, ctx.fresh_state(ctx.initial_params()), ctx.first_state())


def test_a_run_waits_for_weights_that_are_not_finite(tmp_path, monkeypatch):
    monkeypatch.setattr(context, "compile_for", lambda *_: None)
    broken = lambda params: params["norm"].update(weight=params["norm"]["weight"].at[3].set(np.inf))
    cfg = of_folder(tmp_path / "model", broken)
    with contextlib.closing(context.build_run(cfg, fresh=True, ahead=True)) as ctx:
        with pytest.raises(ModelError, match="weights are not finite: model.norm.weight"):
            ctx.first_state()


def test_the_embedded_engine_reports_the_formats_that_were_expected():
    for words in CASES.values():
        cfg = load_config("demo", [*SMALL, *words])
        with contextlib.closing(context.build_run(cfg)) as ctx:
            assert ctx.engine.capabilities().formats == expected_formats(cfg, ctx.model)


def test_a_program_that_does_not_compile_is_left_to_the_run():
    def fail():
        raise RuntimeError

    (thread,) = compile_ahead([fail])
    thread.join(5)
    assert not thread.is_alive()


def test_shapes_that_the_engine_decides_are_not_known():
    assert has_known_shapes(load_config("demo", SMALL))
    lent = ["--rollout.engine", "vllm", "--rollout.one_copy", "true", "--rollout.publish", "in_place",
            "--precision.recipe", "fp8_unified"]
    assert not has_known_shapes(load_config("demo", [*SMALL, *lent]))
