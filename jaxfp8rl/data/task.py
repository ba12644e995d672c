"""The protocol of a task, and code that the kinds of tasks share."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import Field

from jaxfp8rl.data.messages import Prompt
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.verifiers import scorers

Fraction = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
ThinkTags = tuple[str, ...]  # the pair of tags around thoughts, or nothing
GENERATOR = "generator"  # the name of the task's own reward among several
NAME = r"[a-z][a-z0-9_]*"  # the form of a reward's name
ANSWER_TAG_INSTRUCTION = "Give the final answer between <answer> and </answer>."


@dataclasses.dataclass(frozen=True)
class Reward:
    """One of several rewards of a task: `scorer` scores the answer that `extract` finds. `extract` "": the
    task's own."""

    name: str
    scorer: str
    weight: float = 1.0
    extract: Literal["", "all", "tag", "last_line", "last_number", "raw"] = ""


class Task(Protocol):
    """The interface that the loop uses: a frozen dataclass with these methods."""

    kind: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...

    @property
    def in_child(self) -> bool:
        """Whether `score` may be slow or crash, so that it must run in the scoring process."""
        ...

    def problems(self) -> Sequence[Problem]:
        """Training problems, in an order that the options fix."""
        ...

    def held_out(self) -> Sequence[Problem]:
        """Problems that are never trained on; empty if the options ask for none."""
        ...

    def rewarding(self, reward: Reward) -> Task:
        """The same task with the scorer of one of its named rewards."""
        ...

    def score(self, problem: Problem, text: str) -> float | None:
        """The score of a completion's text, without special tokens. None means undefined, and so does an
        exception."""

    def demonstrate(self, problem: Problem, rng: np.random.Generator) -> str:
        """An answer for the supervised warm start to imitate; the reference answer unless the task says
        otherwise."""
        ...

    def load_scorer(self) -> None:
        """Import the packages that `score` needs, so that the time does not count towards an item's limit."""


class ReferenceDemonstrations:
    """Demonstrates the reference as it stands, with the answer in a tag if `extract` is "tag"."""

    extract: scorers.Extract

    def demonstrate(self, problem: Problem, rng: np.random.Generator) -> str:
        if self.extract != "tag":
            return problem.reference or problem.answer
        return "\n".join([problem.reference] * bool(problem.reference)
                         + [f"<answer>{problem.answer}</answer>"])


def check_chat(chat: bool, system_prompt: str) -> None:
    if system_prompt and not chat:
        raise ConfigError("task.system_prompt: only chat templates have a system prompt",
                          "set task.chat = true")


def with_system_prompt(prompt: Prompt, chat: bool, system_prompt: str) -> Prompt:
    if isinstance(prompt, str) and not chat:
        return prompt
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    has_own = messages[0]["role"] == "system"
    return messages if not system_prompt or has_own else ({"role": "system", "content": system_prompt},
                                                          *messages)


def unit_hash(*parts: Any) -> float:
    """A number in [0, 1) determined by the parts, the same on every machine."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:6]) / 2**48


def check_rewards(rewards: Sequence[Any], built_in: Sequence[str]) -> None:
    """Raise ConfigError for rewards (`Reward`, or the config's) with a repeated or malformed name, a weight
    that is not finite, or an unknown scorer."""
    for reward in rewards:
        if [r.name for r in rewards].count(reward.name) > 1 or not re.fullmatch(NAME, reward.name):
            raise ConfigError(
                f'task.rewards: name "{reward.name}": each reward needs a unique name of a-z, 0-9 and _',
                "rename it")
        if not math.isfinite(reward.weight):
            raise ConfigError(f'task.rewards: weight {reward.weight} of "{reward.name}" is not finite',
                              "for example weight = 1.0")
        scorers.check_scorer_name(reward.scorer, built_in, "task.rewards")
