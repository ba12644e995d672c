"""The watchdog ends a run that hangs and reports where it hung, so that no GPU stays idle unnoticed."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from pathlib import Path

from jaxfp8rl.monitors import quiet

EXIT_CODE = 7
GRACE_SECONDS = 30.0


class Watchdog:
    """While entered, ends the process with EXIT_CODE if one phase of the run takes longer than `seconds`; 0
    disables it.

    It names the phase and writes the stacks of all threads to `path`. If a thread holds the interpreter lock,
    so that the watchdog's thread cannot run, faulthandler does the same from outside Python GRACE_SECONDS
    later, with exit code 1 and without the phase. Child processes of the run watch their parent and end with
    it.
    """

    def __init__(self, seconds: float, path: str | Path):
        self._seconds, self._path, self._stop = seconds, Path(path), threading.Event()
        self._phase, self._since = "start", time.monotonic()

    def __enter__(self) -> Watchdog:
        if self._seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        self.phase("start")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        faulthandler.cancel_dump_traceback_later()

    def phase(self, name: str) -> None:
        """Start the phase `name` and restart the clock."""
        self._phase, self._since = name, time.monotonic()
        if self._seconds and (terminal := quiet.descriptor()) is not None:
            faulthandler.dump_traceback_later(self._seconds + GRACE_SECONDS, exit=True, file=terminal)

    def _watch(self) -> None:
        while not self._stop.wait(min(self._seconds / 10, 1.0)):
            phase, passed = self._phase, time.monotonic() - self._since
            if passed > self._seconds:
                self._end(phase, passed)

    def _end(self, phase: str, passed: float) -> None:
        limit = f"run.watchdog_s = {self._seconds:g}"
        message = f'the phase "{phase}" did not end within {passed:.0f} s ({limit})'
        quiet.say(
            f"jaxfp8rl: {message}\n  next step: see {self._path} for where it hung, and continue "
            "from the last checkpoint with --resume; if it was only slow, raise run.watchdog_s")
        try:
            with self._path.open("w") as file:
                print(message, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        finally:
            os._exit(EXIT_CODE)
