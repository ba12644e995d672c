"""The built-in task "arithmetic": sums and differences of small numbers."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from jaxfp8rl.data.file_task import FileTask
from jaxfp8rl.data.permutation import permutation
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.task import GENERATOR, Fraction, Reward, Seed, Task, check_rewards, unit_hash
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.verifiers import scorers


@dataclasses.dataclass(frozen=True)
class ArithmeticTask:
    """`a+b=` with plain decimal answers: `operands` numbers from 0 to `max_operand`, one operation per
    problem.

    `size` problems are drawn (all of them if fewer exist) and split by a hash of the unordered operands. A
    held-out set of operands therefore never occurs in training, in another order or under another operation.
    `demonstration_error` is the share of demonstrations whose answer is one too large, redrawn each time:
    the warm start imitates an imperfect teacher, which reinforcement learning has to surpass.
    """

    kind: ClassVar[str] = "arithmetic"
    max_operand: Annotated[int, Field(ge=1, le=999)] = 99
    operands: Annotated[int, Field(ge=2, le=4)] = 2
    operations: tuple[Literal["+", "-", "*"], ...] = ("+",)
    size: Annotated[int, Field(ge=1)] = 20_000
    held_out_fraction: Fraction = 0.1
    demonstration_error: Fraction = 0.0
    rewards: tuple[Reward, ...] = ()
    scorer_folder: str = ""
    seed: Seed = 0

    def __post_init__(self):
        check_rewards(self.rewards, (GENERATOR, *scorers.SCORERS))
        if not self.operations or len(set(self.operations)) != len(self.operations):
            raise ConfigError(f"task.options.operations = {list(self.operations)}: name each once",
                              'for example ["+", "-"]')
        if (possible := (self.max_operand + 1) ** self.operands * len(self.operations)) > 10**7:
            raise ConfigError(
                f"task.options: max_operand and operands give {possible:,} problems, more than 10 million",
                "lower one of them")

    @property
    def name(self) -> str:
        return self.kind

    @property
    def in_child(self) -> bool:
        return False

    def problems(self) -> Sequence[Problem]:
        return self._split[0]

    def held_out(self) -> Sequence[Problem]:
        return self._split[1]

    def demonstrate(self, problem: Problem, rng: np.random.Generator) -> str:
        return str(int(problem.answer) + int(rng.random() < self.demonstration_error))

    def score(self, problem: Problem, text: str) -> float:
        """1.0 if the text is exactly the answer, without white space around it; otherwise 0.0."""
        return float(text == problem.answer)

    def rewarding(self, reward: Reward) -> Task:
        if reward.scorer == GENERATOR:
            return dataclasses.replace(self, rewards=())
        return FileTask(self.name, scorer=reward.scorer, extract=reward.extract or "all",
                        scorer_folder=self.scorer_folder)

    def load_scorer(self) -> None:
        pass

    @functools.cached_property
    def _split(self) -> tuple[list[Problem], list[Problem]]:
        n, split = self.max_operand + 1, ([], [])
        for code in permutation(n**self.operands * len(self.operations), self.seed, 0)[: self.size].tolist():
            code, operation = divmod(code, len(self.operations))
            numbers = [code // n**i % n for i in reversed(range(self.operands))]
            held_out = unit_hash(self.seed, *sorted(numbers)) < self.held_out_fraction
            split[held_out].append(self._problem(numbers, self.operations[operation]))
        return split

    def _problem(self, numbers: list[int], operation: str) -> Problem:
        apply = {"+": operator.add, "-": operator.sub, "*": operator.mul}[operation]
        expression = operation.join(map(str, numbers))
        same = " ".join(map(str, sorted(numbers)))
        return Problem(expression, f"{expression}=", str(functools.reduce(apply, numbers)), question=same)
