"""How soon arms learn: until a cell has half of what the control gains, in steps, time and tokens."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxfp8rl.experiments.analysis import Outcomes, carried, control_name
from jaxfp8rl.experiments.cells import name_of
from jaxfp8rl.experiments.protocol import Experiment
from jaxfp8rl.experiments.results import Result
from jaxfp8rl.experiments.statistics import interval


class Pace(NamedTuple):
    """steps: with the part of the last one, between two evaluations. minutes: of those steps, the first of
    which compiles and counts as the cell's median step. tokens: sampled in them."""

    steps: float
    minutes: float
    tokens: float


class Paces(NamedTuple):
    """An arm's. by_seed: of its cells that came so far. cells: all that could have."""

    by_seed: Mapping[int, Pace]
    cells: int


def paces(experiment: Experiment, results: Sequence[Result], found: Outcomes) -> dict[str, Paces]:
    """The paces of every arm, at the seeds at which the control gains. {} without a control, and if its gain
    has no interval above 0. results: of the cells of `found`."""
    o, of_control = experiment.protocol.outcome, found.get(control_name(experiment), {})
    gains = [x.gain for x in of_control.values()]
    if not gains or not interval(gains, 1 - o.alpha, o.interval).low > 0:
        return {}
    levels = {seed: x.start + x.gain / 2 for seed, x in of_control.items() if x.gain > 0}
    cells = {(name_of(r.header["arm"]), r.header["seed"]): r for r in results}
    return {arm: Paces({seed: pace for seed in seeds
                        if (pace := reached(cells[arm, seed], o.metric, levels[seed]))}, len(seeds))
            for arm, by_seed in found.items() if (seeds := [s for s in by_seed if s in levels])}


def reached(result: Result, metric: str, level: float) -> Pace | None:
    """Until the metric is at `level` for the first time, on straight lines between evaluations; None if it
    never is. A cell that ended early got no further than its last step."""
    steps, values = carried(result, metric)
    last = max(step["step"] for step in result.steps)
    points = [(s, v) for s, v in zip(steps, values) if s <= last]
    if points[0][1] >= level:
        return Pace(0.0, 0.0, 0.0)
    for (s, low), (t, high) in itertools.pairwise(points):
        if high >= level:
            at = s + (t - s) * (level - low) / (high - low)
            seconds, tokens = (_of_steps(result, key) for key in ("time/step_s", "tokens/rollout"))
            seconds[:1] = [statistics.median(seconds)]
            return Pace(at, _until(seconds, at) / 60, _until(tokens, at))
    return None


def _of_steps(result: Result, key: str) -> list[float]:
    return [step.get(key, 0.0) for step in result.steps if step["step"] > 0]


def _until(values: Sequence[float], at: float) -> float:
    """The sum of the first `at`, with the part of the last one."""
    whole = int(at)
    return sum(values[:whole]) + (at - whole) * sum(values[whole:whole + 1])


def log_ratios(arm: Paces, control: Paces, key: str) -> list[float]:
    """log(arm / control) at each seed at which both came so far and neither began there."""
    both = arm.by_seed.keys() & control.by_seed.keys()
    pairs = [(getattr(arm.by_seed[s], key), getattr(control.by_seed[s], key)) for s in sorted(both)]
    return [math.log(a / b) for a, b in pairs if a > 0 and b > 0]
