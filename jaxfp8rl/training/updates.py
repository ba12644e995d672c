"""Score a step's packed batches once, then update the weights from each in turn."""

from __future__ import annotations

import dataclasses
import math

import jax

from jaxfp8rl.distributed.mesh import fetch
from jaxfp8rl.errors import NonFiniteStep
from jaxfp8rl.policy.policy import scales_in
from jaxfp8rl.precision.recipe import kv_of, rounding_of
from jaxfp8rl.probes.finite import find_nonfinite
from jaxfp8rl.probes.probes import precision_report
from jaxfp8rl.rollout.scored_groups import Rollouts
from jaxfp8rl.run.run_directory import RunDirectory
from jaxfp8rl.training.context import RunContext
from jaxfp8rl.training.step_metrics import counts_of, of_step
from jaxfp8rl.training.unlearned import cause, equal_rewards
from jaxfp8rl.types import Params, TrainBatch, TrainState


def score(ctx: RunContext, policy: Params, batch: TrainBatch) -> tuple[jax.Array, jax.Array | None]:
    """(old_logp, reference_logp or None), each [M, R, T] float32.

    The learner recomputes old_logp; where the update needs no scoring pass, old_logp is the engine's.
    """
    recompute = (ctx.kv_scales or ctx.replay or ctx).score
    old = recompute(policy, batch) if ctx.cfg.loss.old_policy == "recomputed" else batch.rollout_logp
    if ctx.reference is None:
        return old, None
    return old, ctx.reference(policy, batch)


def run_updates(
    ctx: RunContext, run: RunDirectory, state: TrainState, policy: Params, step: int, sampled: Rollouts,
    packed: list[TrainBatch],
    scored: list[tuple],
) -> tuple[TrainState, Params, dict[str, float]]:
    """Apply the step's updates in turn -> (state, its policy, the step's metrics).

    `state` and `policy` are donated. `packed` holds the samples made from the completions `sampled`, and
    `scored` the pair (old_logp, reference_logp) of each batch. Raises NonFiniteStep after
    optim.max_bad_steps updates in a row that were not finite.
    """
    rows, counts, calibration = [], [], ctx.calibration
    drops_rejected = ctx.cfg.loss.old_policy == "recomputed" and ctx.cfg.correction.resolve(
        ).denominator == "kept"
    # a step with one update has no ratios to calibrate by
    shadow = calibration.begin(step, state.params, packed[-1]) if calibration and len(packed) > 1 else None
    for batch, (old, reference) in zip(packed, scored):
        if calibration and shadow is not None and batch is packed[-1]:
            calibration.finish(state.params, batch, ctx.score(policy, batch), old, shadow)
        clip = calibration.clip if calibration else None
        state, policy, metrics = ctx.train_step(state, policy, batch, old, reference, clip)
        rows.append({k: float(v) for k, v in jax.device_get(metrics).items()})
        if clip:
            rows[-1] |= {"clip/bound_low": float(clip[0]), "clip/bound_high": float(clip[1])}
        counted = jax.device_get(batch._replace(routes=None, support=None))
        counts.append(counts_of(counted, rows[-1], drops_rejected))
        ctx.spikes.add(rows[-1]["loss"])
        if is_bad(rows[-1]):
            saved = run.save_bad_batch(batch, old)
            where = _where(ctx, state, batch, old)
            run.note(f"step {step}: an update was not finite and was not applied: {where}")
            if rows[-1]["update/bad_in_a_row"] >= ctx.cfg.optim.max_bad_steps:
                bad = ctx.cfg.optim.max_bad_steps
                raise NonFiniteStep(
                    f"{bad} updates in a row were not finite; none was applied: {where}",
                    f"inspect {saved}; resume from the last checkpoint with --resume and a lower optim.lr",
                )
        elif not rows[-1]["tokens/update"]:
            why = cause(sampled, counted, ctx.cfg, rows[-1])
            run.note(f"step {step}: no update: {why.text}", why.detail, why.text)
    by_rewards = ctx.cfg.loss.advantage != "none"
    if by_rewards and any(r["tokens/update"] for r in rows) and (why := equal_rewards(sampled, ctx.cfg)):
        # only a penalty, or a difference between groups, gave this update a gradient
        run.note(f"step {step}: {why.text}", why.detail, why.text)
    return state, policy, of_step(rows, counts)


def _where(ctx: RunContext, state: TrainState, batch: TrainBatch, old: jax.Array) -> str:
    """Where an update stopped being finite, in a sentence. To look takes the weights once more, unquantised:
    where they do not fit, the run goes on all the same, since the update was skipped."""
    try:
        return find_nonfinite(state.params, jax.device_get(batch), ctx.model, ctx.precision, fetch(old),
                              ctx.cfg.rollout.temperature)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        return "there was no memory left to find out where"


def is_bad(update: dict[str, float]) -> bool:
    """Whether the loss or the gradient of an update was not finite, for another reason than a loss scale that
    was too large."""
    return not (update["update/overflow"]
                or (math.isfinite(update["loss"]) and math.isfinite(update["grad_norm"])))


def probe(ctx: RunContext, run: RunDirectory, state: TrainState, policy: Params,
          batch: TrainBatch) -> dict[str, float]:
    """Measure the FP8 rounding error of weights, activations and the KV cache, layer by layer.

    Returns the metrics of the step and writes the whole report to precision.json. The formats are the
    engine's: for a learner without FP8, the report shows the error that FP8 would have. `policy` belongs to
    `state`, and its scales of FP8 attention are used where it has them.
    """
    formats = ctx.engine.capabilities().formats
    precision = dataclasses.replace(
        ctx.precision, runs=ctx.runs, kv=kv_of(formats), rounding=rounding_of(formats),
    )
    if not (precision.any_fp8 or precision.kv.fp8):
        return {}
    params = {**state.params, **scales_in(policy)}
    report = precision_report(params, batch, ctx.model, precision, ctx.cfg.rollout.temperature)
    report.save(run.path / "precision.json")
    return report.metrics() | {"precision/loss_spikes": ctx.spikes.count}
