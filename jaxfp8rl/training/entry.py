"""`jaxfp8rl.train`: a run from Python, with rewards that are functions."""

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
    """Run a config to its last step -> its run directory, as `jaxfp8rl train` does.

    config: the path of a TOML file, the name of a preset, a run directory (with `resume`), a table, or a
    Config. overrides: as on the command line, `["--optim.lr", "1e-6"]`. reward: a scorer, `function(problem,
    text) -> float | None`, or several by name, of which the `weights` are 1 where none is given; a string
    names one, "exact" say, or "generator", the task's own. A function that a module has at its top runs in
    the scoring processes, under their clock and without secrets; any other, a lambda or a closure, in this
    one, in a thread that nothing can stop. Raises UserErrors with their next step.
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
            raise ConfigError("overrides are for a config that is read from a file",
                              "change the config itself")
        return config if isinstance(config, Config) else of_table(config)
    path = Path(config)
    return load_config(str(path / "config.toml" if resume and path.is_dir() else path), overrides)


def _rewarded(cfg: Config, reward: Any, weights: Mapping[str, float],
              functions: dict[str, Callable]) -> Config:
    """The config with the names of these rewards; those that have none but ours go to `functions`."""
    if not isinstance(reward, Mapping):
        if weights:
            raise ConfigError("weights are for rewards with names",
                              'reward = {"correct": FUNCTION, "brief": OTHER}')
        if cfg.task.kind == "file":
            return _with(cfg, scorer=_name("reward", reward, functions), rewards=())
        reward = {"reward": reward}  # the other kinds have a scorer of their own
    for name in weights.keys() - reward.keys():
        raise ConfigError(f'weights: no reward has the name "{name}"', f"name one of {', '.join(reward)}")
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
    """Another process finds the same function under its name. A module that lies nowhere but in this process
    it would not."""
    found = importlib.machinery.PathFinder.find_spec(module.partition(".")[0])
    return found is not None and getattr(sys.modules.get(module), function, None) is reward
