"""The start-up gate: the learner and the engine score the same tokens with the same weights.

A gap means that they compute different models, and every later number would measure that difference. The
gate also catches an engine that silently missed a weight sync. Under moe.replay = "R3" the learner computes
with the engine's experts, as in the steps.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxfp8rl.config.schema import Gate
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.distributed.mesh import fetch
from jaxfp8rl.errors import GateFailed
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.training.context import RunContext
from jaxfp8rl.training.evaluation import EVAL_STEP
from jaxfp8rl.training.update_batches import pack_samples
from jaxfp8rl.types import Params, TrainBatch


def gate(ctx: RunContext, policy: Params, version: int) -> dict[str, float]:
    """Sample a few completions and score them with the learner, as a step does: with the engine's routes if
    they are to be replayed (moe.replay = "R3"). Raises GateFailed if engine and learner disagree.

    Sampling uses neither top_k nor top_p, so that the full distributions are compared.
    """
    samples, rejected = gate_samples(ctx, version) if ctx.group.first else ([], 0)
    batch = pack_samples(ctx, samples)
    found = check_gate(ctx.cfg.gate, jax.device_get(batch), fetch(ctx.score(policy, batch)), ctx.tokenizer)
    return found | {"gate/rejected": rejected}


def gate_samples(ctx: RunContext, version: int) -> tuple[list[Sample], int]:
    """The gate's samples, and how many completions were unusable (`scored_groups.generate`)."""
    prompts = (ctx.held_out or ctx.train)[: ctx.cfg.gate.completions]
    length = min(ctx.cfg.gate.max_new_tokens, ctx.sampling.max_tokens)
    sampling = dataclasses.replace(ctx.sampling, max_tokens=length, top_k=0, top_p=1.0, support=0)
    requests = scored_groups.make_requests(prompts, sampling, 1, ctx.cfg.run.seed, EVAL_STEP - 1)
    kept, rejected = scored_groups.generate(ctx.engine, prompts, requests, version, ctx.unfit)
    return [s for p, c in kept for s in scored_groups.samples_of(p, c[0])], len(rejected)


def check_gate(cfg: Gate, batch: TrainBatch, learner_logp: np.ndarray,
               tokenizer: Tokenizer) -> dict[str, float]:
    """Compare the learner's log-probabilities [M, R, T] with the engine's in `batch`; float32, in nats.

    Returns gate/mean_gap and gate/max_gap. Raises GateFailed, which shows the worst token in its context, if
    a gap exceeds its limit in `cfg` or is not finite.
    """
    gaps = np.abs(np.asarray(learner_logp) - batch.rollout_logp)
    gaps = np.where(batch.response_mask, np.where(np.isfinite(gaps), gaps, np.inf), 0.0)
    mean, worst = gaps.sum() / batch.response_mask.sum(), gaps.max()
    if mean <= cfg.max_mean_gap and worst <= cfg.max_gap:
        return {"gate/mean_gap": float(mean), "gate/max_gap": float(worst)}
    m, r, t = np.unravel_index(gaps.argmax(), gaps.shape)
    same = batch.segment_ids[m, r, :t] == batch.segment_ids[m, r, t]
    seen = same if batch.ends is None else batch.ends[m, r, :t] > t
    context = tokenizer.decode(batch.tokens[m, r, :t][seen].tolist()[-40:])
    token, learner, engine = int(batch.tokens[m, r, t]), learner_logp[m, r, t], batch.rollout_logp[m, r, t]
    raise GateFailed(
        f"learner and engine disagree at equal weights: mean gap {mean:.4g} nats (limit {cfg.max_mean_gap}), "
        f"largest {worst:.4g} (limit {cfg.max_gap})\n"
        f"  worst token: {tokenizer.decode([token])!r} (id {token}) after {context!r}: "
        f"learner {learner:.4f}, engine {engine:.4f}",
        "the engine may hold different weights or compute in different formats: compare its `capabilities()` "
        "with the precision recipe. If this gap is expected of the recipe, raise gate.max_mean_gap and "
        "gate.max_gap",
    )
