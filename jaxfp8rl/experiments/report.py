"""An experiment's page: Markdown and charts, from its protocol and its committed lines alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path

from jaxfp8rl.errors import ConfigError, DataError, UserError, nearest
from jaxfp8rl.experiments import analysis
from jaxfp8rl.experiments.alarms import alarms
from jaxfp8rl.experiments.analysis import Compared, Outcome, Outcomes
from jaxfp8rl.experiments.beside import Beside, read_guests
from jaxfp8rl.experiments.cells import arms, name_of
from jaxfp8rl.experiments.charts import draw_curves, draw_differences
from jaxfp8rl.experiments.pace import log_ratios, paces
from jaxfp8rl.experiments.protocol import Experiment
from jaxfp8rl.experiments.results import DONE, Result, read_results
from jaxfp8rl.experiments.statistics import Estimate, interval

EQUAL = "mismatch/equal_fraction"
MISMATCH = ("mismatch/k3", "mismatch/token_mult_prob_error", EQUAL, "routing/tokens_differing")
FIGURES = ("seeds", "start", "end", "mean over the run", "gain", "minutes of steps", "M tokens sampled")


def write_report(experiment: Experiment, results: Path, out: Path, pilot: bool = False) -> Path:
    """Write the page of the grid, or of the pilot, to `out` and its charts beside it. Raises UserError if no
    cell is done, and DataError for lines of another experiment."""
    everything, shown = _read(experiment, results, pilot)
    found, before = (analysis.outcomes(experiment, everything, which) for which in (pilot, True))
    compared = analysis.compare(experiment, found, before)
    guests = [] if pilot else read_guests(experiment, results, shown, found)
    out.parent.mkdir(parents=True, exist_ok=True)
    charts = [_chart(out, "curves")]
    draw_curves(shown, experiment.protocol.outcome.metric, charts[0],
                guests={guest.title: guest.results for guest in guests})
    if compared:
        charts.append(_chart(out, "differences"))
        draw_differences(compared, analysis.control_name(experiment), charts[1])
    text = page(experiment, shown, found, compared, [chart.name for chart in charts], pilot, guests)
    out.write_text(text, encoding="utf-8")
    return out


def against(experiment: Experiment, results: Path, choice: str, pilot: bool = False) -> str:
    """The table of `analysis.against` for a `choice` "AXIS=VALUE". Raises as `write_report`, and ConfigError
    for a choice that is not the grid's."""
    (axis, _, value), grid = choice.partition("="), experiment.protocol.grid
    wanted = ((axis, grid, "axis"), (value, grid.get(axis, {}), f"value of {axis}"))
    for word, known, what in wanted:
        if word not in known:
            raise ConfigError(f'--against {choice}: the grid has no {what} "{word}"{nearest(word, known)}',
                              "name an axis and one of its values, as in recipe=bf16")
    everything, _ = _read(experiment, results, pilot)
    rows = analysis.against(experiment, analysis.outcomes(experiment, everything, pilot), axis, value)
    return _table(["arm", "beside", "pairs", "difference"],
                  [[f"`{arm}`", f"`{other}`", str(n), _signed(e)] for arm, other, n, e in rows])


def _read(experiment: Experiment, results: Path, pilot: bool) -> tuple[list[Result], list[Result]]:
    """All lines, and those of the grid or of the pilot."""
    everything = read_results(results)
    for r in everything:
        if r.header["experiment"] != experiment.name:
            cell, other = r.header["cell"], r.header["experiment"]
            raise DataError(f"{results}: {cell} belongs to the experiment {other}",
                            "give each experiment a folder of its own")
    shown = [r for r in everything if r.header["pilot"] == pilot]
    if not shown:
        words = " --pilot" if pilot else ""
        raise UserError(f"{results}: no cell of {experiment.name} is done",
                        f"jaxfp8rl experiment run {experiment.name}{words}")
    return everything, shown


def _chart(out: Path, what: str) -> Path:
    return out.with_name(f"{out.stem}-{what}.png")


