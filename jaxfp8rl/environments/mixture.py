"""Several environments in one run: each trajectory plays with the one that its problem came from."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.task import NAME
from jaxfp8rl.environments.protocol import Environment
from jaxfp8rl.errors import ConfigError

WHERE = "environment"  # the key of a problem's meta that names its environment


class Mixture:
    """The environment "several". of: a table for each, with its `name` ("guess", "module:Class", ...),
    `weight` (its share of the problems), `options`, and `label`, by which its metrics are known. size:
    problems in all.

    Problems are repeated, in turns of their own order, until each environment has its share.
    """

    def __init__(self, make: Callable[[str, dict[str, Any]], Environment], of: Sequence[dict[str, Any]],
                 size: int = 1000):
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"task.options.size = {size!r}: expected a number of problems, 1 or more",
                              "for example 1000")
        labels = [_label(part) for part in of]
        self._size, self._weights = size, [_weight(part) for part in of]
        if not of or len(set(labels)) < len(labels):
            raise ConfigError(f"task.options.of: the labels are {labels}: give one table or more, each with "
                              "its own label", 'for example [[task.options.of]] with name = "guess"')
        self._parts: dict[str, Any] = {label: make(part["name"], part.get("options", {}))
                                       for label, part in zip(labels, of)}

    def problems(self) -> list[Problem]:
        shares = [max(1, round(self._size * w / sum(self._weights))) for w in self._weights]
        found = [self._marked(label, itertools.islice(itertools.cycle(_listed(label, part)), n))
                 for (label, part), n in zip(self._parts.items(), shares)]
        return [p for problems in found for p in problems]

    def held_out(self) -> list[Problem]:
        return [p for label, part in self._parts.items() if hasattr(part, "held_out")
                for p in self._marked(label, part.held_out())]

    def reset(self, problem: Problem) -> Any:
        part = self._playing = copy.copy(self._parts[problem.meta[WHERE]])
        return part.reset(dataclasses.replace(problem, id=problem.meta["id"]))

    def step(self, action: str) -> Any:
        return self._playing.step(action)

    def _marked(self, label: str, problems: Any) -> list[Problem]:
        return [dataclasses.replace(p, id=f"{label} {i}: {p.id}", meta={**p.meta, WHERE: label, "id": p.id})
                for i, p in enumerate(problems)]


def _listed(label: str, part: Any) -> Sequence[Problem]:
    problems = part.problems() if hasattr(part, "problems") else ()
    if not problems:
        raise ConfigError(f'task.options.of: "{label}" has no problems of its own',
                          "give it a method `problems`")
    return problems


def _label(part: dict[str, Any]) -> str:
    known = {"name", "weight", "options", "label"}
    if not isinstance(part, dict) or not isinstance(part.get("name"), str) or part.keys() - known:
        raise ConfigError(f"task.options.of: {part!r:.100}: a table has name, and perhaps weight, "
                          f"options, label",
                          'for example name = "guess"')
    label = part.get("label", part["name"].rpartition(":")[2].lower())
    if not re.fullmatch(NAME, label):
        raise ConfigError(f'task.options.of: label "{label}": a label has a-z, 0-9 and _',
                          "give another label")
    return label


def _weight(part: dict[str, Any]) -> float:
    weight = part.get("weight", 1.0)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < float("inf"):
        raise ConfigError(f"task.options.of: weight = {weight!r}: expected a number above 0",
                          "for example 1.0")
    return float(weight)
