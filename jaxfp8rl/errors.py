"""Errors shown to the user. Each says what was wrong and where, and ends with the next step."""

from __future__ import annotations

import difflib
import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LISTED = 24  # names that a message lists
TOML_TYPES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list",
              dict: "a table"}
LIMITS = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "greater than"),
          "less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}
EXPECTED = {"int": "an integer", "float": "a number", "string": "a string", "bool": "true or false",
            "tuple": "a list", "dict": "a table", "model": "a section of keys, [section]"}


class UserError(ValueError):
    """Base class: wrong input, not a bug. The command line prints it without a stack trace and exits with
    `exit_code`."""

    exit_code = 2

    def __init__(self, message: str, next_step: str = ""):
        super().__init__(f"{message}\n  next step: {next_step}" if next_step else message)
        self.message, self.next_step = message, next_step


class ConfigError(UserError):
    """An unknown or misplaced key, a wrong type, or an impossible combination."""


class DataError(UserError):
    """A malformed dataset row or an unusable prompt; the message names file, line and field."""


class ModelError(UserError):
    """Missing, corrupt or unsuitable weights, config.json or tokenizer."""


class CheckpointError(UserError):
    """A checkpoint that cannot be read, or that belongs to another run."""


class GateFailed(UserError):
    """Learner and engine disagree at equal weights: training would be off-policy from the first token."""

    exit_code = 3


class ProcessFailed(UserError):
    """Another process of the run has ended, with `exit_code`."""

    def __init__(self, message: str, next_step: str = "", exit_code: int = 1):
        super().__init__(message, next_step)
        self.exit_code = exit_code


class NonFiniteStep(UserError):
    """Too many updates in a row were not finite. None of them was applied."""

    exit_code = 4


class OutOfMemory(UserError):
    """The device ran out of memory in a run whose plan fitted."""

    exit_code = 6


def check_writable(path: str | Path, key: str = "") -> None:
    """Raise UserError, naming the setting `key`, unless files can be written to the folder `path` or, if it
    does not exist yet, to its nearest existing parent. Call it before long work. It writes a few bytes to a
    temporary file, because permissions do not reveal a full disk."""
    whole = Path(path).absolute()
    place = next(p for p in (whole, *whole.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as e:
        where = f"{key}: {path}" if key else path
        raise UserError(f"{where}: cannot write to {place}: {e.strerror}",
                        "choose another place, or make room") from e


def near_path(path: str | Path, suffix: str = "") -> str:
    """' (did you mean "runs/a"?)' for the run beside `path` with the most similar name, or "". suffix: files
    that end with it count, too."""
    path = Path(path)
    folder = path.parent
    is_one = lambda p: (p / "config.toml").is_file() or bool(suffix) and p.suffix == suffix
    names = [p.name for p in folder.iterdir() if is_one(p)] if folder.is_dir() else []
    hit = difflib.get_close_matches(path.name, names, 1, 0.6)
    return f' (did you mean "{folder / hit[0]}"?)' if hit else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean "x"?)' for the closest known word. If none is close: the known words, or nothing if
    they are too many to read."""
    known = sorted(known)
    parts = [name for name in known if word in re.split("[_/.]", name)]  # "tis" is a part of "token_tis"
    parts.sort(key=lambda name: (name.count("/"), len(name)))
    hit = difflib.get_close_matches(word, known, 1,
                                    0.8) or parts or difflib.get_close_matches(word, known, 1, 0.6)
    listed = f" (known: {', '.join(known)})" if len(known) <= LISTED else ""
    return f' (did you mean "{hit[0]}"?)' if hit else listed


def wrong_value(err: Mapping[str, Any]) -> str:
    """One of pydantic's errors about a value, in words: its type, its limits, or pydantic's own sentence."""
    kind, got = err["type"], err["input"]
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", err["ctx"]["expected"])
        return f"{json.dumps(got, default=str)} is not a choice{nearest(str(got), choices)}"
    if kind in LIMITS:
        key, words = LIMITS[kind]
        return f"must be {words} {err['ctx'][key]:g}, got {got}"
    if kind == "too_short":
        return f"expected {err['ctx']['min_length']} or more, got {json.dumps(got, default=str)}"
    if kind == "finite_number":
        return f"must be finite, got {got}"
    expected = EXPECTED.get(kind.removesuffix("_type").removesuffix("_parsing"))
    if expected is None:
        return f"{err['msg'].lower()}, got {got!r}"
    hint = ""
    if got == "":  # what an override without a value says
        hint = "; only an optional setting can be empty"
    elif expected == "a string" and isinstance(got, bool | int | float):
        hint = f"; quote it: '\"{got}\"'"
    elif expected == "a list" and isinstance(got, str):
        hint = f"; as a list: '[\"{got}\"]'"
    given = TOML_TYPES.get(type(got), type(got).__name__)
    return f"expected {expected}, got {json.dumps(got, default=str)} ({given}){hint}"
