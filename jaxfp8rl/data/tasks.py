"""Tasks: where problems come from and how an answer is scored.

A task is a frozen dataclass whose fields are its options, so that `as_json()` can rebuild it in the scoring
process. Three kinds: "arithmetic" (built in), "reasoning_gym" (any generator of that package) and "file"
(your rows). `make_task` checks the options of a task; problems are made or read on first use.
"""

from __future__ import annotations

import ast
import dataclasses
import fractions
import functools
import hashlib
import json
import math
import operator
import os
import re
import tomllib
import typing
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import pydantic
from pydantic import Field

from jaxfp8rl.data.files import BadRow
from jaxfp8rl.data.messages import Prompt
from jaxfp8rl.data.permutation import permutation
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.rows import AnswerExtract, Fields, Replies, Row, Rows, read_rows, refuse
from jaxfp8rl.errors import ConfigError, DataError, nearest
from jaxfp8rl.verifiers import numbers, reasoning_gym_faults, scorers

Fraction = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
ThinkTags = tuple[str, ...]  # what thoughts stand between, or nothing
GENERATOR = "generator"  # of several rewards the one that a task gives by itself
ANSWER_TAG_INSTRUCTION = "Give the final answer between <answer> and </answer>."


@dataclasses.dataclass(frozen=True)
class Reward:
    """One of several rewards of a task: what its `scorer` says of what `extract` finds, "" as the task's own
    does."""

    name: str
    scorer: str
    weight: float = 1.0
    extract: Literal["", "all", "tag", "last_line", "last_number", "raw"] = ""


class Task(Protocol):
    """What the loop needs. `in_child`: `score` may be slow or crash, so it must run in the scoring
    process."""

    kind: ClassVar[str]
    name: str

    @property
    def in_child(self) -> bool: ...

    def problems(self) -> Sequence[Problem]:
        """Training problems, in an order that the options fix."""

    def held_out(self) -> Sequence[Problem]:
        """Problems that are never trained on; empty when the options ask for none."""

    def score(self, problem: Problem, text: str) -> float | None:
        """Score of a completion's text (special tokens removed); None: undefined. May raise: undefined as
        well."""

    def demonstrate(self, problem: Problem, rng: np.random.Generator) -> str:
        """An answer for the supervised warm start to imitate; the reference answer unless the task says
        otherwise."""

    def load_scorer(self) -> None:
        """Import what `score` needs, so that no item's clock pays for it."""


class _ReferenceDemonstrations:
    """The reference as it stands, in a tag where `extract` looks there."""

    def demonstrate(self, problem: Problem, rng: np.random.Generator) -> str:
        if self.extract != "tag":
            return problem.reference or problem.answer
        return "\n".join([problem.reference] * bool(problem.reference)
                         + [f"<answer>{problem.answer}</answer>"])


@dataclasses.dataclass(frozen=True)
class ArithmeticTask:
    """`a+b=` with plain decimal answers: `operands` numbers from 0 to `max_operand`, one operation a problem.

    `size` problems are drawn (all, when fewer exist) and split by a hash of the unordered operands: a
    held-out set of operands occurs in training neither in another order nor under another operation.
    `demonstration_error` is the share of demonstrations whose answer is one too large, drawn anew each time:
    a sloppy teacher, whom the warm start imitates and whom reinforcement learning has to surpass.
    """

    kind: ClassVar[str] = "arithmetic"
    name: ClassVar[str] = "arithmetic"
    in_child: ClassVar[bool] = False
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

    def problems(self) -> Sequence[Problem]:
        return self._split[0]

    def held_out(self) -> Sequence[Problem]:
        return self._split[1]

    def demonstrate(self, problem: Problem, rng: np.random.Generator) -> str:
        return str(int(problem.answer) + int(rng.random() < self.demonstration_error))

    def score(self, problem: Problem, text: str) -> float:
        """1.0 for exactly the answer, no blank around it: what stands before the stop token is the answer or
        is wrong."""
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
            held_out = _unit_hash(self.seed, *sorted(numbers)) < self.held_out_fraction
            split[held_out].append(self._problem(numbers, self.operations[operation]))
        return split

    def _problem(self, numbers: list[int], operation: str) -> Problem:
        apply = {"+": operator.add, "-": operator.sub, "*": operator.mul}[operation]
        expression = operation.join(map(str, numbers))
        same = " ".join(map(str, sorted(numbers)))
        return Problem(expression, f"{expression}=", str(functools.reduce(apply, numbers)), question=same)


