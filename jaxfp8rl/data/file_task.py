"""The task "file": problems from the user's own files."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from jaxfp8rl.data.files import BadRow
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.rows import AnswerExtract, Fields, Replies, Row, Rows, read_rows, refuse
from jaxfp8rl.data.task import (
    Fraction,
    ReferenceDemonstrations,
    Reward,
    Seed,
    Task,
    ThinkTags,
    check_chat,
    check_rewards,
    unit_hash,
    with_system_prompt,
)
from jaxfp8rl.errors import DataError
from jaxfp8rl.verifiers import numbers, scorers


@dataclasses.dataclass(frozen=True)
class FileReport:
    """The number of rows read, the rows skipped (with `skip_bad_rows`), and notes on other changes. Training
    and held-out files count together."""

    rows: int
    bad: tuple[BadRow, ...]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FileTask(ReferenceDemonstrations):
    """Rows of files (JSON, JSON Lines, CSV, Parquet): a prompt (a string or a list of {role, content}) and an
    answer (a string, a number or a list of accepted answers).

    Held-out rows come from `held_out_path`. Without one they are the share `held_out_fraction` of `path`,
    chosen by a hash of the prompt. Equal prompts therefore stay together, and a row's split does not depend
    on the other rows, so a file may grow. Held-out rows are ordered by a hash of the prompt alone. The first
    rows, which a run evaluates on, therefore do not depend on the file's order (by subject, for example) nor,
    with a `held_out_path`, on the run. `scorer`: "exact", "math_verify" or "package.module:function".
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
        check_chat(self.chat, self.system_prompt)
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
        """The best score over the accepted answers. A user's scorer is called once, with all of them in
        `problem.answers`."""
        if self.scorer not in scorers.SCORERS or not problem.alternatives:
            return self._score_one(problem, text)
        scores, failed = [], None
        for answer in problem.answers:
            try:
                scores.append(self._score_one(dataclasses.replace(problem, answer=answer, alternatives=()),
                                              text))
            except ValueError as e:  # one of several answers may not be an expression: "two" next to "2"
                failed = e
        if failed and not scores:
            raise failed
        return max(scores)

    def _score_one(self, problem: Problem, text: str) -> float | None:
        answer = scorers.extract(text, self.extract, self.think_tags)
        if answer is None:
            return 0.0
        if self.extract == "last_number" and (number := numbers.whole_number(problem.answer)):
            # in the notation of the extracted number: 1000 for 1,000
            problem = dataclasses.replace(problem, answer=number)
        # an answer from inside a tag has no math delimiters
        if self.scorer == "math_verify" and self.extract == "tag":
            return self._scorer(problem, scorers.as_latex(answer)) or self._scorer(problem, answer)
        return self._scorer(problem, answer)

    def demonstrate(self, problem: Problem, rng: np.random.Generator) -> str:
        """The reference as it stands in the file. If the reference itself would score 0, only the answer."""
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
                            "check prompt_field, answer_field and held_out_fraction of task.options" if total
                            else "name a file with rows, one problem each (docs/datasets.md)")
        # The order does not depend on the seed, so that runs with different seeds evaluate the same problems.
        held_out.sort(key=lambda r: unit_hash(r.prompt))
        roots = [os.path.commonpath([os.path.dirname(file) for file in r.files]) for r in (read[0], read[-1])]
        train, test = ([self._problem(root, r) for r in part] for root, part in zip(roots, (rows, held_out)))
        return train, test, FileReport(total, tuple(bad), tuple(note for r in read for note in r.notes()))

    def _divide(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        """(rows to train on, held-out rows). Held-out rows are those with the lowest hashes. In a small file
        every hash may exceed the share; then the prompt with the lowest hash is held out, provided there are
        others."""
        places = [unit_hash(self.seed, r.prompt) for r in rows]
        share = self.held_out_fraction
        if share and places and min(places) >= share and len(set(places)) > 1:
            share = math.nextafter(min(places), 1)
        return ([r for r, place in zip(rows, places) if place >= share],
                [r for r, place in zip(rows, places) if place < share])

    def _read(self, path: str) -> Rows:
        """`read_rows`, with a row also unusable if no completion can match its answer."""
        fields = Fields(self.prompt_field, self.answer_field, self.answer_extract, self.replies,
                        self.meta_fields)
        found = read_rows(path, fields, self.repeats == "keep")
        if self.extract == "last_number" and self.scorer == "exact" and not self.rewards:
            why = 'is not a number, but extract = "last_number" gives numbers: write the number alone'
            scores = [any(self.score(self._problem("", r), answer) for answer in r.answers)
                      for r in found.rows]
            lost = [BadRow(r.file, r.line, self.answer_field, why) for r, right in zip(found.rows, scores)
                    if not right]
            found.rows = [r for r, right in zip(found.rows, scores) if right]
            found.bad = sorted([*found.bad, *lost], key=lambda b: (found.files.index(b.file), b.line))
        return found

    def _problem(self, root: str, row: Row) -> Problem:
        prompt = with_system_prompt(row.prompt, self.chat, self.system_prompt)
        name = os.path.relpath(row.file, root) if root else row.file
        return Problem(f"{name}:{row.line}", prompt, row.answers[0], row.meta, row.answers[1:], row.reference)


def _without(rows: list[Row], held_out: list[Row], field: str) -> tuple[list[Row], list[BadRow]]:
    """(training rows whose prompt is not held out, the other training rows as bad rows)."""
    held = {json.dumps(r.prompt) for r in held_out}
    shared = [json.dumps(r.prompt) in held for r in rows]
    bad = [BadRow(r.file, r.line, field, "this prompt is also held out") for r, twice in zip(rows, shared)
           if twice]
    return [r for r, twice in zip(rows, shared) if not twice], bad
