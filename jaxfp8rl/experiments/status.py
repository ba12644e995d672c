"""The state of an experiment's cells, and what the rest will cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from jaxfp8rl.experiments import analysis
from jaxfp8rl.experiments.cells import Cell, name_of
from jaxfp8rl.experiments.jobs import jobs_of
from jaxfp8rl.experiments.protocol import Experiment
from jaxfp8rl.experiments.results import DONE, Result, finished, read_result
from jaxfp8rl.experiments.runner import Files
from jaxfp8rl.experiments.statistics import equivalence_power


class Cost(NamedTuple):
    """Predicted minutes of a device for one cell of each arm. measured: in the pilot, on `device`; without a
    pilot they are the budget."""

    minutes: dict[str, float]
    measured: bool
    device: str


def cost(experiment: Experiment, names: Sequence[str], results: Sequence[Result]) -> Cost:
    """The minutes that a cell of each arm in `names` takes of a device, by the newest pilot.

    A cell that shared its device with others took its share. An arm that the pilot did not have is taken for
    the mean of the others.
    """
    pilots = sorted((r for r in results if r.header["pilot"]), key=lambda r: r.header["begun"])
    if not pilots:
        return Cost(dict.fromkeys(names, experiment.protocol.budget.minutes), False, "")
    device = pilots[-1].header["device"]
    taken = [(name_of(r.header["arm"]), r.header["seconds"] / r.header["at_once"] / 60) for r in pilots
             if r.header["device"] == device]
    of_arm = {name: [m for arm, m in taken if arm == name] for name in names}
    usual = statistics.fmean(m for _, m in taken)
    minutes = {name: statistics.fmean(found) if found else usual for name, found in of_arm.items()}
    return Cost(minutes, True, device)


def forecast(experiment: Experiment, left: Sequence[Cell], results: Sequence[Result]) -> str:
    """What the cells that are `left` will cost, in a line."""
    found = cost(experiment, [name_of(cell.arm) for cell in left], results)
    total = sum(found.minutes[name_of(cell.arm)] for cell in left)
    if found.measured:
        return f"{len(left)} cells to run: about {total:.0f} minutes of {found.device}, by the pilot"
    return f"{len(left)} cells to run: {total:.0f} cell minutes at most, by the budget; a pilot tells more"


def power_line(experiment: Experiment, results: Sequence[Result]) -> str:
    """What the grid's test of equivalence can find, by the spread and the control's gain in the pilot."""
    pilot, o = analysis.outcomes(experiment, results, pilot=True), experiment.protocol.outcome
    of_control = list(pilot.get(analysis.control_name(experiment), {}).values())
    spread = analysis.pilot_spread(experiment, pilot)
    if "equivalence" not in o.tests or spread is None or not of_control:
        return "power: unknown; it needs a pilot of the control with two seeds"
    margin = statistics.fmean(analysis.margin_of(experiment, x) for x in of_control)
    pairs = len(experiment.protocol.seeds)
    power = equivalence_power(spread, margin, pairs, o.alpha)
    return (f"power of a test of equivalence: {power:.2f} with {pairs} pairs, at margin {margin:.3g} and the "
            f"pilot's spread {spread.value:.3g}, if there is no difference")


def unfinished(cells: Sequence[Cell], files: Files) -> list[Cell]:
    return [cell for cell in cells if not finished(files.result(cell), cell)]


def state(cell: Cell, files: Files) -> str:
    """One cell's state in words."""
    path, job = files.result(cell), jobs_of([cell], files.work)[1][cell.name]
    if finished(path, cell):
        header = read_result(path).header
        return f"done, {header['seconds'] / 60:.1f} minutes" if header["ended"] == DONE else \
            f"ended by {header['ended']}"
    if job.in_use:
        return f"runs, saved at step {job.step or 0} of {cell.cfg.run.steps}"
    if job.step is not None:
        return f"saved at step {job.step} of {cell.cfg.run.steps}"
    return f"failed: {job.last_error()}" if job.log.is_file() else "not begun"
