"""The other page: sample prompts -> generate -> score -> pack -> step -> publish -> save -> log.

A step samples at the weights of the step before (`weights/version` = step - 1; with rollout.lag at those
before them, beside the step before: jaxfp8rl.rollout.pipeline), learns from what it sampled, and publishes.
Everything random is drawn from (run.seed, step), so a resumed run continues as if it had never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import numpy as np

from bridges.api import PublishReceipt
from jaxfp8rl.checkpoint.read_only import Trained
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.packing import Sample, microbatches_needed, pack
from jaxfp8rl.distributed.mesh import fetch, gloo_warning
from jaxfp8rl.distributed.process_group import joined
from jaxfp8rl.memory.fit import check_memory, explained
from jaxfp8rl.memory.flops import mfu, update_flops
from jaxfp8rl.memory.peak import peak_memory_gib
from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.monitors.console import ConsoleMonitor
from jaxfp8rl.monitors.end.summary import write_summary
from jaxfp8rl.policy.hardware import computed_by
from jaxfp8rl.policy.policy import shared
from jaxfp8rl.policy.warnings import kv_fp8_warning, uncorrected_warning, untested_warning
from jaxfp8rl.probes.finite import check_finite
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.rollout import scored_groups, support
from jaxfp8rl.rollout.samples import sample_rows, top_tokens
from jaxfp8rl.run.provenance import about
from jaxfp8rl.run.run_directory import RunDirectory, claimed
from jaxfp8rl.run.signals import StopSignals
from jaxfp8rl.run.watchdog import Watchdog
from jaxfp8rl.training.context import Parts, build, ignored
from jaxfp8rl.training.gate import check_gate
from jaxfp8rl.training.resume import check_start, fork, restore, save
from jaxfp8rl.training.sft import lost, warm_start
from jaxfp8rl.training.updates import learn, probe, score
from jaxfp8rl.types import Params, TrainBatch, TrainState

EVAL_STEP = 2**31  # evaluation draws its seeds from here on, apart from training's


def train(cfg: Config, resume: bool = False, fork_of: str = "") -> None:
    """Run `cfg` to its last step: from the newest checkpoint of its run directory when `resume`, or of
    another one, `fork_of`.

    Raises UserError and BridgeError kinds with their next step; leaves with exit code 130 or 143 after SIGINT
    or SIGTERM, when the step in progress has been finished and saved.
    """
    cfg = check_start(cfg, resume, fork_of)
    fresh = not (resume or fork_of)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(joined(cfg, resume, fork_of))
        stack.enter_context(claimed(cfg, resume, group))
        check_memory(cfg, fresh)
        stack.enter_context(explained(cfg, fresh))
        watchdog = stack.enter_context(Watchdog(cfg.run.watchdog_s,
                                                f"{cfg.run.dir}/stacks{group.suffix}.txt"))
        console = stack.enter_context(
            contextlib.closing(ConsoleMonitor(cfg.run.steps))) if group.first else None
        told = console.phase if console else ignored
        parts = stack.enter_context(contextlib.closing(build(cfg, group, fresh, told)))
        run = stack.enter_context(RunDirectory(cfg, resume, watchdog.phase, group, console))
        stop = stack.enter_context(StopSignals(group))
        run.note(computed_by(parts.precision, parts.model, parts.support_width > 0))
        engine, calibrated = parts.engine.capabilities(), parts.kv_scales is not None
        warnings = (
            untested_warning(engine), kv_fp8_warning(parts.model, engine.formats, calibrated),
            gloo_warning(parts.layout),
            uncorrected_warning(cfg), *parts.stops.notes, support.note(cfg.rollout, parts.model.vocab_size),
        )
        for warning in filter(None, warnings):
            run.note(warning)
        if fork_of:
            state, step = fork(parts, run, fork_of)
        else:
            state, step = restore(parts, run) if resume else (begin(parts, run, stop), 0)
        run.describe(about(cfg, parts.model, engine))
        run.phase("publish")
        _, policy = hand_over(parts, state, with_scales(parts, parts.policy(state.params)), step)
        run.phase("gate")
        facts = gate(parts, policy, step)
        if not run.begun:
            run.phase("evaluate")
            run.log({"step": step, "weights/version": step, **facts, **evaluate(parts, step)})
        while step < cfg.run.steps and not stop.requested:
            step += 1
            with run.profiled(step == cfg.monitor.profile_step):
                state, policy, metrics, sampled = one_step(parts, run, state, policy, step)
            if step == cfg.run.steps or (cfg.run.eval_every and step % cfg.run.eval_every == 0):
                run.phase("evaluate")
                metrics |= evaluate(parts, step)
            run.log(metrics, samples=sampled)
            stop.settle()
            last = step == cfg.run.steps or stop.requested
            if cfg.run.save_every and (last or step % cfg.run.save_every == 0 or run.unsaved_since):
                save(parts, run, state, step, last)
        if stop.requested and step < cfg.run.steps:
            run.leave(stop.exit_code)
    if group.first:
        write_summary(cfg.run.dir)


def with_scales(parts: Parts, policy: Params) -> Params:
    """The policy with scales for FP8 attention where they are calibrated: before the first step, on prompts
    alone."""
    if parts.kv_scales is None:
        return policy
    if parts.kv_scales.amax is None:
        prompts = [p.token_ids for p in parts.train[: parts.cfg.rollout.prompts_per_step]]
        parts.kv_scales.score(policy, pack_samples(parts, [Sample(p[:-1], p[-1:], np.zeros(1), 0.0)
                                                           for p in prompts]))
    return parts.kv_scales.apply(policy)


def begin(parts: Parts, run: RunDirectory, stop: StopSignals) -> TrainState:
    """Fresh optimiser state around the initial parameters, after the supervised warm start if the config has
    one; saved as step 0, so that whatever stops the run later leaves something to resume. A signal in the
    warm start ends it at once, with the word that it cannot be resumed."""

    def warming(step: int) -> None:
        run.phase("warm start")
        run.warming(step - 1)
        if stop.asked:
            run.leave(stop.asked, lost(parts.cfg.sft.steps, step - 1))

    run.keep_seen(parts.questions.seen)
    run.phase("loading the model")
    params = parts.initial_params()
    check_finite(params, parts.model)
    if parts.cfg.sft.steps:
        if parts.cfg.rollout.sleep != "off":
            parts.engine.sleep()  # until the first publish
        warmed = lambda: warm_start(parts.cfg, parts.model, params, parts.task, parts.train, parts.tokenizer,
                                    run.note, warming)
        params = parts.group.made_by_first(warmed, params)
    state = parts.fresh_state(params)
    if parts.cfg.loss.kl_coef:
        run.save_reference(parts.model, params, parts.cfg.precision.weight_dtype)
        parts.hold_reference(run.load_reference(parts.model))
    if parts.cfg.run.save_every:
        save(parts, run, state, 0)
    return state


def one_step(
    parts: Parts, run: RunDirectory, state: TrainState, policy: Params, step: int
) -> tuple[TrainState, Params, dict, list[dict]]:
    """One rollout batch, its updates and a publish -> (state, its policy, the step's metrics, samples to look
    at)."""
    cfg, clock = parts.cfg, Clock(run.phase)
    batch = parts.batches.take(step, clock)
    if cfg.rollout.sleep != "off":
        parts.engine.sleep()  # until `publish` wakes it
    with clock("score"):
        samples = split(batch, parts)
        packed = [pack_samples(parts, s) for s in samples]
        scored = jax.block_until_ready([score(parts, policy, p) for p in packed])
        packed, likeliest = parts.replay.replayed(packed) if parts.replay else packed, top_tokens(
            parts, policy, batch)
    with clock("update"):
        lr = float(parts.schedule(state.step))
        state, policy, updates = learn(parts, run, state, policy, step, batch, packed, scored)
        policy = with_scales(parts, policy)
    if cfg.monitor.precision_every and step % cfg.monitor.precision_every == 0:
        updates |= probe(parts, run, state, policy, packed[0])
    parts.batches.settle(clock)
    with clock("publish"):
        receipt, policy = hand_over(parts, state, policy, step)
    metrics = {
        "step": step, "lr": lr, **batch.metrics(), **batch.age(step - 1), **updates, **clock.metrics(),
        "publish/bytes": receipt.bytes, "engine/healthy": int(parts.engine.health().ok),
        "memory/peak_gib": peak_memory_gib(),
        "engine/restarts": getattr(parts.engine, "restarts", 0),
    }
    for part in filter(None, (parts.kv_scales, parts.replay)):
        metrics |= part.metrics()
    metrics["tokens/rollout_per_s"] = metrics["tokens/rollout"] / metrics["time/rollout_s"]
    metrics["tokens/update_per_s"] = metrics["tokens/update"] / metrics["time/update_s"]
    if share := mfu(update_flops(parts.model, sum(samples, [])), metrics["time/update_s"], cfg.train.devices):
        metrics["mfu/update"] = share
    return state, policy, metrics, sample_rows(parts, batch, step, samples, packed, scored, likeliest)


def hand_over(parts: Parts, state: TrainState | Trained, policy: Params,
              version: int) -> tuple[PublishReceipt, Params]:
    """Publish -> (receipt, the policy to go on with). With rollout.one_copy codes are made from the masters
    on their way to the engine, a layer at a time, and the policy has them there; what it had of the last
    version is gone before the first byte is.
    """
    if not parts.cfg.rollout.one_copy:
        return publish(parts, policy, version), policy
    receipt = publish(parts, {**state.params, "layers": (state.params["layers"],)}, version)
    return receipt, shared(policy, parts.precision, parts.transport.lend)


def publish(parts: Parts, policy: Params, version: int) -> PublishReceipt:
    """Hand the policy to the engine as `version`. What the transport has not read back already it
    confirms."""
    if parts.cfg.rollout.sleep != "off":
        parts.engine.wake()
    source = LearnerWeights(parts.model, policy, parts.runs, parts.cfg.precision.weight_dtype,
                            parts.group.lend(policy))
    receipt = parts.transport.publish(source, version)
    # else every byte was read from the engine and found equal before the receipt was made
    if not receipt.content:
        parts.transport.verify(receipt)
    return receipt


def gate(parts: Parts, policy: Params, version: int) -> dict[str, float]:
    """Sample a few completions and score them with the learner. Raises GateFailed when the two disagree.

    It samples without top_k and top_p, so that the whole distributions are compared.
    """
    prompts = (parts.held_out or parts.train)[: parts.cfg.gate.completions]
    length = min(parts.cfg.gate.max_new_tokens, parts.sampling.max_tokens)
    sampling = dataclasses.replace(parts.sampling, max_tokens=length, top_k=0, top_p=1.0, support=0)
    requests = scored_groups.make_requests(prompts, sampling, 1, parts.cfg.run.seed, EVAL_STEP - 1)
    kept, _ = scored_groups.generate(parts.engine, prompts, requests, version)
    batch = pack_samples(parts, [Sample(p.token_ids, c[0].token_ids, c[0].logprobs, 0.0) for p, c in kept])
    return check_gate(parts.cfg.gate, batch, fetch(parts.score(policy, batch)), parts.tokenizer)


def evaluate(parts: Parts, version: int) -> dict[str, float]:
    """Mean reward of one greedy completion for each held-out problem, of which those without a score, and
    those that cannot be scored, count as 0, and how many these are. Nothing when the task holds none out."""
    if not parts.held_out:
        return {}
    requests = scored_groups.make_requests(parts.held_out, parts.greedy, 1, parts.cfg.run.seed,
                                           EVAL_STEP + version)
    kept, rejected = scored_groups.generate(parts.engine, parts.held_out, requests, version,
                                            cut=parts.stops.cut)
    groups = scored_groups.score(kept, parts.tokenizer, parts.rewards, parts.cfg.task.think_tags)
    rewards = np.concatenate([[], *(g.rewards for g in groups)])
    problems, undefined = len(kept) + len(rejected), int(np.isnan(rewards).sum()) + len(rejected)
    named = {f"eval/{name}": mean for name, mean in scored_groups.named_means(groups, 0.0).items()}
    return {"eval/reward_mean": float(np.nan_to_num(rewards).sum() / problems), "eval/problems": problems,
            "eval/undefined": undefined, **named}


def split(batch: scored_groups.Rollouts, parts: Parts) -> list[list[Sample]]:
    """The samples of each update: whole groups in order, as many in one update as in another, or one more. A
    group without a sample is none. There are fewer updates than train.updates_per_step where there are fewer
    groups, and one of nothing where there is no group. None has more groups than the configured share, so
    that the shape holds."""
    groups = [g for g in scored_groups.to_samples(batch.chosen, parts.cfg.loss,
                                                  parts.cfg.rollout.max_new_tokens) if g]
    updates = max(min(parts.cfg.train.updates_per_step, len(groups)), 1)
    size, more = divmod(len(groups), updates)
    ends = [i * size + min(i, more) for i in range(updates + 1)]
    return [sum(groups[start:end], []) for start, end in zip(ends, ends[1:])]


def pack_samples(parts: Parts, samples: list[Sample]) -> TrainBatch:
    """Packed to the shape of an update; to a larger one when there are more samples than that holds (the
    gate's)."""
    t, samples = parts.cfg.train, parts.with_routes(samples)
    needed = microbatches_needed(len(samples), parts.cfg.max_model_len, t.row_tokens, t.rows_per_microbatch)
    shape = t.row_tokens, t.rows_per_microbatch, max(needed, parts.microbatches)
    return pack(samples, *shape, parts.no_routes, parts.support_width)
