"""Errors shown to the user. Each says what was wrong and where, and ends with the next step."""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path


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


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean "x"?)' for the closest known word, or the list of known words if none is close."""
    known = sorted(known)
    parts = [name for name in known if word in re.split("[_/.]", name)]  # "tis" is a part of "token_tis"
    parts.sort(key=lambda name: (name.count("/"), len(name)))
    hit = difflib.get_close_matches(word, known, 1,
                                    0.8) or parts or difflib.get_close_matches(word, known, 1, 0.6)
    return f' (did you mean "{hit[0]}"?)' if hit else f" (known: {', '.join(known)})"