@dataclasses.dataclass(frozen=True)
class ReasoningGymTask(_ReferenceDemonstrations):
    """Any generator of the package reasoning-gym, scored by that generator. `options` are the generator's
    own.

    Training takes items [0, size) and held-out the `held_out_size` items after them: most generators draw
    item i from `Random(seed + i)`, so that a neighbouring seed would repeat training items. Held-out items
    whose question occurs in training are dropped. A few generators depend on Python's hash seed: to resume
    one of those, fix PYTHONHASHSEED.
    """

    kind: ClassVar[str] = "reasoning_gym"
    in_child: ClassVar[bool] = True
    name: str
    size: Annotated[int, Field(ge=1)] = 1000
    held_out_size: Annotated[int, Field(ge=0)] = 200
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
        _check_chat(self.chat, self.system_prompt)
        check_rewards(self.rewards, (GENERATOR, *scorers.SCORERS))
        self.load_scorer()

    def problems(self) -> Sequence[Problem]:
        return self._split[0]

    def held_out(self) -> Sequence[Problem]:
        return self._split[1]

    def score(self, problem: Problem, text: str) -> float:
        """The generator's score in [0, 1] of the extracted answer, 0.0 when there is none. Some give partial
        credit. What breaks the scorer, which takes the reference answer, is no answer either; raises where it
        does not take that."""
        answer = scorers.extract(text, self.extract, self.think_tags)
        entry = ast.literal_eval(problem.meta["entry"])
        if not answer:  # which the generator may ask for, but one that names no answer does not
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
                f'task.options.{key}: generator "{self.name}" has no option "{key}"{nearest(key, known | own)}')
        import reasoning_gym

        try:
            total, options = self.size + self.held_out_size, dict(self.options)
            if self.name == "composite":
                from reasoning_gym.composite import DatasetSpec

                options["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **d})
                                       for d in options.get("datasets", ())]
            return reasoning_gym.create_dataset(self.name, size=total, seed=self.seed, **options)
        except (AssertionError, TypeError, ValueError) as e:
            raise ConfigError(f'task.options: generator "{self.name}" refuses {self.options}: {e}') from e

    @functools.cached_property
    def _split(self) -> tuple[list[Problem], list[Problem]]:
        items = [self._problem(i) for i in range(self.size + self.held_out_size)]
        train = items[:self.size]
        seen = {json.dumps(p.prompt) for p in train}
        held_out = [p for p in items[self.size:] if json.dumps(p.prompt) not in seen]
        if self.held_out_size and not held_out:
            raise ConfigError(
                f'generator "{self.name}" repeats itself: every held-out question also occurs in training',
                "make task.options.size smaller, or the options of the generator wider")
        return train, held_out

    def _problem(self, index: int) -> Problem:
        entry = _plain(self._dataset[index])
        # a literal keeps the tuples and integer keys that scorers rely on and JSON would lose
        text = repr(entry)
        if ast.literal_eval(text) != entry:
            raise DataError(
                f'generator "{self.name}", item {index}: its metadata does not survive as a literal')
        instruction = self.instruction or (ANSWER_TAG_INSTRUCTION if self.extract == "tag" else "")
        question = entry["question"] + (f"\n{instruction}" if instruction else "")
        prompt = _prompt(question, self.chat, self.system_prompt)
        meta, answer = {"entry": text}, reasoning_gym_faults.reference(entry)
        return Problem(f"{self.name}:{self.seed}:{index}", prompt, answer, meta, question=entry["question"])


