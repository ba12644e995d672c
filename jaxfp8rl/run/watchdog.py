"""A run that stands still says where, and ends: nobody is left waiting for a GPU that does nothing."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

EXIT_CODE = 7
GRACE_SECONDS = 30.0


class Watchdog:
    """While entered, ends the process with EXIT_CODE when one phase of the run takes more than `seconds`; 0:
    never.

    It names the phase, and writes the stacks of all threads to `path`. Should a thread hold the interpreter,
    so that this one never comes to run, faulthandler does the same from outside Python after GRACE_SECONDS
    more, with exit code 1 and without the phase. Children of the run end with it: each of them watches its
    parent.
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
        """Something else begins: the clock starts anew."""
        self._phase, self._since = name, time.monotonic()
        if self._seconds and sys.__stderr__:
            faulthandler.dump_traceback_later(self._seconds + GRACE_SECONDS, exit=True, file=sys.__stderr__)

    def _watch(self) -> None:
        while not self._stop.wait(min(self._seconds / 10, 1.0)):
            phase, passed = self._phase, time.monotonic() - self._since
            if passed > self._seconds:
                self._end(phase, passed)

    def _end(self, phase: str, passed: float) -> None:
        said = f'the phase "{phase}" has not ended within {passed:.0f} s (run.watchdog_s = {self._seconds:g})'
        print(
            f"jaxfp8rl: {said}\n  next step: see where it stood in {self._path}; --resume goes on from what is saved, "
            "with a longer run.watchdog_s if it was slow and did not hang", file=sys.stderr, flush=True)
        try:
            with self._path.open("w") as file:
                print(said, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        finally:
            os._exit(EXIT_CODE)
