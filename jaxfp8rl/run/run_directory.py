"""The run directory: config.toml, metrics.jsonl, samples.jsonl, checkpoints/, events/, logs/."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxfp8rl.checkpoint.base_model import FOLDER, keep_base_model
from jaxfp8rl.checkpoint.saver import Saver
from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.resume_rules import changes, check_resumable, described
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.data.seen import write_seen
from jaxfp8rl.distributed.mesh import fetch
from jaxfp8rl.distributed.process_group import ALONE, ProcessGroup, check_shared
from jaxfp8rl.errors import CheckpointError, ConfigError, UserError, check_writable
from jaxfp8rl.health.table import Watch
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import load_params, save_params
from jaxfp8rl.monitors.base import Monitors
from jaxfp8rl.monitors.console import ConsoleMonitor
from jaxfp8rl.monitors.end.evaluations import forget_after
from jaxfp8rl.monitors.jsonl import JsonlMonitor, read_metrics
from jaxfp8rl.monitors.notes import ABOUT, write_note
from jaxfp8rl.monitors.trackers import check_trackers, make_trackers
from jaxfp8rl.run.provenance import write_about
from jaxfp8rl.types import Params, TrainBatch, TrainState

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


@contextlib.contextmanager
def claimed(cfg: Config, resume: bool, group: ProcessGroup = ALONE) -> Iterator[None]:
    """Lock the run directory for this process or group while entered.

    It is a lock of the operating system, so it ends with the process even if the process is killed. Raises
    the errors of `check_run_directory` and `check_trackers`, and ConfigError if another process uses the
    directory or it cannot be created.
    """
    lock = Path(cfg.run.dir) / ".lock"
    if not group.first:
        check_shared(group, lock)
        yield
        return
    check_trackers(cfg)  # only this process builds the trackers, and only after its engine
    if not lock.exists():  # no run uses the directory: check before it is created
        check_run_directory(cfg, resume)
    with locked(cfg):
        check_run_directory(cfg, resume)  # again, since another run may have ended in the meantime
        check_shared(group, lock)
        yield


@contextlib.contextmanager
def locked(cfg: Config) -> Iterator[None]:
    """Lock the run directory, which is created, while entered. Raises ConfigError as `claimed` does."""
    lock = Path(cfg.run.dir) / ".lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"run.dir: {cfg.run.dir} cannot be created: {e.strerror}",
                          "choose another --run.dir") from e
    with lock.open("a+") as file:
        _take(file, cfg)
        file.truncate(0)
        print(os.getpid(), file=file, flush=True)
        yield


def _take(file: TextIO, cfg: Config) -> None:
    """Lock `file` until it is closed. Raises ConfigError if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ConfigError(f"run.dir: {cfg.run.dir} is in use by process {file.read().strip() or '?'}",
                          "wait for that process or end it, or choose another --run.dir") from None
    except OSError as e:  # some network file systems
        print(
            f"run.dir: {cfg.run.dir} is on a disk without locks ({e.strerror}): "
            "make sure that no other run uses it")


def check_claimable(cfg: Config, resume: bool) -> None:
    """Raise the errors of `claimed` without locking or creating anything."""
    check_trackers(cfg)
    check_run_directory(cfg, resume)
    if (lock := Path(cfg.run.dir) / ".lock").exists():
        with lock.open("a+") as file:
            _take(file, cfg)


def check_run_directory(cfg: Config, resume: bool) -> None:
    """Check before anything loads that a run can start, or resume, in its directory.

    Raises ConfigError or CheckpointError for a start over an existing run, a resumption without a run, with
    settings that may not change, or to a step before the newest checkpoint. A run that failed before its
    first line of metrics, for example at the gate, may be resumed or started again.
    """
    folder = Path(cfg.run.dir)
    check_writable(folder, "run.dir")
    begun, checkpoints = _size(folder / "metrics.jsonl") > 0, Checkpoints(folder / "checkpoints", 1)
    if begun and not resume:
        raise ConfigError(f"run.dir: {folder} already holds a run",
                          "continue it with --resume, or choose another --run.dir")
    if not resume:
        return
    if (newest := checkpoints.latest()) is None:
        if begun:
            raise checkpoints.none_to_go_on_from()
        raise CheckpointError(f"run.dir: {folder} holds no run to resume",
                              "train without --resume (a warm start starts again)")
    check_resumable(cfg)
    if newest > cfg.run.steps:
        raise ConfigError(
            f"run.steps = {cfg.run.steps}: the newest checkpoint of {folder} is of step {newest}",
            f"set run.steps to at least {newest}, or fork an earlier step: --fork RUN@STEP --run.dir NEW")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def by_first(f: Callable[..., None]) -> Callable[..., None]:
    """Decorate a method so that it runs only in the first process."""
    return functools.wraps(f)(lambda self, *args, **options: f(self, *args, **options) if self.group.first
                              else None)


