"""Checkpoints of a run: save them, resume the run from one, or fork another run from one."""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8rl.checkpoint.base_model import check_base_model, with_base_model
from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.resume_rules import changes, described, settled
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.dataset import PromptStream
from jaxfp8rl.data.seen import check_unseen, read_seen
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.errors import CheckpointError, ConfigError, DataError, NonFiniteStep
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.optim.loss_scale import rescaled
from jaxfp8rl.optim.low_bit import decode, is_scaled
from jaxfp8rl.optim.schedule import make_schedule
from jaxfp8rl.policy.adapters import check_digest, masters_like
from jaxfp8rl.policy.initial import on_devices
from jaxfp8rl.probes.finite import bad_tensors, check_finite
from jaxfp8rl.rollout.problems import Data
from jaxfp8rl.run.run_directory import RunDirectory
from jaxfp8rl.training.context import RunContext
from jaxfp8rl.types import Params, TrainState


def save(ctx: RunContext, run: RunDirectory, state: TrainState, step: int, last: bool = False) -> None:
    """Save a checkpoint of `state` after `step`.

    Raises NonFiniteStep if a parameter is not finite, so that a run can always resume from the newest
    checkpoint.
    """
    if bad := bad_tensors(state.params, ctx.model):
        raise NonFiniteStep(f"after step {step} the parameters are not finite and were not saved: {bad[0]}",
                            "resume from the last checkpoint with --resume and a lower optim.lr")
    clip = ctx.calibration.state() if ctx.calibration else {}
    seen = {n: np.asarray(x).tolist()
            for n, x in (ctx.kv_scales.amax or {}).items()} if ctx.kv_scales else {}
    loop = ctx.batches.state() | {"tokenizer": ctx.tokenizer.fingerprint(), "contents": ctx.contents,
                                    "kv_amax": seen, "teacher": ctx.teacher}
    loop |= {"spikes": ctx.spikes.state(), "eos_token_ids": list(ctx.tokenizer.eos_token_ids)}
    run.save(step, state, loop | clip | ({"base": ctx.base} if ctx.base else {}), last)


def restore(ctx: RunContext, run: RunDirectory) -> tuple[TrainState, int]:
    """Restore the newest undamaged checkpoint -> (state, step).

    The prompt stream continues from the checkpoint's position, and later metrics are deleted. Raises
    CheckpointError, and leaves the run directory untouched, if the checkpoint belongs to another model, other
    data or another tokenizer.
    """
    run.phase("restore")
    state, loop, step = run.restore(_like(ctx))
    check_same_data(loop, ctx.tokenizer, ctx.contents)
    check_same_teacher(loop, ctx.teacher)
    state = _with_draft_head(ctx, run, state)
    notes = list(ctx.batches.restore(loop, step))
    _take_up(ctx, loop)
    if ctx.cfg.keeps_reference and ctx.cfg.lora.rank:
        ctx.hold_first_adapters()
    elif ctx.cfg.keeps_reference:
        ctx.hold_reference(run.load_reference(ctx.model))
    check_finite(state.params, ctx.model, "the checkpoint")
    if read_seen(run.path) is None:  # an earlier version began this run and did not record its problems
        run.keep_seen(ctx.questions.seen)
    for note in rate_notes(load_config(str(run.path / "config.toml")), ctx.cfg, int(state.step)):
        run.note(note)
    run.rewind(step)
    for note in notes:
        run.note(note)
    return state, step


def check_data(cfg: Config, data: Data) -> None:
    """Raise CheckpointError, as `restore` does, if the newest checkpoint was taken on other data.

    Whether the checkpoint is damaged is not checked.
    """
    check_same_data(Checkpoints(Path(cfg.run.dir) / "checkpoints", 1).loop_state(), data.tokenizer,
                data.contents())


def check_same_data(loop: dict[str, Any], tokenizer: Tokenizer, contents: dict[str, str]) -> None:
    """Raise CheckpointError if the checkpoint whose loop state is `loop` was taken on other data."""
    if loop["tokenizer"] != tokenizer.fingerprint():
        raise CheckpointError("model.tokenizer: the checkpoint was taken with another vocabulary",
                              "resume with the same tokenizer")
    for name in (name for name, digest in contents.items() if loop["contents"][name] != digest):
        raise CheckpointError(
            f"task: the checkpoint was taken on other {name}: their answers or their prompts' tokens differ",
            "restore the task's files and the tokenizer, or start another run (--fork)")


