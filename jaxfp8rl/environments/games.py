"""Environments that come with the package, small enough to be learned from scratch on a CPU
(docs/turns.md)."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

import numpy as np

from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.task import unit_hash
from jaxfp8rl.errors import ConfigError


@dataclasses.dataclass
class Guess:
    """A number from 1 to `largest` is to be guessed; each guess is answered "+" (it is larger) or "-", and
    anything else "?".

    The reward is 1 for the number. Who halves what is left needs log2(largest + 1) turns at most.
    """

    largest: int = 7
    seed: int = 0

    def __post_init__(self):
        if not 2 <= self.largest <= 999:
            raise ConfigError(f"task.options.largest = {self.largest}: from 2 to 999", "for example 7")

    def problems(self) -> Sequence[Problem]:
        return [Problem(f"guess {n}", "?", str(n), question=str(n)) for n in range(1, self.largest + 1)]

    def held_out(self) -> Sequence[Problem]:
        """None: there are too few numbers, and the prompt does not tell them apart."""
        return []

    def reset(self, problem: Problem) -> str:
        self._number = int(problem.answer)
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        if not re.fullmatch(r"[0-9]{1,3}", action):
            return "?", 0.0, False
        guess = int(action)
        return "+" if self._number > guess else "-", float(guess == self._number), guess == self._number


@dataclasses.dataclass
class Calculator:
    """Expressions such as 31+7*45-8, which the calculator works off an operation at a time.

    A turn names the operator to work out next, and the calculator shows what is left, so that the numbers may
    have more digits than the model could compute with: "31+315-8=", "346-8=", "338". "=" hands in that
    number. Each right key gives an equal share of the reward 1; a wrong one ends the trajectory. Products
    come first, then sums and differences from left to right.
    """

    operands: int = 3
    max_operand: int = 99
    operations: tuple[str, ...] = ("+", "-", "*")
    size: int = 2000
    held_out_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self):
        kinds = set(self.operations)
        if not kinds or kinds - set("+-*") or len(kinds) < len(self.operations):
            raise ConfigError(f"task.options.operations = {list(self.operations)}: of +, -, *, each once",
                              'for example ["+", "*"]')
        if not 2 <= self.operands <= 5 or not 1 <= self.max_operand <= 999:
            raise ConfigError(
                f"task.options: operands = {self.operands}, max_operand = {self.max_operand} is out of range",
                "set operands from 2 to 5, and max_operand from 1 to 999")

    def problems(self) -> Sequence[Problem]:
        return self._split[False]

    def held_out(self) -> Sequence[Problem]:
        return self._split[True]

    @functools.cached_property
    def _split(self) -> dict[bool, list[Problem]]:
        numbers, kinds = self.max_operand + 1, len(self.operations)
        signs = kinds ** (self.operands - 1)
        found: dict[bool, list[Problem]] = {False: [], True: []}
        words = np.random.Philox(key=np.array([self.seed, 0], np.uint64)).random_raw(self.size).tolist()
        for word in dict.fromkeys(word % (numbers**self.operands * signs) for word in words):
            code, which = divmod(word, signs)
            values = [code // numbers**i % numbers for i in range(self.operands)]
            signs_of = [self.operations[which // kinds**i % kinds] for i in range(self.operands - 1)]
            text = "".join(f"{value}{sign}" for value, sign in zip(values, [*signs_of, "="]))
            found[unit_hash(self.seed, text) < self.held_out_fraction].append(
                Problem(text[:-1], text, str(_value(text[:-1]))))
        return found

    def reset(self, problem: Problem) -> str:
        self._left, self._keys = problem.id, len(re.findall(r"[-+*]", problem.id)) + 1
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        key = next_key(self._left)
        if action != key:
            return "", 0.0, True
        self._left = self._left if key == "=" else reduced(self._left)
        rest = "" if next_key(self._left) == "=" else "="
        return self._left + rest, 1 / self._keys, key == "="


def next_key(expression: str) -> str:
    """The operator that is worked out next; "=" if a number alone is left."""
    rest = expression.removeprefix("-")
    return "*" if "*" in rest else next((c for c in rest if c in "+-"), "=")


def reduced(expression: str) -> str:
    """The expression with its next operation worked out."""
    operation = r"\*" if next_key(expression) == "*" else r"[-+]"
    first = re.search(rf"(^-?|(?<=[-+*]))(\d+)({operation})(\d+)", expression)
    assert first, expression
    a, sign, b = int(first[1] + first[2]), first[3], int(first[4])
    value = {"*": a * b, "+": a + b, "-": a - b}[sign]
    return expression[: first.start()] + str(value) + expression[first.end() :]


def _value(expression: str) -> int:
    while next_key(expression) != "=":
        expression = reduced(expression)
    return int(expression)
