"""The embedded engine's log-probabilities are the learner's, on the tokens it sampled.

In float32 the two differ in the order of sums alone: prefill and decode against packed rows, some 1e-6 nats.
Where activations or cached keys and values are rounded to E4M3, such a difference now and then tips a value
over a rounding boundary and moves every later token of that row by 2^-4 of one element: rare, and no order of
summation prevents it. So with such roundings nearly all tokens agree to 1e-5 and the rest stay small; a
learner that lacks one of the roundings agrees on nearly none.
"""

import dataclasses
import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.config.learning import Loss
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.losses.objectives import SELECTING, policy_loss
from jaxfp8rl.precision.records import KvFormat, Precision
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.samples import make_top_k
from jaxfp8rl.training import publishing
from jaxfp8rl.training.context import RunContext, build_run
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score
from jaxfp8rl.training.update_batches import pack_samples
from jaxfp8rl.types import TrainBatch

pytestmark = pytest.mark.usefixtures("quick_compile")
TINY = ("--rollout.prompts_per_step", "8", "--rollout.samples_per_prompt", "4", "--rollout.max_new_tokens",
        "12",
        "--rollout.temperature", "0.8", "--train.rows_per_microbatch", "4", "--sft.steps", "0")
AUTO_KV, W8A16 = ("--rollout.kv_cache", "auto"), ("--precision.embedded_activations", "high")
SOME_LAYERS = ("--model.config.num_hidden_layers", "4", "--precision.first_layers_bf16", "1",
               "--precision.last_layers_bf16", "1", "--precision.exclude", r"layers\.2\.self_attn\.o_proj")
CASES = {
    "bf16": ("--precision.recipe", "bf16", *AUTO_KV),
    "W8A16, some layers": (*AUTO_KV, *W8A16, *SOME_LAYERS),
    "W8A16, FP8 KV": W8A16,
    "W8A8, some layers": (*AUTO_KV, *SOME_LAYERS),
    "W8A8, FP8 KV": (),
}
OBJECTIVES = get_args(Loss.model_fields["objective"].annotation)
EXACT = ("bf16", "W8A16, some layers")  # nothing that depends on a sum is rounded to E4M3


@functools.cache
def case(name: str) -> tuple[RunContext, dict, TrainBatch]:
    """A run's context, parameters far from uniform, and a packed batch that its engine sampled from them."""
    ctx = build_run(load_config("demo", ["--run.dir", "unused", *TINY, *CASES[name]]))
    params = jax.tree.map(lambda a: 4 * a if jnp.std(a) > 0 else a, ctx.initial_params())
    publishing.publish(ctx, ctx.policy(params), 3)
    return ctx, params, sample(ctx, seed=1)


def sample(ctx: RunContext, seed: int, known: bool = True) -> TrainBatch:
    prompts = ctx.train[seed * 8 : seed * 8 + 8]
    requests = scored_groups.make_requests(prompts, ctx.sampling, 4, seed, 1)
    kept, rejected = scored_groups.generate(ctx.engine, prompts, requests, 3)
    assert not rejected
    among = lambda c: scored_groups.support_of(c) if known else None
    return pack_samples(
        ctx,
        [Sample(p.token_ids, c.token_ids, c.logprobs, 0.0, support=among(c)) for p, cs in kept for c in cs]
    )


def gaps(ctx: RunContext, params, batch: TrainBatch, precision: Precision | None = None) -> np.ndarray:
    """|learner - engine| of each sampled token, in nats; of a learner of another precision where one is
    given.
    """
    policy, score = ctx.policy, ctx.score
    if precision:
        policy, score = make_policy(precision), make_score(make_logprobs(ctx.model, precision, 0.8, "none"))
    return np.abs(np.asarray(score(policy(params), batch)) - batch.rollout_logp)[batch.response_mask]


@pytest.mark.parametrize("name",
                         [pytest.param(n, marks=pytest.mark.slow) if "layers" in n or "W8A16" in n else n
                          for n in CASES])
def test_engine_and_learner_agree_on_every_token(name):
    ctx, params, batch = case(name)
    found = gaps(ctx, params, batch)
    # the distributions are not flat
    assert len(found) > 200 and np.std(batch.rollout_logp[batch.response_mask]) > 0.5
    if name in EXACT:
        assert found.max() < 1e-5
    else:
        assert np.median(found) < 2e-6 and np.quantile(found, 0.8) < 1e-5 and found.max() < 0.5


