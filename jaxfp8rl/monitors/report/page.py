"""The content of the report page: its sections, charts, tables and texts. template.html and style.css lay it
out."""

from __future__ import annotations

import datetime
import importlib.resources
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from jaxfp8rl.errors import UserError
from jaxfp8rl.monitors.end.summary import write_json
from jaxfp8rl.monitors.report import compare, completions
from jaxfp8rl.monitors.report.charts import Line, line_chart, number, stacked_chart, swatch
from jaxfp8rl.monitors.report.runs import Run, events, load_runs
from jaxfp8rl.monitors.report.sections import HELD_OUT, MEASURES, REWARD, SECTIONS, Metric, Section
from jaxfp8rl.monitors.series import phases_of
from jaxfp8rl.monitors.sparkline import FLAT
from jaxfp8rl.version import __version__

TABLE_ROWS = 20
EVENTS = 50


class Chart(NamedTuple):
    """A figure: picture, legend of (symbol, name), note, and the numbers as a table."""

    title: str
    note: str
    svg: Markup
    legend: Sequence[tuple[Markup, str]]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_report(paths: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page of one run, or a comparison of several runs -> its path.

    Without `out` it is RUN/report.html, or comparison.html beside the first of several runs. Raises UserError
    for a run without metrics, and for a path that cannot be written.
    """
    runs = load_runs(paths)
    first = Path(paths[0])
    path = Path(out) if out else first / "report.html" if len(runs) == 1 else first.parent / "comparison.html"
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--out {path}: not a file in an existing folder",
                        "create the folder, or name another file")
    path.write_text(render(runs), encoding="utf-8")
    if not out:
        for folder, run in zip(map(Path, paths), runs):
            write_json(folder, run.records, run.verdict, run.extremes)
    return path


def render(runs: Sequence[Run]) -> str:
    """The whole page as HTML. All text from a run is escaped, since a completion may contain markup."""
    groups = compare.variants(runs)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
                                     lstrip_blocks=True)
    environment.filters |= {"number": number, "in_rows": in_rows}
    files = importlib.resources.files(__package__)
    template, style = ((files / name).read_text(encoding="utf-8") for name in ("template.html", "style.css"))
    room = completions.TOKENS // len(runs)
    return environment.from_string(template).render(
        style=Markup(style), title=_title(runs), version=__version__,
        written=datetime.datetime.now(datetime.UTC),
        runs=runs, groups=groups, facts=[_facts(run) for run in runs],
        sections=[_section(section, groups) for section in SECTIONS],
        phases=[_phases(g.runs[0], len(runs) > 1) for g in groups if g.runs[0].series("time/step_s")[0]],
        variant_of={run.name: group.name for group in groups for run in group.runs},
        evaluations=_evaluations(runs), tests=compare.paired_tests(groups, MEASURES),
        differences=_differences(runs),
        events=[(run.name, run.verdict, (found := events(run))[:EVENTS], len(found), run.notes)
                for run in runs],
        extremes=[(run.name, [(name, row, completions.as_text(row.get("prompt")))
                              for name, row in run.extremes.items()])
                  for run in runs],
        completions=[(run.name, completions.prepared(run.samples, room), run.sampled) for run in runs],
        steps=completions.STEPS, everything=[(run.name, _everything(run)) for run in runs],
    )


def _title(runs: Sequence[Run]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"


def _differences(runs: Sequence[Run]) -> list[list[Any]]:
    found = compare.config_differences(runs)
    return [[key, *("unset" if v is None else v for v in values)] for key, values in found.items()]


def _evaluations(runs: Sequence[Run]) -> list[list[str]]:
    """A row for each pass@k of each record of each run's eval.json."""
    return [
        [run.name, str(e["step"]), f"pass@{k}", number(x["estimate"]),
         f"{number(x['low'])} to {number(x['high'])}", _asked(e)]
        for run in runs for e in run.evaluations for k, x in e["pass_at_k"].items()
    ]


def _asked(record: Mapping[str, Any]) -> str:
    """The problems and the sampling of an evaluation, in words."""
    parts = [f"{record['problems']} problems, {record['samples']} completions each"]
    parts += ["greedy"] * record.get("greedy", False)
    parts += [f"passed from {threshold:g}"] if (threshold := record.get("threshold", 1)) != 1 else []
    return ", ".join([*parts, *(f"{key} = {value}" for key, value in record.get("overrides", {}).items())])


def _facts(run: Run) -> dict[str, str]:
    """The main numbers of a run, shown at the top of the page."""
    facts = {"verdict": run.verdict.word, "steps": number(run.records[-1]["step"])}
    for metric, label in ((HELD_OUT, "held-out reward"), (REWARD, "training reward")):
        if values := run.series(metric.key)[1]:
            facts[label] = f"{values[0]:.3f} \N{RIGHTWARDS ARROW} {values[-1]:.3f}"
    medians = ("mismatch/k3", "mismatch k3"), ("correction/ess",
                                               "effective sample size"), ("time/step_s", "seconds a step")
    for key, label in medians:
        if values := run.series(key)[1]:
            facts[f"{label}, median"] = number(statistics.median(values))
    if values := run.series("memory/peak_gib")[1]:
        facts["peak memory, GiB"] = number(max(values))
    if values := run.series("time/step_s")[1]:
        seconds = round(sum(values))
        facts["time in steps"] = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return facts


def _section(section: Section, groups: Sequence[compare.Variant]) -> dict[str, Any]:
    """The id, title and charts of a section, and the metrics without a chart because they never change."""
    charts, constant = [], []
    for metric in section.metrics:
        lines = [line for i, group in enumerate(groups) if (line := _line(metric, group, i))]
        values = [y for line in lines for y in line.y]
        if values and max(values) - min(values) <= FLAT * max(map(abs, values)):
            constant.append(f"{metric.title}: {number(statistics.median(values))}")
        elif values:
            charts.append(_chart(metric, lines, {g.name for g in groups if len(g.runs) > 1}))
    return {"id": section.anchor, "title": section.title, "charts": charts, "constant": constant}


def in_rows(charts: Sequence[Chart], most: int = 3) -> list[Sequence[Chart]]:
    """Rows of at most `most` charts, as equal as possible: 4 charts become 2 and 2."""
    count = math.ceil(len(charts) / most)
    ends = [round(i * len(charts) / count) for i in range(count + 1)] if count else []
    return [charts[a:b] for a, b in zip(ends, ends[1:])]


def _line(metric: Metric, group: compare.Variant, place: int) -> Line | None:
    """The mean over a variant's seeds, with a band from the smallest to the largest. A single run has the
    confidence band of the metric, if it has one."""
    found = [dict(zip(*run.series(metric.key))) for run in group.runs]
    steps = sorted({s for f in found for s in f})
    if not steps:
        return None
    columns = [[f[s] for f in found if s in f] for s in steps]
    y = [statistics.fmean(c) for c in columns]
    if len(found) > 1:
        return Line(group.name, steps, y, [min(c) for c in columns], [max(c) for c in columns], place)
    low, high = _interval(metric, group.runs[0], steps, y)
    return Line(group.name, steps, y, low, high, place)


def _interval(metric: Metric, run: Run, steps: Sequence[int],
              y: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """(low, high) of metric.band; empty if the run lacks the numbers for it."""
    by_step = {int(r["step"]): r for r in run.records}
    completions_a_step = run.config.get("rollout.prompts_per_step",
                                        0) * run.config.get("rollout.samples_per_prompt", 0)
    if metric is HELD_OUT and all(0 <= v <= 1 and "eval/problems" in by_step[s] for s, v in zip(steps, y)):
        bounds = [wilson(v, by_step[s]["eval/problems"]) for s, v in zip(steps, y)]
    elif metric is REWARD and completions_a_step:
        errors = [1.96 * float(by_step[s].get("reward/std", 0.0)) / math.sqrt(completions_a_step)
                  for s in steps]
        bounds = [(v - e, v + e) for v, e in zip(y, errors)]
    else:
        return (), ()
    return [low for low, _ in bounds], [high for _, high in bounds]


def wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's (1927) interval for a share of n. For a mean of values within [0, 1] it is conservative, since
    no such values vary more than zeros and ones."""
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return middle - half, middle + half


def _chart(metric: Metric, lines: Sequence[Line], seeded: set[str]) -> Chart:
    """The chart of a metric. `seeded`: the names of the lines with several seeds."""
    bands = [metric.band] * any(line.low for line in lines
                                if line.name not in seeded) + ["the range of the seeds"] * bool(seeded)
    note = f"{metric.words} Band: {'; of several runs '.join(bands)}." if bands else metric.words
    legend = [(swatch(line.place), line.name) for line in lines] if len(lines) > 1 else []
    table = _table([line.name or metric.title for line in lines],
                   [dict(zip(line.x, line.y)) for line in lines])
    return Chart(metric.title, note, line_chart(metric.title, lines, metric.log, metric.unit, metric.bounds),
                 legend, *table)


def _phases(run: Run, named: bool) -> Chart:
    """The seconds of each phase, stacked up to the whole step. `named`: the title names the run."""
    title = "Seconds a step by phase" + (f", {run.name}" if named else "")
    steps, whole = run.series("time/step_s")
    found = {p: dict(zip(*run.series(f"time/{p}_s"))) for p in phases_of(run.records)}
    found["other"] = {s: max(0.0, t - sum(f.get(s, 0.0) for f in found.values()))
                      for s, t in zip(steps, whole)}
    lines = [Line(p, steps, [f.get(s, 0.0) for s in steps], place=i)
             for i, (p, f) in enumerate(found.items())]
    note = f"Together {number(sum(whole))} s in {len(steps)} steps. "
    if max(whole) > 3 * statistics.median(whole):
        longest = steps[whole.index(max(whole))]
        note += f"The longest, step {longest} with {number(max(whole))} s, is cut off at the top."
    legend = [(swatch(line.place, area=True), f"{line.name} {sum(line.y) / max(sum(whole), 1e-9):.0%}")
              for line in lines]
    head, rows = _table([line.name for line in lines], [dict(zip(line.x, line.y)) for line in lines])
    return Chart(title, note, stacked_chart(title, lines, "seconds"), legend, head, rows)


def _table(names: Sequence[str], columns: Sequence[dict[float, float]]) -> tuple[list[str], list[list[str]]]:
    """A table of at most TABLE_ROWS steps, spread evenly from the first to the last."""
    steps = sorted({s for c in columns for s in c})
    last, count = len(steps) - 1, min(TABLE_ROWS, len(steps))
    picked = [steps[round(i * last / max(count - 1, 1))] for i in range(count)]
    return ["step", *names], [[str(s), *(number(c[s]) if s in c else "" for c in columns)] for s in picked]


def _everything(run: Run) -> list[list[str]]:
    """The first, last, median, smallest and largest value of every metric of the run."""
    keys = sorted({k for r in run.records for k, v in r.items() if isinstance(v, int | float)} - {"step"})
    reduce: Sequence[Callable] = (lambda v: v[0], lambda v: v[-1], statistics.median, min, max)
    return [[k, *(number(f(v)) for f in reduce)] for k in keys if (v := run.series(k)[1])]
