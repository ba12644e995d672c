"""Saves of a running loop: started between two steps, written while the run goes on, retried if they fail."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.distributed.process_group import ALONE, ProcessGroup
from jaxfp8rl.errors import CheckpointError
from jaxfp8rl.types import TrainState

PEERS_S = 60.0  # seconds that a run that crashed waits for the parts of the other processes


class Saver:
    """Starts the saves of a run and handles their results. If there are several processes, all call its
    methods.

    A save that fails (a full disk, for example) is noted and retried after the next step; the older
    checkpoints are still there. It becomes a CheckpointError if none has succeeded for `patience` seconds, or
    if it is the last one. `phase` is called before the loop waits, `note` for each failure.
    """

    def __init__(
        self, checkpoints: Checkpoints, patience: float, group: ProcessGroup = ALONE,
        phase: Callable[[str], None] = lambda name: None, note: Callable[[str], None] = print
    ):
        self._checkpoints, self._patience, self._group = checkpoints, patience, group
        self._phase, self._note = phase, note
        self._times: dict[str, float] = {}
        self.unsaved_since: float | None = None  # time.monotonic() of the first failure in a row

    def save(self, step: int, state: TrainState, loop: dict[str, Any], wait: bool = False,
             last: bool = False) -> None:
        """Begin a checkpoint. Returns when `state` has been copied; with `wait` or `last`, when it is
        durable."""
        self._take_up()
        try:
            with self._blocked():
                self._checkpoints.save_async(step, state, loop)
        except Exception as e:  # Orbax, tensorstore and the system each raise their own
            self._failed(step, e, last)
        if wait or last:
            self._take_up(last)

    def check(self) -> None:
        """Handle the result of the save in flight, if it has finished. The loop calls this after each
        step."""
        if self._checkpoints.finished():
            self._take_up()

    @property
    def again(self) -> bool:
        """Whether the newest save failed, and no other is in flight."""
        return self.unsaved_since is not None and self._checkpoints.in_flight is None

    def metrics(self) -> dict[str, float]:
        """Seconds since the last call. `time/save_s`: how long saves held up the loop. `time/save_write_s`:
        how long the last finished save was written in the background. Empty if there was no save."""
        times, self._times = self._times, {}
        return times

    def close(self) -> None:
        """Wait for the save in flight, however the run ends. The other processes may be gone."""
        if (write := self._checkpoints.in_flight) is None:
            return
        self._phase("save")
        concurrent.futures.wait([write.seconds], None if self._group.count == 1 else PEERS_S)
        if write.seconds.done() and (error := write.seconds.exception()):
            self._note(_message(write.step, error))

    def _take_up(self, last: bool = False) -> None:
        if (write := self._checkpoints.in_flight) is None:
            return
        try:
            with self._blocked():
                seconds = self._checkpoints.wait()
        except Exception as e:
            self._failed(write.step, e, last)
        else:
            self.unsaved_since, self._times["time/save_write_s"] = None, seconds

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        """Time a section that holds up the loop."""
        self._phase("save")
        start = time.perf_counter()
        try:
            yield
        finally:
            before = self._times.get("time/save_s", 0.0)
            self._times["time/save_s"] = before + time.perf_counter() - start

    def _failed(self, step: int, error: Exception, last: bool) -> None:
        """Note the failure. Raises CheckpointError if retrying is not possible."""
        since = self.unsaved_since = self.unsaved_since or time.monotonic()
        passed = self._group.broadcast(lambda: time.monotonic() - since)
        if last or passed > self._patience:
            newest = self._checkpoints.latest()
            there = "there is none" if newest is None else f"the newest is that of step {newest}"
            raise CheckpointError(f"{_message(step, error)}; {there}",
                                  "make room in run.dir, then --resume") from error
        left = self._patience - passed
        self._note(f"{_message(step, error)}; it is tried again after each step, for {left:.0f} s "
                   "(run.save_patience_s)")


def _message(step: int, error: BaseException) -> str:
    return f"the checkpoint of step {step} could not be written: {type(error).__name__}: {error}"
