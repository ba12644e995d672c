"""Environments by name: those of the package, and a user's own "module:Class" or "file.py:Class"."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jaxfp8rl.environments.games import Calculator, Guess
from jaxfp8rl.environments.mixture import Mixture
from jaxfp8rl.environments.protocol import Environment
from jaxfp8rl.environments.verifiers_adapter import NAME as VERIFIERS
from jaxfp8rl.environments.verifiers_adapter import VerifiersEnvironment
from jaxfp8rl.errors import ConfigError, nearest
from jaxfp8rl.verifiers.own_scorers import find_object

GIVEN = {"make", "seed", "form", "think_tags"}  # arguments that are no options
OWN: dict[str, type] = {"guess": Guess, "calculator": Calculator}


def make_environment(name: str, options: Mapping[str, Any], seed: int, folder: str = "", form: str = "",
                     think_tags: Sequence[str] = ()) -> Environment:
    """The environment `name` with its options. `folder`: where the module of a user's own is looked for
    first. `form`, `think_tags`: of the model's calls and thoughts, for those of `verifiers`.

    Raises ConfigError for an unknown name, a module that cannot be loaded, options that it does not take, and
    whatever it raises itself.
    """
    if name in OWN:
        return _made(name, OWN[name], {"seed": seed, **options})
    if name == VERIFIERS:
        return _made(name, VerifiersEnvironment, {"form": form, "think_tags": think_tags, **options})
    if name == "several":
        own = functools.partial(make_environment, seed=seed, folder=folder, form=form, think_tags=think_tags)
        return _made(name, Mixture, {"make": own, **options})
    if ":" not in name:
        raise ConfigError('task.name: there is no environment '
                          f'"{name}"{nearest(name, [*OWN, "several", VERIFIERS])}',
                          'your own is "module:Class" or "file.py:Class"')
    return _made(name, find_object(name, folder, "task.name"), dict(options))


def _made(name: str, cls: Any, options: dict[str, Any]) -> Environment:
    _check_options(name, cls, options)
    try:
        made = cls(**options)
    except ConfigError:
        raise
    except Exception as e:
        raise ConfigError(f'task.name: the environment "{name}" cannot be made: {type(e).__name__}: {e}',
                          "task.options are its arguments (docs/turns.md)") from e
    for method in ("reset", "step"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(f'task.name: "{name}" is no environment: it has no method `{method}`',
                              "docs/turns.md shows one")
    return made


def _check_options(name: str, cls: Any, options: dict[str, Any]) -> None:
    """Raise ConfigError for an option that the class does not take, and for one that it misses."""
    try:
        takes = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class of C tells nothing
        return
    found = f'the environment "{name}"'
    unknown = [key for key in options if key not in takes]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        raise ConfigError(f"task.options.{unknown[0]}: {found} has no such option"
                          f"{nearest(unknown[0], takes.keys() - GIVEN)}",
                          "task.options are its arguments (docs/turns.md)")
    needed = (key for key, p in takes.items()
              if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    if missing := next((key for key in needed if key not in options), None):
        raise ConfigError(f"task.options.{missing} is missing: {found} needs it",
                          "docs/turns.md has examples")
