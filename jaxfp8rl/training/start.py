"""Start a run: from its config to the weights with which its first step samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxfp8rl.config.schema import Config
from jaxfp8rl.distributed.mesh import gloo_warning
from jaxfp8rl.distributed.process_group import joined
from jaxfp8rl.memory.cache import with_cache
from jaxfp8rl.memory.fit import check_memory, explained
from jaxfp8rl.monitors.console import ConsoleMonitor
from jaxfp8rl.monitors.end.summary import write_summary
from jaxfp8rl.monitors.notes import write_note
from jaxfp8rl.monitors.quiet import FOLDER as LOGS
from jaxfp8rl.monitors.quiet import quiet
from jaxfp8rl.policy.hardware import computed_by, decode_note
from jaxfp8rl.policy.initial import on_devices
from jaxfp8rl.policy.warnings import (
    base_warning,
    engine_warning,
    kv_fp8_warning,
    uncorrected_warning,
    version_warnings,
)
from jaxfp8rl.probes.finite import check_finite
from jaxfp8rl.rollout import support
from jaxfp8rl.rollout.embedded import embedded_precision
from jaxfp8rl.rollout.gpu_memory import share_gpu
from jaxfp8rl.run.provenance import about
from jaxfp8rl.run.run_directory import RunDirectory, claimed
from jaxfp8rl.run.signals import StopSignals
from jaxfp8rl.run.watchdog import Watchdog
from jaxfp8rl.training.context import RunContext, begins_with_weights, build_run, ignored
from jaxfp8rl.training.evaluation import evaluate
from jaxfp8rl.training.gate import gate
from jaxfp8rl.training.publishing import sync_weights, with_noise, with_scales
from jaxfp8rl.training.resume import check_start, fork, restore, save
from jaxfp8rl.training.sft import lost
from jaxfp8rl.training.warm_start import warm_start
from jaxfp8rl.types import Params, TrainState


@contextlib.contextmanager
def started(cfg: Config, resume: bool,
            fork_of: str) -> Iterator[tuple[RunContext, RunDirectory, StopSignals]]:
    """The parts of a run, its directory and its signals, until the run ends. The summary of a run that comes
    to its end is written."""
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
        if console:
            note_early(cfg, console, *version_warnings(cfg), of_cache, others)
        ctx = build_run(cfg, group, fresh, console.phase if console else ignored, compiles_ahead())
        stack.enter_context(contextlib.closing(ctx))
        run = stack.enter_context(RunDirectory(cfg, resume, watchdog.phase, group, console))
        stop = stack.enter_context(StopSignals(group))
        note_all(ctx, run, fresh)
        yield ctx, run, stop
    if group.first:
        write_summary(cfg.run.dir)


def note_early(cfg: Config, console: ConsoleMonitor, *notes: str) -> None:
    """Note what is known before the engine starts, of which much can fail: there is no RunDirectory yet."""
    for note in filter(None, notes):
        console.note(note)
        write_note(Path(cfg.run.dir), note)


def note_all(ctx: RunContext, run: RunDirectory, fresh: bool) -> None:
    """Note what computes the run, and what its user should know of it."""
    cfg, engine = ctx.cfg, ctx.engine.capabilities()
    notes = (
        computed_by(ctx.precision, ctx.model, ctx.support_width > 0), engine_warning(cfg, engine),
        kv_fp8_warning(ctx.model, engine.formats, ctx.kv_scales is not None), gloo_warning(ctx.layout),
        decode_note(cfg, embedded_precision(cfg, ctx.model, ctx.runs), ctx.model), uncorrected_warning(cfg),
        base_warning(cfg) if fresh and cfg.lora.rank else None, *ctx.stops.notes,
        support.note(cfg.rollout, ctx.model.vocab_size),
    )
    for note in filter(None, notes):
        run.note(note)


def compiles_ahead() -> bool:
    """Whether to compile while the engine starts: on a GPU, where the engine does not need the compiler's
    cores."""
    return jax.default_backend() == "gpu"


def initial_state(ctx: RunContext, run: RunDirectory, stop: StopSignals, resume: bool,
                  fork_of: str) -> tuple[TrainState, int]:
    """(the state with which the run begins or goes on, its step)."""
    if fork_of:
        return fork(ctx, run, fork_of)
    return restore(ctx, run) if resume else (init_train_state(ctx, run, stop), 0)


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
    params, draft = ctx.initial_params(), None
    check_finite(params, ctx.model)
    if ctx.cfg.lora.rank:
        ctx.hold_first_adapters()
        return ctx.fresh_state(params)
    if ctx.cfg.sft.steps:
        if ctx.cfg.rollout.sleep != "off":
            ctx.engine.sleep()  # until the first publish
        data, formats = (ctx.task, ctx.train, ctx.tokenizer), ctx.engine.capabilities().formats
        warmed = lambda: warm_start(ctx.cfg, ctx.model, params, data, run.note, warming, formats)
        params, draft = ctx.group.broadcast_tree(warmed, (params, None))  # several processes have no head
        params = on_devices(params, ctx.layout)
    state = ctx.fresh_state(params)
    if draft:
        state = state._replace(draft=ctx.layout.place(draft))
    if ctx.cfg.keeps_reference:
        run.save_reference(ctx.model, params, ctx.cfg.precision.weight_dtype)
        ctx.hold_reference(run.load_reference(ctx.model))
    return state


def first_publish(ctx: RunContext, run: RunDirectory, state: TrainState, step: int) -> Params:
    """Publish the first policy, compare engine and learner, and evaluate it if the run is new -> the
    policy."""
    run.describe(about(ctx.cfg, ctx.model, ctx.engine.capabilities()))
    run.phase("publish")
    _, policy = sync_weights(ctx, state, with_scales(ctx, ctx.policy(state.params)), step)
    if warning := ctx.noise.check(policy):
        run.note(warning)
    run.phase("gate")
    facts = gate(ctx, policy, step)
    if not run.begun:
        run.phase("evaluate")
        run.log({"step": step, "weights/version": step, **facts, **evaluate(ctx, step)})
    return with_noise(ctx, state, policy, step)