def check_same_teacher(loop: dict[str, Any], digest: str) -> None:
    """Raise CheckpointError if the checkpoint whose loop state is `loop` was taken with another teacher than
    the one with this digest. One that an earlier version wrote does not say."""
    if (was := loop.get("teacher", digest)) != digest:
        before, now = (f"a teacher of SHA-256 {of[:16]}..." if of else "no teacher" for of in (was, digest))
        raise CheckpointError(f"reference.path: the checkpoint was taken with {before}, and here is {now}",
                              "name the folder of the same weights; another teacher is for another run "
                              "(--fork)")


def check_start(cfg: Config, resume: bool, fork_of: str) -> Config:
    """The config of a run, `settled`; where the base model's files are gone, it names the run's own copies.

    Raises ConfigError or CheckpointError, before anything loads, if the run cannot start, resume or fork this
    way.
    """
    cfg = settled(check(cfg), resume)
    if resume and fork_of:
        raise ConfigError("--resume continues the run in run.dir, --fork starts a new run there",
                          "pass only one of them")
    if fork_of:
        check_forkable(cfg, fork_of)
    if resume:
        cfg = with_base_model(cfg, cfg.run.dir)
        check_base_model(cfg, cfg.run.dir)
    return cfg


def check_forkable(cfg: Config, source: str) -> None:
    """Raise ConfigError or CheckpointError, before anything loads, if the checkpoint to fork from does not
    exist, or has other adapters than this run."""
    name, step = _source(source)
    if not (name / "config.toml").is_file():
        raise ConfigError(f"--fork {source}: {name} is not a run directory: it holds no config.toml",
                          "pass the run.dir of the other run")
    if name.resolve() == Path(cfg.run.dir).resolve():
        raise ConfigError(f"--fork {source}: that is run.dir itself",
                          "continue that run with --resume, or choose another --run.dir")
    other = load_config(str(name / "config.toml"))
    if (theirs := _what_learns(other)) != (ours := _what_learns(cfg)):
        raise ConfigError(f"--fork {source}: its checkpoint has {theirs}, and lora asks for {ours}",
                          f"set [lora] as in {name}/config.toml; or begin from its weights: `jaxfp8rl export "
                          f"{name} OUT`, --model.path OUT")
    if cfg.lora.rank and cfg.lora.path != other.lora.path:
        raise ConfigError(f'--fork {source}: lora.path = "{cfg.lora.path}" has no effect: the run begins '
                          "with the adapters of the checkpoint",
                          f'set lora.path = "{other.lora.path}", as there, or leave out --fork')
    step = Checkpoints(name / "checkpoints", 1).kept(step, f"--fork {name}@")
    if step >= cfg.run.steps:
        raise ConfigError(f"run.steps = {cfg.run.steps}: the checkpoint was taken after step {step}",
                          "raise run.steps")


def _what_learns(cfg: Config) -> str:
    """The parameters in a checkpoint, and what a product of adapters is multiplied by."""
    adapters = f"adapters of rank {cfg.lora.rank} on {', '.join(sorted(cfg.lora.targets))}, factor {{:g}}"
    return adapters.format(cfg.lora.scale) if cfg.lora.rank else "all parameters"


def _source(text: str) -> tuple[Path, int | None]:
    """"RUN" or "RUN@STEP" -> (run directory, step or None)."""
    text = os.path.expanduser(text)
    name, _, step = text.rpartition("@")
    return (Path(name), int(step)) if name and step.isdecimal() else (Path(text), None)


def fork(ctx: RunContext, run: RunDirectory, source: str) -> tuple[TrainState, int]:
    """Start this run from a checkpoint of another run -> (state, step). `source`: "RUN", for its newest
    checkpoint, or "RUN@STEP".

    Any setting may differ that leaves the shapes of the state equal. With the same problems and the same
    seed, the prompt stream continues where the other run's stood; else it starts anew. The problems of
    completions that the other run sampled ahead are drawn again, its completions are not used. The KL
    reference is the other run's if it has one, else the policy with which this run starts.
    """
    run.phase("restore")
    name, step = _source(source)
    other = Checkpoints(name / "checkpoints", 1, ctx.group)
    state, loop = other.restore(_like(ctx), step)
    state = _with_draft_head(ctx, run, state)
    run.keep_seen(np.union1d(ctx.questions.seen, unseen_by(name, loop, ctx)))
    state = rescaled(state, ctx.precision.compute_dtype)
    mine, theirs = ctx.stream.state(), loop["stream"]
    if all(mine[key] == theirs[key] for key in ("seed", "fingerprint")):
        ctx.stream = PromptStream.from_state(ctx.train, theirs, ctx.stream.curriculum)
        ctx.batches.draw_again(loop)
    _take_up(ctx, loop)
    for bad, why in other.damaged.items():
        run.note(f"checkpoint {bad} of {name} is damaged: {why}")
    run.note(f"forked from {name} at step {loop['step']}; " + _differences(ctx, name))
    for note in rate_notes(load_config(str(name / "config.toml")), ctx.cfg, int(state.step)):
        run.note(note)
    if ctx.cfg.keeps_reference and ctx.cfg.lora.rank:
        ctx.hold_first_adapters()
    elif ctx.cfg.keeps_reference:
        if (reference := name / "reference").is_dir():
            copy = functools.partial(shutil.copytree, reference, run.path / "reference")
            ctx.group.run_and_sync(copy, alone=True)
        else:
            params = jax.tree.map(decode, state.params, is_leaf=is_scaled)
            run.save_reference(ctx.model, params, ctx.cfg.precision.weight_dtype)
        ctx.hold_reference(run.load_reference(ctx.model))
    save(ctx, run, state, loop["step"])
    return state, loop["step"]


