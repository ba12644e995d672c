"""An experiment as a file: what is asked, what runs, and how it will be judged, written before it runs.

`load_protocol` reads experiments/NAME.toml. A refusal names the file, the line, the key and the nearest right
thing, as for a config. docs/experiments.md explains each key.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import Field

from jaxfp8rl.config.problems import Places, invalid
from jaxfp8rl.config.section import Section, listed
from jaxfp8rl.config.toml import presets
from jaxfp8rl.errors import ConfigError, nearest
from jaxfp8rl.monitors.names import METRICS, is_metric

Keys = dict[str, Any]  # keys of a config, nested as in its file
Values = Annotated[dict[str, Keys], Field(min_length=1)]
Names = Annotated[tuple[str, ...], pydantic.BeforeValidator(listed), Field(strict=False, min_length=1)]
Choice = dict[str, Names]  # axis -> names of its values
Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(strict=False, min_length=1)]
FOLDER = Path("experiments")
CHECKOUT = Path(__file__).parents[2] / FOLDER
NAME = r"[a-z0-9][a-z0-9_.]*"  # of axes and values: a cell's name joins them with "-"


class Pilot(Section):
    """The runs that come before the grid, to see its cost and its spread."""

    seeds: Seeds = Field(description="seeds of the pilot; the grid never uses them")
    arms: tuple[Choice, ...] = Field(
        default=(), strict=False, description='arms of the pilot, as [{recipe = "bf16"}]; empty: all')


class Budget(Section):
    """What a cell may cost."""

    steps: int = Field(ge=1, description="run.steps of every cell")
    minutes: float = Field(gt=0, description="minutes after which a cell is ended, all its starts together")


class Outcome(Section):
    """What is compared, and how."""

    metric: str = Field(default="eval/reward_mean", description="metric of the steps that evaluate")
    measure: Literal["end", "mean"] = Field(
        default="end", description="the last evaluation, or the mean of all after the first")
    margin: float | None = Field(
        default=None, gt=0, description="margin of equivalence, in units of the metric")
    margin_of_gain: float | None = Field(
        default=None, gt=0, le=1, description="margin of equivalence, as a share of the control's gain")
    tests: tuple[Literal["difference", "equivalence"], ...] = Field(
        default=("difference", "equivalence"), strict=False, min_length=1,
        description="paired t-test, and two one-sided tests; each corrected over the arms after Holm")
    alpha: float = Field(default=0.05, gt=0, lt=0.5, description="level of the tests")
    interval: Literal["student", "bootstrap"] = Field(
        default="student", description="kind of the intervals that are shown")


class Protocol(Section):
    """A whole experiment."""

    question: str = Field(min_length=1, description="the question, in a sentence")
    hypothesis: str = Field(min_length=1, description="the answer that is expected")
    refuted_by: str = Field(min_length=1, description="the result that would change our mind")
    config: str = Field(min_length=1,
                        description="the preset or TOML file that every cell begins with; a file's path "
                        "begins at the protocol's folder")
    settings: Keys = Field(default={}, description="keys of a config that all cells share")
    warm_start: Keys | None = Field(
        default=None, description="make one warm start a seed, with these keys, for all cells of the seed; "
        "absent: each cell makes the config's own")
    grid: dict[str, Values] = Field(
        min_length=1, description="axes of the grid; each value has a name and keys of a config")
    exclude: tuple[Choice, ...] = Field(
        default=(), strict=False, description='combinations that are left out: [{recipe = "bf16"}]')
    control: dict[str, str] | None = Field(
        default=None,
        description="the arm that all others are compared with; absent: gains alone are reported")
    seeds: Seeds = Field(description="seeds of the grid; cells of one seed are paired")
    budget: Budget
    outcome: Outcome
    pilot: Pilot


class Experiment(NamedTuple):
    """A protocol with its place. digest: of the file's bytes. where: the lines of its keys."""

    name: str
    path: Path
    digest: str
    protocol: Protocol
    where: Places

    @property
    def base(self) -> str:
        """The config file or preset that cells begin with, as `load_config` takes it."""
        beside = self.path.parent / self.protocol.config
        return str(beside) if beside.is_file() else self.protocol.config

    @property
    def results(self) -> Path:
        """The folder of the committed lines."""
        return self.path.parent / "results" / self.name


def load_protocol(name: str) -> Experiment:
    """Read experiments/NAME.toml, or the TOML file at the path `name`. Raises ConfigError."""
    path = _path_of(name)
    raw = path.read_bytes()
    try:
        text = raw.decode()
        data = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"{path}: not valid TOML: {e}", "correct the line") from e
    where = Places(str(path), text, ())
    try:
        protocol = Protocol.model_validate(data)
    except pydantic.ValidationError as e:
        raise invalid(str(path), e, where.named, _unknown, "docs/experiments.md explains every key") from e
    found = Experiment(path.stem, path, digest(raw), protocol, where)
    _check(found)
    return found


