"""The training loop: sample prompts -> generate -> score -> pack -> step -> publish -> save -> log.

Step n samples at the weights of step n - 1 (`weights/version`), learns from these completions, and publishes.
With rollout.max_staleness = k it samples up to k versions earlier (jaxfp8rl.rollout.pipeline).
Everything random is drawn from (run.seed, step), so a resumed run continues as if it had never stopped.
"""

from __future__ import annotations

import jax
import numpy as np

from jaxfp8rl.config.schema import Config
from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.rollout.samples import sample_rows, top_tokens
from jaxfp8rl.rollout.selected import selected
from jaxfp8rl.run.run_directory import RunDirectory
from jaxfp8rl.training.context import RunContext
from jaxfp8rl.training.evaluation import evaluate_quietly
from jaxfp8rl.training.publishing import sync_weights, with_scales
from jaxfp8rl.training.resume import save
from jaxfp8rl.training.start import first_publish, initial_state, started
from jaxfp8rl.training.step_metrics import of_parts, rates
from jaxfp8rl.training.update_batches import pack_samples, split
from jaxfp8rl.training.updates import probe, run_updates, score
from jaxfp8rl.types import Params, TrainState


def train(cfg: Config, resume: bool = False, fork_of: str = "") -> None:
    """Run `cfg` to its last step.

    With `resume` the run starts from the newest checkpoint of its run directory, with `fork_of` from a
    checkpoint of another run. Raises subclasses of UserError and BridgeError, which give the next step. After
    SIGINT or SIGTERM it finishes and saves the step in progress and exits with code 130 or 143.
    """
    with started(cfg, resume, fork_of) as (ctx, run, stop):
        cfg = ctx.cfg
        state, step = initial_state(ctx, run, stop, resume, fork_of)
        policy = first_publish(ctx, run, state, step)
        begun, stopping = step, stop.requested
        while step < cfg.run.steps and not stopping:
            step += 1
            with run.profiled(step == cfg.monitor.profile_step):
                state, policy, metrics, sampled = one_step(ctx, run, state, policy, step)
            if step == cfg.run.steps or (cfg.run.eval_every and step % cfg.run.eval_every == 0):
                run.phase("evaluate")
                found, policy = evaluate_quietly(ctx, state, policy, step)
                metrics |= found
            run.log(metrics, samples=sampled)
            if step == begun + 1 and str(ctx.kept):
                run.note(str(ctx.kept))
            stop.settle()
            run.saver.check()
            stopping = stop.requested  # a signal during the save below ends the run after the next step
            last = step == cfg.run.steps or stopping
            if cfg.run.save_every and (last or step % cfg.run.save_every == 0 or run.saver.again):
                save(ctx, run, state, step, last)
        if stopping and step < cfg.run.steps:
            run.leave(stop.exit_code)


def one_step(
    ctx: RunContext, run: RunDirectory, state: TrainState, policy: Params, step: int
) -> tuple[TrainState, Params, dict, list[dict]]:
    """One rollout batch, its updates and a publish -> (state, its policy, the step's metrics, rows for
    samples.jsonl)."""
    cfg, clock = ctx.cfg, Clock(run.phase)
    batch = ctx.batches.next_batch(step, clock)
    sampled_with = ctx.noise.metrics()
    if cfg.rollout.sleep != "off" or cfg.lends_policy:
        ctx.engine.sleep()  # until `publish`
    with clock("score"):
        taken = selected(batch, cfg, step)
        samples = split(batch, taken, ctx, step - 1)
        packed = [pack_samples(ctx, s) for s in samples]
        scored = jax.block_until_ready([score(ctx, policy, p) for p in packed])
        packed, likeliest = ctx.replay.replayed(packed) if ctx.replay else packed, top_tokens(
            ctx, policy, batch)
    with clock("update"):
        lr = float(np.asarray(ctx.schedule(state.step)))
        state, policy, updates = run_updates(ctx, run, state, policy, step, batch, packed, scored)
        policy = with_scales(ctx, policy)
    if cfg.monitor.precision_every and step % cfg.monitor.precision_every == 0:
        updates |= probe(ctx, run, state, policy, packed[0])
    with ctx.batches.held(clock), clock("publish"):
        receipt, policy = sync_weights(ctx, state, policy, step, noisy=True)
    metrics = {
        "step": step, "lr": lr, **batch.metrics(), **batch.age(step - 1), **taken.metrics, **updates,
        **clock.metrics(), **sampled_with, "publish/bytes": receipt.bytes, **of_parts(ctx, policy),
    }
    metrics |= rates(ctx, metrics, samples)
    return state, policy, metrics, sample_rows(ctx, batch, step, samples, packed, scored, likeliest)
