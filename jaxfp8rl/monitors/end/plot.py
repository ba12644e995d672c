"""The four plots of a run: reward, mismatch, correction, time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from jaxfp8rl.monitors.end.axes import SPAN, Bounds, labels, value_axis
from jaxfp8rl.monitors.series import Records, phases_of, series

matplotlib.use("Agg")  # a file, never a window

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, VIOLET, GREY = "#4269d0", "#efb118", "#3ca951", "#d1495b", "#a463f2", "#9aa0a6"
# the colour of each phase
COLORS = {"rollout": BLUE, "wait": BLUE, "reward": VIOLET, "score": GREY, "update": ORANGE, "publish": GREEN}
STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6", "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "figure.facecolor": "white",
}


def write_plot(records: Records, path: str | Path) -> Path:
    """Draw `records` (metrics.jsonl) into a PNG at `path`."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
        for draw, ax in zip((_reward, _mismatch, _correction, _time), axes.flat):
            draw(ax, records)
            ax.set_xlabel("step")
            ax.margins(x=0.02)
        figure.savefig(path, dpi=130)
        plt.close(figure)
    return Path(path)


def _noisy(ax: Axes, points: tuple[list[int], list[float]], color: str, label: str = "") -> None:
    """The values, faint, under their moving average."""
    steps, values = points
    ax.plot(steps, values, color=color, alpha=0.25, lw=1)
    ax.plot(steps, smooth(values), color=color, lw=2, label=label)


def _scale(ax: Axes, values: list[float], bounds: Bounds) -> None:
    """Scale an axis so that a constant is level and all tick labels differ."""
    ends, found = value_axis(values, bounds)
    ax.set_yticks(found, labels(found))
    room = 0.03 * (ends[1] - ends[0])
    ax.set_ylim(ends[0] - room, ends[1] + room)


def _reward(ax: Axes, records: Records) -> None:
    _noisy(ax, series(records, "reward/mean"), BLUE, "training, smoothed")
    ax.plot(*series(records, "eval/reward_mean"), color=ORANGE, lw=1.5, marker="o", ms=5, label="held-out")
    ax.set_ylabel("reward, mean of the completions")
    ax.set_title("Reward")
    ax.legend(loc="best")


def _mismatch(ax: Axes, records: Records) -> None:
    _noisy(ax, series(records, "mismatch/token_mult_prob_error"), RED)
    ax.axhline(1.0, color=GREY, lw=1, ls="--")
    ax.set_title("Mismatch of engine and learner")
    ax.set_ylabel("mean exp|Δ log p| of a token; 1: none")
    _scale(ax, series(records, "mismatch/token_mult_prob_error")[1], (1, None))


def _correction(ax: Axes, records: Records) -> None:
    _noisy(ax, series(records, "correction/ess"), GREEN)
    ax.set_ylabel("effective sample size, share of tokens", color=GREEN)
    _scale(ax, series(records, "correction/ess")[1], (0, 1))
    other = ax.twinx()
    _noisy(other, truncated := series(records, "correction/truncated_fraction"), RED)
    other.set_ylabel("truncated weights, share of tokens", color=RED)
    _scale(other, [0, SPAN, *truncated[1]], (0, 1))
    other.grid(False)
    other.spines.right.set_visible(True)
    ax.set_title("Correction")


def _time(ax: Axes, records: Records) -> None:
    phases = {p: dict(zip(*series(records, f"time/{p}_s"))) for p in phases_of(records)}
    steps = sorted(set().union(*phases.values()))
    stacked = [[phases[p].get(step, 0.0) for step in steps] for p in phases]
    ax.stackplot(steps, stacked, labels=list(phases), colors=[COLORS[p] for p in phases], lw=0)
    ax.set_ylabel("seconds")
    ax.set_title("Seconds a step")
    usual = sorted(sum(column) for column in zip(*stacked))
    if usual:  # the first steps compile: cut them off rather than flatten the rest
        ax.set_ylim(0, 1.4 * usual[int(0.9 * (len(usual) - 1))] or None)
    ax.legend(loc="upper right", ncols=3, columnspacing=1, handlelength=1)


def smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average without its start-up bias (Kingma & Ba 2015, section 3)."""
    out, mean = [], 0.0
    for n, value in enumerate(values, start=1):
        mean = weight * mean + (1 - weight) * value
        out.append(mean / (1 - weight**n))
    return out
