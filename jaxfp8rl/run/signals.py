"""SIGINT and SIGTERM: a run stops after the step in progress."""

from __future__ import annotations

import signal

from jaxfp8rl.distributed.process_group import ALONE, ProcessGroup


class StopSignals:
    """While entered, the first SIGINT or SIGTERM makes the loop stop after the step in progress; a second one
    stops at once.

    asked: the exit code for the signal that this process received, or 0. exit_code: that of the whole group,
    updated by `settle`.
    """

    def __init__(self, group: ProcessGroup = ALONE):
        self.asked, self.exit_code, self._group = 0, 0, group

    @property
    def requested(self) -> bool:
        return bool(self.exit_code)

    def settle(self) -> None:
        """Called between two steps: if one process of the group was asked to stop, all of them stop."""
        self.exit_code = self._group.all_reduce_max(self.asked)

    def __enter__(self) -> StopSignals:
        try:
            self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # only the main thread may handle signals
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def _ask(self, number: int, _: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = 128 + number
        if self._group.count == 1:
            self.settle()
        print("\nstopping after this step; signal again to stop now", flush=True)
