"""A learner's programs: compiled from shapes, before there is data, and not again when there is."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import threading
import time

import chex
import jax
import numpy as np
import pytest

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.errors import ModelError
from jaxfp8rl.models.loading import save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.rollout.engines import expected_formats
from jaxfp8rl.training import ahead, context, publishing
from jaxfp8rl.training.ahead import KeptLowered, compile_ahead
from jaxfp8rl.training.programs import compiled_ahead, has_known_shapes, make_programs
from jaxfp8rl.training.update_batches import pack_samples

pytestmark = pytest.mark.usefixtures("quick_compile")
SMALL = ["--run.dir", "unused", "--rollout.prompts_per_step", "4", "--rollout.samples_per_prompt", "2",
         "--model.config.num_hidden_layers", "1"]
PROGRAMS = "policy", "score", "train_step"
MAIN = {"jit_on_weights", "jit_score", "jit_update"}
CASES = {
    "fp8": [], "bf16": ["--precision.recipe", "bf16", "--rollout.kv_cache", "auto"],
    "offload": ["--optim.offload", "true", "--optim.first_moment", "float8", "--precision.recipe", "bf16",
                "--rollout.kv_cache", "auto"],
    "calibrated": ["--rollout.kv_scales", "calibrated"],
}


def some(*fast):
    """All cases; those that are not fast are slow tests."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.fixture
def compiled(monkeypatch):
    """The names of the programs that XLA has compiled, in their order."""
    names, compile_ = [], jax._src.compiler.compile_or_get_cached

    def recorded(backend, computation, *args, **kwargs):
        names.append(computation.operation.attributes["sym_name"].value)
        return compile_(backend, computation, *args, **kwargs)

    monkeypatch.setattr(jax._src.compiler, "compile_or_get_cached", recorded)
    return names


@pytest.mark.slow  # the next test says so too of programs that were lowered elsewhere
@pytest.mark.parametrize("case", CASES)
def test_what_was_compiled_ahead_is_not_compiled_again(case, compiled):
    cfg = load_config("demo", [*SMALL, *CASES[case]])
    with contextlib.closing(context.build_run(cfg)) as ctx:
        found = with_ahead(ctx, None)
        assert set(compiled) >= MAIN
        compiled.clear()
        two_steps(found)
        assert not MAIN & set(compiled), [n for n in compiled if n in MAIN]


@pytest.mark.parametrize("case", some("calibrated"))
def test_a_program_that_was_lowered_elsewhere_computes_the_same(case, compiled, tmp_path):
    """To the last bit, and with the same donations; it is lowered by a process of its own, once."""
    cfg = load_config("demo", [*SMALL, *CASES[case]])
    with contextlib.closing(context.build_run(cfg)) as ctx:
        kept = KeptLowered.of(str(tmp_path), cfg, ctx.model, ctx.layout)
        found = with_ahead(ctx, kept)
        programs = {found.policy, found.score, found.train_step.__wrapped__}
        assert all(program._known is not None for program in programs)
        compiled.clear()
        theirs = two_steps(found)
        assert not MAIN & set(compiled), [n for n in compiled if n in MAIN]
        ours = two_steps(dataclasses.replace(found, **{name: getattr(ctx, name) for name in PROGRAMS}))
        chex.assert_trees_all_equal(theirs, ours)
        again = KeptLowered.of(str(tmp_path), cfg, ctx.model, ctx.layout)
        assert again._child is None and again.read("score") == kept.read("score")


def with_ahead(ctx, kept):
    """The context with programs compiled ahead, once they are."""
    own = make_programs(ctx.cfg, ctx.model, ctx.runs, ctx.engine.capabilities().formats, ctx.layout)
    made = compiled_ahead(own, ctx.cfg, ctx.model, ctx.layout, kept)
    for thread in threading.enumerate():
        if thread.name == "lowering":
            thread.join()
    return dataclasses.replace(ctx, kv_scales=made.kv_scales, **{n: getattr(made, n) for n in PROGRAMS})