@functools.cache
def filtered(**settings) -> tuple[RunContext, dict, TrainBatch]:
    """As `case`, of a run that samples among the likeliest tokens."""
    ctx, params, _ = case("bf16")
    rollout = ctx.cfg.rollout.model_copy(update=settings)
    ctx = dataclasses.replace(ctx, cfg=ctx.cfg.model_copy(update={"rollout": rollout}))
    return ctx, params, sample(ctx, seed=1)


FILTER = {"top_k": 8, "top_p": 0.8}


def test_of_a_filtered_draw_engine_and_learner_normalise_over_the_same_tokens():
    """Which are those that numpy leaves of the learner's whole distribution."""
    ctx, params, batch = filtered(**FILTER)
    live = batch.response_mask
    assert gaps(ctx, params, batch).max() < 1e-5 and (batch.rollout_logp[live] < -1e-3).mean() > 0.3
    assert np.median(gaps(ctx, params, sample(ctx, 1, known=False))) > 0.05  # over the whole vocabulary
    words = ctx.model.vocab_size
    ids, logp = make_top_k(ctx.model, ctx.precision, 0.8, words)(ctx.policy(params), batch)
    p = np.exp(np.asarray(logp, np.float64)[live][:, : FILTER["top_k"]])
    p /= p.sum(-1, keepdims=True)
    before, border = p.cumsum(-1) - p, FILTER["top_p"]
    clear = np.abs(before - border).min(-1) > 1e-4  # elsewhere roundings decide
    assert clear.mean() > 0.9
    for kept, order, told in zip((before < border)[clear], np.asarray(ids)[live][clear],
                                 batch.support[live][clear]):
        assert set(order[: kept.sum()]) == set(told[told >= 0])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_filter_takes_no_gradient_from_tokens_to_be_avoided(objective):
    """With two policies the ratio is pi / mu: at zero age it is 1, whatever the filter, and nothing is
    clipped. Of the tokens with a negative advantage GSPO had kept none, ppo_clip 8%, DPPO 75%."""
    ctx, params, batch = filtered(**FILTER)
    logp, config = ctx.score(ctx.policy(params), batch), Loss(objective=objective).objective_config
    rows = [jnp.asarray(a[0]) for a in (batch.rollout_logp, batch.response_mask, batch.segment_ids)]
    chosen = jnp.zeros_like(rows[1]) if objective in SELECTING else None
    loss = lambda logp: jnp.sum(policy_loss(logp, rows[0], -jnp.ones_like(logp), *rows[1:], config, None,
                                            chosen)[0])
    gradient = np.asarray(jax.grad(loss)(logp[0]))[batch.response_mask[0]]
    assert (np.abs(gradient) > 1e-3 / len(gradient)).all() and len(gradient) > 50


@pytest.mark.parametrize("missing", [{"kv": KvFormat()}, {"activations_fp8": False}],
                         ids=["kv", "activations_fp8"])
def test_a_learner_without_one_of_the_roundings_is_far_off(missing):
    ctx, params, batch = case("W8A8, FP8 KV")
    lacking = dataclasses.replace(ctx.precision, **missing)
    found = gaps(ctx, params, batch, lacking)
    assert np.median(found) > 1e-3


@pytest.mark.slow  # the test before it has the fast form
def test_a_learner_that_excludes_other_layers_is_far_off():
    ctx, params, batch = case("W8A16, some layers")
    runs = tuple(dataclasses.replace(r, fp8=r.fp8 | {"o_proj"} if r.fp8 else r.fp8)
                 for r in ctx.precision.runs)
    other = dataclasses.replace(ctx.precision, runs=runs)
    assert np.median(gaps(ctx, params, batch, other)) > 1e-4


def test_a_publish_replaces_the_weights_and_the_old_batch_no_longer_fits():
    ctx, params, batch = case("bf16")
    moved = jax.tree.map(lambda a: a * 1.05, params)
    publishing.publish(ctx, ctx.policy(moved), 3)
    try:
        again = sample(ctx, seed=1)
        assert gaps(ctx, moved, again).max() < 1e-5 < np.median(gaps(ctx, params, again))
    finally:
        publishing.publish(ctx, ctx.policy(params), 3)
    # and back, bit for bit
    np.testing.assert_array_equal(sample(ctx, seed=1).rollout_logp, batch.rollout_logp)


def test_a_publish_that_was_not_read_back_is_verified(monkeypatch):
    ctx, params, _ = case("bf16")
    verified, publish = [], ctx.transport.publish
    monkeypatch.setattr(ctx.transport, "verify", verified.append)
    receipt = publishing.publish(ctx, ctx.policy(params), 3)
    assert verified == [receipt] and not receipt.content
    monkeypatch.setattr(ctx.transport, "publish",
                        lambda *args: dataclasses.replace(publish(*args), content="of the engine"))
    assert publishing.publish(ctx, ctx.policy(params), 3).content and verified == [receipt]


