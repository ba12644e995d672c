"""Three ways to judge a metric: by bounds at each step, by the share of faulty steps, or by its trend over
the run."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Records = Sequence[Mapping[str, Any]]
Series = list[tuple[int, float]]  # (step, value)

OFTEN = 0.1  # share of steps; a fault in more of them is systematic, not an accident
NOISE = ("the noise is meant to be seen here, and the correction weighs by it; if `correction/ess` is low, "
         "lower `noise.start` (docs/noise.md)")


class Level(enum.IntEnum):
    HEALTHY, WARNING, ILL = range(3)

    def __str__(self) -> str:
        return self.name.lower()


class Finding(NamedTuple):
    """One unhealthy metric: its level, a sentence about it, and the next step."""

    key: str
    level: Level
    text: str
    remedy: str


class Bound(NamedTuple):
    """A metric with bounds that every step is compared with.

    The run gets a warning if the median of the run, or of its last tenth, is beyond `warn`. It is ill if such
    a median is beyond `sick`, or if more than OFTEN of the steps are. Fewer steps beyond `sick` are a warning
    if `once` is set. A single step beyond `never`, or a value that is not finite, makes the run ill.

    by_noise: noise on the policy that samples (`[noise]`) raises it. The steps with noise are then judged
    apart, and make no run ill while their values are finite.
    """

    key: str
    name: str
    warn: float
    sick: float
    remedy: str
    source: str
    above: bool = True  # values above the bounds are unhealthy; otherwise values below them
    never: float = math.nan
    once: bool = True
    by_noise: bool = False

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
        """The level of one step's value, or of a median."""
        if self._past(value, self.sick) or not math.isfinite(value):
            return Level.ILL
        return Level.WARNING if self._past(value, self.warn) else Level.HEALTHY

    def level_in(self, record: Mapping[str, Any]) -> Level:
        """The level of one step's value, in its record."""
        value = float(record[self.key])
        excused = self.by_noise and has_noise(record) and math.isfinite(value)
        return min(self.level_of(value), Level.WARNING) if excused else self.level_of(value)

    def judge(self, records: Records) -> Finding | None:
        if not self.by_noise:
            return self._of(records)
        loud = self._of([r for r in records if has_noise(r)])
        if loud and all(math.isfinite(v) for _, v in series_of(records, self.key)):
            loud = Finding(self.key, Level.WARNING, f"{loud.text} in the steps with noise", NOISE)
        quiet = self._of([r for r in records if not has_noise(r)])
        return max(filter(None, (quiet, loud)), key=lambda finding: finding.level, default=None)

    def _of(self, records: Records) -> Finding | None:
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
        parts = [f"{self.show(median)} in the median"] if self.level_of(median) else []
        if self.level_of(tail) > self.level_of(median):
            parts.append(f"{self.show(tail)} in the last {tenth(found)} steps")
        if single:
            parts.append(f"{self.show(worst)} at step {step}")
        return self._finding(max(self.level_of(median), self.level_of(tail), single), parts)

    def show(self, value: float) -> str:
        """The value, with enough digits to tell it from the bounds."""
        return shown(value, self.warn, self.sick)

    def _finding(self, level: Level, parts: Sequence[str]) -> Finding | None:
        text = f"{self.name} {', '.join(parts)} (healthy {self.healthy})"
        return Finding(self.key, level, text, self.remedy) if level else None

    def _past(self, value: float, bound: float) -> bool:
        return value > bound if self.above else value < bound

    @property
    def _beyond(self) -> str:
        return "above" if self.above else "below"


class Fault(NamedTuple):
    """A metric that counts faults, which a healthy run does not have. `share` maps (value, record) to the
    faulty share of a step, from 0 to 1. The run is ill if the mean share exceeds `often`; otherwise any fault
    is a warning if `any` is set."""

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
    """A metric that is judged by its trend over the run: `find` returns (level, text), or None if the trend
    is healthy."""

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
    """Every number recorded under `key`, including infinities and NaN."""
    return [(int(r["step"]), float(r[key])) for r in records if is_number(r.get(key))]


def shown(value: float, *bounds: float) -> str:
    """The value with three digits, or with as many as place it on its own side of the bounds: 1.0502 is not
    shown as 1.05."""
    same = lambda text: all((float(text) > b, float(text) < b) == (value > b, value < b) for b in bounds)
    text = next((t for digits in range(3, 17) if same(t := f"{value:.{digits}g}")), repr(value))
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else text


def has_noise(record: Mapping[str, Any]) -> bool:
    """Whether the policy that sampled a step had noise on its gains."""
    return record.get("noise/sigma", 0) > 0


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def tenth(found: Sequence) -> int:
    """The length of the first or last part of a series: a tenth of it, at least three values, and never more
    than half."""
    return max(1, min(max(3, len(found) // 10), len(found) // 2))


def median_of(found: Series) -> float:
    """The median of the values of a series."""
    return statistics.median(value for _, value in found)


def at(steps: Sequence[int], found: Sequence) -> str:
    """"at step 7", or "in 3 of 20 steps, first in step 7"."""
    return f"at step {steps[0]}" if len(
        steps) == 1 else f"in {len(steps)} of {len(found)} steps, first in step {steps[0]}"
