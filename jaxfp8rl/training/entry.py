"""`jaxfp8rl.train`: start a run from Python, with Python functions as rewards."""

from __future__ import annotations

import importlib.machinery
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxfp8rl.config.sampling import RewardSection
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config, of_table
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.verifiers.own_scorers import CALLABLE, check_signature, handed_over

Reward = Callable[[Any, str], float | None] | str


def train(
    config: Config | Mapping[str, Any] | str | os.PathLike, overrides: Sequence[str] = (), *,
    reward: Reward | Mapping[str, Reward] | None = None, weights: Mapping[str, float] | None = None,
    resume: bool = False, fork_of: str = "",
) -> Path:
    """Run a config to its last step, as `jaxfp8rl train` does, and return its run directory.

    config: the path of a TOML file, the name of a preset, a run directory (with `resume`), a table, or a
    Config. overrides: as on the command line, `["--optim.lr", "1e-6"]`. reward: a scorer,
    `function(problem, text) -> float | None`, or several scorers by name; a name without an entry in
    `weights` has the weight 1. A string names a built-in scorer, for example "exact", or "generator", the
    task's own scorer.

    A function at the top level of a module runs in the scoring processes, with a timeout and without access
    to secrets. Any other function, such as a lambda or a closure, runs in a thread of this process, which
    cannot be stopped. Raises subclasses of UserError, which give the next step.
    """
    cfg = _config(config, overrides, resume)
    functions: dict[str, Callable] = {}
    if reward is not None:
        cfg = _rewarded(cfg, reward, weights or {}, functions)
    with handed_over(functions):
        from jaxfp8rl.config.rules import check  # both load jax
        from jaxfp8rl.training.loop import train as run

        run(check(cfg), resume, fork_of)
    return Path(cfg.run.dir)


def _config(config: Any, overrides: Sequence[str], resume: bool) -> Config:
    if isinstance(config, Config | Mapping):
        if overrides:
            raise ConfigError("overrides apply only to a config that is read from a file",
                              "change the config itself")
        return config if isinstance(config, Config) else of_table(config)
    path = Path(config)
    return load_config(str(path / "config.toml" if resume and path.is_dir() else path), overrides)


def _rewarded(cfg: Config, reward: Any, weights: Mapping[str, float],
              functions: dict[str, Callable]) -> Config:
    """The config with these rewards entered by name. A function that cannot be imported by name is added to
    `functions`."""
    if not isinstance(reward, Mapping):
        if weights:
            raise ConfigError("weights need rewards with names",
                              'pass reward={"correct": FUNCTION, "brief": OTHER}')
        if cfg.task.kind == "file":
            return _with(cfg, scorer=_name("reward", reward, functions), rewards=())
        reward = {"reward": reward}  # other kinds of task have a scorer of their own: this one needs a name
    for name in weights.keys() - reward.keys():
        raise ConfigError(f'weights: no reward is named "{name}"', f"use one of {', '.join(reward)}")
    named = [RewardSection(name=name, scorer=_name(name, one, functions),
                           weight=float(weights.get(name, 1.0)))
             for name, one in reward.items()]
    return _with(cfg, scorer="", rewards=tuple(named))


def _with(cfg: Config, **changes: Any) -> Config:
    return cfg.model_copy(update={"task": cfg.task.model_copy(update=changes)})


def _name(name: str, reward: Any, functions: dict[str, Callable]) -> str:
    if isinstance(reward, str):
        return reward
    module, function = getattr(reward, "__module__", None), getattr(reward, "__qualname__", "")
    label = re.sub(r"\W", "_", getattr(reward, "__name__", type(reward).__name__)).strip("_") or "function"
    check_signature(reward, label)
    if module not in (None, "__main__") and function.isidentifier() and _is_at_top(reward, module, function):
        return f"{module}:{function}"
    functions[f"{name}_{label}"] = reward
    return f"{CALLABLE}{name}_{label}"


def _is_at_top(reward: Any, module: str, function: str) -> bool:
    """Whether another process can import the same function by name. It cannot import a module that exists
    only in this process."""
    found = importlib.machinery.PathFinder.find_spec(module.partition(".")[0])
    return found is not None and getattr(sys.modules.get(module), function, None) is reward
