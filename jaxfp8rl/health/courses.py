"""Unhealthy trends of metrics over a run. Each function returns (level, text), or None if the trend is
healthy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxfp8rl.health.judges import OFTEN, Level, Records, Series, at, median_of, series_of, shown, tenth

Found = tuple[Level, str] | None

# A gradient norm is compared with the median of at most WINDOW and at least KNOWN steps before it.
WINDOW, KNOWN = 100, 3
TEACHING = 0.1  # share of groups whose rewards differ; below it most samples give no gradient
FALL = 0.2, 0.5  # share of the best reward that was lost: warning, ill
# A fall must exceed this many standard deviations. The maximum over many steps is itself extreme, so the
# training reward needs more.
SURE = {"reward/mean": 5, "eval/reward_mean": 3}
# ENTROPY_FLOOR is in nats a token; the others are ratios between the beginning and the end (warning, ill).
ENTROPY_FLOOR, ENTROPY_FALL, ENTROPY_RISE = 0.01, (5, 20), (2, 3)
# Share of the held-out completions that are one and the same: warning, ill; of at least FEW problems.
CONSTANT, FEW = (0.75, 0.9), 20
SPIKE = (10, 100)  # times the median of the steps before: warning, ill


def _finite(records: Records, key: str) -> Series:
    return [(step, value) for step, value in series_of(records, key) if math.isfinite(value)]


def _rose(records: Records) -> bool:
    """Whether the reward rose from the beginning to the end by more than its noise."""
    values = [value for _, value in _finite(records, "reward/mean")]
    part = tenth(values)
    return len(values) > 1 and statistics.fmean(values[-part:]) - statistics.fmean(
        values[:part]) > 3 * _noise(values, part)


def _noise(values: Sequence[float], part: int) -> float:
    """The standard deviation of a mean of `part` values, estimated from the differences of neighbouring
    values, so that a trend does not count as noise."""
    differences = [abs(b - a) for a, b in zip(values, values[1:])]
    return 1.4826 * statistics.median(differences) / math.sqrt(2 * part) if differences else 0.0


def _milder(level: Level, rose: bool) -> Level:
    """One level milder if the reward rose: the same symptoms then come from learning."""
    return Level(max(level - rose, 0))


def _often(steps: Sequence[int], found: Series) -> Level:
    """The level of a fault that may happen occasionally: ill if it happened in more than half of the steps or
    in all of the last ones."""
    if 2 * len(steps) > len(found) or {step for step, _ in found[-tenth(found) :]} <= set(steps):
        return Level.ILL
    return Level.WARNING if len(steps) > OFTEN * len(found) else Level.HEALTHY


def zero_steps(records: Records) -> list[int]:
    """The steps in which every reward was 0."""
    return [int(r["step"]) for r in records if r.get("reward/mean") == 0 and not r.get("reward/std", 0)]


def zeros(records: Records) -> Found:
    """Steps in which every reward was 0, and rewards that are not finite."""
    found, steps = series_of(records, "reward/mean"), zero_steps(records)
    if broken := [step for step, value in found if not math.isfinite(value)]:
        return Level.ILL, f"reward not finite {at(broken, found)}"
    level = _often(steps, found) if steps else Level.HEALTHY
    return (level, f"all rewards were 0 {at(steps, found)}") if level else None


def alike(records: Records) -> Found:
    """Steps in which the rewards are equal within every group. Steps whose rewards are all 0 belong to
    `zeros`, and a task that has been learned ends with equal rewards; neither counts here."""
    rose, zeros = _rose(records), set(zero_steps(records))
    equal = {int(r["step"]): r for r in records if r.get("reward/groups_solved_in_part",
                                                         r.get("reward/std")) == 0}
    steps = [step for step, r in equal.items() if step not in zeros
             and not (rose and r.get("reward/std", 1) == 0)]
    found = series_of(records, "reward/mean") or series_of(records, "reward/groups_solved_in_part")
    if steps and (level := _milder(_often(steps, found), rose)):
        values = {equal[step].get("reward/mean") for step in steps if equal[step].get("reward/std") == 0}
        value = values.pop() if len(values) == 1 else None
        text = "all rewards of each group were equal" if value is None else f"all rewards were {shown(value)}"
        return level, f"{text} {at(steps, found)}"
    shares = [share for _, share in _finite(records, "reward/groups_solved_in_part") if share]
    if shares and (median := statistics.median(shares)) < TEACHING and not rose:
        return Level.WARNING, f"rewards differ in only {median:.1%} of the groups (median over the steps)"
    return None


def constant(records: Records) -> Found:
    """The share of held-out problems that the last evaluation answered by one and the same completion."""
    key = "eval/commonest_share"
    found = [(r[key], r.get("eval/problems", 0)) for r in records if key in r]
    if not found or found[-1][1] < FEW or (share := found[-1][0]) <= CONSTANT[0]:
        return None
    level = Level.ILL if share > CONSTANT[1] else Level.WARNING
    return level, f"{share:.0%} of the held-out problems got the same completion at the end"


def fall(key: str, name: str) -> Callable[[Records], Found]:
    """The function that finds whether the metric `key` ends far below its best value."""
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
    """An entropy that collapses, grows, or is not finite."""
    found = series_of(records, "entropy")
    if broken := [step for step, value in found if not math.isfinite(value)]:
        return Level.ILL, f"entropy not finite {at(broken, found)}"
    if len(found) < 2:
        return None
    first, last = median_of(found[: tenth(found)]), median_of(found[-tenth(found) :])
    text = f"entropy went from {shown(first)} to {shown(last)} nats a token"
    fall, rise = first / max(last, 1e-12), last / max(first, 1e-12)
    low, high = 1 + (last < ENTROPY_FLOOR
                     or fall > ENTROPY_FALL[1]), 1 + (rise > ENTROPY_RISE[1] and last - first > 1)
    if last < ENTROPY_FLOOR or fall > ENTROPY_FALL[0]:
        level = _milder(Level(low), _rose(records))
    elif rise > ENTROPY_RISE[0] and last - first > 0.5:
        level = _milder(Level(high), _rose(records))
    else:
        return None
    return (level, text) if level else None


def gradients(records: Records) -> Found:
    """Spikes of the gradient norm, and norms that are not finite. Steps that overflowed under a loss scale do
    not count: their update was skipped and the scale lowered."""
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
    """Restarts of the engine."""
    found = _finite(records, "engine/restarts")
    times = int(max((value for _, value in found), default=0))
    level = Level.ILL if times > OFTEN * len(found) and times > 1 else Level.WARNING
    return (level, f"the engine was restarted {times} time{'s' * (times > 1)}") if times else None


def completions(record: Mapping[str, Any]) -> float:
    """The number of completions that a step sampled: its tokens over their mean length. Infinite if the
    record lacks either."""
    length = record.get("response/length_mean") or 0
    return record.get("tokens/rollout", math.inf) / length if length > 0 else math.inf


def share_of(value: float, whole: float) -> float:
    """value / whole, at most 1; a tiny share if the whole is unknown."""
    return min(value / whole, 1.0) if 0 < whole < math.inf else min(value, 1e-9)