class RunDirectory:
    """All files that a run writes. Except for checkpoints, only the first of several processes writes them.

    It is a context manager, which closes every file on exit. `phase` is called with the name of each slow
    phase.
    """

    def __init__(
        self, cfg: Config, resume: bool, phase: Callable[[str], None] = lambda name: None,
        group: ProcessGroup = ALONE,
        console: ConsoleMonitor | None = None,
    ):
        self.path, self._began, self.group = Path(cfg.run.dir), phase, group
        self._console, self._watch = console, Watch()
        self._cfg, self._config_changed, self._detailed = cfg, False, set()
        self._checkpoints = Checkpoints(self.path / "checkpoints", cfg.run.keep_checkpoints, group)
        self.saver = Saver(self._checkpoints, cfg.run.save_patience_s, group, self.phase, self.note)
        self._open(resume)

    @by_first
    def _open(self, resume: bool) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._console = console = self._console or ConsoleMonitor(self._cfg.run.steps)
        try:
            if not resume:
                self._begin()
            self._metrics, self._samples = (JsonlMonitor(self.path / f"{n}.jsonl")
                                            for n in ("metrics", "samples"))
            self._trackers = make_trackers(self._cfg, self.path, self.note)
            self._monitors = Monitors([self._metrics, console, *self._trackers])
        except BaseException:  # or the live line would go on and hide the terminal's cursor
            console.close()
            raise

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            self.saver.close()
        finally:
            self._close(kind)

    @by_first
    def _close(self, kind: type | None) -> None:
        for part in (self._monitors, self._samples):
            # after an error, a second failure to write would hide the first
            with contextlib.suppress(*[OSError] if kind else []):
                part.close()

    @by_first
    def log(self, record: dict[str, Any], samples: Sequence[dict[str, Any]] = ()) -> None:
        """Write a record of metrics and its samples. Raises CheckpointError if the disk is full or fails,
        since a run must not continue without its record."""
        try:
            if self._config_changed:
                self._write_config()
            self._monitors.log(record | self.saver.metrics())
            for text in self._watch.notes(record):
                self.note(text)
            for row in samples:
                self._samples.log(row)
        except OSError as e:
            if e.errno not in DISK_ERRORS:
                raise
            raise CheckpointError(
                f"run.dir: the metrics of step {record['step']} could not be written: {e.strerror}",
                "free disk space in run.dir, then continue with --resume") from e

    def profiled(self, wanted: bool) -> contextlib.AbstractContextManager:
        """If `wanted`, trace host and device to `profile/` while entered."""
        return jax.profiler.trace(
            str(self.path / "profile")) if wanted and self.group.first else contextlib.nullcontext()

    def phase(self, name: str) -> None:
        """Announce a slow phase to the watchdog and the console."""
        self._began(name)
        if self._console:
            self._console.phase(name)

    @by_first
    def warming(self, done: int) -> None:
        """Show the number of finished updates of the warm start."""
        if self._console:
            self._console.bar("warm start", done, self._cfg.sft.steps)

    @by_first
    def note(self, text: str, detail: str = "", kind: str = "") -> None:
        """Write a note to the console and, with the time, to notes.txt. `detail` is added to the first note
        of each `kind`."""
        if detail and kind not in self._detailed:
            self._detailed.add(kind)
            text += f"\n{detail}"
        if self._console:
            self._console.note(text)
        write_note(self.path, text)

    @by_first
    def describe(self, start: dict[str, Any]) -> None:
        """Add the entry of this start to run.json."""
        try:
            write_about(self.path, start)
        except ValueError as e:
            self.note(f"run.json is damaged and was started again: {e}")
            (self.path / ABOUT).unlink()
            write_about(self.path, start)

    def save(self, step: int, state: TrainState, loop: dict[str, Any], last: bool = False) -> None:
        """Start writing a checkpoint while the run continues (jaxfp8rl.checkpoint.saver).

        It waits for the `last` checkpoint, and for one before the first line of metrics, so that a run with a
        line of metrics can always be resumed.
        """
        self.saver.save(step, state, loop, wait=not self.begun, last=last)

    @property
    def begun(self) -> bool:
        """Whether the run has a line of metrics."""
        return self.group.broadcast(lambda: _size(self._metrics.path) > 0)

    def leave(self, code: int, lost: str = "") -> NoReturn:
        """End the process after a signal, with a note on how to continue, or the message `lost` about lost
        work."""
        step, command = self._checkpoints.latest(), f"jaxfp8rl train {shlex.quote(str(self.path))} --resume"
        saved = "nothing is saved" if step is None else f"step {step} is saved; continue with: {command}"
        self.note(f"stopped; {lost or saved}")
        raise SystemExit(code)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any], int]:
        """(state, loop state, step) of the newest undamaged checkpoint. Nothing is deleted yet, since the
        resumption may still be refused."""
        state, loop = self._checkpoints.restore(like)
        for step, why in self._checkpoints.damaged.items():
            self.note(f"checkpoint {step} is damaged, continuing from {loop['step']}: {why}")
        return state, loop, loop["step"]

    @by_first
    def rewind(self, step: int) -> None:
        """Continue from `step`: delete later steps from metrics, samples, trackers and evaluations.

        Changed settings apply to the following steps, so config.toml is rewritten with the first of them.
        """
        changed = described(changes(load_config(str(self.path / "config.toml")), self._cfg))
        if changed and step < self._cfg.run.steps:
            self.note(f"resumed at step {step} with other settings: {'; '.join(changed)}")
            self._config_changed = True
        records = read_metrics(self._metrics.path)
        kept = [record for record in records if int(record["step"]) <= step]
        for tracker in self._trackers if len(kept) < len(records) else ():
            tracker.rewind(step, kept)
        for lines in (self._metrics, self._samples):
            lines.truncate_after(step)
        self._forget_evaluations(step)
        (self.path / "summary.json").unlink(missing_ok=True)  # the run has not ended after all
        if not (self.path / FOLDER).exists():  # an earlier version started this run
            keep_base_model(self._cfg, self.path)
        self._checkpoints.set_aside(step)

    def _forget_evaluations(self, step: int) -> None:
        try:
            forget_after(self.path / "eval.json", step)
        except ValueError as e:
            self.note(f"eval.json was not changed and may hold evaluations of deleted steps: {e}")

    def _begin(self) -> None:
        """Start a new run: remove the files of an earlier start that failed before its first line of
        metrics."""
        if left := self._checkpoints.set_aside(-1, "left"):
            self.note(
                f"checkpoint {', '.join(map(str, left))} of a start that failed was renamed to "
                "checkpoints/left-STEP")
        if self._was_ours():
            self._forget_evaluations(-1)
            for name in ("reference", FOLDER):
                shutil.rmtree(self.path / name, ignore_errors=True)
        self._write_config()
        keep_base_model(self._cfg, self.path)

    def _was_ours(self) -> bool:
        """Whether an earlier start left its config here. No file is removed from any other folder, whatever
        the names in it."""
        try:
            return bool(load_config(str(self.path / "config.toml")))
        except UserError:
            return False

    def _write_config(self) -> None:
        """Replace config.toml atomically: without a whole one the run cannot be resumed."""
        draft = self.path / "config.toml.tmp"
        with draft.open("w", encoding="utf-8") as file:
            file.write(dump_config(self._cfg))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path / "config.toml")
        self._config_changed = False

    @by_first
    def keep_seen(self, seen: np.ndarray) -> None:
        """Record the problems that the weights are trained on."""
        write_seen(self.path, seen)

    def save_reference(self, model: ModelConfig, params: Params, dtype: str) -> None:
        """Save the policy that the run began with, as the Hugging Face folder `reference`."""
        params = fetch(params) if self.group.count > 1 else params
        self.group.run_and_sync(lambda: save_params(self.path / "reference", model, params, dtype=dtype),
                            alone=True)

    def load_reference(self, model: ModelConfig) -> Params:
        """The reference policy, on the host, in float32."""
        return load_params(self.path / "reference", model)[1]

    def save_bad_batch(self, batch: TrainBatch, old_logp: jax.Array) -> Path:
        """Save the newest batch whose update was not finite, for inspection."""
        path = self.path / "bad_batch.safetensors"
        arrays = {name: x for name, x in fetch(batch._asdict() | {"old_logp": old_logp}).items()
                  if x is not None}
        if self.group.first:
            save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, path)
        return path