def page(experiment: Experiment, shown: Sequence[Result], found: Outcomes, compared: Sequence[Compared],
         charts: Sequence[str], pilot: bool = False, guests: Sequence[Beside] = ()) -> str:
    """The text of the page."""
    p = experiment.protocol
    parts = [
        f"# {experiment.name}{': the pilot' if pilot else ''}",
        p.question,
        f"**Result.** {' '.join(sentences(experiment, found, compared))}",
        f"**Hypothesis.** {p.hypothesis}",
        f"**What would change our mind.** {p.refuted_by}",
        *(f"![{name}]({name})" for name in charts),
        "## Arms", _arms(experiment, found),
        *(["## Beside the control", _differences(experiment, compared)] if compared else []),
        *_paces(experiment, shown, found),
        *_mismatch(shown, found),
        *_alarms(shown),
        *(["## Beside, not of this protocol", _guests(experiment, guests)] if guests else []),
        "## Protocol", _protocol(experiment, shown, found, pilot),
    ]
    return "\n\n".join(parts) + "\n"


def sentences(experiment: Experiment, found: Outcomes, compared: Sequence[Compared]) -> list[str]:
    """The result in sentences: what the control, or without one every arm, gained, and each arm beside it."""
    control, o = analysis.control_name(experiment), experiment.protocol.outcome
    gains = {arm: interval([x.gain for x in by.values()], 1 - o.alpha, o.interval)
             for arm, by in found.items() if by and control in ("", arm)}
    gained = [f"`{arm}` gained {_signed(e)} of `{o.metric}`, {_seeds(found[arm])}."
              for arm, e in gains.items()]
    what = {"end": "at the end", "mean": "in the mean over the run"}[o.measure]
    beside = [f"`{c.arm}` is {c.verdict}{_of(c)} `{control}` {what}: {_signed(c.difference)}, "
              f"{_seeds(c.seeds)}." for c in compared]
    return [*gained, *beside, *_alike(experiment, found)]


def _alike(experiment: Experiment, found: Outcomes) -> list[str]:
    """A sentence about arms whose seeds all came to the same value."""
    still = analysis.alike(experiment, found)
    names, values = (f"`{arm}`" for arm in still), sorted({f"{v:.3f}" for v in still.values()})
    return [f"**All seeds of {', '.join(names)} came to the same value ({', '.join(values)}).** A policy "
            "with one answer to all problems does that, and so does a task that is solved: two arms of "
            "that kind are not compared."] if still else []


def _seeds(of: Sized) -> str:
    return f"{len(of)} seed{'' if len(of) == 1 else 's'}"


def _of(c: Compared) -> str:
    if c.verdict == "equivalent":
        return f" (margin {c.margin:.3g}) to"
    return " than" if c.verdict in ("better", "worse") else " beside"


def _arms(experiment: Experiment, found: Outcomes) -> str:
    """The table of arms: outcome, gain, time and tokens."""
    o = experiment.protocol.outcome
    rows = []
    for arm, by_seed in found.items():
        runs = list(by_seed.values())
        if not runs:
            rows.append([f"`{arm}`", "0", *["-"] * 6])
            continue
        rows.append([f"`{arm}`", *_figures(experiment, runs)])
    level = f"{100 * (1 - o.alpha):g}%"
    note = (f"`{o.metric}`: mean over the seeds, with its {level} interval "
            f"({'Student' if o.interval == 'student' else 'bootstrap'}).")
    return "\n\n".join([_table(["arm", *FIGURES], rows), note, *_early(found)])


def _figures(experiment: Experiment, runs: Sequence[Outcome]) -> list[str]:
    """The cells of FIGURES."""
    o = experiment.protocol.outcome
    measures = ([getattr(x, key) for x in runs] for key in ("start", "end", "mean", "gain"))
    return [str(len(runs)), *(_plain(interval(values, 1 - o.alpha, o.interval)) for values in measures),
            f"{statistics.fmean(x.minutes for x in runs):.1f}",
            f"{statistics.fmean(x.tokens for x in runs) / 1e6:.2f}"]


