"""Series of metrics over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Records = Sequence[dict[str, Any]]


def phases_of(records: Records) -> tuple[str, ...]:
    """The phases of a step. With rollout.max_staleness a step waits for the rollout and the scoring that run
    beside it."""
    waits = any("time/wait_s" in r for r in records)
    return (*(("wait",) if waits else ("rollout", "reward")), "score", "update", "publish")


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the records that hold a finite number under `key`."""
    points = [(r["step"], r[key]) for r in records if isinstance(r.get(key), int | float)
              and math.isfinite(r[key])]
    return [step for step, _ in points], [float(value) for _, value in points]
