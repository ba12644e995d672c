"""Engine and learner as one policy: vLLM compiled, W8A8, CUDA graphs, and the learner that mirrors it."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import jax
import numpy as np
import torch
import vllm

from benchmarks.mirror import gaps, sample
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.training import publishing
from jaxfp8rl.training.context import build_run
from jaxfp8rl.training.step import make_logprobs, make_score

OPTIONS = [
    "--rollout.engine", "vllm", "--rollout.gpu_memory_utilization", "0.1", "--rollout.kv_cache_gib", "4",
    "--rollout.kv_cache", "auto", "--precision.compute_dtype", "bfloat16", "--model.config.num_hidden_layers",
    "4",
    # two a KV head: short segments are one step of the attention kernel's keys
    "--model.config.num_attention_heads", "4",
]


def drawn_wide(ctx):
    """Random weights, so wide that the distributions are far from uniform."""
    return jax.tree.map(lambda w: 4 * w if w.ndim > 1 and w.shape[-1] > 64 else w, ctx.initial_params())


KERNEL = pytest.mark.xfail(strict=True,
                           reason="5.1% of tokens differ by the attention kernel: docs/attention.md")


@pytest.mark.parametrize(
    ("products", "attention"),
    [("tensor_core", "xla"), ("pallas", "xla"), pytest.param("pallas", "pallas", marks=KERNEL)]
)
def test_most_tokens_have_the_same_probability_in_both_to_the_last_bit(products, attention):
    """What is left is a rounding of BF16 attention or logits here and there."""
    same, apart, rollout = distances("--precision.products", products, "--precision.attention", attention)
    print(f"products {products}, attention {attention}, {told(same)}; summed in float32 {told(apart)}")
    assert rollout.std() > 0.5
    assert (same > 1e-5).mean() < 0.05 and same.mean() < 1e-3
    assert apart.mean() > 5 * same.mean()


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize(("architecture", "eps"), [("LlamaForCausalLM", "1e-6"), ("LlamaForCausalLM", "1e-5"),
                                                   ("MistralForCausalLM", "1e-5"),
                                                   ("Qwen2ForCausalLM", "1e-6"),
                                                   ("Qwen3ForCausalLM", "1e-5")])
def test_so_it_is_for_the_other_families(architecture, eps, cache):
    """With an FP8 cache FlashAttention 3's own sums remain: docs/notebook_precision.md."""
    model_type = architecture.removesuffix("ForCausalLM").lower()
    # Qwen2's heads are as wide as hidden_size and their number say: here 64, for rows of whole FP8 blocks
    wider = ["--model.config.hidden_size", "256"] if model_type == "qwen2" else []
    same, apart, rollout = distances(
        "--rollout.kv_cache", cache, "--precision.attention", "xla", "--model.config.rms_norm_eps", eps,
        "--model.config.architectures", f'["{architecture}"]', "--model.config.model_type", model_type,
        *wider)
    print(f"{architecture}, eps {eps}, cache {cache}, {told(same)}; summed in float32 {told(apart)}")
    assert rollout.std() > 0.5
    share, mean = (0.05, 1e-3) if cache == "auto" else (0.3, 1e-2)
    assert (same > 1e-5).mean() < share and same.mean() < mean


def distances(*options: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """|log-probability of the learner - the engine's| of every sampled token, with products as configured and
    summed in float32, and the engine's own, all [tokens]."""
    ctx = build_run(load_config("demo", [*OPTIONS, *options]))
    try:
        params = drawn_wide(ctx)
        policy = ctx.policy(params)
        publishing.publish(ctx, policy, 0)
        batch = sample(ctx, 1024)
        mask, rollout = np.asarray(batch.response_mask), np.asarray(batch.rollout_logp)
        other = dataclasses.replace(ctx.precision, products="float32")
        scores = ctx.score, make_score(make_logprobs(ctx.model, other, 1.0, remat="none"))
        same, apart = (np.abs(np.asarray(score(policy, batch)) - rollout)[mask] for score in scores)
    finally:
        ctx.close()
    return same, apart, rollout[mask]


def told(gaps: np.ndarray) -> str:
    return (f"{gaps.size} tokens: {(gaps > 1e-5).mean():.1%} differ, mean {gaps.mean():.2e}, largest "
            f"{gaps.max():.2e} nats")


def test_beside_an_fp8_cache_a_learner_in_bfloat16_is_nearer_to_the_engine_than_one_in_float32():
    """Of every vLLM that is tested: 0.25.1 and 0.32 compile the same roundings (docs/notebook_precision.md).
    The float32 learner's distance is what a wrong rounding looks like."""
    ctx = build_run(load_config("demo", [*OPTIONS, "--rollout.kv_cache", "fp8"]))
    try:
        params = drawn_wide(ctx)
        publishing.publish(ctx, ctx.policy(params), 0)
        batch, formats = sample(ctx, 1024), ctx.engine.capabilities().formats
        high = dataclasses.replace(ctx.precision, compute_dtype="float32")
        mirrored, apart = (gaps(ctx, params, batch, precision) for precision in (ctx.precision, high))
    finally:
        ctx.close()
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}, {formats}")
    print(f"bfloat16 {mirrored}\nfloat32 {apart}")
    assert formats.fused_quantizer and formats.attention == "fp8_e4m3"
    excess = [found["token_mult_prob_error"] - 1 for found in (mirrored, apart)]
    assert 2 * excess[0] < excess[1]
