"""The task "environment": the problems that an environment brings along. Its rewards come turn by turn."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxfp8rl.data.generated import read
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.task import Reward, Seed, Task, check_chat, with_system_prompt
from jaxfp8rl.errors import ConfigError

CHILD = (sys.executable, "-P", "-W", "ignore", "-m", "jaxfp8rl.environments.problems")
SECONDS = 600  # for an environment to list its problems
HASHES = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}  # of all processes that run code of a user


@dataclasses.dataclass(frozen=True)
class EnvironmentTask:
    """The problems of the environment `name` with its `options`, listed by a process of its own: no code of
    an environment runs in the learner's."""

    kind: ClassVar[str] = "environment"
    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scorer_folder: str = ""
    chat: bool = False
    system_prompt: str = ""
    seed: Seed = 0

    def __post_init__(self):
        check_chat(self.chat, self.system_prompt)

    @property
    def in_child(self) -> bool:
        return False

    def problems(self) -> Sequence[Problem]:
        return self._listed[0]

    def held_out(self) -> Sequence[Problem]:
        return self._listed[1]

    def score(self, problem: Problem, text: str) -> float:
        """0: the rewards are those that the environment gave the turns."""
        return 0.0

    def demonstrate(self, problem: Problem, rng: np.random.Generator) -> str:
        return problem.reference or problem.answer

    def rewarding(self, reward: Reward) -> Task:
        raise ConfigError(f'task.rewards: "{reward.name}": an environment gives the rewards itself',
                          "leave task.rewards out")

    def load_scorer(self) -> None:
        pass

    @functools.cached_property
    def _listed(self) -> tuple[list[Problem], list[Problem]]:
        found = asked_of_child({"task": self.kind, **dataclasses.asdict(self)},
                               f'task.name: the environment "{self.name}"')
        mine = lambda p: dataclasses.replace(
            p, prompt=with_system_prompt(p.prompt, self.chat, self.system_prompt))
        train, held_out = ([mine(read(line)) for line in found[part]] for part in ("problems", "held_out"))
        return train, held_out


def tool_schemas(tools: Sequence[str], folder: str) -> list[dict[str, Any]]:
    """The schemas of these tools, as chat templates take them. Raises ConfigError."""
    asked = {"tools": list(tools), "scorer_folder": folder}
    return asked_of_child(asked, "environment.tools: what imports them")["schemas"] if tools else []


def asked_of_child(asked: dict[str, Any], who: str) -> dict[str, Any]:
    """The answer of a process that imports an environment or tools. Raises ConfigError if it has none."""
    words = [*CHILD, json.dumps(asked)]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=SECONDS,
                              env={**os.environ, **HASHES})
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{who} did not answer within {SECONDS} s",
                          "make it by hand in a fresh Python") from None
    if done.returncode:
        last = done.stderr.strip().splitlines() or ["it wrote no error message"]
        raise ConfigError(f"{who} died: {last[-1]}", "make it by hand in a fresh Python")
    found = json.loads(done.stdout)
    if "fatal" in found:
        raise ConfigError(found["fatal"], found["next_step"])
    return found
