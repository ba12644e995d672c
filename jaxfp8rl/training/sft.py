"""`jaxfp8rl sft`: the supervised warm start alone (jaxfp8rl.training.warm_start), written as an HF folder.

It saves checkpoints as it goes, from which `--resume` goes on to the same weights, bit for bit.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jaxfp8rl.checkpoint.saver import Saver
from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.resume_rules import refused_changes
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.data.seen import FILE as SEEN
from jaxfp8rl.data.seen import Questions, write_seen
from jaxfp8rl.errors import CheckpointError, ConfigError, check_writable
from jaxfp8rl.gpus import take_gpu, take_host_memory
from jaxfp8rl.memory.fit import check_warm_start, explained_alone
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import check_empty, check_weights, save_params
from jaxfp8rl.models.packed_config import form_named
from jaxfp8rl.monitors.console import ConsoleMonitor
from jaxfp8rl.monitors.quiet import FOLDER as LOGS
from jaxfp8rl.monitors.quiet import quiet
from jaxfp8rl.policy.hardware import check_kernels
from jaxfp8rl.policy.initial import starting_params
from jaxfp8rl.policy.routing_replay import with_options
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.policy.warnings import version_warnings
from jaxfp8rl.precision.jit import check_kept, keep_compiled
from jaxfp8rl.probes.finite import check_finite
from jaxfp8rl.rollout.gpu_memory import memory_of_jax
from jaxfp8rl.rollout.problems import Data, load_data
from jaxfp8rl.run.run_directory import locked
from jaxfp8rl.run.signals import StopSignals
from jaxfp8rl.training.resume import check_same_data, shapes_like
from jaxfp8rl.training.warm_start import WarmStart, masters
from jaxfp8rl.types import TrainState

CHECKPOINTS = "sft_checkpoints"  # below run.dir, until the warm start is done


def run_sft(cfg: Config, resume: bool = False) -> None:
    """Warm-start the config's model and write it to <run.dir>/sft, a Hugging Face folder that `model.path`
    accepts.

    With `resume` it goes on from the newest checkpoint of an interrupted warm start. After SIGINT or SIGTERM
    it finishes and saves the update in progress and exits with code 130 or 143. Raises subclasses of
    UserError.
    """
    if resume and (sft_folder(cfg) / SEEN).is_file():
        shutil.rmtree(Path(cfg.run.dir) / CHECKPOINTS, ignore_errors=True)
        return print(f"nothing to do: {sft_folder(cfg)} is written")
    take_gpu()  # before anything asks JAX for its devices
    if cfg.optim.offload:
        take_host_memory()
    prepared = prepare_sft(cfg, resume)
    keep_compiled(cfg.train.compilation_cache)
    with (locked(cfg), quiet(Path(cfg.run.dir) / LOGS / "stderr.txt"),
          explained_alone(cfg, CHECKPOINTS) as others):
        check_sft(cfg, resume)  # again, since another process may have ended in the meantime
        _run_sft(cfg, *prepared, resume, others)


def _run_sft(cfg: Config, model: ModelConfig, data: Data, questions: Questions, resume: bool,
             others: str) -> None:
    check_warm_start(cfg, model, memory_of_jax())
    updates = WarmStart.of(cfg, model, (data.task, data.train, data.tokenizer))
    with (contextlib.closing(ConsoleMonitor(cfg.sft.steps)) as console, StopSignals() as stop,
          contextlib.closing(Kept(cfg, data, stop, console.note)) as kept):
        for note in filter(None, (*version_warnings(cfg), others, *data.stops.notes, updates.described)):
            console.note(note)
        console.phase("warm start")
        state, done = kept.restore(model, updates) if resume else kept.begin(model, updates)
        began = lambda step: console.bar("warm start", step - 1, cfg.sft.steps)
        params = masters(updates.run(state, console.note, began, done, kept.after))
    folder = sft_folder(cfg)
    shutil.rmtree(folder, ignore_errors=True)  # empty, or left by a process that was killed at this point
    save_params(folder, model, params, dtype=cfg.precision.weight_dtype)
    data.tokenizer.save(str(folder))
    write_seen(folder, questions.seen)
    shutil.rmtree(Path(cfg.run.dir) / CHECKPOINTS, ignore_errors=True)
    print(f"wrote {folder}")


class Kept:
    """The checkpoints of a warm start, beside the config with which it began."""

    def __init__(self, cfg: Config, data: Data, stop: StopSignals, note: Callable[[str], None]):
        self._cfg, self._stop, self._note, self._tokenizer = cfg, stop, note, data.tokenizer
        self._folder = Path(cfg.run.dir) / CHECKPOINTS
        self._checkpoints = Checkpoints(self._folder, keep=1)
        self._saver = Saver(self._checkpoints, cfg.run.save_patience_s, note=note)
        self._loop = {"tokenizer": data.tokenizer.fingerprint(), "contents": data.contents()}

    def begin(self, model: ModelConfig, updates: WarmStart) -> tuple[TrainState, int]:
        """(the initial state, 0)."""
        if self._cfg.sft.save_every:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "config.toml").write_text(dump_config(self._cfg), encoding="utf-8")
        return updates.begin(starting_params(self._cfg, model)), 0

    def restore(self, model: ModelConfig, updates: WarmStart) -> tuple[TrainState, int]:
        """(state, updates done) of the newest undamaged checkpoint. Raises CheckpointError."""
        state, loop = self._checkpoints.restore(shapes_like(self._cfg, model, updates.begin))
        check_same_data(loop, self._tokenizer, self._loop["contents"])
        check_finite(state.params, model, "the checkpoint")
        for step, why in self._checkpoints.damaged.items():
            self._note(f"checkpoint {step} is damaged, continuing from {loop['step']}: {why}")
        self._checkpoints.set_aside(loop["step"])
        self._note(f"warm start goes on after update {loop['step']} of {self._cfg.sft.steps}")
        return state, loop["step"]

    def after(self, step: int, state: TrainState) -> None:
        """Save `state` where it is due. Raises SystemExit after a signal, unless the warm start is done."""
        every = self._cfg.sft.save_every
        if step == self._cfg.sft.steps:
            return
        if self._stop.requested:
            self._leave(step, state)
        if every and (step % every == 0 or self._saver.again):
            self._saver.save(step, state, self._loop)
        self._saver.check()

    def _leave(self, step: int, state: TrainState) -> NoReturn:
        of = f"{step} of {self._cfg.sft.steps}"
        if self._cfg.sft.save_every:
            self._saver.save(step, state, self._loop, last=True)
            self._note(f"stopped; update {of} is saved: the same command with --resume goes on")
        else:
            self._note(f"stopped; nothing is saved, because sft.save_every = 0: updates 1 to {of} are lost")
        raise SystemExit(self._stop.exit_code)

    def close(self) -> None:
        self._saver.close()


def prepare_sft(cfg: Config, resume: bool = False) -> tuple[ModelConfig, Data, Questions]:
    """Check all of a warm start that needs no device, as `preflight` does for a run."""
    check_sft(cfg, resume)
    model = with_options(model_config(cfg), cfg)
    check_learns(cfg, model)
    p, fp8 = cfg.precision, cfg.precision.resolve().forward_fp8
    check_kernels(p.products if fp8 else "auto", p.attention, p.compute_dtype, model)
    if fp8:
        engine_runs(cfg, model)  # refuses shapes that FP8 does not support
    if cfg.model.path:
        check_weights(cfg.model.path, model)
    data = load_data(cfg, model)
    return model, data, data.questions(cfg)


def check_sft(cfg: Config, resume: bool = False) -> None:
    """Raise UserErrors for a warm start that cannot begin, or go on, before anything loads."""
    if not cfg.sft.steps:
        raise ConfigError("sft.steps = 0: nothing to train",
                          "set sft.steps, sft.lr and sft.examples_per_step")
    check(cfg)
    _check_interrupted(cfg, resume)
    if not resume:
        check_empty(sft_folder(cfg))
    check_writable(sft_folder(cfg))
    check_kept(cfg.train.compilation_cache)


def check_learns(cfg: Config, model: ModelConfig) -> None:
    """Raise ConfigError for a model whose weights do not learn: those in four bits."""
    if model.packed:
        name, form = form_named(Path(cfg.model.path).name)
        of = Path(cfg.model.path).with_name(name) if form else "FOLDER"
        raise ConfigError(
            f"model.path: {cfg.model.path or 'model.config'} has weights in four bits "
            f"({model.packed.form}), and a "
            "warm start trains all parameters",
            f"warm up the BF16 folder (--model.path {of}), then `jaxfp8rl quantize "
            f"{sft_folder(cfg)} OUT --format "
            f"{model.packed.form}`, and train adapters over OUT: `jaxfp8rl train` with lora.rank = 32 and "
            "sft.steps = 0")


def _check_interrupted(cfg: Config, resume: bool) -> None:
    """An interrupted warm start goes on as it began, if it is asked to, and is not written over."""
    folder = Path(cfg.run.dir) / CHECKPOINTS
    done = Checkpoints(folder, 1).latest()
    if done is None:
        if resume:
            raise CheckpointError(f"run.dir: {cfg.run.dir} holds no warm start to resume",
                                  "run the same command without --resume")
        return
    if not resume:
        raise ConfigError(
            f"run.dir: {cfg.run.dir} holds a warm start that was interrupted after update {done}",
            f"go on with --resume, or remove {folder}")
    if refused := refused_changes(load_config(str(folder / "config.toml")), cfg):
        raise CheckpointError(
            f"run.dir: {cfg.run.dir} is resumed with the settings it was begun with; these are others:\n  "
            + "\n  ".join(refused), f"go on with those of {folder}/config.toml, or remove the folder")


def sft_folder(cfg: Config) -> Path:
    return Path(cfg.run.dir) / "sft"


def lost(steps: int, done: int) -> str:
    """The message about a warm start of `train`, of `steps` updates, that ends after `done` of them."""
    return (
        f"nothing is saved: a warm start cannot be resumed, and {done} of its {steps} updates are lost. "
        "The same command starts it again. `jaxfp8rl sft` saves its warm start as it goes, and any number of "
        "runs can use it as model.path")
