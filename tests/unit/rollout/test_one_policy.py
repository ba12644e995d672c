"""precision.exact = "engine": the learner's log-probabilities are those that the embedded engine recorded, in every
bit, whatever was decoded beside a token, and the gradient is the plain learner's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.losses.logprobs import token_logprobs
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.training import loop
from jaxfp8rl.training.context import RunContext, build_run
from jaxfp8rl.training.step import make_logprobs
from jaxfp8rl.types import TrainBatch
from pallas_kernels.decode_attention import ordered
from pallas_kernels.rows import by_rows

pytestmark = pytest.mark.usefixtures("quick_compile")
SMALL = ("--rollout.prompts_per_step", "6", "--rollout.samples_per_prompt", "4", "--rollout.temperature", "0.8",
         "--train.rows_per_microbatch", "2", "--sft.steps", "0", "--rollout.max_new_tokens", "6",
         "--precision.exact", "engine")
AUTO_KV, BF16 = ("--rollout.kv_cache", "auto"), ("--precision.recipe", "bf16")
IN_BF16 = ("--precision.compute_dtype", "bfloat16")
MIXTURE = ("--model.config.architectures", '["Qwen3MoeForCausalLM"]', "--model.config.model_type", "qwen3_moe",
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
    loop.publish(ctx, ctx.policy(params), 3)
    return ctx, params


def sampled(ctx: RunContext, seed: int = 1, prompts: int = 6) -> TrainBatch:
    problems = ctx.train[seed * prompts : (seed + 1) * prompts]
    requests = scored_groups.make_requests(problems, ctx.sampling, 4, seed, 1)
    kept, rejected = scored_groups.generate(ctx.engine, problems, requests, 3)
    assert not rejected
    return loop.pack_samples(ctx, [Sample(p.token_ids, c.token_ids, c.logprobs, 0.0) for p, cs in kept for c in cs])


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.int32)


@pytest.mark.parametrize("name", [n if n == "FP8" else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_learners_log_probabilities_are_the_engines_bit_for_bit(name):
    ctx, params = case(name)
    batch = sampled(ctx)
    live = batch.response_mask
    assert live.sum() > 70 and np.std(batch.rollout_logp[live]) > 0.3
    assert (bits(ctx.score(ctx.policy(params), batch)) == bits(batch.rollout_logp))[live].all()


def test_without_it_they_are_not():
    ctx, params = case("FP8")
    plain = make_logprobs(ctx.model, dataclasses.replace(ctx.precision, exact=0), 0.8, "none")
    batch = sampled(ctx)
    micro = jax.tree.map(lambda x: x[0], batch)
    found, live = jax.jit(plain)(ctx.policy(params), micro)[0], micro.response_mask
    assert not (bits(found) == bits(micro.rollout_logp))[live].all()
    assert np.max(np.abs(found - micro.rollout_logp)[live]) < 1
