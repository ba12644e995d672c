"""Tasks: the source of problems and the scoring of answers.

A task is a frozen dataclass whose fields are its options, so that `from_json` can rebuild it in the scoring
process from `as_json`. There are four kinds: "arithmetic" (built in), "reasoning_gym" (any generator of that
package), "file" (the user's rows) and "environment" (problems that an environment brings along). `make_task`
checks the options of a task; problems are made or read on first use.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from typing import Any

import pydantic

from jaxfp8rl.data.arithmetic import ArithmeticTask
from jaxfp8rl.data.environment_task import EnvironmentTask
from jaxfp8rl.data.file_task import FileTask
from jaxfp8rl.data.reasoning_gym_task import ReasoningGymTask
from jaxfp8rl.data.task import Reward, Task
from jaxfp8rl.errors import ConfigError, nearest, wrong_value


def named(task: Task) -> dict[str, Task]:
    """A task for each named reward, with that reward's scorer; a task without named rewards stands under
    ""."""
    return {r.name: task.rewarding(r) for r in getattr(task, "rewards", ())} or {"": task}


TASKS: dict[str, type] = {t.kind: t for t in (ArithmeticTask, ReasoningGymTask, FileTask, EnvironmentTask)}
OF_SECTION = (  # keys of the section [task] itself, not of task.options
    "name", "path", "held_out_path", "seed", "system_prompt", "chat", "think_tags", "scorer", "scorer_folder",
    "rewards",
    "skip_bad_rows",
)
TOML = "as TOML"  # marks a value in JSON that only TOML can represent


def make_task(task: Any, **options: Any) -> Task:
    """Build a task from its kind ("arithmetic", "reasoning_gym", "file", "environment") and options, or from
    a configuration's `[task]`.

    Settings of the section take precedence over `options`. Options that reasoning_gym does not know go to the
    generator, and those of an environment to that. Raises ConfigError for an unknown kind, generator or
    option, an option given twice, and a value of the wrong type or out of range.
    """
    if not isinstance(task, str):
        return make_task(task.kind, **{**options, **_section_options(task)})
    if task not in TASKS:
        raise ConfigError(f'task.kind: unknown kind "{task}"{nearest(task, TASKS)}', "name one of these")
    cls = TASKS[task]
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if cls in (ReasoningGymTask, EnvironmentTask):
        inner = {k: options.pop(k) for k in options.keys() - fields.keys()}
        options["options"] = {**options.get("options", {}), **inner}
    for key in options.keys() - fields.keys():
        raise ConfigError(
            f'{_full(key)}: a task of kind "{task}" has no option "{key}"'
            f"{nearest(key, fields.keys() - OF_SECTION)}",
            "docs/tasks.md lists them")
    for key, field in fields.items():
        if field.default is field.default_factory is dataclasses.MISSING and not options.get(key):
            raise ConfigError(f'task.{key}: a task of kind "{task}" needs it',
                              "docs/tasks.md describes it")
    return cls(**{k: _checked(k, v, hints[k]) for k, v in options.items()})


def as_json(task: Task) -> str:
    """The task as text, from which `from_json` rebuilds it in another process. Dates and times, which JSON
    lacks, are marked."""
    return json.dumps({"task": task.kind, **dataclasses.asdict(task)},
                      default=lambda date: {TOML: date.isoformat()})


def from_json(text: str) -> Task:
    return make_task(**json.loads(text, object_hook=lambda x: tomllib.loads(f"x = {x[TOML]}")["x"]
                                  if x.keys() == {TOML} else x))


def _section_options(section: Any) -> dict[str, Any]:
    """The set fields of `jaxfp8rl.config.sampling.Task` that concern a task, merged with its `options`."""
    given = {f: getattr(section, f) for f in OF_SECTION
             if getattr(section, f) != type(section).model_fields[f].default}
    if section.kind != "file":  # other tasks have no rows; `prepare` skips their prompts
        given.pop("skip_bad_rows", None)
    if "rewards" in given:
        given["rewards"] = [reward.model_dump() for reward in given["rewards"]]
    for key in section.options.keys() & OF_SECTION:
        raise ConfigError(f"task.options.{key}: a key of [task] itself", f"task.{key}")
    return {**given, **section.options}


def _full(key: str) -> str:
    """The full name of a key in a config."""
    return f"task.{key}" if key in OF_SECTION else f"task.options.{key}"


def _checked(key: str, value: Any, hint: Any) -> Any:
    value = tuple(value) if isinstance(value, list) else value  # TOML and JSON have no tuples
    try:
        if key == "rewards":
            return tuple(r if isinstance(r, Reward) else pydantic.TypeAdapter(Reward).validate_python(r)
                         for r in value)
        return pydantic.TypeAdapter(hint).validate_python(value, strict=True)
    except pydantic.ValidationError as e:
        raise ConfigError(f"{_full(key)}: {wrong_value(e.errors()[0])}",
                          "docs/tasks.md lists its values") from e

