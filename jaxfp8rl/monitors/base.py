"""The monitor contract, and a fan-out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

Record = Mapping[str, float | int | str]


class Monitor(Protocol):
    """Takes one flat record a step: `step` (int) and the keys of docs/metrics.md."""

    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Monitors:
    """Passes each record to every monitor, in order; closes them all."""

    def __init__(self, monitors: Iterable[Monitor]):
        self.monitors = tuple(monitors)

    def log(self, record: Record) -> None:
        for monitor in self.monitors:
            monitor.log(record)

    def close(self) -> None:
        for monitor in self.monitors:
            monitor.close()
