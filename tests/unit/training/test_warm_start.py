"""The supervised warm start in the precision of its recipe."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bridges.api import EngineFormats
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.policy.initial import starting_params
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.rollout.engines import expected_formats
from jaxfp8rl.rollout.problems import load_data
from jaxfp8rl.training import warm_start
from jaxfp8rl.training.draft import fresh_draft
from jaxfp8rl.training.programs import learner_precision, plain_precision
from jaxfp8rl.training.step import make_logprobs
from jaxfp8rl.training.warm_start import WarmStart, make_sft_step, warm_precision

pytestmark = pytest.mark.usefixtures("quick_compile")
UPDATES = 24


def config(recipe: str, *words: str) -> Config:
    return load_config("demo", ["--precision.recipe", recipe, "--task.options.operands", "2",
                                "--task.options.demonstration_error", "0.0", "--train.row_tokens", "48",
                                "--train.rows_per_microbatch", "4", "--sft.examples_per_step", "32", *words])


def keeping(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner`, with the newest gradients in its state."""

    def update(grads, state, params=None):
        updates, state = inner.update(grads, state[0], params)
        return updates, (state, grads)

    return optax.GradientTransformation(
        lambda params: (inner.init(params), jax.tree.map(jnp.zeros_like, params)), update)


@functools.cache
def course(recipe: str) -> tuple[list[float], list[np.ndarray]]:
    """(the losses of a warm start, the gradients of its first update)."""
    cfg, optimizer, losses, first = config(recipe), keeping(optax.adam(1e-3)), [], None
    model = model_config(cfg)
    data = load_data(cfg, model)
    found = WarmStart.of(cfg, model, (data.task, data.train, data.tokenizer))
    update = make_sft_step(make_logprobs(model, found.precision, 1.0, "none"), found.precision, optimizer)
    state = found.begin(starting_params(cfg, model))
    state = state._replace(opt_state=optimizer.init(state.params))
    policy = found.policy(state.params)
    for step in range(1, UPDATES + 1):
        state, policy, metrics = update(state, policy, found.batch(step))
        first = first or list(map(np.asarray, jax.tree.leaves(state.opt_state[1])))
        losses.append(float(metrics["loss"]))
    return losses, first


@pytest.mark.slow  # two large programs; tests/e2e/test_train.py sees the loss of an FP8 warm start fall
def test_the_loss_falls_in_fp8_as_it_does_in_bf16():
    fp8, high = course("fp8_unified")[0], course("bf16")[0]
    assert high[0] == pytest.approx(np.log(128), abs=0.2), "a token's nats, all of the vocabulary alike"
    assert fp8[-1] < 0.5 * fp8[0] and high[-1] < 0.5 * high[0]
    assert 0 < np.abs(np.subtract(fp8, high)).max() < 0.1


@pytest.mark.slow
def test_gradients_in_fp8_point_where_those_of_bf16_do():
    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.sum(a * b) / (np.linalg.norm(a) * np.linalg.norm(b)))

    cosines = [cosine(a, b) for a, b in zip(course("fp8_unified")[1], course("bf16")[1], strict=True)]
    assert 0.97 < min(cosines) < 0.99999, cosines  # the quantisation shows


@pytest.mark.parametrize("recipe, fp8, said", [
    ("bf16", False, "warm start: computes in float32, without FP8"),
    ("fp8_rollout", False, "warm start: computes in float32, without FP8"),
    ("fp8_forward", True,
     'warm start: computes as "fp8_forward", forward in FP8, backward in high precision'),
    ("fp8_unified", True, 'warm start: computes as "fp8_unified", forward in FP8, backward in FP8'),
])
def test_a_warm_start_computes_as_its_recipes_learner(recipe, fp8, said):
    cfg = config(recipe)
    model, formats = model_config(cfg), expected_formats(config(recipe), model_config(cfg))
    of_learner = lambda: learner_precision(cfg, model, engine_runs(cfg, model), formats)
    want = of_learner() if fp8 else plain_precision(cfg, model)
    assert warm_precision(cfg, model) == want and want.any_fp8 == fp8
    data = load_data(cfg, model)
    assert WarmStart.of(cfg, model, (data.task, data.train, data.tokenizer)).described == said


def test_in_a_run_it_mirrors_the_formats_that_the_engine_reports():
    cfg = config("fp8_unified")
    weights_only = EngineFormats("fp8_e4m3_128x128", "bfloat16", "bfloat16", "bfloat16")
    found = warm_precision(cfg, model_config(cfg), weights_only)
    assert not found.activations_fp8 and not found.kv.fp8 and found.any_fp8


def test_formats_that_are_not_known_are_not_guessed(monkeypatch):
    monkeypatch.setattr(warm_start, "expected_formats", lambda cfg, model: None)
    cfg = config("fp8_unified")
    with pytest.raises(ConfigError, match='rollout.engine = "jax", which are not known .*\n.*"bf16"'):
        warm_precision(cfg, model_config(cfg))
    assert not warm_precision(config("fp8_rollout"), model_config(cfg)).any_fp8


def test_a_draft_head_learns_beside_the_policy_which_learns_the_same_in_bits():
    compiled, before = [], []

    def listen(event: str, duration: float, **_) -> None:
        compiled.extend([event] * (event == "/jax/core/compile/backend_compile_duration"))

    def warmed(*words: str):
        cfg = config("bf16", "--sft.steps", "12", "--sft.warmup_steps", "2", *words)
        model = model_config(cfg)
        data = load_data(cfg, model)
        data = data.task, data.train, data.tokenizer
        before.clear()
        jax.monitoring.register_event_duration_secs_listener(listen)
        found = warm_start.warm_start(cfg, model, starting_params(cfg, model), data, lambda _: None,
                                      lambda step: before.append(len(compiled)))
        jax.monitoring.unregister_event_duration_listener(listen)
        assert len(before) == 12 and before[0] < before[1] == before[11], "the first update alone compiles"
        return found, cfg, model, data

    (params, draft), cfg, model, data = warmed("--rollout.speculation", "head", "--rollout.min_num_seqs",
                                               "64")
    (plain, none), *_ = warmed()
    assert none is None and int(draft.step) == 12
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    learned, fresh = (_guesses(cfg, model, data, params, head) for head in (draft, fresh_draft(cfg, model)))
    assert learned > fresh + 0.5, "the mean log-probability of a token that the head guesses"


def _guesses(cfg, model, data, params, draft) -> float:
    found = WarmStart.of(cfg, model, data, with_draft=True)
    state = found.begin(jax.tree.map(jnp.copy, params))._replace(draft=jax.tree.map(jnp.copy, draft))
    _, _, metrics = found.update(state, found.policy(state.params), found.batch(99))
    return float(metrics["draft/logp"])


def test_a_warm_start_alone_has_no_draft_head():
    cfg = config("bf16", "--sft.steps", "2", "--rollout.speculation", "head", "--rollout.min_num_seqs", "64")
    model = model_config(cfg)
    data = load_data(cfg, model)
    found = WarmStart.of(cfg, model, (data.task, data.train, data.tokenizer))
    assert found.begin(starting_params(cfg, model)).draft is None
