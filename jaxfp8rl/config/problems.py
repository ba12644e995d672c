"""What is wrong with a config, in words, and where.

tomllib forgets where a key stood. When there is something to say, `key_lines` finds the lines again: it
parses ever longer prefixes of the file and notes when each key first appears, which is right for multi-line
values, dotted keys and inline tables alike.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pydantic

from jaxfp8rl.config.overrides import KeyPath, Override
from jaxfp8rl.config.schema import SECTIONS
from jaxfp8rl.config.section import Section
from jaxfp8rl.errors import ConfigError, nearest, wrong_value
from jaxfp8rl.other_names import FORMER, key_here, plain, value_here

MAX_PROBLEMS = 10
NAMED = 4  # keys of a table that a refusal names
NEXT_STEP = "`jaxfp8rl config demo` prints every key with its meaning"

# --- where a key stands


class Places:
    """Where each key was given. Lines are looked up at the first question: errors are rare."""

    def __init__(self, name: str, text: str, overrides: Sequence[Override]):
        self.name, self.text = name, text
        self.flags = {o.path: o.flag for o in overrides}

    @functools.cached_property
    def lines(self) -> dict[KeyPath, int]:
        return key_lines(self.text)

    def of(self, path: KeyPath) -> str:
        """ "--optim.lr" or "demo.toml:12". A missing key has the place of its section."""
        for n in range(len(path), 0, -1):
            if path[:n] in self.flags:
                return self.flags[path[:n]]
            if path[:n] in self.lines:
                return f"{self.name}:{self.lines[path[:n]]}"
        return self.name

    def named(self, path: KeyPath) -> str:
        """The place and the key. A flag names both."""
        place, key = self.of(path), ".".join(path)
        return place if path in self.flags else f"{place}: {key}"


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line, from 1, on which each key and table of a valid TOML text is first written."""
    lines, seen, start = text.splitlines(keepends=True), {}, 1
    for n in range(1, len(lines) + 1):
        try:
            data = tomllib.loads("".join(lines[:n]))
        except tomllib.TOMLDecodeError:
            continue  # inside a multi-line value, which began at `start`
        for path in _paths(data):
            seen.setdefault(path, start)
        start = n + 1
    return seen


def _paths(data: Mapping[str, Any], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in data.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, key))


# --- what is wrong


def unknown_key(path: KeyPath, got: Any = None) -> str:
    """Why `path` is not a key: the section that it belongs to, its name here, or the nearest name.

    got: the value that was given. If it is a table of another framework, our names for its keys are listed.
    """
    *sections, key = path[:-1] + (plain(path[-1]),)
    if not sections and path[0] in SECTIONS:
        return f"a section of settings, not one setting: give --{path[0]}.KEY VALUE"
    if ours := FORMER.get(".".join((*sections, key))):
        return f'unknown key: "{path[-1]}" is {ours} now'
    if ours := key_here(".".join(path)):
        return f'unknown key: "{path[-1]}" of other frameworks is {ours} here'
    if inner := [(".".join(p), ours) for p in _paths(got)
                 if (ours := key_here(".".join(p)))] if isinstance(got, dict) else []:
        return "unknown section of other frameworks: " + ", ".join(
            f'"{name}" is {ours} here' for name, ours in inner[:NAMED])
    homes = [f"{s}.{key}" for s, model in SECTIONS.items() if key in model.model_fields]
    if ".".join((*sections, key)) in homes:
        return f'unknown key (did you mean "{key}"?)'
    if homes:
        return f'unknown key: "{path[-1]}" belongs to {" or ".join(homes)}'
    if not sections:
        everything = {f"{s}.{k}": k for s, model in SECTIONS.items() for k in model.model_fields}
        if (dotted := key.replace("_", ".", 1)) in everything:  # --run-dir
            return f'unknown section or key (did you mean "{dotted}"?)'
        close = nearest(key, [*SECTIONS, *everything.values()])
        full = next((f for f, k in everything.items() if f'"{k}"' in close), None)
        return "unknown section or key" + (f' (did you mean "{full}"?)' if full else nearest(key, SECTIONS))
    fields, words = _section_at(sections).model_fields, key.replace("_", " ")
    meant = [name for name, field in fields.items() if "_" in key and words in (field.description or "")]
    return f'unknown key (did you mean "{meant[0]}"?)' if meant else f"unknown key{nearest(key, fields)}"


def _section_at(path: Sequence[str]) -> type[Section]:
    """The section that a key's parents name. For a table in a list, `task.rewards.0`, its own class."""
    found = SECTIONS[path[0]]
    for key in path[1:]:
        annotation = found.model_fields[key].annotation if key in found.model_fields else ()
        parts = [annotation, *typing.get_args(annotation),
                 *(b for a in typing.get_args(annotation) for b in typing.get_args(a))]
        found = next((p for p in parts if isinstance(p, type) and issubclass(p, Section)), found)
    return found


def _explain(err: Mapping[str, Any], unknown: Callable[[KeyPath, Any], str]) -> str:
    """One of pydantic's errors as a line for the user."""
    kind, path, got = err["type"], tuple(map(str, err["loc"])), err["input"]
    if kind == "value_error":  # one of our own validators
        return str(err["ctx"]["error"])
    if kind == "extra_forbidden":
        return unknown(path, got)
    if kind == "missing":
        return f"missing; it has no default{_description(path)}"
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", err["ctx"]["expected"])
        if ours := value_here(".".join(path), got, options):
            return f"{json.dumps(got, default=str)} is not a choice: here it is {ours}"
    return wrong_value(err)


def _description(path: KeyPath) -> str:
    if len(path) != 2 or path[0] not in SECTIONS:
        return ""
    text = SECTIONS[path[0]].model_fields[path[1]].description
    return f" ({text})" if text else ""


def invalid(name: str, error: pydantic.ValidationError, named: Callable[[KeyPath], str],
            unknown: Callable[[KeyPath, Any], str] = unknown_key, next_step: str = NEXT_STEP) -> ConfigError:
    """All that pydantic refuses in the config called `name`, at once. named: a key with its place. unknown:
    why a path is no key. Both are others for files that are not configs."""
    errors = error.errors()
    inside = {err["loc"][:-1] for err in errors}  # a list of which no item is left is not what was wrong
    problems = [f"{named(tuple(map(str, err['loc'])))}: {_explain(err, unknown)}" for err in errors
                if not (err["type"] == "too_short" and err["loc"] in inside)]
    if len(problems) == 1:
        return ConfigError(problems[0], next_step)
    more = [f"... and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    listing = "\n  ".join(problems[:MAX_PROBLEMS] + more)
    return ConfigError(f"{name}: {len(problems)} problems\n  {listing}", next_step)


def placed(e: ConfigError, where: Places) -> ConfigError:
    """The refusal of a rule, headed by the place of a key that it names: if one was given on the command
    line, of that one."""
    message = e.message
    keys = [m for m in re.findall(r"\b([a-z]+)\.([a-z_0-9]+)", message)
            if m[0] in SECTIONS] or [(message.split(":")[0],)]
    path = next((key for key in keys if key in where.flags), keys[0])
    place = where.of(path)
    if path in where.flags:  # the flag names the key
        message = message.removeprefix(f"{'.'.join(path)}: ")
    return ConfigError(f"{place}: {message}", e.next_step)


