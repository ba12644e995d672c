"""The run directory: config.toml, metrics.jsonl, samples.jsonl, checkpoints/, events/; and the clock and signals of a run."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfp8rl.checkpoint import Checkpoints
from jaxfp8rl.config import Config
from jaxfp8rl.errors import CheckpointError, ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import load_params, save_params
from jaxfp8rl.monitors.base import Monitors
from jaxfp8rl.monitors.console import ConsoleMonitor
from jaxfp8rl.monitors.jsonl import JsonlMonitor
from jaxfp8rl.toml_config import dump_config
from jaxfp8rl.types import Params, TrainBatch, TrainState

PHASE = "phase: "  # begins the note that a Clock adds to what went wrong

def check_run_directory(cfg: Config, resume: bool) -> None:
    """Refuse, before anything loads, to start over a run, or to resume where there is none.

    A run that failed before its first line of metrics left nothing to keep.
    """
    metrics = Path(cfg.run.dir) / "metrics.jsonl"
    used = metrics.exists() and metrics.stat().st_size > 0
    if used and not resume:
        raise ConfigError(
            f"run.dir: {cfg.run.dir} holds a run already", "continue it with --resume, or choose another --run.dir"
        )
    if resume and not used:
        raise CheckpointError(f"run.dir: {cfg.run.dir} holds no run to resume", "train without --resume")


class RunDirectory:
    """Everything a run writes. A context manager: leaving it closes every file."""

    def __init__(self, cfg: Config, resume: bool):
        self.path = Path(cfg.run.dir)
        self.path.mkdir(parents=True, exist_ok=True)
        self._config = dump_config(cfg)
        if not resume:
            self._write_config()
        self._checkpoints = Checkpoints(self.path / "checkpoints", cfg.run.keep_checkpoints)
        self._console = ConsoleMonitor(cfg.run.steps)
        self._metrics, self._samples = (JsonlMonitor(self.path / f"{n}.jsonl") for n in ("metrics", "samples"))
        self._monitors = Monitors([self._metrics, self._console, *_trackers(cfg, self.path)])

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        for part in (self._monitors, self._samples, self._checkpoints):
            part.close()

    def log(self, record: dict[str, Any], samples: list[dict[str, Any]] = ()) -> None:
        self._monitors.log(record)
        for row in samples:
            self._samples.log(row)

    def profiled(self, wanted: bool) -> contextlib.AbstractContextManager:
        """While entered, if `wanted`, host and device are traced to `profile/`."""
        return jax.profiler.trace(str(self.path / "profile")) if wanted else contextlib.nullcontext()

    def note(self, text: str) -> None:
        self._console.note(text)

    def save(self, step: int, state: TrainState, loop: dict[str, Any]) -> None:
        self._checkpoints.save(step, state, loop)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any], int]:
        """(state, loop state, step) of the newest checkpoint. Nothing is written: the run may still be refused."""
        state, loop = self._checkpoints.restore(like)
        return state, loop, self._checkpoints.latest()

    def rewind(self, step: int) -> None:
        """Continue from `step`: forget the lines of metrics and samples after it, and keep the config that continues."""
        for lines in (self._metrics, self._samples):
            lines.truncate_after(step)
        self._write_config()

    def _write_config(self) -> None:
        (self.path / "config.toml").write_text(self._config, encoding="utf-8")

    def save_reference(self, model: ModelConfig, params: Params, dtype: str) -> None:
        """Keep the policy that the run began with: a Hugging Face folder, `reference`."""
        save_params(self.path / "reference", model, params, dtype=dtype)

    def load_reference(self, model: ModelConfig) -> Params:
        return jax.tree.map(jax.numpy.asarray, load_params(self.path / "reference", model)[1])

    def save_bad_batch(self, batch: TrainBatch, old_logp: jax.Array) -> Path:
        """Keep the newest batch whose update was not finite, as arrays, to be looked at."""
        path = self.path / "bad_batch.npz"
        np.savez_compressed(path, old_logp=np.asarray(old_logp), **{k: np.asarray(v) for k, v in batch._asdict().items()})
        return path


def _trackers(cfg: Config, path: Path) -> list:
    if "tensorboard" not in cfg.run.trackers:
        return []
    from jaxfp8rl.monitors.tensorboard import TensorboardMonitor

    return [TensorboardMonitor(path / "events")]


class Clock:
    """Wall-clock seconds of the phases of one step, on the host."""

    def __init__(self):
        self._start, self._phases = time.perf_counter(), {}

    @contextlib.contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        try:
            yield
        except Exception as e:
            e.add_note(PHASE + phase)
            raise
        self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """time/<phase>_s for each phase, and time/step_s since the clock was made."""
        return {f"time/{k}_s": v for k, v in (*self._phases.items(), ("step", time.perf_counter() - self._start))}


class StopSignals:
    """While entered, the first SIGINT or SIGTERM asks the loop to stop after the step in progress; the second stops at once."""

    def __init__(self):
        self.requested, self.exit_code = False, 130

    def __enter__(self) -> StopSignals:
        try:
            self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: signals are somebody else's
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def _ask(self, number: int, _: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested, self.exit_code = True, 128 + number
        print("\nstopping after this step, which is saved; once more to stop now", flush=True)


def peak_memory_gib() -> float:
    """The GPU allocator's peak on the first device, or the process's peak resident size where there is no GPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use", 0) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peak / 2**30