def test_other_prompts_compile_nothing():
    ctx, params, batch = case("bf16")
    gaps(ctx, params, batch)
    before = ctx.engine._flights.programs(), ctx.score._cache_size()
    for seed in (2, 3):
        ctx.score(ctx.policy(case("bf16")[1]), sample(ctx, seed))
    assert (ctx.engine._flights.programs(), ctx.score._cache_size()) == before


def test_an_evaluation_runs_the_programs_of_a_step():
    ctx, *_ = case.__wrapped__("bf16")  # one whose engine has compiled nothing for other tests
    prompts = ctx.train[:3]
    before = ctx.engine._flights._advance._cache_size()
    for sampling in (ctx.greedy, ctx.sampling):
        requests = scored_groups.make_requests(prompts, sampling, 1, 0, 1)
        scored_groups.generate(ctx.engine, prompts, requests, 3)
    assert ctx.engine._flights._advance._cache_size() == before == 1


def test_an_evaluation_of_more_than_a_step_takes_turns():
    ctx, *_ = case("bf16")
    prompts = ctx.train[:40]
    requests = scored_groups.make_requests(prompts, ctx.greedy, 1, 0, 1)
    kept, _ = scored_groups.generate(ctx.engine, prompts, requests, 3)
    shape = ctx.engine._flights._shape
    assert len(kept) == 40 <= shape.sequences and shape.rows == 32  # a step's completions


def test_filters_and_temperature_leave_the_reported_distribution_normalised():
    """With top_k = 1 every sampled token is certain; the greedy one is reported at temperature 1,
    unfiltered."""
    ctx, params, _ = case("bf16")
    prompts = ctx.train[:8]
    certain = dataclasses.replace(ctx.sampling, top_k=1)
    for sampling, sure in ((certain, True), (ctx.greedy, False)):
        kept, _ = scored_groups.generate(ctx.engine, prompts,
                                         scored_groups.make_requests(prompts, sampling, 1, 0, 1), 3)
        values = np.concatenate([c.logprobs for _, (c,) in kept])
        assert (values == 0).all() if sure else (values < 0).all()
        tokens = [c.token_ids.tolist() for _, (c,) in kept]
        if sure:
            first = tokens
    assert tokens == first


@pytest.mark.parametrize("keep", [True, False])
def test_tokens_over_several_publishes_have_the_log_probabilities_that_they_were_sampled_with(keep):
    """With keys and values computed again, those of each version's learner; with kept ones, up to the first
    publish alone."""
    ctx, params, _ = case("bf16")
    weights, prompts = {0: params}, ctx.train[:4]
    requests = scored_groups.make_requests(prompts, ctx.sampling, 4, 9, 1)
    publishing.publish(ctx, ctx.policy(params), 0)
    ctx.engine.submit(requests)
    done = ctx.engine.poll()
    for version in (1, 2):
        weights[version] = jax.tree.map(lambda a, version=version: a * (1 + 0.1 * version), params)
        ctx.engine.pause(keep)
        publishing.publish(ctx, ctx.policy(weights[version]), version)
        ctx.engine.resume()
        done += ctx.engine.poll()
    while ctx.engine.partial():
        done += ctx.engine.poll()
    order = {r.request_id: p for r, p in zip(requests, prompts)}
    samples = [Sample(order[c.request_id].token_ids, c.token_ids, c.logprobs, 0.0) for group in done
               for c in group]
    batch = pack_samples(ctx, samples)
    versions = [np.repeat([v.version for v in c.version_spans], [v.stop - v.start for v in c.version_spans])
                for group in done for c in group]
    told = [s._replace(logprobs=v.astype(np.float32)) for s, v in zip(samples, versions)]
    of_version = pack_samples(ctx, told).rollout_logp
    found = {}
    for version, w in weights.items():
        gap = np.abs(np.asarray(ctx.score(ctx.policy(w), batch)) - batch.rollout_logp)
        found[version] = gap[batch.response_mask & (of_version == version)]
    publishing.publish(ctx, ctx.policy(params), 3)
    assert all(len(gap) > 20 for gap in found.values()) and found[0].max() < 1e-5
    later = np.concatenate([found[1], found[2]])
    assert later.max() < 1e-5 if not keep else np.median(later) > 1e-4
