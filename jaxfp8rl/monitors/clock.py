"""The wall clock of a step's phases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

PHASE = "phase: "  # prefix of the note that a Clock adds to an exception


class Clock:
    """Wall-clock seconds of the phases of one step, on the host. `began` is called with the name of each."""

    def __init__(self, began: Callable[[str], None] = lambda phase: None):
        self._start, self._phases, self._began = time.perf_counter(), {}, began

    @contextlib.contextmanager
    def __call__(self, phase: str):
        self._began(phase)
        start = time.perf_counter()
        try:
            yield
        except Exception as e:
            e.add_note(PHASE + phase)
            raise
        self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    def include(self, other: Clock) -> None:
        """Add the phases that another thread has timed."""
        for phase, seconds in other._phases.items():
            self._phases[phase] = self._phases.get(phase, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """time/<phase>_s for each phase, and time/step_s since the clock was made."""
        return {f"time/{k}_s": v for k, v in (*self._phases.items(),
                                              ("step", time.perf_counter() - self._start))}