def digest(raw: bytes) -> str:
    """The hash by which results name their protocol."""
    return hashlib.sha256(raw).hexdigest()[:16]


def _path_of(name: str) -> Path:
    """The file of an experiment: a path, or a name in ./experiments or in that of this checkout."""
    places = [Path(name), *(folder / f"{name}.toml" for folder in (FOLDER, CHECKOUT))]
    if found := next((p for p in places if p.suffix == ".toml" and p.is_file()), None):
        return found
    known = known_experiments()
    hint = nearest(Path(name).stem, known) if known else f" (there is no folder {FOLDER})"
    raise ConfigError(f"{name}: no such experiment{hint}",
                      f"name a file of {FOLDER}/, or give the path of a TOML file")


def known_experiments() -> list[str]:
    """The names of the experiments in ./experiments and in this checkout."""
    return sorted({p.stem for folder in (FOLDER, CHECKOUT) for p in folder.glob("*.toml")})


def _unknown(path: tuple[str, ...], _: Any = None) -> str:
    """Why `path` is no key of a protocol."""
    model: Any = Protocol
    for key in path[:-1]:
        model = model.model_fields[key].annotation
    return f"unknown key{nearest(path[-1], model.model_fields)}"


# --- what belongs together


def _check(found: Experiment) -> None:
    """Refuse what pydantic cannot see: names that do not exist, and parts that contradict each other."""
    p, known = found.protocol, presets()
    if not Path(found.base).is_file() and found.base not in known:
        _refuse(found, ("config",),
                f"{p.config}: no such file, nor a shipped preset{nearest(p.config, known)}")
    for axis, values in p.grid.items():
        for name in (axis, *values):
            if not re.fullmatch(NAME, name):
                _refuse(found, ("grid", axis),
                        f'the name "{name}" has other characters than a-z, 0-9, "_" and "."')
    for key, choices in (("exclude", p.exclude), ("pilot.arms", p.pilot.arms)):
        for choice in choices:
            _check_choice(found, key, choice)
    if not is_metric(metric := p.outcome.metric):
        raise ConfigError(f"{found.where.named(('outcome', 'metric'))}: {metric}: a run writes no such "
                          f"metric{nearest(metric, [m for m in METRICS if '*' not in m])}",
                          "docs/metrics.md lists them; that of a scorer is eval/reward/NAME/mean")
    if p.control is not None:
        _check_control(found, p.control)
    if again := set(p.seeds) & set(p.pilot.seeds):
        _refuse(found, ("pilot", "seeds"),
                f"seed {min(again)} is also one of the grid: a pilot has seeds of its own")
    for key, seeds in ((("seeds",), p.seeds), (("pilot", "seeds"), p.pilot.seeds)):
        if len(set(seeds)) < len(seeds):
            _refuse(found, key, "a seed stands there twice")


def _check_control(found: Experiment, control: Mapping[str, str]) -> None:
    """Refuse a control that is no arm, and a test of equivalence without a margin."""
    p = found.protocol
    _check_choice(found, "control", {axis: (name,) for axis, name in control.items()})
    if missing := p.grid.keys() - control.keys():
        _refuse(found, ("control",), f"it names no value of the axis {sorted(missing)[0]}")
    if any(matches(control, choice) for choice in p.exclude):
        _refuse(found, ("control",), "it is among the combinations that `exclude` leaves out")
    if (p.outcome.margin is None) == (p.outcome.margin_of_gain is None) and "equivalence" in p.outcome.tests:
        _refuse(found, ("outcome",),
                "a test of equivalence needs `margin` or `margin_of_gain`, one of the two")


def _check_choice(found: Experiment, key: str, choice: Mapping[str, Sequence[str]]) -> None:
    grid, path = found.protocol.grid, tuple(key.split("."))
    for axis, names in choice.items():
        if axis not in grid:
            _refuse(found, path, f'the grid has no axis "{axis}"{nearest(axis, grid)}')
        for name in names:
            if name not in grid[axis]:
                _refuse(found, path, f'grid.{axis} has no value "{name}"{nearest(name, grid[axis])}')


def _refuse(found: Experiment, path: tuple[str, ...], why: str) -> typing.NoReturn:
    raise ConfigError(f"{found.where.named(path)}: {why}", "docs/experiments.md explains every key")


def matches(arm: Mapping[str, str], choice: Mapping[str, Sequence[str]]) -> bool:
    """Whether an arm has a value that `choice` names, on every axis that `choice` names."""
    return all(arm[axis] in names for axis, names in choice.items())
