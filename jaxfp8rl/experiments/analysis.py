"""From the lines of cells to what an experiment says: outcomes, paired comparisons, and verdicts.

A cell that ended before its last step counts with its last evaluation, carried forward to the end, so that a
recipe does not look better for the seeds in which it broke.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxfp8rl.errors import DataError, nearest
from jaxfp8rl.experiments import statistics as tests
from jaxfp8rl.experiments.cells import arms, name_of
from jaxfp8rl.experiments.protocol import Experiment
from jaxfp8rl.experiments.results import DONE, Result
from jaxfp8rl.experiments.statistics import Estimate

STEPS_OF_AN_END = 5  # one step has few tokens, and k3 a heavy tail


class Outcome(NamedTuple):
    """What one cell came to. minutes: of its steps; tokens: sampled."""

    start: float
    end: float
    mean: float
    minutes: float
    tokens: float
    ended: str

    @property
    def gain(self) -> float:
        return self.end - self.start


class Compared(NamedTuple):
    """An arm beside the control, over the seeds that both have. p and p_equivalent are Holm's, None where the
    test was not registered. margin: the mean, where each pair has its own. power: of the test of equivalence,
    by the pilot's spread; None without a pilot."""

    arm: str
    seeds: tuple[int, ...]
    difference: Estimate
    effect: float | None
    p: float | None
    p_equivalent: float | None
    margin: float | None
    power: float | None
    verdict: str


Outcomes = Mapping[str, Mapping[int, Outcome]]  # arm -> seed -> outcome


def outcomes(experiment: Experiment, results: Sequence[Result], pilot: bool = False) -> Outcomes:
    """The outcomes of the grid's cells, or of the pilot's, by arm and seed, in the protocol's order."""
    found: dict[str, dict[int, Outcome]] = {name_of(arm): {} for arm in arms(experiment, pilot)}
    metric = experiment.protocol.outcome.metric
    for result in results:
        name = name_of(result.header["arm"])
        if result.header["pilot"] == pilot and name in found:
            found[name][result.header["seed"]] = outcome(result, metric)
    return found


def outcome(result: Result, metric: str) -> Outcome:
    """Raises DataError if a cell has no step with the metric."""
    seen = [step[metric] for step in result.steps if metric in step]
    if not seen:
        known = {key for step in result.steps for key in step}
        raise DataError(f"the lines of {result.header['cell']}: no step has the outcome's metric, {metric}"
                        f"{nearest(metric, known)}",
                        "set outcome.metric to one that a run writes (docs/metrics.md). Lines that lack it: "
                        "remove them, with their copies in the work folder, and `jaxfp8rl experiment run` "
                        "writes them anew from the runs")
    _, values = carried(result, metric)
    steps = [step for step in result.steps if step["step"] > 0]
    return Outcome(seen[0], values[-1], statistics.fmean(values[1:] or values),
                   sum(s.get("time/step_s", 0.0) for s in steps) / 60,
                   sum(s.get("tokens/rollout", 0.0) for s in steps), result.header["ended"])