def _paces(experiment: Experiment, shown: Sequence[Result], found: Outcomes) -> list[str]:
    """Title and table: how soon each arm has half of the control's gain; [] if no gain of it is sure."""
    by_arm, control = paces(experiment, shown, found), analysis.control_name(experiment)
    o, rows = experiment.protocol.outcome, []
    for arm, of_arm in by_arm.items():
        figures = ["-"] * 3
        if cells := list(of_arm.by_seed.values()):
            steps, minutes, tokens = map(statistics.fmean, zip(*cells))
            figures = [f"{steps:.1f}", f"{minutes:.2f}", f"{tokens / 1e6:.3f}"]
        ratios = [log_ratios(of_arm, by_arm[control], key) for key in ("tokens", "minutes")]
        rows.append([f"`{arm}`", f"{len(cells)} of {of_arm.cells}", *figures, *(
            _times(interval(logs, 1 - o.alpha, o.interval)) if logs and arm != control else "-"
            for logs in ratios)])
    head = ["arm", "cells", "steps", "minutes of steps", "M tokens sampled", "tokens, times the control's",
            "minutes, times the control's"]
    note = (f"Until `{o.metric}` has risen by half of what `{control}` gains with the same seed, on straight "
            "lines between evaluations: means over the cells that came so far. The last columns are geometric "
            "means over pairs, with their intervals. The first step, which compiles, counts as the median one. "
            "Minutes compare as far as cells shared a device alike.")
    return ["## Pace", _table(head, rows), note] if rows else []


def _times(logs: Estimate) -> str:
    mean, low, high = map(math.exp, (logs.mean, logs.low, logs.high))
    return f"{mean:.2f}" if math.isnan(low) else f"{mean:.2f} ({low:.2f} to {high:.2f})"


def _mismatch(shown: Sequence[Result], arm_names: Iterable[str]) -> list[str]:
    """Title and table: what engine and learner differ by at the start and at the end of each arm's cells."""
    keys = [key for key in MISMATCH if any(key in step for r in shown for step in r.steps)]
    if not keys:
        return []
    rows = []
    for arm in arm_names:
        cells = [r for r in shown if name_of(r.header["arm"]) == arm]
        pairs = [analysis.first_and_last(cells, key) for key in keys]
        rows.append([f"`{arm}`", *(_ranged(values) for pair in pairs for values in pair)])
    head = ["arm", *(f"{key.split('/')[1]}, {when}" for key in keys for when in ("start", "end"))]
    older = "" if EQUAL in keys else f" These lines are older than `{EQUAL}`."
    note = ("[Of engine and learner](../metrics.md#mismatch-and-correction), means over the first and over "
            f"the last {analysis.STEPS_OF_AN_END} steps of a cell: the mean over the seeds (least to "
            "largest).")
    return ["## Mismatch", _table(head, rows), note + older]


def _alarms(shown: Sequence[Result]) -> list[str]:
    """Title and table: how long before a fall of the reward each metric was ill; [] if no reward fell."""
    found, rows = alarms(shown), []
    for a in found:
        steps = _ranged([float(x) for x in a.before])
        rows.append([f"`{a.rule.key}`", a.rule.ill, f"{len(a.before)} of {len(a.ahead)}", steps,
                     f"{a.without} of {a.held}"])
    head = ["metric", "ill", "before the fall, cells", "steps before it", "without a fall, cells"]
    note = ("The reward fell where the training or the held-out reward ends 50% below its best. The fall is "
            "the first step from which on one of them lay as low; the held-out reward is known at evaluations "
            "alone. A metric spoke at the first step after which [its rule](../health.md), asked about the "
            "steps so far, says ill: the mean over the cells (least to largest).")
    return ["## Alarms", _table(head, rows), note] if found else []


