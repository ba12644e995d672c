"""The cells of an experiment: every arm of the grid at every seed, each with its resolved and checked config.

An arm is a combination of values, one of each axis. A cell is an arm at a seed, and one run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxfp8rl.config.overrides import KeyPath
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config, to_toml
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.experiments.protocol import Experiment, Keys, matches

Arm = Mapping[str, str]  # axis -> the name of its value
# where things are, which differs from machine to machine
PLACES = (("run", "dir"), ("task", "scorer_folder"), ("train", "compilation_cache"))
OWN: dict[KeyPath, str] = {  # keys that the experiment itself sets -> what to do instead
    ("run", "steps"): "set budget.steps, which is the run.steps of every cell",
    ("run", "seed"): "name the seeds in `seeds` and in `pilot.seeds`",
    ("run", "dir"): "leave it out; `jaxfp8rl experiment run --work DIR` names the folder of all runs",
}


class Cell(NamedTuple):
    """One run. warm: the config of the warm start that it shares with the other cells of its seed, or None.
    digest: of everything that decides what the run computes."""

    arm: Arm
    seed: int
    pilot: bool
    cfg: Config
    warm: Config | None
    digest: str

    @property
    def name(self) -> str:
        return f"{'pilot-' if self.pilot else ''}{name_of(self.arm)}-s{self.seed}"


def name_of(arm: Arm) -> str:
    return "-".join(arm.values())


def arms(experiment: Experiment, pilot: bool = False) -> list[Arm]:
    """The arms of the grid, or of its pilot, in the order of the file."""
    p = experiment.protocol
    all_of_them = (dict(zip(p.grid, names)) for names in itertools.product(*p.grid.values()))
    kept: list[Arm] = [arm for arm in all_of_them if not any(matches(arm, choice) for choice in p.exclude)]
    if not pilot or not p.pilot.arms:
        return kept
    return [arm for arm in kept if any(matches(arm, choice) for choice in p.pilot.arms)]


def cells(experiment: Experiment, pilot: bool = False) -> list[Cell]:
    """The cells of the grid, or of its pilot, seed by seed. Raises ConfigError, with the protocol's line, for
    a config that cannot run, and if no arm is left."""
    p = experiment.protocol
    seeds = p.pilot.seeds if pilot else p.seeds
    if not arms(experiment, pilot):
        key = ("pilot", "arms") if arms(experiment) else ("exclude",)
        raise ConfigError(f"{experiment.where.named(key)}: no arm of the grid is left",
                          "leave out fewer combinations in `exclude`, or name other arms in `pilot.arms`")
    resolved = [(arm, *_resolved(experiment, arm)) for arm in arms(experiment, pilot)]
    return [Cell(arm, seed, pilot, _seeded(cfg, seed), warm and _seeded(warm, seed),
                 digest_of(_seeded(cfg, seed), *([warm] if warm else [])))
            for seed in seeds for arm, cfg, warm in resolved]


def _resolved(experiment: Experiment, arm: Arm) -> tuple[Config, Config | None]:
    """The configs of an arm and of its warm start, without their seed."""
    p = experiment.protocol
    budget = [(("budget", "steps"), {"run": {"steps": p.budget.steps}})]
    shared = [(("settings",), p.settings)]
    own = [(("grid", axis, value), p.grid[axis][value]) for axis, value in arm.items()]
    cfg = _load(experiment, [*budget, *shared, *own], f"arm {name_of(arm)}")
    _check(experiment, cfg, name_of(arm))
    if p.warm_start is None:
        return cfg, None
    warm = _load(experiment, [*budget, *shared, (("warm_start",), p.warm_start)], "the warm start")
    if not warm.sft.steps:
        raise ConfigError(f"{experiment.where.named(('warm_start',))}: sft.steps is 0", "set sft.steps in it")
    return cfg, warm


def _load(experiment: Experiment, tables: list[tuple[KeyPath, Keys]], what: str) -> Config:
    """The config with the keys of `tables`, each with its place in the protocol; a later one wins."""
    words, places = list[str](), dict[str, KeyPath]()
    for place, keys in tables:
        for path, value in _flat(keys):
            if path in OWN and place[0] != "budget":
                raise ConfigError(f"{experiment.where.named((*place, *path))}: the experiment sets this key "
                                  f"itself\n  in {what}", OWN[path])
            flag = f"--{'.'.join(path)}"
            words += [f"{flag}={to_toml(value)}"]
            places[flag] = place if place[0] == "budget" else (*place, *path)
    try:
        return load_config(experiment.base, words)
    except ConfigError as e:
        named = lambda m: experiment.where.named(places[m[0]]) if m[0] in places else m[0]
        message = re.sub(r"--[\w.]+(?<!\.)", named, e.message)
        if str(experiment.path) not in message:
            message = f"{experiment.path}: {message}"
        raise ConfigError(f"{message}\n  in {what}", e.next_step) from e


def _flat(keys: Keys) -> Iterator[tuple[KeyPath, Any]]:
    """(path, value) of each key of each section. A table as a value, such as task.options, is one value: it
    replaces the config's."""
    for section, value in keys.items():
        inner = value.items() if isinstance(value, dict) else ()
        yield from (((section, key), v) for key, v in inner) if inner else [((section,), value)]


def _check(experiment: Experiment, cfg: Config, name: str) -> None:
    """Refuse what a cell cannot have."""
    metric, where = experiment.protocol.outcome.metric, experiment.path
    if not cfg.run.save_every:
        raise ConfigError(f"{where}: arm {name}: run.save_every = 0: a cell that was ended could not go on",
                          "set run.save_every to a few steps")
    over_the_run = experiment.protocol.outcome.measure == "mean"
    if metric.startswith("eval/") and not cfg.run.eval_every and over_the_run:
        raise ConfigError(
            f'{where}: arm {name}: outcome.measure = "mean" is over evaluations, and run.eval_every = 0',
            "set run.eval_every")
    if cfg.train.devices > 1:
        raise ConfigError(f"{where}: arm {name}: {cfg.train.mesh}: a cell runs on one device",
                          "leave out train.data, train.fsdp and train.tensor")


def _seeded(cfg: Config, seed: int) -> Config:
    return cfg.model_copy(update={"run": cfg.run.model_copy(update={"seed": seed})})


def digest_of(*cfgs: Config) -> str:
    """The hash of all settings that are not their defaults. A setting that a later version adds therefore
    changes no hash."""
    parts = [_settings(cfg) for cfg in cfgs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _settings(cfg: Config) -> dict[str, Any]:
    found = cfg.model_dump(exclude_defaults=True)
    for section, key in PLACES:
        found.get(section, {}).pop(key, None)
    return found
