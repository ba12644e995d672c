"""The charts of an experiment: curves with bands, reward against wall clock, and paired differences."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes

from jaxfp8rl.experiments.analysis import Compared, carried
from jaxfp8rl.experiments.cells import name_of
from jaxfp8rl.experiments.results import Result
from jaxfp8rl.experiments.statistics import interval
from jaxfp8rl.monitors.end.plot import BLUE, GREEN, GREY, ORANGE, RED, STYLE, VIOLET, plt

COLORS, DASHES = (BLUE, ORANGE, GREEN, RED, VIOLET, GREY), ("-", "--", ":", "-.")


def draw_curves(results: Sequence[Result], metric: str, path: Path, level: float = 0.95,
                guests: Mapping[str, Sequence[Result]] = MappingProxyType({})) -> None:
    """The metric over the steps, and over the minutes of the steps: the mean of the seeds of each arm, with
    the interval of the mean as a band. guests: runs of other trainers by title, in black and dashed."""
    by_arm: dict[str, list[Result]] = {}
    for result in results:
        by_arm.setdefault(name_of(result.header["arm"]), []).append(result)
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", sharey=True)
        looks = itertools.cycle(itertools.product(DASHES, COLORS))
        black = itertools.cycle((dash, "black") for dash in DASHES[1:])
        drawn = [*zip(by_arm.items(), looks), *zip(guests.items(), black)]
        for (arm, found), (dash, color) in drawn:
            for ax, clock in ((left, None), (right, "time/step_s")):
                _curve(ax, found, metric, clock, level, f"{arm} ({len(found)})", color, dash)
        left.set(xlabel="step", ylabel=metric, title="Over the steps")
        right.set(xlabel="minutes of steps", title="Against wall clock")
        left.legend(loc="best", title="arm (seeds)", fontsize=8)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _curve(ax: Axes, found: Sequence[Result], metric: str, clock: str | None, level: float, label: str,
           color: str, dash: str) -> None:
    """One arm. On the clock, a point stands at the mean time of its seeds."""
    values: dict[int, list[float]] = {}
    for result in found:
        for step, value in zip(*carried(result, metric)):
            values.setdefault(step, []).append(value)
    steps = sorted(step for step, seen in values.items() if len(seen) == len(found))
    x = steps if clock is None else np.mean([_elapsed(r, steps, clock) for r in found], axis=0)
    at = [interval(values[step], level) for step in steps]
    ax.plot(x, [e.mean for e in at], color=color, ls=dash, lw=1.8, marker="o", ms=3, label=label)
    if len(found) > 1:
        ax.fill_between(x, [e.low for e in at], [e.high for e in at], color=color, alpha=0.13, lw=0)


def _elapsed(result: Result, steps: Sequence[int], clock: str) -> list[float]:
    """The minutes of all steps up to each of `steps`."""
    taken: Mapping[int, float] = {s["step"]: s.get(clock, 0.0) for s in result.steps}
    return [sum(v for n, v in taken.items() if n <= step) / 60 for step in steps]


def draw_differences(found: Sequence[Compared], control: str, path: Path) -> None:
    """The paired differences to the control with their intervals, and the margin of equivalence."""
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(8, 1.4 + 0.42 * len(found)), layout="constrained")
        for place, c in enumerate(reversed(found)):
            different = RED if "worse" in c.verdict else BLUE
            color = {"equivalent": GREEN, "inconclusive": GREY}.get(c.verdict, different)
            ax.plot([c.difference.low, c.difference.high], [place, place], color=color, lw=2)
            ax.plot([c.difference.mean], [place], "o", color=color, ms=6)
            if c.margin is not None:
                ax.plot([-c.margin, c.margin], [place, place], "|", color="black", ms=14)
        ax.set_yticks(range(len(found)), [c.arm for c in reversed(found)])
        ax.set_ylim(-0.6, len(found) - 0.4)
        ax.axvline(0, color="black", lw=1)
        ax.set(xlabel=f"difference to {control}, paired by seed; bars: the margin",
               title="Paired differences")
        figure.savefig(path, dpi=110)
        plt.close(figure)