def _ranged(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean, low, high = (f"{x:.3g}" for x in (statistics.fmean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def _guests(experiment: Experiment, guests: Sequence[Beside]) -> str:
    """The table of other trainers, and what differs."""
    control = analysis.control_name(experiment)
    counted = lambda g, key: _counted(g.results, key, "runs")
    rows = [[g.title, *_figures(experiment, list(g.outcomes.values())), str(len(g.paired)),
             _signed(g.difference) if g.difference else "-"] for g in guests]
    parts = [_table(["trainer", *FIGURES, "pairs", f"difference to `{control}`"], rows),
             f"Each began with the weights of `{control}`, learned from its prompts in their order with its "
             "scorer and its number of steps, and was evaluated as a cell is, by the same engine. It is no "
             "arm of the protocol: the difference, paired by seed, has an interval and no verdict."]
    for g in guests:
        starts = [r.header["start_s"] for r in g.results]
        differs = [text for r in g.results for text in r.header["differs"]]
        parts += [f"{g.title}: {statistics.fmean(starts):.0f} s from the command to the first step, which do "
                  f"not count. Devices: {counted(g, 'device')}. Code: {counted(g, 'commit')}. "
                  f"At once on a device: {counted(g, 'at_once')}. It differs from `{control}`:",
                  "\n".join(f"- {text}" for text in dict.fromkeys(differs))]
    return "\n\n".join([*parts, *_early({g.title: g.outcomes for g in guests})])


def _early(found: Outcomes) -> list[str]:
    """A line about the cells that ended early, if there are any."""
    early = [f"`{arm}` at seed {seed} ({x.ended})" for arm, by in found.items() for seed, x in by.items()
             if x.ended != DONE]
    return [f"Ended early, and counted with the last evaluation: {', '.join(early)}."] if early else []


def _differences(experiment: Experiment, compared: Sequence[Compared]) -> str:
    o = experiment.protocol.outcome
    p = lambda x: "-" if x is None else f"{x:.3f}" if x >= 0.001 else f"{x:.0e}"
    number = lambda x, form: "-" if x is None else format(x, form)
    rows = [[f"`{c.arm}`", str(len(c.seeds)), _signed(c.difference), number(c.effect, "+.2f"), p(c.p),
             number(c.margin, ".3g"), p(c.p_equivalent), number(c.power, ".2f"), c.verdict]
            for c in compared]
    head = ["arm", "pairs", "difference", "effect size", "p, different", "margin", "p, equivalent", "power",
            "verdict"]
    return "\n\n".join([_table(head, rows), (
        f"Paired by seed with `{analysis.control_name(experiment)}`, level {o.alpha:g}. Both p are Holm's "
        "over the arms. Effect size: Hedges' g of the differences. Power: the chance to find equivalence if "
        "there is no difference, by the pilot's spread and how well its seeds tell it, before Holm.")])


def _protocol(experiment: Experiment, shown: Sequence[Result], found: Outcomes, pilot: bool) -> str:
    p, wanted = experiment.protocol, arms(experiment, pilot)
    seeds = p.pilot.seeds if pilot else p.seeds
    done, of = sum(map(len, found.values())), len(wanted) * len(seeds)
    others = sorted({r.header["protocol"] for r in shown} - {experiment.digest})
    lines = [
        f"`{experiment.path.name}` ({experiment.digest}) begins with `{p.config}`; {p.budget.steps} steps, "
        f"{p.budget.minutes:g} minutes a cell at most. {done} of {of} cells are done.",
        f"Arms ({', '.join(p.grid)}): {', '.join(f'`{name_of(arm)}`' for arm in wanted)}. "
        f"Seeds: {', '.join(map(str, seeds))}.",
        f"Devices: {_counted(shown, 'device')}. Code: {_counted(shown, 'commit')}. "
        f"At once on a device: {_counted(shown, 'at_once')}.",
    ]
    if others:
        lines.append(f"Some cells ran under an earlier text of the protocol ({', '.join(others)}), with the "
                     "same settings.")
    return "\n\n".join(lines)


def _counted(shown: Sequence[Result], key: str, what: str = "cells") -> str:
    """The values of a header's key, the most frequent first."""
    values = [str(r.header[key]) for r in shown]
    counts = sorted({(-values.count(v), v) for v in values})
    return ", ".join(f"{v} ({-n} {what})" for n, v in counts)


def _plain(e: Estimate) -> str:
    return f"{e.mean:.3f}" if math.isnan(e.low) else f"{e.mean:.3f} ({e.low:.3f} to {e.high:.3f})"


def _signed(e: Estimate) -> str:
    return f"{e.mean:+.3f}" if math.isnan(e.low) else f"{e.mean:+.3f} ({e.low:+.3f} to {e.high:+.3f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
