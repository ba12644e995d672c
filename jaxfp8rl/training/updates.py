"""What the learner does with a step's packed batches: score them once, then update by each in turn."""

from __future__ import annotations

import dataclasses
import math

import jax

from jaxfp8rl.distributed.mesh import fetch
from jaxfp8rl.errors import NonFiniteStep
from jaxfp8rl.policy.policy import scales_in
from jaxfp8rl.precision.recipe import FP8_KV
from jaxfp8rl.probes.finite import find_nonfinite
from jaxfp8rl.probes.probes import precision_report
from jaxfp8rl.rollout.scored_groups import Rollouts
from jaxfp8rl.run.run_directory import RunDirectory
from jaxfp8rl.training.context import RunContext
from jaxfp8rl.training.step_metrics import counts_of, of_step
from jaxfp8rl.training.unlearned import cause, equal_rewards
from jaxfp8rl.types import Params, TrainBatch, TrainState


def score(ctx: RunContext, policy: Params, batch: TrainBatch) -> tuple[jax.Array, jax.Array | None]:
    """(old_logp, reference_logp or None), [M, R, T]. old_logp is recomputed by the learner, or the engine's
    own word where the update needs no scoring pass."""
    recompute = (ctx.kv_scales or ctx.replay or ctx).score
    old = recompute(policy, batch) if ctx.cfg.loss.old_policy == "recomputed" else batch.rollout_logp
    if ctx.reference is None:
        return old, None
    # in the same attention
    return old, ctx.score(ctx.reference | scales_in(policy), batch._replace(routes=None))


def run_updates(
    ctx: RunContext, run: RunDirectory, state: TrainState, policy: Params, step: int, sampled: Rollouts,
    packed: list[TrainBatch],
    scored: list[tuple],
) -> tuple[TrainState, Params, dict[str, float]]:
    """Apply the step's updates in turn -> (state, its policy, the step's metrics). `state` and `policy` are
    donated; `sampled` is what `packed` was made of. Raises NonFiniteStep after too many bad ones in a row."""
    rows, counts, calibration = [], [], ctx.calibration
    drops_rejected = ctx.cfg.loss.old_policy == "recomputed" and ctx.cfg.correction.resolve(
        ).denominator == "kept"
    # one has no ratios
    shadow = calibration.begin(step, state.params, packed[-1]) if calibration and len(packed) > 1 else None
    for batch, (old, reference) in zip(packed, scored):
        if calibration and shadow is not None and batch is packed[-1]:
            calibration.finish(state.params, batch, ctx.score(policy, batch), old, shadow)
        clip = calibration.clip if calibration else None
        state, policy, metrics = ctx.train_step(state, policy, batch, old, reference, clip)
        rows.append({k: float(v) for k, v in jax.device_get(metrics).items()})
        if clip:
            rows[-1] |= {"clip/bound_low": float(clip[0]), "clip/bound_high": float(clip[1])}
        counts.append(counts_of(batch, rows[-1], drops_rejected))
        ctx.spikes.add(rows[-1]["loss"])
        if is_bad(rows[-1]):
            saved = run.save_bad_batch(batch, old)
            where = find_nonfinite(state.params, batch, ctx.model, ctx.precision, fetch(old),
                                   ctx.cfg.rollout.temperature)
            run.note(f"step {step}: an update was not finite and was not applied: {where}")
            if rows[-1]["update/bad_in_a_row"] >= ctx.cfg.optim.max_bad_steps:
                raise NonFiniteStep(
                    f"{ctx.cfg.optim.max_bad_steps} updates in a row were not finite; none was applied: {where}",
                    f"look at {saved}; resume from the last checkpoint with --resume and a lower optim.lr",
                )
        elif not rows[-1]["tokens/update"]:
            why = cause(sampled, batch, ctx.cfg, rows[-1])
            run.note(f"step {step}: no update: {why.text}", why.detail, why.text)
    if any(r["tokens/update"] for r in rows) and (why := equal_rewards(sampled, ctx.cfg)):
        # the update was of a penalty alone, or of the groups' levels
        run.note(f"step {step}: {why.text}", why.detail, why.text)
    return state, policy, of_step(rows, counts)


def is_bad(update: dict[str, float]) -> bool:
    """Whether it was not finite, with or without anything to learn from, and not for a loss scale that was
    too large."""
    return not (update["update/overflow"]
                or (math.isfinite(update["loss"]) and math.isfinite(update["grad_norm"])))


def probe(ctx: RunContext, run: RunDirectory, state: TrainState, policy: Params,
          batch: TrainBatch) -> dict[str, float]:
    """What FP8 rounds away in weights, activations and the cache, and which layers that shows in: metrics of
    the step, and the whole report as precision.json. All as the engine has it: a learner without FP8 is asked
    what that would cost it. `policy` is of `state` and has the scales of FP8 attention, where there are any.
    """
    formats = ctx.engine.capabilities().formats
    precision = dataclasses.replace(
        ctx.precision, runs=ctx.runs, kv_fp8=formats.kv_cache == FP8_KV,
        kv_truncated=formats.kv_truncated,
        attention_fp8=formats.attention == FP8_KV, fused_quantizer=formats.fused_quantizer,
    )
    if not (precision.any_fp8 or precision.kv_fp8):
        return {}
    params = {**state.params, **scales_in(policy)}
    report = precision_report(params, batch, ctx.model, precision, ctx.cfg.rollout.temperature)
    report.save(run.path / "precision.json")
    return report.metrics() | {"precision/loss_spikes": ctx.spikes.count}
