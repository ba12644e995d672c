"""How a run's metrics are judged: by a bound at each step, by what should not be at all, or by their course
over the run."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Records = Sequence[Mapping[str, Any]]
Series = list[tuple[int, float]]  # (step, value)

OFTEN = 0.1  # of the steps: what is wrong in more of them is the run's, and no accident


class Level(enum.IntEnum):
    HEALTHY, WARNING, ILL = range(3)

    def __str__(self) -> str:
        return self.name.lower()


class Finding(NamedTuple):
    """What is not healthy of a metric, in words, and the next step."""

    key: str
    level: Level
    text: str
    remedy: str


class Bound(NamedTuple):
    """A metric that has a bound at every step.

    A warning beyond `warn`, ill beyond `sick`: as the median of the run or of its last tenth, or in more than
    OFTEN of the steps. Less often beyond `sick` is a warning, where `once` says so. Ill also is a step beyond
    `never`, and what is not finite.
    """

    key: str
    name: str
    warn: float
    sick: float
    remedy: str
    source: str
    above: bool = True  # unhealthy is what lies above the bounds; else what lies below
    never: float = math.nan
    once: bool = True

    @property
    def healthy(self) -> str:
        return f"{'below' if self.above else 'above'} {self.warn:g}"

    @property
    def warning(self) -> str:
        between = [] if self.sick == self.warn else [f"{self._beyond} {self.warn:g} in the median"]
        return "; ".join(between + [f"a step {self._beyond} {self.sick:g}"] * self.once)

    @property
    def ill(self) -> str:
        never = [] if math.isnan(self.never) else [f"a step {self._beyond} {self.never:g}"]
        return "; ".join(
            [f"{self._beyond} {self.sick:g} in the median, or in more than {OFTEN:.0%} of the steps", *never])

    def level_of(self, value: float) -> Level:
        """Of one step's value, or of a median."""
        if self._past(value, self.sick) or not math.isfinite(value):
            return Level.ILL
        return Level.WARNING if self._past(value, self.warn) else Level.HEALTHY

    def judge(self, records: Records) -> Finding | None:
        found = series_of(records, self.key)
        if not found:
            return None
        if broken := [step for step, v in found if not math.isfinite(v)]:
            return self._finding(Level.ILL, [f"not finite {at(broken, found)}"])
        median, tail = median_of(found), median_of(found[-tenth(found) :])
        step, worst = (max if self.above else min)(found, key=lambda pair: pair[1])
        past = [step for step, v in found if self._past(v, self.sick)]
        often = len(past) > OFTEN * len(found) or self._past(worst, self.never)
        single = Level.ILL if often else Level.WARNING if past and self.once else Level.HEALTHY
        said = [f"{self.show(median)} in the median"] if self.level_of(median) else []
        if self.level_of(tail) > self.level_of(median):
            said.append(f"{self.show(tail)} in the last {tenth(found)} steps")
        if single:
            said.append(f"{self.show(worst)} at step {step}")
        return self._finding(max(self.level_of(median), self.level_of(tail), single), said)

    def show(self, value: float) -> str:
        """With the digits that tell it from the bounds."""
        return shown(value, self.warn, self.sick)

    def _finding(self, level: Level, said: Sequence[str]) -> Finding | None:
        text = f"{self.name} {', '.join(said)} (healthy {self.healthy})"
        return Finding(self.key, level, text, self.remedy) if level else None

    def _past(self, value: float, bound: float) -> bool:
        return value > bound if self.above else value < bound

    @property
    def _beyond(self) -> str:
        return "above" if self.above else "below"


class Fault(NamedTuple):
    """A metric of what should not be at all. `share`: of (value, record) how much of a step is wrong, from 0
    to 1. More than `often` of all steps together is ill; less is a warning, where `any` says so."""

    key: str
    name: str
    healthy: str
    share: Callable[[float, Mapping[str, Any]], float]
    remedy: str
    source: str
    often: float = OFTEN
    any: bool = True

    @property
    def warning(self) -> str:
        return "any" if self.often and self.any else ""

    @property
    def ill(self) -> str:
        return f"more than {self.often:.0%} of all" if self.often else "any"

    def judge(self, records: Records) -> Finding | None:
        have = [r for r in records if is_number(r.get(self.key))]
        shares = [self.share(r[self.key], r) if math.isfinite(r[self.key]) else 1.0 for r in have]
        steps = [int(r["step"]) for r, share in zip(have, shares) if share > 0]
        level = Level.ILL if sum(shares) > self.often * len(have) else Level(self.any and bool(steps))
        return Finding(self.key, level, f"{self.name} {at(steps, have)}", self.remedy) if level else None


class Course(NamedTuple):
    """A metric that is judged by its course over the run: `find` returns (level, text), or None."""

    key: str
    name: str
    healthy: str
    warning: str
    ill: str
    find: Callable[[Records], tuple[Level, str] | None]
    remedy: str
    source: str

    def judge(self, records: Records) -> Finding | None:
        found = self.find(records)
        return Finding(self.key, *found, self.remedy) if found else None


Rule = Bound | Fault | Course


def series_of(records: Records, key: str) -> Series:
    """Every number under `key`, those that are not finite too."""
    return [(int(r["step"]), float(r[key])) for r in records if is_number(r.get(key))]


def shown(value: float, *bounds: float) -> str:
    """Three digits, or as many as tell the value from the bounds: 1.0502 is no 1.05."""
    same = lambda text: all((float(text) > b, float(text) < b) == (value > b, value < b) for b in bounds)
    text = next((t for digits in range(3, 17) if same(t := f"{value:.{digits}g}")), repr(value))
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else text


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def tenth(found: Sequence) -> int:
    """How many values the first or the last part of a series has: a tenth, three at least, and never more
    than half."""
    return max(1, min(max(3, len(found) // 10), len(found) // 2))


def median_of(found: Series) -> float:
    return statistics.median(value for _, value in found)


def at(steps: Sequence[int], found: Sequence) -> str:
    return f"at step {steps[0]}" if len(
        steps) == 1 else f"in {len(steps)} of {len(found)} steps, first in step {steps[0]}"
