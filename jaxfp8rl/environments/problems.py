"""A process that lists the problems of an environment, or the schemas of tools, so that no code of theirs
runs in the learner's: `python -m jaxfp8rl.environments.problems TASK_JSON`, or with {"tools": [...],
"scorer_folder": ...}. It prints one JSON object: what was asked for, or why there is none. Never imports jax
or torch."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from jaxfp8rl.data.generated import written
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.environments.registry import make_environment
from jaxfp8rl.environments.tools import find_tool, schema_of
from jaxfp8rl.errors import ConfigError, UserError


def listed(task: dict[str, Any]) -> dict[str, Any]:
    """The lines of the problems to train on and to hold out, or the schemas of the tools. Raises
    UserError."""
    if "tools" in task:
        return {"schemas": [schema_of(find_tool(name, task["scorer_folder"])) for name in task["tools"]]}
    name, found = task["name"], {}
    environment: Any = make_environment(name, task["options"], task["seed"], task["scorer_folder"])
    if not callable(getattr(environment, "problems", None)):
        raise ConfigError(f'task.name: the environment "{name}" has no problems of its own: no '
                          f'method `problems`',
                          "write one that returns jaxfp8rl.data.problem.Problem objects (docs/turns.md)")
    for part in ("problems", "held_out"):
        problems = getattr(environment, part, list)()
        found[part] = [_line(name, p) for p in _sequence(name, part, problems)]
    return found


def _sequence(name: str, part: str, problems: Any) -> Sequence[Any]:
    if not isinstance(problems, Sequence) or isinstance(problems, str):
        raise ConfigError(f'task.name: "{name}".{part}() returned {type(problems).__name__} '
                          f'instead of a list',
                          "return a list of Problem")
    return problems


def _line(name: str, problem: Any) -> str:
    if not isinstance(problem, Problem):
        raise ConfigError(f'task.name: "{name}": {problem!r:.60} is no Problem',
                          "make each jaxfp8rl.data.problem.Problem(id, prompt, answer)")
    return written(problem)


def main(task: str) -> None:
    with contextlib.redirect_stdout(sys.stderr):  # whatever an environment prints is no problem
        try:
            found = listed(json.loads(task))
        except UserError as e:
            found = {"fatal": e.message, "next_step": e.next_step}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
