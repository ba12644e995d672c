"""The training loop: sample prompts -> generate -> score -> pack -> step -> publish -> save -> log.

Step n samples at the weights of step n - 1 (`weights/version`), learns from these completions, and publishes.
With rollout.max_staleness = k it samples up to k versions earlier (jaxfp8rl.rollout.pipeline).
Everything random is drawn from (run.seed, step), so a resumed run continues as if it had never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import cast

import jax
import numpy as np

from bridges.api import LendingTransport, PublishReceipt, WeightSource
from jaxfp8rl.checkpoint.read_only import Trained
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.packing import Sample, microbatches_needed, placed, shared_fraction
from jaxfp8rl.distributed.mesh import fetch, gloo_warning
from jaxfp8rl.distributed.process_group import joined
from jaxfp8rl.memory.cache import with_cache
from jaxfp8rl.memory.fit import check_memory, explained
from jaxfp8rl.memory.flops import mfu, update_flops
from jaxfp8rl.memory.peak import peak_memory_gib
from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.monitors.console import ConsoleMonitor
from jaxfp8rl.monitors.end.summary import write_summary
from jaxfp8rl.monitors.notes import write_note
from jaxfp8rl.monitors.quiet import FOLDER as LOGS
from jaxfp8rl.monitors.quiet import quiet
from jaxfp8rl.policy.hardware import computed_by, decode_note
from jaxfp8rl.policy.initial import on_devices
from jaxfp8rl.policy.policy import with_engine_weights
from jaxfp8rl.policy.warnings import (
    base_warning,
    engine_warning,
    kv_fp8_warning,
    uncorrected_warning,
    version_warnings,
)
from jaxfp8rl.probes.finite import check_finite
from jaxfp8rl.publish.adapters import merge_error
from jaxfp8rl.publish.draft_head import WithDraftHead
from jaxfp8rl.rollout import scored_groups, support
from jaxfp8rl.rollout.adapters import weights_of
from jaxfp8rl.rollout.embedded import embedded_precision
from jaxfp8rl.rollout.engines import share_gpu
from jaxfp8rl.rollout.own_rows import pack_own
from jaxfp8rl.rollout.samples import sample_rows, top_tokens
from jaxfp8rl.rollout.selected import Selected, selected
from jaxfp8rl.run.provenance import about
from jaxfp8rl.run.run_directory import RunDirectory, claimed
from jaxfp8rl.run.signals import StopSignals
from jaxfp8rl.run.watchdog import Watchdog
from jaxfp8rl.training.context import RunContext, begins_with_weights, build_run, ignored
from jaxfp8rl.training.gate import check_gate
from jaxfp8rl.training.resume import check_start, fork, restore, save
from jaxfp8rl.training.sft import lost
from jaxfp8rl.training.updates import probe, run_updates, score
from jaxfp8rl.training.warm_start import warm_start
from jaxfp8rl.types import Params, TrainBatch, TrainState

EVAL_STEP = 2**31  # evaluation draws its seeds from here on, apart from training's


def train(cfg: Config, resume: bool = False, fork_of: str = "") -> None:
    """Run `cfg` to its last step.

    With `resume` the run starts from the newest checkpoint of its run directory, with `fork_of` from a
    checkpoint of another run. Raises subclasses of UserError and BridgeError, which give the next step. After
    SIGINT or SIGTERM it finishes and saves the step in progress and exits with code 130 or 143.
    """
    cfg = check_start(cfg, resume, fork_of)
    fresh = not (resume or fork_of)
    share_gpu(cfg)  # before the processes meet on their devices
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(joined(cfg, resume, fork_of))
        stack.enter_context(claimed(cfg, resume, group))
        stack.enter_context(quiet(Path(cfg.run.dir) / LOGS / f"stderr{group.suffix}.txt"))
        check_memory(cfg, fresh)
        cfg, of_cache = with_cache(cfg, fresh, group.broadcast)
        others = stack.enter_context(explained(cfg, fresh))
        watchdog = stack.enter_context(Watchdog(cfg.run.watchdog_s,
                                                f"{cfg.run.dir}/stacks{group.suffix}.txt"))
        console = stack.enter_context(
            contextlib.closing(ConsoleMonitor(cfg.run.steps))) if group.first else None
        on_phase = console.phase if console else ignored
        if console:
            note_early(cfg, console, *version_warnings(cfg), of_cache, others)
        ctx = build_run(cfg, group, fresh, on_phase, compiles_ahead())
        stack.enter_context(contextlib.closing(ctx))
        run = stack.enter_context(RunDirectory(cfg, resume, watchdog.phase, group, console))
        stop = stack.enter_context(StopSignals(group))
        run.note(computed_by(ctx.precision, ctx.model, ctx.support_width > 0))
        engine, calibrated = ctx.engine.capabilities(), ctx.kv_scales is not None
        warnings = (
            engine_warning(cfg, engine), kv_fp8_warning(ctx.model, engine.formats, calibrated),
            gloo_warning(ctx.layout),
            decode_note(cfg, embedded_precision(cfg, ctx.model, ctx.runs), ctx.model),
            uncorrected_warning(cfg), base_warning(cfg) if fresh and cfg.lora.rank else None,
            *ctx.stops.notes, support.note(cfg.rollout, ctx.model.vocab_size),
        )
        for warning in filter(None, warnings):
            run.note(warning)
        if fork_of:
            state, step = fork(ctx, run, fork_of)
        else:
            state, step = restore(ctx, run) if resume else (init_train_state(ctx, run, stop), 0)
        run.describe(about(cfg, ctx.model, engine))
        run.phase("publish")
        _, policy = sync_weights(ctx, state, with_scales(ctx, ctx.policy(state.params)), step)
        if warning := ctx.noise.check(policy):
            run.note(warning)
        run.phase("gate")
        facts = gate(ctx, policy, step)
        if not run.begun:
            run.phase("evaluate")
            run.log({"step": step, "weights/version": step, **facts, **evaluate(ctx, step)})
        policy = with_noise(ctx, state, policy, step)
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
    if group.first:
        write_summary(cfg.run.dir)


def note_early(cfg: Config, console: ConsoleMonitor, *notes: str) -> None:
    """Note what is known before the engine starts, of which much can fail: there is no RunDirectory yet."""
    for note in filter(None, notes):
        console.note(note)
        write_note(Path(cfg.run.dir), note)


def compiles_ahead() -> bool:
    """Whether to compile while the engine starts: on a GPU, where the engine does not need the compiler's
    cores."""
    return jax.default_backend() == "gpu"


def with_scales(ctx: RunContext, policy: Params) -> Params:
    """The policy with its calibrated scales of FP8 attention, if the run calibrates them. Before the first
    step they are calibrated on prompts, since there are no completions yet."""
    if ctx.kv_scales is None:
        return policy
    if ctx.kv_scales.amax is None:
        prompts = [p.token_ids for p in ctx.train[: ctx.cfg.rollout.prompts_per_step]]
        policy = policy | ctx.layout.place({"kv_scales": ctx.kv_scales.unit_scales()})
        ctx.kv_scales.score(policy, pack_samples(ctx, [Sample(p[:-1], p[-1:], np.zeros(1), 0.0)
                                                           for p in prompts]))
    return ctx.kv_scales.apply(policy)


def init_train_state(ctx: RunContext, run: RunDirectory, stop: StopSignals) -> TrainState:
    """The initial parameters, after the supervised warm start if the config has one, with a fresh optimiser
    state.

    The state is saved as step 0, so that a run that stops in its first step can be resumed. A signal during
    the warm start ends it at once, with the message that it cannot be resumed.
    """

    def warming(step: int) -> None:
        run.phase("warm start")
        run.warming(step - 1)
        if stop.asked:
            run.leave(stop.asked, lost(ctx.cfg.sft.steps, step - 1))

    run.keep_seen(ctx.questions.seen)
    run.phase("loading the model")
    state = ctx.first_state() if begins_with_weights(ctx.cfg) else state_from_params(ctx, run, warming)
    if ctx.cfg.run.save_every:
        save(ctx, run, state, 0)
    return state


def state_from_params(ctx: RunContext, run: RunDirectory, warming: Callable[[int], None]) -> TrainState:
    """The initial state of a config that makes more of its float32 parameters: a warm start, or the reference
    policy of the KL term."""
    params = ctx.initial_params()
    check_finite(params, ctx.model)
    if ctx.cfg.lora.rank:
        ctx.hold_first_adapters()
        return ctx.fresh_state(params)
    if ctx.cfg.sft.steps:
        if ctx.cfg.rollout.sleep != "off":
            ctx.engine.sleep()  # until the first publish
        data, formats = (ctx.task, ctx.train, ctx.tokenizer), ctx.engine.capabilities().formats
        warmed = lambda: warm_start(ctx.cfg, ctx.model, params, data, run.note, warming, formats)
        params = on_devices(ctx.group.broadcast_tree(warmed, params), ctx.layout)
    state = ctx.fresh_state(params)
    if ctx.cfg.keeps_reference:
        run.save_reference(ctx.model, params, ctx.cfg.precision.weight_dtype)
        ctx.hold_reference(run.load_reference(ctx.model))
    return state


def one_step(
    ctx: RunContext, run: RunDirectory, state: TrainState, policy: Params, step: int
) -> tuple[TrainState, Params, dict, list[dict]]:
    """One rollout batch, its updates and a publish -> (state, its policy, the step's metrics, rows for
    samples.jsonl)."""
    cfg, clock = ctx.cfg, Clock(run.phase)
    batch = ctx.batches.next_batch(step, clock)
    sampled_with = ctx.noise.metrics()
    if cfg.rollout.sleep != "off":
        ctx.engine.sleep()  # until `publish` wakes it
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
        **clock.metrics(), **sampled_with,
        "publish/bytes": receipt.bytes, "engine/healthy": int(ctx.engine.health().ok),
        "memory/peak_gib": peak_memory_gib(),
        "engine/restarts": getattr(ctx.engine, "restarts", 0),
    }
    if ctx.precision.adapters and cfg.lora.publish == "merged":
        metrics["lora/merge_error"] = merge_error(policy, ctx.precision.adapters, ctx.runs,
                                                  cfg.precision.weight_dtype)
    for part in (ctx.kv_scales, ctx.replay, ctx.engine, ctx.explorer):
        metrics |= getattr(part, "metrics", dict)()
    metrics["tokens/rollout_per_s"] = metrics["tokens/rollout"] / metrics["time/rollout_s"]
    metrics["tokens/update_per_s"] = metrics["tokens/update"] / metrics["time/update_s"]
    learned = [s for update in samples for s in placed(update, cfg.train.row_tokens, cfg.train.shared_prefix)]
    if cfg.train.shared_prefix:
        metrics["update/shared_fraction"] = shared_fraction(learned)
    if share := mfu(update_flops(ctx.model, learned), metrics["time/update_s"], cfg.train.devices):
        metrics["mfu/update"] = share
    return state, policy, metrics, sample_rows(ctx, batch, step, samples, packed, scored, likeliest)


def sync_weights(ctx: RunContext, state: TrainState | Trained, policy: Params,
              version: int, noisy: bool = False) -> tuple[PublishReceipt, Params]:
    """Publish `policy` as `version`, or `noisy` with the noise of that version -> (receipt, the policy for
    the next step).

    With rollout.one_copy the masters are quantised a layer at a time on their way into the engine, and the
    returned policy reads the codes in the engine's memory. Its arrays of the previous version are deleted
    before the first byte is written.
    """
    if not ctx.cfg.rollout.one_copy:
        return publish(ctx, policy, version, noisy, getattr(state, "draft", None)), policy
    receipt = publish(ctx, {**state.params, "layers": (state.params["layers"],)}, version, noisy)
    return receipt, with_engine_weights(policy, ctx.precision, cast(LendingTransport, ctx.transport).lend)


def with_noise(ctx: RunContext, state: TrainState, policy: Params, version: int) -> Params:
    """Publish the noise of `version` too, if it has any, after what is not to see it -> the policy."""
    return sync_weights(ctx, state, policy, version, noisy=True)[1] if ctx.noise.sigma(version) else policy


def evaluate_quietly(ctx: RunContext, state: TrainState, policy: Params,
                     step: int) -> tuple[dict[str, float], Params]:
    """`evaluate` the policy itself, without the noise that it samples with -> (metrics, the policy)."""
    if not ctx.noise.sigma(step):
        return evaluate(ctx, step), policy
    with ctx.batches.held(Clock(ignored)):
        _, policy = sync_weights(ctx, state, policy, step)
        found = evaluate(ctx, step)
        return found, with_noise(ctx, state, policy, step)


def publish(ctx: RunContext, policy: Params, version: int, noisy: bool = False,
            draft: TrainState | None = None) -> PublishReceipt:
    """Hand the policy to the engine as `version`, or `noisy` with the noise of that version, with the draft
    head where there is one, and verify the tensors that the transport has not read back already."""
    if ctx.cfg.rollout.sleep != "off":
        ctx.engine.wake()
    policy = ctx.noise.added(policy, version) if noisy else policy
    source: WeightSource = weights_of(ctx.cfg, ctx.model, policy, ctx.runs, ctx.group.lend)
    if draft:
        source = WithDraftHead(source, draft.params, ctx.model, ctx.cfg.precision.weight_dtype)
    receipt = ctx.transport.publish(source, version)
    # a receipt with digests of content was made after every byte in the engine was found equal
    if not receipt.content:
        ctx.transport.verify(receipt)
    if ctx.drafting:
        ctx.drafting.publish(policy, version)
    return receipt


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


def split(batch: scored_groups.Rollouts, taken: Selected, ctx: RunContext,
          version: int) -> list[list[Sample]]:
    """The samples of each update of the step that begins at `version`: whole units in order, groups where
    nothing is replayed, with at most one unit more in one update than in another.

    Units without samples are left out. With fewer units than train.updates_per_step there is one update a
    unit; with none there is one empty update. No update has more groups than the configured share, so the
    packed shape never grows.
    """
    loss, longest = ctx.cfg.loss, ctx.cfg.rollout.max_new_tokens
    units = list(filter(None, scored_groups.to_samples(batch.chosen, loss, longest, version, *taken[:2])))
    updates = max(min(ctx.cfg.train.updates_per_step, len(units)), 1)
    size, more = divmod(len(units), updates)
    ends = [i * size + min(i, more) for i in range(updates + 1)]
    return [sum(units[start:end], []) for start, end in zip(ends, ends[1:])]


def pack_samples(ctx: RunContext, samples: list[Sample]) -> TrainBatch:
    """Pack samples to the shape of an update, or to a larger shape if they do not fit (those of the gate may
    not)."""
    t, samples = ctx.cfg.train, ctx.with_routes(samples)
    needed = microbatches_needed(len(samples), ctx.cfg.max_model_len, t.row_tokens, t.rows_per_microbatch)
    times = max(1, -(-needed // ctx.microbatches))  # whole multiples, so that few shapes are compiled
    shape = t.row_tokens, t.rows_per_microbatch, times * ctx.microbatches
    ages, weighs = ctx.cfg.loss.needs_ages, ctx.cfg.selection.weighs
    extras = ctx.no_routes, ctx.support_width, ages, t.shared_prefix, weighs
    return pack_own(ctx.group, ctx.layout, samples, *shape, *extras)
