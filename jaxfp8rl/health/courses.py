"""Courses of metrics over a run that are not healthy. Each function returns (level, words), or None."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxfp8rl.health.judges import OFTEN, Level, Records, Series, at, median_of, series_of, shown, tenth

Found = tuple[Level, str] | None

# steps before one, at most and at least, whose median its gradient norm is compared with
WINDOW, KNOWN = 100, 3
TEACHING = 0.1  # of the groups with rewards that differ: below, most of what is sampled teaches nothing
FALL = 0.2, 0.5  # of the best reward lost
# standard deviations of its noise that a fall has; of many steps one is extreme
SURE = {"reward/mean": 5, "eval/reward_mean": 3}
# nats a token; factors from the beginning to the end
ENTROPY_FLOOR, ENTROPY_FALL, ENTROPY_RISE = 0.01, (5, 20), (2, 3)
SPIKE = (10, 100)  # times the median before it


def _finite(records: Records, key: str) -> Series:
    return [(step, value) for step, value in series_of(records, key) if math.isfinite(value)]


def _rose(records: Records) -> bool:
    """Whether the reward is higher at the end than at the beginning, by more than its noise."""
    values = [value for _, value in _finite(records, "reward/mean")]
    part = tenth(values)
    return len(values) > 1 and statistics.fmean(values[-part:]) - statistics.fmean(
        values[:part]) > 3 * _noise(values, part)


def _noise(values: Sequence[float], part: int) -> float:
    """The standard deviation of a mean of `part` values, from how much neighbours differ: a trend is no
    noise."""
    differences = [abs(b - a) for a, b in zip(values, values[1:])]
    return 1.4826 * statistics.median(differences) / math.sqrt(2 * part) if differences else 0.0


def _milder(level: Level, rose: bool) -> Level:
    """One level better where the reward has risen: what looks ill is how the policy has learned."""
    return Level(max(level - rose, 0))


def _often(steps: Sequence[int], found: Series) -> Level:
    """Of what may happen now and then: ill in more than half of the steps, or in all of the last ones."""
    if 2 * len(steps) > len(found) or {step for step, _ in found[-tenth(found) :]} <= set(steps):
        return Level.ILL
    return Level.WARNING if len(steps) > OFTEN * len(found) else Level.HEALTHY


def zero_steps(records: Records) -> list[int]:
    """Steps in which every reward was 0."""
    return [int(r["step"]) for r in records if r.get("reward/mean") == 0 and not r.get("reward/std", 0)]


def zeros(records: Records) -> Found:
    found, steps = series_of(records, "reward/mean"), zero_steps(records)
    if broken := [step for step, value in found if not math.isfinite(value)]:
        return Level.ILL, f"reward not finite {at(broken, found)}"
    level = _often(steps, found) if steps else Level.HEALTHY
    return (level, f"all rewards were 0 {at(steps, found)}") if level else None


def alike(records: Records) -> Found:
    """Steps whose rewards are equal within every group; without those in which all are 0, and those at the
    end of a task that has been learned."""
    rose, zeros = _rose(records), set(zero_steps(records))
    equal = {int(r["step"]): r for r in records if r.get("reward/groups_solved_in_part",
                                                         r.get("reward/std")) == 0}
    steps = [step for step, r in equal.items() if step not in zeros
             and not (rose and r.get("reward/std", 1) == 0)]
    found = series_of(records, "reward/mean") or series_of(records, "reward/groups_solved_in_part")
    if steps and (level := _milder(_often(steps, found), rose)):
        values = {equal[step].get("reward/mean") for step in steps if equal[step].get("reward/std") == 0}
        value = values.pop() if len(values) == 1 else None
        said = "all rewards of each group were equal" if value is None else f"all rewards were {shown(value)}"
        return level, f"{said} {at(steps, found)}"
    shares = [share for _, share in _finite(records, "reward/groups_solved_in_part") if share]
    if shares and (median := statistics.median(shares)) < TEACHING and not rose:
        return Level.WARNING, f"rewards differ in only {median:.1%} of the groups, in the median"
    return None


def fall(key: str, name: str) -> Callable[[Records], Found]:
    def find(records: Records) -> Found:
        found = _finite(records, key)
        part = 1 if key.startswith("eval/") else tenth(found)
        if len(found) < 2 * part or len(found) < 2:
            return None
        values = [value for _, value in found]
        means = [statistics.fmean(values[i : i + part]) for i in range(len(values) - part + 1)]
        best, last = max(means[: len(means) - part]), means[-1]
        problems = next((r["eval/problems"] for r in records if r.get("eval/problems")), 0)
        noise = 0.5 / math.sqrt(problems or 100) if key.startswith("eval/") else _noise(values, part)
        lost = (best - last) / max(best - min(0.0, *values), 1e-12)
        if best - last <= SURE[key] * noise or lost <= FALL[0]:
            return None
        level = Level.ILL if lost > FALL[1] else Level.WARNING
        return level, f"{name} fell from {shown(best)} to {shown(last)}"

    return find


def entropy(records: Records) -> Found:
    found = series_of(records, "entropy")
    if broken := [step for step, value in found if not math.isfinite(value)]:
        return Level.ILL, f"entropy not finite {at(broken, found)}"
    if len(found) < 2:
        return None
    first, last = median_of(found[: tenth(found)]), median_of(found[-tenth(found) :])
    said = f"entropy went from {shown(first)} to {shown(last)} nats a token"
    fall, rise = first / max(last, 1e-12), last / max(first, 1e-12)
    low, high = 1 + (last < ENTROPY_FLOOR
                     or fall > ENTROPY_FALL[1]), 1 + (rise > ENTROPY_RISE[1] and last - first > 1)
    if last < ENTROPY_FLOOR or fall > ENTROPY_FALL[0]:
        level = _milder(Level(low), _rose(records))
    elif rise > ENTROPY_RISE[0] and last - first > 0.5:
        level = _milder(Level(high), _rose(records))
    else:
        return None
    return (level, said) if level else None


def gradients(records: Records) -> Found:
    """Those that overflowed under a loss scale are none: the update was left out, and the scale made
    smaller."""
    found = series_of([r for r in records if not r.get("update/overflow")], "grad_norm")
    if broken := [step for step, value in found if not math.isfinite(value)]:
        return Level.ILL, f"gradient norm not finite {at(broken, found)}"
    factors, before = [], []
    for step, value in found:
        if len(before) >= KNOWN:
            factors.append((value / statistics.median(before[-WINDOW:]), value, step))
        before += [value] * (value > 0)
    spikes = [step for factor, _, step in factors if factor > SPIKE[0]]
    if not spikes:
        return None
    factor, value, step = max(factors)
    level = Level.ILL if factor > SPIKE[1] or len(spikes) > OFTEN * len(found) else Level.WARNING
    return level, f"gradient norm {shown(value)} at step {step}, {shown(factor)} times the median before it"


def restarts(records: Records) -> Found:
    found = _finite(records, "engine/restarts")
    times = int(max((value for _, value in found), default=0))
    level = Level.ILL if times > OFTEN * len(found) and times > 1 else Level.WARNING
    return (level, f"the engine was started anew {times} time{'s' * (times > 1)}") if times else None


def completions(record: Mapping[str, Any]) -> float:
    """How many a step sampled: their tokens over their mean length. Infinite where it does not say."""
    length = record.get("response/length_mean") or 0
    return record.get("tokens/rollout", math.inf) / length if length > 0 else math.inf


def share_of(value: float, whole: float) -> float:
    """The share, a tiny one where the whole is unknown."""
    return min(value / whole, 1.0) if 0 < whole < math.inf else min(value, 1e-9)
