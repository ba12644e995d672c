"""What an asynchronous run records of its rollouts, so that a resumed run learns from the same tokens.

    rollouts.jsonl       one line a step: the groups admitted and dropped, and those taken with their versions
    rollouts/STEP.json   the step's completions, and the queue behind them, for as long as a resumption may
                         need them

A record is written before its step learns. After a kill at any point the run goes on from its newest
checkpoint and replays the recorded steps behind it, whatever the timing of the engine was.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import CheckpointError
from jaxfp8rl.monitors.jsonl import JsonlMonitor


class Journal:
    """The records of a run's steps in `folder`. `settings`: a digest of what decides a step. `keep`: the
    number of newest records that are kept."""

    def __init__(self, folder: Path, settings: str, keep: int):
        self._folder, self._settings, self._keep = folder, settings, keep
        self._lines: JsonlMonitor | None = None

    @classmethod
    def of(cls, cfg: Config) -> Journal | None:
        """The journal of a run; None for one whose batches follow from its checkpoint alone."""
        if not (cfg.rollout.max_staleness or cfg.rollout.in_flight):
            return None
        decides = cfg.model_dump(mode="json", exclude={"run", "monitor"})
        settings = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
        keep = cfg.run.save_every * (cfg.run.keep_checkpoints + 1)
        return cls(Path(cfg.run.dir) / "rollouts", settings, keep)

    def write(self, step: int, line: dict[str, Any], record: dict[str, Any]) -> None:
        """Write the line and the record of `step`. Raises CheckpointError if the disk is full or fails."""
        try:
            if self._lines is None:  # the first step that is not replayed
                self._lines = JsonlMonitor(self._folder.with_suffix(".jsonl"))
                self._lines.truncate_after(step - 1)
            self._lines.log({"step": step, **line})
            if self._keep:
                self._write(step, {"settings": self._settings, **record})
        except OSError as e:
            raise CheckpointError(f"run.dir: the rollouts of step {step} could not be written: {e.strerror}",
                                  "free disk space in run.dir, then continue with --resume") from e

    def _write(self, step: int, record: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for other in self._steps():
            if other >= step or other <= step - self._keep:  # of a course that was left, or out of use
                self._path(other).unlink()
        draft = self._folder / "draft"
        draft.write_text(json.dumps(record), encoding="utf-8")
        os.replace(draft, self._path(step))

    def read(self, after: int) -> tuple[dict[int, dict[str, Any]], list[str]]:
        """(the records of the steps that follow `after` without a gap, notes about them)."""
        found: dict[int, dict[str, Any]] = {}
        while (record := self._record(after + len(found) + 1)) is not None:
            found[after + len(found) + 1] = record
        if not found:
            return {}, []
        if any(record["settings"] != self._settings for record in found.values()):
            return {}, [f"{len(found)} recorded steps after step {after} are sampled anew: they were "
                        "recorded under other settings"]
        return found, [f"the rollouts of steps {after + 1} to {after + len(found)} are replayed as they were "
                       "recorded"]

    def _record(self, step: int) -> dict[str, Any] | None:
        """None if there is none, or only what a loss of power left of it."""
        try:
            return json.loads(self._path(step).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def _steps(self) -> list[int]:
        return [int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdecimal()]

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.json"
