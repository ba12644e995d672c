"""precision.exact = "engine": the learner's log-probabilities are those that the embedded engine recorded, in
every bit, whatever was decoded beside a token, and the gradient is the plain learner's."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.precision.weights import grad_slots_of, trainable
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.training import loop, publishing
from jaxfp8rl.training.context import RunContext, build_run
from jaxfp8rl.training.step import make_logprobs
from jaxfp8rl.training.update_batches import pack_samples
from jaxfp8rl.types import TrainBatch
from pallas_kernels.decode_attention import ordered
from pallas_kernels.logprob import parts
from pallas_kernels.numerics import relative_l2

pytestmark = pytest.mark.usefixtures("quick_compile")
SMALL = ("--rollout.prompts_per_step", "6", "--rollout.samples_per_prompt", "4", "--rollout.temperature",
         "0.8",
         "--train.rows_per_microbatch", "2", "--sft.steps", "0", "--rollout.max_new_tokens", "6",
         "--precision.exact", "engine")
AUTO_KV, BF16 = ("--rollout.kv_cache", "auto"), ("--precision.recipe", "bf16")
IN_BF16 = ("--precision.compute_dtype", "bfloat16")
MIXTURE = ("--model.config.architectures", '["Qwen3MoeForCausalLM"]', "--model.config.model_type",
           "qwen3_moe",
           "--model.config.num_experts", "4", "--model.config.num_experts_per_tok", "2",
           "--model.config.moe_intermediate_size", "128", "--model.config.decoder_sparse_step", "1",
           "--model.config.mlp_only_layers", "[]", "--model.config.norm_topk_prob", "true")
CASES = {
    "FP8": (),  # fewer rows than sequences: refills, and groups share the pages of their prompt
    "FP8, BF16 cache": (*AUTO_KV, *IN_BF16),
    "W8A16": ("--precision.embedded_activations", "high"),
    "float32": (*BF16, *AUTO_KV),
    "BF16": (*BF16, *AUTO_KV, *IN_BF16),
    "a mixture in FP8": MIXTURE,
    "a mixture in BF16": (*MIXTURE, *BF16, *AUTO_KV, *IN_BF16),
}


@functools.cache
def case(name: str, rows: int = 5) -> tuple[RunContext, dict]:
    """A run's context, and parameters far from uniform."""
    ctx = build_run(load_config("demo", ["--run.dir", "unused", *SMALL, *CASES[name],
                                         "--rollout.max_num_seqs", str(rows)]))
    params = jax.tree.map(lambda a: 4 * a if jnp.std(a) > 0 else a, ctx.initial_params())
    publishing.publish(ctx, ctx.policy(params), 3)
    return ctx, params


def sampled(ctx: RunContext, seed: int = 1, prompts: int = 6) -> TrainBatch:
    problems = ctx.train[seed * prompts : (seed + 1) * prompts]
    requests = scored_groups.make_requests(problems, ctx.sampling, 4, seed, 1)
    kept, rejected = scored_groups.generate(ctx.engine, problems, requests, 3)
    assert not rejected
    return pack_samples(ctx, [Sample(p.token_ids, c.token_ids, c.logprobs, 0.0) for p, cs in kept
                                   for c in cs])


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.int32)


@pytest.mark.parametrize("name",
                         [n if n == "FP8" else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_learners_log_probabilities_are_the_engines_bit_for_bit(name):
    ctx, params = case(name)
    batch = sampled(ctx)
    live = batch.response_mask
    assert live.sum() > 70 and np.std(batch.rollout_logp[live]) > 0.3
    assert (bits(ctx.score(ctx.policy(params), batch)) == bits(batch.rollout_logp))[live].all()


@pytest.mark.slow
def test_tokens_that_a_draft_head_guessed_have_the_policys_log_probabilities():
    """More rows than sequences, so that guesses are verified."""
    ctx = build_run(load_config("demo", ["--run.dir", "unused", *SMALL, "--rollout.min_num_seqs", "96",
                                         "--rollout.speculation", "head"]))
    params = jax.tree.map(lambda a: 4 * a if jnp.std(a) > 0 else a, ctx.initial_params())
    publishing.publish(ctx, ctx.policy(params), 3, draft=ctx.fresh_draft())
    batch = sampled(ctx)
    told = ctx.engine.metrics()
    assert told["speculation/drafted"] > 50 and 0 < told["speculation/accepted"] < 1
    assert (bits(ctx.score(ctx.policy(params), batch)) == bits(batch.rollout_logp))[batch.response_mask].all()


@pytest.mark.slow
def test_without_it_they_are_not():
    ctx, params = case("FP8")
    plain = make_logprobs(ctx.model, dataclasses.replace(ctx.precision, exact=0), 0.8, "none")
    batch = sampled(ctx)
    micro = jax.tree.map(lambda x: x[0], batch)
    found, live = jax.jit(plain)(ctx.policy(params), micro)[0], micro.response_mask
    assert not (bits(found) == bits(micro.rollout_logp))[live].all()
    assert np.max(np.abs(found - micro.rollout_logp)[live]) < 1


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 16])
def test_over_numbers_of_rows(rows):
    ctx, params = case("FP8", rows)
    batch = sampled(ctx, 2, prompts=4)
    live = batch.response_mask
    assert (bits(ctx.score(ctx.policy(params), batch)) == bits(batch.rollout_logp))[live].all()


