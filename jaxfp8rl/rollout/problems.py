"""The problems of a run as prompts of tokens, checked and split."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.curriculum import Curriculum
from jaxfp8rl.data.dataset import PromptStream, contents, demonstrable, prepare
from jaxfp8rl.data.environment_task import tool_schemas
from jaxfp8rl.data.file_task import FileTask
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.seen import Questions, check_unseen, digests_of, question, read_seen
from jaxfp8rl.data.task import Task
from jaxfp8rl.data.tasks import make_task
from jaxfp8rl.data.tokenizer import Tokenizer, check_fits, load_tokenizer
from jaxfp8rl.environments.calls import told
from jaxfp8rl.environments.mixture import WHERE as ENVIRONMENT
from jaxfp8rl.errors import DataError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.rollout.scored_groups import Prompt
from jaxfp8rl.rollout.stops import Stops, stops_of


@dataclasses.dataclass(frozen=True)
class Data:
    """The task with its usable prompts, and the stops, which hold the tokenizer."""

    stops: Stops
    task: Task
    train: list[Prompt]
    held_out: list[Prompt]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.stops.tokenizer

    def contents(self) -> dict[str, str]:
        """Digests of the problems, which a resumed run compares with its own.

        Answers of reasoning_gym are left out: its options determine them, and some of its generators write a
        different correct answer in each process.
        """
        answers = self.task.kind != "reasoning_gym"
        return {"problems": contents(self.train, answers),
                "held-out problems": contents(self.held_out, answers)}

    def stream(self, cfg: Config) -> PromptStream[Prompt]:
        """The order of the problems to train on, with the curriculum that the config asks for."""
        c = cfg.curriculum
        if c.by == "none":
            return PromptStream(self.train, cfg.run.seed)
        keys = [p.problem.meta[ENVIRONMENT] if c.by == "environment" else i for i, p in enumerate(self.train)]
        return PromptStream(self.train, cfg.run.seed, Curriculum(keys, c.solved_at, c.pace, c.floor))

    def questions(self, cfg: Config) -> Questions:
        """The questions to train on and to hold out. Raises DataError if the weights in model.path were
        trained on a question that is held out here."""
        train, held_out = (digests_of([p.problem for p in prompts])
                           for prompts in (self.train, self.held_out))
        if not cfg.model.path or (seen := read_seen(cfg.model.path)) is None:
            return Questions(train, held_out)
        check_unseen(held_out, seen, f"model.path, {cfg.model.path},")
        return Questions(np.union1d(train, seen), held_out)


def load_data(cfg: Config, model: ModelConfig, made: Callable[[Task], None] = lambda task: None) -> Data:
    """Load the tokenizer and the problems, encoded and checked against the vocabulary and the prompt limit.
    `made` is called with the task before its problems are there, which can take a while. Raises
    UserErrors."""
    tokenizer = load_tokenizer(cfg.model.tokenizer or cfg.model.path, cfg.task.date,
                               cfg.task.chat_template_kwargs)
    tools = tool_schemas(cfg.environment.tools, cfg.task.scorer_folder)
    knows_tools = tokenizer.with_tools(tools) if tools else None
    tokenizer = knows_tools or tokenizer
    check_fits(tokenizer, model.vocab_size)
    task = make_task(cfg.task)
    made(task)
    as_told = (lambda p: p) if knows_tools else functools.partial(told_of, tools)
    train, held_out = (_prompts(cfg, [*map(as_told, problems)], tokenizer)
                       for problems in (task.problems(), task.held_out()))
    held_out = _not_in(train, held_out)
    if isinstance(task, FileTask):
        print(*task.report.notes, sep="\n", end="\n" if task.report.notes else "")
        if bad := task.report.bad:
            print(f"left out {len(bad)} bad rows out of {task.report.rows}; the first: {bad[0]}")
    if not held_out:
        print("no problem is held out: there will be no evaluation (docs/tasks.md)")
    if cfg.sft.steps and (lost := len(train) - len(demonstrable(train, task.name))):
        print(
            f"the warm start leaves out {lost} of {len(train)} problems, "
            "which have no reference answer to imitate")
    if len(train) < cfg.rollout.prompts_per_step:
        raise DataError(
            f"only {len(train)} usable problems, but a step takes "
            f"rollout.prompts_per_step = {cfg.rollout.prompts_per_step}",
            f"give the task more problems, or set rollout.prompts_per_step to {len(train)}" if train
            else "give the task problems to train on")
    chat = any(not isinstance(prompt.problem.prompt, str) for prompt in [*train, *held_out])
    return Data(stops_of(cfg.rollout, tokenizer, chat), task, train, held_out)


def told_of(tools: Sequence[Any], problem: Problem) -> Problem:
    """The problem with the tools in its first message, for a chat template that does not write them
    itself."""
    if not tools or isinstance(problem.prompt, str):
        return problem
    return dataclasses.replace(problem, prompt=tuple(told(tools, problem.prompt)))


def _prompts(cfg: Config, problems: Sequence[Problem], tokenizer: Tokenizer) -> list[Prompt]:
    usable, report = prepare(problems, tokenizer, cfg.task.max_prompt_tokens, skip=cfg.task.skip_bad_rows)
    if report.first:
        left_out = f"{report.empty} empty, {report.too_long} overlong and {report.refused} refused prompts"
        print(f"left out {left_out} out of {len(problems)}; the first: {report.first}")
    return [Prompt(*p) for p in usable]


def _not_in(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[Prompt]:
    """The held-out problems whose question is not in training. The split compares whole prompts, so the same
    question with another system prompt can be on both sides."""
    asked = {question(p.problem) for p in train}
    kept = [p for p in held_out if question(p.problem) not in asked]
    if left_out := len(held_out) - len(kept):
        print(f"left out {left_out} held-out problems whose question is also trained on, in another prompt")
    return kept
