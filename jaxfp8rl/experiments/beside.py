"""Guests of an experiment: runs of another trainer on the problem of the control, one a seed.

Their lines stand in experiments/results/NAME/beside/GUEST-sSEED.jsonl, in the form of a cell's. The header
has the keys of a cell's and those of GUEST. Its arm is {"beside": GUEST}. Its config is the hash of the
control's config at that seed, which says that the guest had the same weights, prompts, budget and settings.
The protocol did not register a guest. It is therefore shown with an interval, and not tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxfp8rl.errors import DataError
from jaxfp8rl.experiments import analysis
from jaxfp8rl.experiments.analysis import Outcome, Outcomes
from jaxfp8rl.experiments.cells import name_of
from jaxfp8rl.experiments.protocol import Experiment
from jaxfp8rl.experiments.results import RESTORE, Result, read_results
from jaxfp8rl.experiments.statistics import Estimate, interval

FOLDER = "beside"  # in the folder of an experiment's lines
# title: the trainer with its version and precision. start_s: seconds before the first step, which the clock
# of the steps does not count. differs: sentences about what is not as in the control.
GUEST = ("title", "start_s", "differs")


class Beside(NamedTuple):
    """A guest. difference: to the control at the experiment's measure, over the seeds `paired` that both
    have; None if there are none."""

    title: str
    results: tuple[Result, ...]
    outcomes: Mapping[int, Outcome]
    paired: tuple[int, ...]
    difference: Estimate | None


def read_guests(experiment: Experiment, results: Path, cells: Sequence[Result],
                found: Outcomes) -> list[Beside]:
    """The guests whose lines are in `results`/beside. cells: the lines of the grid; found: its outcomes.
    Raises DataError for lines that are no guest's, or of other settings than the control's."""
    control = analysis.control_name(experiment)
    configs = {r.header["seed"]: r.header["config"] for r in cells if name_of(r.header["arm"]) == control}
    guests: dict[str, list[Result]] = {}
    for result in read_results(results / FOLDER):
        _check(experiment, results / FOLDER, result, configs)
        guests.setdefault(result.header["title"], []).append(result)
    return [_beside(experiment, title, rs, found.get(control, {})) for title, rs in guests.items()]


def _check(experiment: Experiment, folder: Path, result: Result, configs: Mapping[int, str]) -> None:
    header = result.header
    where = f"{folder}: {header['cell']}"
    if missing := [key for key in GUEST if key not in header]:
        raise DataError(f"{where}: not the lines of a guest: the header has no {missing[0]}", RESTORE)
    if header["experiment"] != experiment.name:
        raise DataError(f"{where} ran beside the experiment {header['experiment']}",
                        "give each experiment a folder of its own")
    own = configs.get(header["seed"])
    if own is not None and header["config"] != own:
        raise DataError(f"{where} ran beside other settings than those of "
                        f"{analysis.control_name(experiment)}-s{header['seed']}",
                        "run it again beside these, or remove its lines")


def _beside(experiment: Experiment, title: str, results: Sequence[Result],
            control: Mapping[int, Outcome]) -> Beside:
    o = experiment.protocol.outcome
    by_seed = {r.header["seed"]: analysis.outcome(r, o.metric) for r in results}
    differences = analysis.paired(by_seed, control, o.measure)
    return Beside(title, tuple(results), by_seed, tuple(differences),
                  interval(list(differences.values()), 1 - o.alpha, o.interval) if differences else None)