def two_steps(ctx):
    """(state, policy, metrics) after two updates; the state before is donated."""
    state = ctx.fresh_state(ctx.initial_params())
    policy = publishing.with_scales(ctx, ctx.policy(state.params))
    sample = [Sample(p.token_ids, (1, 2, 3), np.full(3, -2.0, np.float32), 1.0 - i % 2)
              for i, p in enumerate(ctx.train[:8])]
    for _ in range(2):
        batch, before = pack_samples(ctx, sample), state
        ctx.score(policy, batch)
        old = (ctx.kv_scales or ctx).score(policy, batch)
        state, policy, metrics = ctx.train_step(state, policy, batch, old, None, None)
        assert all(x.is_deleted() for x in jax.tree.leaves(before.params))
        policy = publishing.with_scales(ctx, policy)
    return state, policy, metrics


def test_a_process_that_cannot_lower_leaves_it_to_the_run(tmp_path, monkeypatch):
    cfg = load_config("demo", SMALL)
    monkeypatch.setattr(ahead, "CHILD", (sys.executable, "-c", "raise SystemExit('no such thing')"))
    kept = KeptLowered.of(str(tmp_path), cfg, model_config(cfg), ONE)
    with pytest.warns(UserWarning, match="score: the process that lowers .* failed.*: no such thing"):
        assert kept.read("score") is None


ENDS = """
import sys, jax, jax.numpy as jnp
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.training import ahead
ahead.CHILD = (sys.executable, "-c", "import time; time.sleep(600)")
cfg, add = load_config("demo"), jax.jit(lambda x: x + 1)
kept = ahead.KeptLowered(ahead.Path(sys.argv[1]), cfg, model_config(cfg))
ahead.compile_ahead([ahead.Ahead(add, jax.jit, (jax.ShapeDtypeStruct((2,), jnp.float32),))], kept)
raise SystemExit("an engine that does not start")
"""


def test_a_start_that_fails_does_not_wait_for_programs_that_are_not_lowered(tmp_path):
    """The error stands there, and the shell has its prompt: PATIENCE is a minute."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True,
                          timeout=ahead.PATIENCE + 60)
    assert done.stderr == "an engine that does not start\n" and done.returncode == 1
    assert time.monotonic() - began < ahead.PATIENCE


@pytest.mark.parametrize(("words", "same"), [
    (["--run.dir", "another"], True), (["--run.steps", "7"], False), (["--optim.lr", "3e-4"], False),
    (["--train.row_tokens", "640"], False)])
def test_the_key_of_lowered_programs(words, same):
    """The section `run` does not enter, the number of updates and all other settings do."""
    of = lambda *more: ahead.key_of(cfg := load_config("demo", [*SMALL, *more]), model_config(cfg))
    assert (of(*words) == of()) == same


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
    monkeypatch.setattr(context, "compiled_ahead", lambda programs, *_: programs)
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
    monkeypatch.setattr(context, "compiled_ahead", lambda programs, *_: programs)
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
    """Its error is raised where the run calls it."""
    def fails(x):
        raise RuntimeError("this program")

    program = ahead.Ahead(jax.jit(fails), jax.jit, (jax.ShapeDtypeStruct((), np.float32),))
    thread = compile_ahead([program])
    with pytest.raises(RuntimeError, match="this program"):
        program(np.float32(1))
    thread.join(5)
    assert not thread.is_alive()


def test_shapes_that_the_engine_decides_are_not_known():
    assert has_known_shapes(load_config("demo", SMALL))
    lent = ["--rollout.engine", "vllm", "--rollout.one_copy", "true", "--rollout.publish", "in_place",
            "--precision.recipe", "fp8_unified"]
    assert not has_known_shapes(load_config("demo", [*SMALL, *lent]))
