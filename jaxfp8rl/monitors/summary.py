"""What a run came to: a table on the terminal and `plot.png`, both read from the run directory's metrics.jsonl."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxfp8rl.errors import UserError
from jaxfp8rl.monitors.jsonl import read_metrics

Records = Sequence[dict[str, Any]]

# (metric, name in the table, format)
_MEASURES = (
    ("eval/reward_mean", "held-out reward", ".3f"),
    ("reward/mean", "training reward", ".3f"),
    ("mismatch/token_mult_prob_error", "mismatch, 1: none", ".4f"),
    ("correction/ess", "effective sample size", ".4f"),
    ("correction/truncated_fraction", "truncated fraction", ".4f"),
    ("tokens/rollout_per_s", "rollout tokens/s", ",.0f"),
    ("tokens/update_per_s", "update tokens/s", ",.0f"),
)


def phases_of(records: Records) -> tuple[str, ...]:
    """What a step's time goes by. With rollout.lag it waits for what is sampled and scored beside it."""
    waits = any("time/wait_s" in r for r in records)
    return (*(("wait",) if waits else ("rollout", "reward")), "score", "update", "publish")


def write_summary(run_dir: str | Path, console: Console | None = None) -> Path:
    """Print the table of `run_dir` and write its plot; returns the plot's path.

    Raises UserError when the directory holds no metrics.
    """
    from jaxfp8rl.monitors.plot import write_plot  # matplotlib takes a second to import

    path = Path(run_dir) / "metrics.jsonl"
    records = read_metrics(path) if path.is_file() else []
    if not records:
        raise UserError(f"{path}: no metrics to summarise", "give the directory of a run that took at least one step")
    console = console or Console()
    console.print(summary_table(records))
    console.print(phase_table(records))
    plot = write_plot(records, Path(run_dir) / "plot.png")
    console.print(f"plot: {plot}", highlight=False)
    return plot


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the records that hold a finite number under `key`."""
    points = [(r["step"], r[key]) for r in records if isinstance(r.get(key), int | float) and math.isfinite(r[key])]
    return [step for step, _ in points], [float(value) for _, value in points]


def summary_table(records: Records) -> Table:
    """First, last, median, smallest and largest of each measure the run logged."""
    table = Table("", "first", "last", "median", "min", "max", title=f"{records[-1]['step']} steps", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, name, form in _MEASURES:
        _, values = series(records, key)
        if values:
            shown = values[0], values[-1], statistics.median(values), min(values), max(values)
            table.add_row(name, *(f"{value:{form}}" for value in shown))
    return table


def phase_table(records: Records) -> Table:
    """Seconds a phase took over the run, and its share of all steps' wall time."""
    total = sum(series(records, "time/step_s")[1])
    seconds = {phase: sum(series(records, f"time/{phase}_s")[1]) for phase in phases_of(records)}
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    table = Table("phase", "seconds", "share", title=f"{total:,.1f} s in steps", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for phase, spent in seconds.items():
        table.add_row(phase, f"{spent:,.1f}", f"{spent / total:.0%}" if total else "")
    return table
