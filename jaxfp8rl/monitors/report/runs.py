"""Read a run directory: metrics, config, sampled completions, notes. Nothing of the learner is
imported."""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxfp8rl.errors import UserError, near_path
from jaxfp8rl.health.table import Verdict, verdict
from jaxfp8rl.monitors.end.evaluations import read_evaluations
from jaxfp8rl.monitors.end.extremes import extremes
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.monitors.notes import ABOUT, read_starts
from jaxfp8rl.monitors.report.completions import pick
from jaxfp8rl.monitors.series import series


@dataclasses.dataclass(frozen=True)
class Run:
    """The content of a run directory.

    `records`: metrics.jsonl. `samples`: selected rows of samples.jsonl, which has `sampled` rows. `config`:
    dotted key -> value. `notes`: the lines of notes.txt. `evaluations`: the records of eval.json, oldest
    first. `extremes`: the best and the worst sampled completion. `starts`: the entries of run.json.
    """

    name: str
    records: Sequence[dict[str, Any]]
    samples: Sequence[dict[str, Any]]
    sampled: int
    config: Mapping[str, Any]
    notes: Sequence[str]
    evaluations: Sequence[Mapping[str, Any]]
    extremes: Mapping[str, Mapping[str, Any]]
    starts: Sequence[Mapping[str, Any]]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric, for the steps at which it was logged and is finite."""
        return series(self.records, key)

    @functools.cached_property
    def verdict(self) -> Verdict:
        return verdict(self.records)

    @property
    def about(self) -> dict[str, str]:
        """Model, task, recipe, engine, hardware, commit and command of the last start; without run.json,
        those that the config holds."""
        keys = {"model": "model.path", "task": "task.kind", "recipe": "precision.recipe",
                "engine": "rollout.engine"}
        made = {name: self.config.get(key)
                for name, key in keys.items()} | dict(self.starts[-1] if self.starts else {})
        if isinstance(versions := made.get("versions"), Mapping):
            made["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
        if len(self.starts) > 1:
            made["date"] = (f"{self.starts[0].get('date')}, resumed {len(self.starts) - 1} time(s), last "
                            f"{made.get('date')}")
        return {name: str(value) for name, value in made.items() if value}

    @property
    def seed(self) -> Any:
        return self.config.get("run.seed")


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read the run directories. Raises UserError if one holds no metrics or is given twice."""
    folders = [Path(p) for p in paths]
    names = [p.name or str(p.resolve().name) for p in folders]
    if len(set(names)) < len(names):  # runs/a/demo and runs/b/demo
        names = [str(p) for p in folders]
    if twice := {n for n in names if names.count(n) > 1}:
        raise UserError(f"given twice: {', '.join(sorted(twice))}", "name each run directory once")
    return [_load(path, name) for path, name in zip(folders, names)]


def _load(path: Path, name: str) -> Run:
    records = _read(read_metrics, path / "metrics.jsonl", [])
    if not records:
        if not (path / "config.toml").is_file():
            raise UserError(f"{path} is no run directory{near_path(path)}",
                            "give what run.dir was, for example runs/demo")
        raise UserError(f"{path / 'metrics.jsonl'}: no metrics to report",
                        "wait until the run has finished a step, or resume it")
    samples, sampled = _read(pick, path / "samples.jsonl", ([], 0))
    config = _read(lambda p: tomllib.loads(p.read_text(encoding="utf-8")), path / "config.toml", {})
    notes = _read(lambda p: p.read_text(encoding="utf-8").splitlines(), path / "notes.txt", [])
    evaluations = _read(read_evaluations, path / "eval.json", [])
    kept = _read(extremes, path / "samples.jsonl", {})
    starts = _read(read_starts, path / ABOUT, [])
    return Run(name, records, samples, sampled, dict(_flat(config)), notes, evaluations, kept, starts)


def _read(read, path: Path, missing):
    """The content of a file, or `missing` if the run has not written it. Raises UserError, with the path, if
    the file is damaged."""
    if not path.is_file():
        return missing
    try:
        return read(path)
    except (ValueError, KeyError, AttributeError) as e:
        raise UserError(f"{path}: {e}", "remove the damaged line, or restore the file from a backup") from e


def _flat(table: Mapping[str, Any], prefix: str = ""):
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def events(run: Run) -> list[tuple[int, str]]:
    """(step, description) of every irregular event of the run, and how the run handled it."""
    return [(int(r["step"]), text(r[key])) for r in run.records for key, wrong, text in _WRONG if key in r
            and wrong(r[key])]


_WRONG = (
    ("update/applied", lambda x: x < 1,
     lambda _: "an update was not applied; the note of that step gives the reason"),
    ("engine/healthy", lambda x: x < 1, lambda _: "the engine reported that it is not healthy"),
    ("rollout/groups_rejected", lambda x: x > 0,
     lambda x: f"{x:.0f} groups of completions could not be learned from"),
    ("reward/undefined", lambda x: x > 0,
     lambda x: f"{x:.0f} completions have no score: the scorer failed or timed out"),
    ("eval/undefined", lambda x: x > 0,
     lambda x: f"{x:.0f} held-out problems have no score and count as failed"),
    ("loss", lambda x: not math.isfinite(x), lambda x: f"the loss was {x}"),
)
