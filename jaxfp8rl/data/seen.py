"""The problems that weights were trained on: `trained_on.npy`, in a run directory and in each folder of
weights that comes from one.

Other runs may start from these weights (`--fork`, a shared warm start, an export) and hold out other
problems. A problem that the weights were trained on must not be held out, whatever changed the split: a seed,
a share, a file or a size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxfp8rl.errors import DataError

if TYPE_CHECKING:
    from jaxfp8rl.data.problem import Problem

FILE = "trained_on.npy"


class Questions(NamedTuple):
    """Digests of the problems trained on, by earlier runs of the same weights too, and of those held out."""

    seen: np.ndarray
    held_out: np.ndarray


def digests_of(problems: Sequence[Problem]) -> np.ndarray:
    """Digests of the problems' questions, each once: uint64, sorted."""
    return np.unique(np.array([_digest(question(p)) for p in problems], np.uint64))


def question(problem: Problem) -> str:
    """The text of a problem's question, without system prompt, chat template and, if the task separates it,
    instruction."""
    if problem.question:
        return problem.question
    if isinstance(problem.prompt, str):
        return problem.prompt.strip()
    return "\n".join(str(message["content"]) for message in problem.prompt
                     if message["role"] != "system").strip()


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:8])


def read_seen(folder: str | Path) -> np.ndarray | None:
    """Digests of the problems that the weights in `folder` were trained on; None if there is no such record.
    Raises DataError for a damaged file."""
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        return np.load(path, allow_pickle=False).astype(np.uint64, casting="safe")
    except (ValueError, TypeError, EOFError) as e:
        raise DataError(f"{path} is damaged: {e}", "copy it again from the source of these weights") from e


def write_seen(folder: str | Path, seen: np.ndarray) -> None:
    np.save(Path(folder) / FILE, seen)


def check_unseen(held_out: np.ndarray, seen: np.ndarray, by: str) -> None:
    """Raise DataError if the weights that run `by` trained have seen held-out problems."""
    if known := np.isin(held_out, seen).sum():
        raise DataError(
            f"task: {known} of {len(held_out)} held-out problems are among those that {by} was trained on",
            "keep that run's task.seed, task.options and files, or hold out problems of another task",
        )