def unseen_by(run: Path, loop: dict[str, Any], ctx: RunContext) -> np.ndarray:
    """The problems that the weights of `run` were trained on, checked against this run's held-out problems.

    `loop`: the loop state of its checkpoint. Raises DataError if one of them is held out here. Raises it too
    if an earlier version started `run` without recording its problems and the problems differ here.
    """
    seen = read_seen(run)
    if seen is None and loop["contents"]["problems"] == ctx.contents["problems"]:
        seen = ctx.questions.seen
    if seen is None:
        raise DataError(
            f"task: the problems to train on or to hold out differ from those of {run}, "
            "which an earlier version started without recording them",
            "keep that run's problems: task.seed, task.options, the files",
        )
    check_unseen(ctx.questions.held_out, seen, str(run))
    return seen


def rate_notes(before: Config, now: Config, update: int) -> Iterator[str]:
    """Notes about the learning rate from `update` on: it differs from that of the settings `before`, or its
    decay has ended."""
    was, rate = (float(np.asarray(make_schedule(cfg.optim, cfg.updates)(update))) for cfg in (before, now))
    if not math.isclose(was, rate, rel_tol=1e-3):
        yield (f"the learning rate of the next update is {rate:.3g}; "
               f"with the earlier settings it would have been {was:.3g}")
    elif now.optim.schedule != "constant" and (now.optim.total_steps or now.updates) <= update < now.updates:
        longer = make_schedule(now.optim.model_copy(update={"total_steps": now.updates}), now.updates)
        yield (
            f"the learning rate finished its decay at update {now.optim.total_steps} (optim.total_steps) "
            f"and stays at {rate:.3g}. With --optim.total_steps {now.updates} "
            f"it would now be {longer(update):.3g} and go on falling")


def _like(ctx: RunContext) -> TrainState:
    """The shapes, dtypes and shardings of the state to restore.

    Its arrays are freed before the checkpoint's arrays are loaded. No weights are read, since the checkpoint
    holds them and the folder of the base model may be gone.
    """
    fresh = lambda params: ctx.fresh_state(on_devices(params, ctx.layout))
    return shapes_like(ctx.cfg, ctx.model, fresh)


def _with_draft_head(ctx: RunContext, run: RunDirectory, state: TrainState) -> TrainState:
    """The state with a draft head that has learned nothing, where the config has one and the checkpoint has
    none."""
    if state.draft is None and (draft := ctx.fresh_draft()):
        run.note("the checkpoint has no draft head; this one begins anew")
        return state._replace(draft=draft)
    return state


def shapes_like(cfg: Config, model: ModelConfig, fresh_state: Callable[[Params], TrainState]) -> TrainState:
    """The shapes, dtypes and shardings of `fresh_state(masters)`. Its arrays are freed."""
    params = masters_like(cfg, model)
    fresh = fresh_state(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), params))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), fresh)


def _take_up(ctx: RunContext, loop: dict[str, Any]) -> None:
    """Continue the calibrations and counters from the checkpoint's loop state. Raises CheckpointError if its
    adapters were trained over another base."""
    if ctx.base:
        check_digest(ctx.base["digest"], loop["base"]["digest"], "the checkpoint")
    if ctx.calibration:
        ctx.calibration.take_up(loop)
    if ctx.kv_scales and loop["kv_amax"]:
        ctx.kv_scales.amax = {name: jnp.asarray(x, jnp.float32) for name, x in loop["kv_amax"].items()}
    if ctx.replay:
        ctx.replay.steps = loop["step"]
    ctx.spikes.take_up(loop["spikes"])


def _differences(ctx: RunContext, other: Path) -> str:
    found = changes(load_config(str(other / "config.toml")), ctx.cfg)
    return "settings that differ: " + "; ".join(
        described({k: v for k, v in found.items() if k != ("run", "dir")}) or ["none"])
