"""Evaluate the policy on the held-out problems during a run."""

from __future__ import annotations

import numpy as np

from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.training.context import RunContext, ignored
from jaxfp8rl.training.publishing import sync_weights, with_noise
from jaxfp8rl.types import Params, TrainState

EVAL_STEP = 2**31  # evaluation draws its seeds from here on, apart from training's


def evaluate(ctx: RunContext, version: int) -> dict[str, float]:
    """Evaluate one greedy completion of each held-out problem: the mean reward, the counts of problems, and
    the share of completions that are the commonest one.

    A completion that was rejected or has no score counts as 0 in the mean and is counted in `eval/undefined`.
    Returns {} if the task holds out no problems.
    """
    return ctx.group.broadcast(lambda: evaluated(ctx, version)) if ctx.held_out else {}


def evaluated(ctx: RunContext, version: int) -> dict[str, float]:
    requests = scored_groups.make_requests(ctx.held_out, ctx.greedy, 1, ctx.cfg.run.seed,
                                           EVAL_STEP + version)
    kept, rejected = scored_groups.generate(ctx.player, ctx.held_out, requests, version,
                                            cut=ctx.stops.cut)
    groups = scored_groups.score(kept, ctx.tokenizer, ctx.rewards, ctx.cfg.task.think_tags)
    rewards = np.concatenate([[], *(g.rewards for g in groups)])
    problems, undefined = len(kept) + len(rejected), int(np.isnan(rewards).sum()) + len(rejected)
    named = {f"eval/{name}": mean for name, mean in scored_groups.named_means(groups, 0.0).items()}
    return {"eval/reward_mean": float(np.nan_to_num(rewards).sum() / problems), "eval/problems": problems,
            "eval/undefined": undefined, "eval/commonest_share": scored_groups.commonest_share(kept), **named}


def evaluate_quietly(ctx: RunContext, state: TrainState, policy: Params,
                     step: int) -> tuple[dict[str, float], Params]:
    """`evaluate` the policy itself, without the noise that it samples with -> (metrics, the policy)."""
    if not ctx.noise.sigma(step):
        return evaluate(ctx, step), policy
    with ctx.batches.held(Clock(ignored)):
        _, policy = sync_weights(ctx, state, policy, step)
        found = evaluate(ctx, step)
        return found, with_noise(ctx, state, policy, step)
