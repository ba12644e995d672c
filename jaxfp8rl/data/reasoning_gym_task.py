"""The task "reasoning_gym": any generator of that package."""

from __future__ import annotations

import ast
import dataclasses
import fractions
import functools
import json
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from jaxfp8rl.data.file_task import FileTask
from jaxfp8rl.data.generated import generated
from jaxfp8rl.data.messages import Prompt
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.task import (
    ANSWER_TAG_INSTRUCTION,
    GENERATOR,
    ReferenceDemonstrations,
    Reward,
    Seed,
    Task,
    ThinkTags,
    check_chat,
    check_rewards,
    with_system_prompt,
)
from jaxfp8rl.errors import ConfigError, DataError, nearest
from jaxfp8rl.verifiers import reasoning_gym_faults, scorers

# the fields that a problem depends on; all of them are JSON
_OF_PROBLEMS = ("name", "size", "held_out_size", "examples", "extract", "instruction", "chat",
                "system_prompt", "seed", "options")


@dataclasses.dataclass(frozen=True)
class ReasoningGymTask(ReferenceDemonstrations):
    """Any generator of the package reasoning-gym, scored by that generator. `options` are passed to the
    generator.

    Training uses items [0, size), and the held-out set the `held_out_size` items after them: most generators
    draw item i from `Random(seed + i)`, so a neighbouring seed would repeat training items. Held-out items
    whose question occurs in training are dropped. A few generators depend on Python's hash seed; to resume
    such a run, fix PYTHONHASHSEED.

    `examples`: so many solved problems come before each question, the items after the held-out set. Problems
    that ask the same are dropped.
    """

    kind: ClassVar[str] = "reasoning_gym"
    name: str
    size: Annotated[int, Field(ge=1)] = 1000
    held_out_size: Annotated[int, Field(ge=0)] = 200
    examples: Annotated[int, Field(ge=0)] = 0
    extract: scorers.Extract = "tag"
    instruction: str = ""
    think_tags: ThinkTags = scorers.THINK_TAGS
    rewards: tuple[Reward, ...] = ()
    scorer_folder: str = ""
    chat: bool = False
    system_prompt: str = ""
    seed: Seed = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_chat(self.chat, self.system_prompt)
        check_rewards(self.rewards, (GENERATOR, *scorers.SCORERS))
        self.load_scorer()

    @property
    def in_child(self) -> bool:
        return True

    def problems(self) -> Sequence[Problem]:
        return self._split[0]

    def held_out(self) -> Sequence[Problem]:
        return self._split[1]

    def score(self, problem: Problem, text: str) -> float:
        """The generator's score in [0, 1] of the extracted answer; 0.0 if there is none. Some generators give
        partial credit.

        An answer that makes the scorer raise scores 0.0, provided that the scorer accepts the reference
        answer. If it raises on that as well, so does this function.
        """
        answer = scorers.extract(text, self.extract, self.think_tags)
        entry = ast.literal_eval(problem.meta["entry"])
        # An empty answer scores only if the generator's answer is empty too; a missing one never scores.
        if not answer:
            return float(answer is not None and answer == entry["answer"])
        try:
            return reasoning_gym_faults.score(self._dataset, answer, entry)
        except MemoryError:
            raise
        except Exception:
            if problem.answer:
                reasoning_gym_faults.score(self._dataset, problem.answer, entry)
            return 0.0

    def rewarding(self, reward: Reward) -> Task:
        how = reward.extract or self.extract
        if reward.scorer == GENERATOR:
            return dataclasses.replace(self, extract=how, rewards=())
        shared = {"think_tags": self.think_tags, "scorer_folder": self.scorer_folder}
        return FileTask(self.name, scorer=reward.scorer, extract=how, **shared)

    def load_scorer(self) -> None:
        self._dataset  # noqa: B018  imports the package and builds the generator

    @functools.cached_property
    def _dataset(self):
        known = _reasoning_gym_options(self.name)
        for key in self.options.keys() - known:
            own = {f.name for f in dataclasses.fields(self)} - {"options"}
            raise ConfigError(
                f'task.options.{key}: generator "{self.name}" has no option '
                f'"{key}"{nearest(key, known | own)}', "use one of these, or leave it out")
        import reasoning_gym

        try:
            total, options = self.size + self.held_out_size + self.examples, dict(self.options)
            if self.name == "composite":
                from reasoning_gym.composite import DatasetSpec

                options["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **d})
                                       for d in options.get("datasets", ())]
            return reasoning_gym.create_dataset(self.name, size=total, seed=self.seed, **options)
        except (AssertionError, TypeError, ValueError) as e:
            raise ConfigError(f'task.options: generator "{self.name}" refuses {self.options}: {e}',
                              "change the option that it names") from e

    @functools.cached_property
    def _split(self) -> tuple[list[Problem], list[Problem]]:
        fields = {name: getattr(self, name) for name in _OF_PROBLEMS}
        items = generated(self.problem, self.size + self.held_out_size, fields)
        shown = {entry["question"] for entry in self._examples}
        train = [p for p in items[:self.size] if p.question not in shown]
        seen = {json.dumps(p.prompt) for p in train}
        held_out = [p for p in items[self.size:]
                    if p.question not in shown and json.dumps(p.prompt) not in seen]
        if self.held_out_size and not held_out:
            raise ConfigError(
                f'generator "{self.name}" repeats itself: every held-out question also occurs in training',
                "lower task.options.size, or widen the options of the generator")
        return train, held_out

    def problem(self, index: int) -> Problem:
        """The problem of item `index`. Raises DataError if its metadata does not survive as text."""
        entry = _plain(self._dataset[index])
        # a literal keeps the tuples and integer keys that scorers rely on and JSON would lose
        text = repr(entry)
        if ast.literal_eval(text) != entry:
            raise DataError(
                f'generator "{self.name}", item {index}: its metadata does not survive as a literal',
                "choose another generator")
        prompt = with_system_prompt(self._after_examples(self._asked(entry)), self.chat, self.system_prompt)
        meta, answer = {"entry": text}, reasoning_gym_faults.reference(entry)
        return Problem(f"{self.name}:{self.seed}:{index}", prompt, answer, meta, question=entry["question"])

    def _asked(self, entry: dict[str, Any]) -> str:
        instruction = self.instruction or (ANSWER_TAG_INSTRUCTION if self.extract == "tag" else "")
        return entry["question"] + (f"\n{instruction}" if instruction else "")

    @functools.cached_property
    def _examples(self) -> list[dict[str, Any]]:
        first = self.size + self.held_out_size
        return [self._dataset[i] for i in range(first, first + self.examples)]

    def _after_examples(self, question: str) -> Prompt:
        solved = [(self._asked(entry), f"<answer>{answer}</answer>" if self.extract == "tag" else answer)
                  for entry in self._examples for answer in (reasoning_gym_faults.reference(entry),)]
        if not self.chat or not solved:
            return "".join(f"{asked} {answer}\n\n" for asked, answer in solved) + question
        turns = [{"role": role, "content": text} for pair in solved
                 for role, text in zip(("user", "assistant"), pair)]
        return (*turns, {"role": "user", "content": question})


def _reasoning_gym_options(name: str) -> set[str]:
    try:
        with warnings.catch_warnings():  # a package that it needs compares strings by `is`
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym.factory import DATASETS
    except ImportError as e:
        raise ConfigError(f"task.kind: reasoning_gym cannot be imported: {e}",
                          "pip install 'jaxfp8rl[tasks]'") from e
    if name not in DATASETS:
        raise ConfigError(f'task.name: reasoning-gym has no generator "{name}"{nearest(name, DATASETS)}',
                          'name one of them, for example "chain_sum"')
    return {f.name for f in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}


def _plain(value: Any) -> Any:
    """The value with numpy scalars and fractions as Python numbers, also inside dicts, lists, tuples and
    sets."""
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_plain(v) for v in value)
    if isinstance(value, fractions.Fraction):
        return int(value) if value.denominator == 1 else float(value)
    return value.item() if isinstance(value, np.generic) else value
