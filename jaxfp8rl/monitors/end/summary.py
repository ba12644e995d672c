"""The summary of a run, read from its directory: tables, completions and verdict on the terminal, plot.png
and summary.json."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxfp8rl.errors import UserError
from jaxfp8rl.health.table import STYLES, Verdict, verdict
from jaxfp8rl.monitors.end.extremes import extremes, lines_of
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.monitors.notes import write_note
from jaxfp8rl.monitors.series import Records, phases_of, series
from jaxfp8rl.monitors.sparkline import sparkline

# (metric, name in the table, format)
_MEASURES = (
    ("eval/reward_mean", "held-out reward", ".3f"),
    ("reward/mean", "training reward", ".3f"),
    ("mismatch/token_mult_prob_error", "mismatch, 1: none", ".4f"),
    ("correction/ess", "effective sample size", ".4f"),
    ("correction/truncated_fraction", "truncated weights", ".4f"),
    ("tokens/rollout_per_s", "rollout tokens/s", ",.0f"),
    ("tokens/update_per_s", "update tokens/s", ",.0f"),
)


def write_summary(run_dir: str | Path, console: Console | None = None) -> Path:
    """Print the summary of the run in `run_dir`, its verdict last, and write plot.png and summary.json -> the
    path of the plot.

    Raises UserError when the directory holds no metrics.
    """
    from jaxfp8rl.monitors.end.plot import write_plot  # matplotlib takes a second to import

    run_dir = Path(run_dir)
    path = run_dir / "metrics.jsonl"
    records = read_metrics(path) if path.is_file() else []
    if not records:
        raise UserError(f"{path}: no metrics to summarise",
                        "give the directory of a run that took at least one step")
    console, found = console or Console(), verdict(records)
    plain = lambda text, style=None: console.print(text, style=style, markup=False, highlight=False,
                                                   soft_wrap=True)
    console.print(summary_table(records, found))
    console.print(phase_table(records))
    kept = extremes(run_dir / "samples.jsonl")
    for line in (*history(records), *lines_of(kept)):
        plain(line)
    plain(f"plot: {(plot := write_plot(records, run_dir / 'plot.png'))}")
    write_json(run_dir, records, found, kept)
    for finding in found.findings:
        plain(f"  {finding.level}: {finding.text}; {finding.remedy}", STYLES[finding.level])
    plain(f"verdict: {found.line}", None if found.level is None else STYLES[found.level])
    write_note(run_dir, f"verdict: {found.line}")
    return plot


def write_json(run_dir: Path, records: Records, found: Verdict, kept: Mapping[str, Any]) -> Path:
    """summary.json: the verdict, each measure, the best and the worst completion, for programs."""
    measures = {key: reduced(values) for key, *_ in _MEASURES if (values := series(records, key)[1])}
    findings = [{"metric": f.key, "level": str(f.level), "text": f.text, "remedy": f.remedy}
                for f in found.findings]
    whole = {"verdict": found.word, "line": found.line, "steps": records[-1]["step"], "findings": findings,
             "measures": measures, **kept}
    path = run_dir / "summary.json"
    path.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def history(records: Records) -> list[str]:
    """One line for each of the main metrics, from its first to its last value, within 80 columns."""
    found = [(name, form, values) for key, name, form in _MEASURES[:3]
             if len(values := series(records, key)[1]) > 1]
    return [f"{name:<18} {values[0]:{form}} {sparkline(values)} {values[-1]:{form}}"
            for name, form, values in found]


def level_style(found: Verdict, key: str) -> str | None:
    """The colour of a metric; None for a healthy one."""
    return next((STYLES[f.level] for f in found.findings if f.key == key), None)


def reduced(values: Sequence[float]) -> dict[str, float]:
    return {"first": values[0], "last": values[-1], "median": statistics.median(values), "min": min(values),
            "max": max(values)}


def summary_table(records: Records, found: Verdict) -> Table:
    """The first, last, median, smallest and largest value of each measure; a metric that is not healthy is
    coloured."""
    table = Table("", "first", "last", "median", "min", "max", title=f"{records[-1]['step']} steps",
                  title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, name, form in _MEASURES:
        _, values = series(records, key)
        if values:
            table.add_row(name, *(f"{value:{form}}" for value in reduced(values).values()),
                          style=level_style(found, key))
    return table


def phase_table(records: Records) -> Table:
    """The seconds of each phase over the run, and its share of the wall time of all steps."""
    total = sum(series(records, "time/step_s")[1])
    seconds = {phase: sum(series(records, f"time/{phase}_s")[1]) for phase in phases_of(records)}
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    table = Table("phase", "seconds", "share", title=f"{total:,.1f} s in steps", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for phase, spent in seconds.items():
        table.add_row(phase, f"{spent:,.1f}", f"{spent / total:.0%}" if total else "")
    return table
