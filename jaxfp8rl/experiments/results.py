"""The lines of a cell that are committed: experiments/results/NAME/CELL.jsonl.

The first line is a header: the cell, the hashes of its config and of its protocol, the device, versions, and
seconds. The others are the steps, each with the few metrics that a report needs, in five digits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxfp8rl.errors import DataError
from jaxfp8rl.experiments.cells import Cell
from jaxfp8rl.experiments.protocol import Experiment
from jaxfp8rl.monitors.jsonl import read_metrics, whole_lines
from jaxfp8rl.monitors.notes import ABOUT, read_starts

DONE = "done"
RESTORE = "restore it from git, or run the cell again"
FIELDS = (
    "step", "reward/mean", "eval/reward_mean", "eval/problems", "eval/commonest_share",
    "mismatch/token_mult_prob_error", "mismatch/k3", "mismatch/equal_fraction", "routing/tokens_differing",
    "correction/ess", "entropy", "grad_norm", "response/length_mean",
    "tokens/rollout", "time/step_s",
)
HEADER = ("experiment", "cell", "arm", "seed", "pilot", "config", "protocol", "ended", "steps", "seconds",
          "at_once", "device", "commit", "versions", "begun")


class Result(NamedTuple):
    """A cell's lines. header: the keys of HEADER. steps: records of FIELDS and the outcome's metric."""

    header: dict[str, Any]
    steps: list[dict[str, Any]]


def write_result(path: Path, experiment: Experiment, cell: Cell, run: Path, ended: str,
                 seconds: float, at_once: int) -> None:
    """Write the lines of the run in the folder `run`. ended: DONE, or why the run ended before its last step.
    at_once: the largest number of cells that shared the device."""
    records, start = read_metrics(run / "metrics.jsonl"), read_starts(run / ABOUT)[-1]
    header = {
        "experiment": experiment.name, "cell": cell.name, "arm": dict(cell.arm), "seed": cell.seed,
        "pilot": cell.pilot, "config": cell.digest, "protocol": experiment.digest, "ended": ended,
        "steps": cell.cfg.run.steps, "seconds": round(seconds, 1), "at_once": at_once,
        "device": start["hardware"], "commit": os.environ.get("JAXFP8RL_COMMIT", start["commit"]),
        "versions": start["versions"], "begun": read_starts(run / ABOUT)[0]["date"],
    }
    write_lines(path, experiment, header, records)


def write_lines(path: Path, experiment: Experiment, header: Mapping[str, Any],
                records: Iterable[Mapping[str, Any]]) -> None:
    """Write a header and the records of the steps, whole or not at all. Of a record the FIELDS and the
    outcome's metric are kept."""
    fields = dict.fromkeys((*FIELDS, experiment.protocol.outcome.metric))
    lines = [header, *({k: _short(r[k]) for k in fields if k in r} for r in records)]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(draft, path)


def _short(value: Any) -> Any:
    """Five digits. A number that is not finite is text, as in metrics.jsonl."""
    if not isinstance(value, float):
        return value
    short = float(f"{value:.5g}")
    return short if abs(short) < float("inf") else str(value)


def read_result(path: Path) -> Result:
    """Raises DataError for a file that is not the lines of a cell."""
    try:
        first, *rest = whole_lines(path)
        header = json.loads(first)
        missing = [key for key in HEADER if key not in header]
        steps = [json.loads(line) for line in rest]
    except (ValueError, TypeError) as e:
        raise DataError(f"{path}: not the lines of a cell: {e}", RESTORE) from e
    if missing or not all("step" in step for step in steps):
        why = f"the header has no {missing[0]}" if missing else "a line has no step"
        raise DataError(f"{path}: not the lines of a cell: {why}", RESTORE)
    return Result(header, [{k: float(v) if isinstance(v, str) else v for k, v in s.items()} for s in steps])


def read_results(folder: Path) -> list[Result]:
    """All cells of an experiment, in the order of their names."""
    return [read_result(path) for path in sorted(folder.glob("*.jsonl"))]


def finished(path: Path, cell: Cell) -> bool:
    """Whether `path` holds the lines of this very cell. Raises DataError if they are another config's."""
    if not path.is_file():
        return False
    header = read_result(path).header
    if header["config"] != cell.digest:
        raise DataError(f"{path}: the cell ran with other settings than the protocol has now",
                        "give the changed experiment a name of its own, or remove the file")
    return True