@pytest.mark.slow
def test_with_staggered_arrivals_and_rows_that_are_put_out():
    ctx, params = case("FP8")
    ctx.engine._flights._pages = 8  # each sequence may take one of 16 slots
    problems, engine = ctx.train[30:42], ctx.engine
    requests, done = scored_groups.make_requests(problems, ctx.sampling, 3, 5, 1), []
    for request in requests:
        engine.submit([request])
        done += engine.poll()
    while len(done) < len(requests):
        done += engine.poll()
    prompt = {r.request_id: r.prompt_token_ids for r in requests}
    batch = pack_samples(ctx, [Sample(prompt[c.request_id], c.token_ids, c.logprobs, 0.0) for g in done
                                    for c in g])
    assert (bits(ctx.score(ctx.policy(params), batch)) == bits(batch.rollout_logp))[batch.response_mask].all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "FP8", "a mixture in FP8"])
def test_the_gradient_is_the_plain_learners(name):
    """In float32 to its roundings. In FP8 codes differ where the sums before them do: by no more than the
    plain gradient moves where the embedding is off by a rounding of float16, as exponentials are."""
    ctx, params = case(name)
    policy, micro, rng = ctx.policy(params), jax.tree.map(lambda x: x[0],
                                                          sampled(ctx)), np.random.default_rng(0)
    weigh = jnp.asarray(rng.standard_normal(micro.tokens.shape), jnp.float32)

    def gradient(exact: int, policy: dict = policy) -> list:
        logprobs = make_logprobs(ctx.model, dataclasses.replace(ctx.precision, exact=exact), 0.8, "layer")
        slots = grad_slots_of(policy, ctx.precision.compute_dtype)
        loss = lambda slots: jnp.sum(logprobs(trainable(policy, slots), micro)[0] * weigh)
        return jax.tree.leaves(jax.jit(jax.grad(loss))(slots))

    exact, plain = gradient(ctx.precision.exact), gradient(0)
    off = jax.tree.map(lambda w: w * jnp.asarray(1 + 2.0**-11 * rng.uniform(-1, 1, w.shape), w.dtype),
                       policy["embed_tokens"])
    moved = gradient(0, policy | {"embed_tokens": off})
    for one, other, third in zip(exact, plain, moved, strict=True):
        bound = 1e-5 if name == "float32" else 2 * relative_l2(third, other)
        assert np.linalg.norm(other) > 0 and bound < 0.5
        assert relative_l2(one, other) < bound


@pytest.mark.slow
def test_every_correction_weight_of_a_run_is_one(tmp_path):
    cfg = load_config("demo", ["--run.dir", str(tmp_path / "run"), "--run.steps", "4", "--run.eval_every",
                               "0",
                               "--run.eval_problems", "8", "--run.save_every", "0", "--sft.steps", "8",
                               "--rollout.prompts_per_step", "16", "--train.rows_per_microbatch", "8",
                               "--precision.exact", "engine", "--correction.preset", "token_tis"])
    loop.train(cfg)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "mismatch/k3" in line]
    assert len(steps) == 4
    for line in steps:
        assert line["mismatch/k3"] == line["mismatch/max_logp_diff"] == line["staleness/k1"] == 0
        assert line["correction/raw_weight_min"] == line["correction/raw_weight_max"] == 1
        assert line["correction/weight_min"] == line["correction/weight_max"] == 1


@pytest.mark.parametrize("window", [None, 300])
def test_a_querys_attention_depends_on_its_own_keys_alone(window):
    """Beside other queries, in other orders and places, to the bit; and it is softmax's."""
    rng, (S, K, d) = np.random.default_rng(0), (1400, 2, 16)
    k, v = (jnp.asarray(rng.normal(size=(S, K, d)), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(20, 4, d)), jnp.float32)
    lengths, base = (jnp.asarray(rng.integers(*at, 20), jnp.int32) for at in ((0, 1100), (0, 300)))
    attend = jax.jit(lambda q, n, base: ordered.attention(
        q, k, v, n, lambda base, at: base[:, None] + at, base, jnp.ones(K), jnp.ones(K), 0.3,
        None if window is None else jnp.maximum(n - window, 0)))
    o = attend(q, lengths, base)
    for some in ([5], [3, 7], range(19, -1, -1)):
        some = np.array(some)
        np.testing.assert_array_equal(attend(q[some], lengths[some], base[some]), o[some])
    for i in range(20):
        first = max(0, int(lengths[i]) - (window or S))
        keys, values = (np.asarray(x, np.float64)[int(base[i]) :][first : int(lengths[i])] for x in (k, v))
        p = np.exp(0.3 * np.einsum("kgd,skd->kgs", np.asarray(q[i]).reshape(K, 2, d), keys))
        want = np.einsum("kgs,skd->kgd", p / np.maximum(p.sum(-1, keepdims=True), 1e-30), values)
        np.testing.assert_allclose(np.asarray(o[i]).reshape(K, 2, d), want, atol=1e-6)


def test_a_heads_log_probabilities_depend_on_their_own_row_alone():
    rng, words = np.random.default_rng(0), 700
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((20, 32), (words, 32)))
    targets, inverse = jnp.asarray(rng.integers(0, words,
                                                20)), jnp.asarray(rng.uniform(0.5, 2, 20), jnp.float32)
    by_parts = jax.jit(parts.logprobs)
    found = by_parts(x, w, targets, inverse)
    for some in ([5], [3, 7], range(19, -1, -1)):
        some = np.array(some)
        np.testing.assert_array_equal(by_parts(x[some], w, targets[some], inverse[some]), found[some])
    want = jax.nn.log_softmax(x @ w.T * inverse[:, None])[jnp.arange(20), targets]
    np.testing.assert_allclose(found, want, atol=1e-5)