def carried(result: Result, metric: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the metric. In a cell that ended early the last value stands at the steps that are
    missing, as far apart as those before, and at the last one."""
    points = [(s["step"], float(s[metric])) for s in result.steps if metric in s]
    last = result.header["steps"]
    if result.header["ended"] != DONE and points[-1][0] < last:
        apart = points[1][0] - points[0][0] if len(points) > 1 else last
        later = [*range(points[-1][0] + apart, last, apart), last]
        points += [(step, points[-1][1]) for step in later]
    return [step for step, _ in points], [value for _, value in points]


def first_and_last(cells: Sequence[Result], key: str) -> tuple[list[float], list[float]]:
    """The means of a metric over the first and over the last STEPS_OF_AN_END steps that have it, a number a
    cell; of cells that have it."""
    seen = [[step[key] for step in cell.steps if key in step] for cell in cells]
    means = lambda span: [statistics.fmean(values[span]) for values in seen if values]
    return means(slice(STEPS_OF_AN_END)), means(slice(-STEPS_OF_AN_END, None))


def compare(experiment: Experiment, found: Outcomes, pilot: Outcomes) -> list[Compared]:
    """Every other arm beside the control; none without a control. Holm's correction is over the arms that
    have at least two pairs."""
    control, measure = control_name(experiment), experiment.protocol.outcome.measure
    if not control:
        return []
    pairs = {arm: by_seed for arm in found if arm != control
             if (by_seed := paired(found[arm], found[control], measure))}
    differences = {arm: list(by_seed.values()) for arm, by_seed in pairs.items()}
    margins = {arm: [margin_of(experiment, found[control][s]) for s in pairs[arm]] for arm in pairs}
    still = set(alike(experiment, found))
    tested = [arm for arm in pairs if len(pairs[arm]) > 1 and not {arm, control} <= still]
    p = dict(zip(tested, tests.holm([tests.p_different(differences[arm]) for arm in tested])))
    equal = dict(zip(tested, tests.holm([tests.p_equivalent(differences[arm], margins[arm])
                                         for arm in tested])))
    spread = pilot_spread(experiment, pilot)
    return [_compared(experiment, arm, list(pairs[arm]), differences[arm], statistics.fmean(margins[arm]),
                      p.get(arm), equal.get(arm), spread) for arm in pairs]


def paired(arm: Mapping[int, Outcome], other: Mapping[int, Outcome], measure: str) -> dict[int, float]:
    """The arm less the other at each seed that both have."""
    both = sorted(arm.keys() & other.keys())
    return {s: getattr(arm[s], measure) - getattr(other[s], measure) for s in both}


def against(experiment: Experiment, found: Outcomes, axis: str,
            value: str) -> list[tuple[str, str, int, Estimate]]:
    """Each arm beside that with `value` of `axis` and otherwise the same: (arm, the other, pairs, the
    difference with its interval). Where no protocol registered the pairs, they are not tested."""
    o, rows = experiment.protocol.outcome, []
    for arm in arms(experiment):
        name, other = name_of(arm), name_of({**arm, axis: value})
        if name != other and (differences := paired(found[name], found.get(other, {}), o.measure)):
            estimate = tests.interval(list(differences.values()), 1 - o.alpha, o.interval)
            rows.append((name, other, len(differences), estimate))
    return rows


def alike(experiment: Experiment, found: Outcomes) -> dict[str, float]:
    """The arms whose seeds, two or more, all came to one value, and the value. Nothing was left there for the
    seeds to differ in: the policy gives one answer to all, or the task is solved."""
    values = {arm: [getattr(x, experiment.protocol.outcome.measure) for x in by.values()]
              for arm, by in found.items()}
    return {arm: vs[0] for arm, vs in values.items() if len(vs) > 1 and len(set(vs)) == 1}


def _compared(experiment: Experiment, arm: str, seeds: Sequence[int], differences: Sequence[float],
              margin: float, p: float | None, equal: float | None, spread: tests.Spread | None) -> Compared:
    o = experiment.protocol.outcome
    p, equal = (p if "difference" in o.tests else None), (equal if "equivalence" in o.tests else None)
    power = None
    if spread is not None and equal is not None:
        power = tests.equivalence_power(spread, margin, len(seeds), o.alpha)
    return Compared(arm, tuple(seeds), tests.interval(differences, 1 - o.alpha, o.interval),
                    tests.effect_size(differences), p, equal,
                    margin if "equivalence" in o.tests else None, power,
                    verdict(statistics.fmean(differences), p, equal, o.alpha))


def verdict(difference: float, p: float | None, equal: float | None, alpha: float) -> str:
    """The registered tests in a word or two. "inconclusive": neither says anything."""
    different, equivalent = p is not None and p < alpha, equal is not None and equal < alpha
    way = "better" if difference > 0 else "worse"
    if different and equivalent:
        return f"{way}, within the margin"
    return way if different else "equivalent" if equivalent else "inconclusive"


def margin_of(experiment: Experiment, control: Outcome) -> float:
    """The margin of a pair; 0 where none is registered."""
    o = experiment.protocol.outcome
    if o.margin_of_gain is not None:
        return o.margin_of_gain * (getattr(control, o.measure) - control.start)
    return o.margin or 0.0


def pilot_spread(experiment: Experiment, pilot: Outcomes) -> tests.Spread | None:
    """The standard deviation of a paired difference in the pilot.

    It is pooled over the arms that were paired with the control. If the pilot has the control alone, it is
    that of two runs with independent seeds, which is at most too large. None if the pilot has one seed.
    """
    control, measure = control_name(experiment), experiment.protocol.outcome.measure
    of_control = {s: getattr(x, measure) for s, x in pilot.get(control, {}).items()}
    paired = [[getattr(x, measure) - of_control[s] for s, x in found.items() if s in of_control]
              for arm, found in pilot.items() if arm != control]
    spread = tests.pooled_spread([d for d in paired if d])
    if spread is None and (alone := tests.pooled_spread([list(of_control.values())] if of_control else [])):
        return alone._replace(value=math.sqrt(2) * alone.value)
    return spread


def control_name(experiment: Experiment) -> str:
    """The name of the control's arm; "" without a control."""
    p = experiment.protocol
    return name_of({axis: p.control[axis] for axis in p.grid}) if p.control else ""
