"""The trackers of run.trackers. A failing tracker never stops a run, since metrics.jsonl holds the same
data."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import UserError
from jaxfp8rl.monitors.base import Monitor, Record

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_trackers(cfg: Config) -> None:
    """Raise UserError if a tracker's package is missing. Nothing is imported."""
    for name in cfg.run.trackers:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(f'run.trackers: "{name}" needs the package {PACKAGES[name]}',
                            'pip install "jaxfp8rl[trackers]", or leave it out of run.trackers')


def make_trackers(cfg: Config, folder: Path, note: Callable[[str], None]) -> list[Tracker]:
    return [Tracker(name, lambda name=name: _make(name, cfg, folder), note) for name in cfg.run.trackers]


def _make(name: str, cfg: Config, folder: Path) -> Rewinding:
    if name == "wandb":
        from jaxfp8rl.monitors.wandb import WandbMonitor

        return WandbMonitor(folder, cfg.model_dump(mode="json"))
    from jaxfp8rl.monitors.tensorboard import TensorboardMonitor

    return TensorboardMonitor(folder / "events")


class Rewinding(Monitor, Protocol):
    """A monitor that a resumed run takes back to the step that it resumes from."""

    def rewind(self, step: int, records: Iterable[Record]) -> None: ...


class Tracker:
    """The monitor that `make` builds. At its first error, `note` is called and it is off for the rest of the
    run."""

    def __init__(self, name: str, make: Callable[[], Rewinding], note: Callable[[str], None]):
        self._name, self._note = name, note
        self._monitor: Rewinding | None = None
        self._monitor = self._try(make)

    def log(self, record: Record) -> None:
        if monitor := self._monitor:
            self._try(lambda: monitor.log(record))

    def rewind(self, step: int, records: Iterable[Record]) -> None:
        """Undo the steps after `step`; `records` are those up to it."""
        if monitor := self._monitor:
            self._try(lambda: monitor.rewind(step, records))

    def close(self) -> None:
        if self._monitor:
            self._try(self._monitor.close)

    def _try(self, act: Callable[[], Rewinding | None]) -> Rewinding | None:
        try:
            return act()
        except Exception as e:  # the network's, the service's, a full disk's, a broken package's
            self._monitor = None
            self._note(f"run.trackers: {self._name} is off for the rest of the run: {type(e).__name__}: {e}")
            return None