@dataclasses.dataclass(frozen=True)
class FileReport:
    """Rows read, and those left out (with `skip_bad_rows`), training and held-out files together; what else
    was done to them."""

    rows: int
    bad: tuple[BadRow, ...]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FileTask(_ReferenceDemonstrations):
    """Rows of files (JSON, JSON Lines, CSV, Parquet): a prompt (a string or a list of {role, content}) and an
    answer (a string, a number or a list of accepted ones).

    Held-out rows come from `held_out_path`, or else are the share `held_out_fraction` of `path` chosen by a
    hash of the prompt, which keeps equal prompts together: a row's place does not depend on the others, so
    that a file may grow. They come in the order of a hash of the prompt alone: the first of them, which a run
    evaluates on, depend neither on the file's order (by subject, say) nor, for a `held_out_path`, on the run.
    `scorer`: "exact", "math_verify" or "package.module:function".
    """

    kind: ClassVar[str] = "file"
    path: str
    held_out_path: str = ""
    held_out_fraction: Fraction = 0.05
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    answer_extract: AnswerExtract = "auto"
    meta_fields: tuple[str, ...] = ()
    replies: Replies = "refuse"
    repeats: Literal["drop", "keep"] = "drop"
    scorer: str = "exact"
    extract: scorers.Extract = "all"
    think_tags: ThinkTags = scorers.THINK_TAGS
    rewards: tuple[Reward, ...] = ()
    scorer_folder: str = ""
    chat: bool = False
    system_prompt: str = ""
    skip_bad_rows: bool = False
    seed: Seed = 0

    def __post_init__(self):
        _check_chat(self.chat, self.system_prompt)
        scorers.check_scorer_name(self.scorer)
        check_rewards(self.rewards, scorers.SCORERS)

    @property
    def name(self) -> str:
        return self.path

    @property
    def in_child(self) -> bool:
        return self.scorer != "exact" and not self.scorer.startswith(scorers.CALLABLE)

    @property
    def report(self) -> FileReport:
        return self._split[2]

    def problems(self) -> Sequence[Problem]:
        return self._split[0]

    def held_out(self) -> Sequence[Problem]:
        return self._split[1]

    def score(self, problem: Problem, text: str) -> float | None:
        """Of several accepted answers, each is as good; a scorer of one's own is given all of them, in
        `problem.answers`."""
        if self.scorer not in scorers.SCORERS or not problem.alternatives:
            return self._score_one(problem, text)
        scores, failed = [], None
        for answer in problem.answers:
            try:
                scores.append(self._score_one(dataclasses.replace(problem, answer=answer, alternatives=()),
                                              text))
            except ValueError as e:  # "two", beside "2", is no mathematical expression
                failed = e
        if failed and not scores:
            raise failed
        return max(scores)

    def _score_one(self, problem: Problem, text: str) -> float | None:
        answer = scorers.extract(text, self.extract, self.think_tags)
        if answer is None:
            return 0.0
        if self.extract == "last_number" and (number := numbers.whole_number(problem.answer)):
            # written as what is extracted: 1000 for 1,000
            problem = dataclasses.replace(problem, answer=number)
        # cut out of its tag, an answer has no delimiters left
        if self.scorer == "math_verify" and self.extract == "tag":
            return self._scorer(problem, scorers.as_latex(answer)) or self._scorer(problem, answer)
        return self._scorer(problem, answer)

    def demonstrate(self, problem: Problem, rng: np.random.Generator) -> str:
        """The reference as it stands in the file; where that would score nothing, the answer in it alone."""
        whole = super().demonstrate(problem, rng)
        return whole if self.scorer != "exact" or self.score(problem, whole) else problem.answer

    def rewarding(self, reward: Reward) -> Task:
        return dataclasses.replace(self, scorer=reward.scorer, extract=reward.extract or self.extract,
                                   rewards=())

    def load_scorer(self) -> None:
        self._scorer  # noqa: B018

    @functools.cached_property
    def _scorer(self):
        return scorers.load_scorer(self.scorer, self.scorer_folder)

    @functools.cached_property
    def _split(self) -> tuple[list[Problem], list[Problem], FileReport]:
        read = [self._read(path) for path in (self.path, self.held_out_path) if path]
        bad, total = [b for r in read for b in r.bad], sum(r.total for r in read)
        if self.held_out_path:
            held_out = read[1].rows
            rows, shared = _without(read[0].rows, held_out, self.prompt_field)
            bad += shared
        else:
            rows, held_out = self._divide(read[0].rows)
        if not self.skip_bad_rows:
            refuse(bad, total)
        if not rows:
            raise DataError(f"{self.path}: no usable row is left to train on ({total} read, {len(bad)} bad)",
                            "check prompt_field, answer_field and held_out_fraction of task.options")
        # no seed in it: runs of other seeds are compared on the same
        held_out.sort(key=lambda r: _unit_hash(r.prompt))
        roots = [os.path.commonpath([os.path.dirname(file) for file in r.files]) for r in (read[0], read[-1])]
        train, test = ([self._problem(root, r) for r in part] for root, part in zip(roots, (rows, held_out)))
        return train, test, FileReport(total, tuple(bad), tuple(note for r in read for note in r.notes()))

    def _divide(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        """(rows to train on, rows held out): those of the lowest hashes. A few rows may all lie above the
        share: then it is the lowest one's prompt, for as long as there are others."""
        places = [_unit_hash(self.seed, r.prompt) for r in rows]
        share = self.held_out_fraction
        if share and places and min(places) >= share and len(set(places)) > 1:
            share = math.nextafter(min(places), 1)
        return ([r for r, place in zip(rows, places) if place >= share],
                [r for r, place in zip(rows, places) if place < share])

    def _read(self, path: str) -> Rows:
        """`read_rows`; an answer that no completion can match is unusable too."""
        fields = Fields(self.prompt_field, self.answer_field, self.answer_extract, self.replies,
                        self.meta_fields)
        found = read_rows(path, fields, self.repeats == "keep")
        if self.extract == "last_number" and self.scorer == "exact" and not self.rewards:
            why = 'is no number, which extract = "last_number" gives: write the number alone'
            scores = [any(self.score(self._problem("", r), answer) for answer in r.answers)
                      for r in found.rows]
            lost = [BadRow(r.file, r.line, self.answer_field, why) for r, right in zip(found.rows, scores)
                    if not right]
            found.rows = [r for r, right in zip(found.rows, scores) if right]
            found.bad = sorted([*found.bad, *lost], key=lambda b: (found.files.index(b.file), b.line))
        return found

    def _problem(self, root: str, row: Row) -> Problem:
        prompt = _prompt(row.prompt, self.chat, self.system_prompt)
        name = os.path.relpath(row.file, root) if root else row.file
        return Problem(f"{name}:{row.line}", prompt, row.answers[0], row.meta, row.answers[1:], row.reference)


def named(task: Task) -> dict[str, Task]:
    """A task for each of its named rewards, the same but for the scorer; the task itself, without a name,
    where it has none."""
    return {r.name: task.rewarding(r) for r in getattr(task, "rewards", ())} or {"": task}


TASKS: dict[str, type] = {t.kind: t for t in (ArithmeticTask, ReasoningGymTask, FileTask)}
OF_SECTION = (  # keys of [task] itself
    "name", "path", "held_out_path", "seed", "system_prompt", "chat", "think_tags", "scorer", "scorer_folder",
    "rewards",
    "skip_bad_rows",
)
TOML = "as TOML"  # marks in JSON what only TOML can write


def make_task(task: Any, **options: Any) -> Task:
    """Build a task from its kind ("arithmetic", "reasoning_gym", "file") and options, or from a
    configuration's `[task]`.

    What the section sets comes before `options`. Options that reasoning_gym does not know go to the
    generator. Raises ConfigError for an unknown kind, generator or option, an option given twice, and a value
    of the wrong type or out of range.
    """
    if not isinstance(task, str):
        return make_task(task.kind, **{**options, **_section_options(task)})
    if task not in TASKS:
        raise ConfigError(f'task.kind: unknown kind "{task}"{nearest(task, TASKS)}')
    cls = TASKS[task]
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if cls is ReasoningGymTask:
        inner = {k: options.pop(k) for k in options.keys() - fields.keys()}
        options["options"] = {**options.get("options", {}), **inner}
    for key in options.keys() - fields.keys():
        raise ConfigError(
            f'{_full(key)}: a task of kind "{task}" has no option "{key}"{nearest(key, fields)}',
            "docs/tasks.md lists them")
    for key, field in fields.items():
        if field.default is field.default_factory is dataclasses.MISSING and not options.get(key):
            raise ConfigError(f'task.{key}: a task of kind "{task}" needs it')
    return cls(**{k: _checked(k, v, hints[k]) for k, v in options.items()})


def as_json(task: Task) -> str:
    """What `from_json` makes the same task of, in another process: JSON has neither dates nor times, TOML and
    generators have."""
    return json.dumps({"task": task.kind, **dataclasses.asdict(task)},
                      default=lambda date: {TOML: date.isoformat()})


def from_json(text: str) -> Task:
    return make_task(**json.loads(text, object_hook=lambda x: tomllib.loads(f"x = {x[TOML]}")["x"]
                                  if x.keys() == {TOML} else x))


def _section_options(section: Any) -> dict[str, Any]:
    """The fields of `jaxfp8rl.config.schema.Task` that are set and concern a task, and its `options`, side by
    side."""
    given = {f: getattr(section, f) for f in OF_SECTION
             if getattr(section, f) != type(section).model_fields[f].default}
    if section.kind != "file":  # it has no rows, but prompts, which `prepare` skips
        given.pop("skip_bad_rows", None)
    if "rewards" in given:
        given["rewards"] = [reward.model_dump() for reward in given["rewards"]]
    for key in section.options.keys() & OF_SECTION:
        raise ConfigError(f"task.options.{key}: a key of [task] itself", f"task.{key}")
    return {**given, **section.options}


def _full(key: str) -> str:
    """The key in a config."""
    return f"task.{key}" if key in OF_SECTION else f"task.options.{key}"


def _checked(key: str, value: Any, hint: Any) -> Any:
    value = tuple(value) if isinstance(value, list) else value  # TOML and JSON have no tuples
    try:
        if key == "rewards":
            return tuple(r if isinstance(r, Reward) else pydantic.TypeAdapter(Reward).validate_python(r)
                         for r in value)
        return pydantic.TypeAdapter(hint).validate_python(value, strict=True)
    except pydantic.ValidationError as e:
        raise ConfigError(f"{_full(key)} = {value!r}: {e.errors()[0]['msg']}",
                          "docs/tasks.md lists them") from e


def check_rewards(rewards: Sequence[Any], built_in: Sequence[str]) -> None:
    """Raise ConfigError for rewards (`Reward`, or the config's) of one name, of a weight that is no number,
    or of no scorer."""
    for reward in rewards:
        if [r.name
                for r in rewards].count(reward.name) > 1 or not re.fullmatch(r"[a-z][a-z0-9_]*", reward.name):
            raise ConfigError(
                f'task.rewards: name "{reward.name}": each has a name of its own, of a-z, 0-9 and _',
                "rename it")
        if not math.isfinite(reward.weight):
            raise ConfigError(f'task.rewards: weight {reward.weight} of "{reward.name}" is no number',
                              "weight = 1.0, say")
        scorers.check_scorer_name(reward.scorer, built_in, "task.rewards")


def _check_chat(chat: bool, system_prompt: str) -> None:
    if system_prompt and not chat:
        raise ConfigError("task.system_prompt: only a prompt rendered with the chat template has one",
                          "set task.chat = true")


def _prompt(prompt: Prompt, chat: bool, system_prompt: str) -> Prompt:
    if isinstance(prompt, str) and not chat:
        return prompt
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    has_own = messages[0]["role"] == "system"
    return messages if not system_prompt or has_own else ({"role": "system", "content": system_prompt},
                                                          *messages)


def _unit_hash(*parts: Any) -> float:
    """A number in [0, 1) fixed by the parts, on every machine."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:6]) / 2**48


def _without(rows: list[Row], held_out: list[Row], field: str) -> tuple[list[Row], list[BadRow]]:
    """Training rows whose prompt is not held out, and the others as bad rows."""
    held = {json.dumps(r.prompt) for r in held_out}
    shared = [json.dumps(r.prompt) in held for r in rows]
    bad = [BadRow(r.file, r.line, field, "this prompt is also held out") for r, twice in zip(rows, shared)
           if twice]
    return [r for r, twice in zip(rows, shared) if not twice], bad


def _reasoning_gym_options(name: str) -> set[str]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as e:
        raise ConfigError(f"task.kind: reasoning_gym cannot be imported: {e}",
                          "pip install 'jaxfp8rl[tasks]'") from e
    if name not in DATASETS:
        raise ConfigError(f'task.name: reasoning-gym has no generator "{name}"{nearest(name, DATASETS)}')
    return {f.name for f in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}


def _plain(value: Any) -> Any:
    """numpy scalars and fractions as Python's numbers, inside dicts, lists, tuples and sets."""
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_plain(v) for v in value)
    if isinstance(value, fractions.Fraction):
        return int(value) if value.denominator == 1 else float(value)
    return value.item() if isinstance(value, np.generic) else value
