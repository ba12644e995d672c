"""Which problems weights were trained on: `trained_on.npy`, in a run directory and in each folder of weights
that comes of one.

Weights go on to other runs (`--fork`, a shared warm start, an export), which may hold out other problems. A
problem that weights were trained on is refused where it is to be held out, whatever put it there: a seed, a
share, a file, another size.
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
    """Digests of what is trained on, by earlier runs of the same weights too, and of what is held out."""

    seen: np.ndarray
    held_out: np.ndarray


def digests_of(problems: Sequence[Problem]) -> np.ndarray:
    """What the problems ask, each once: uint64, sorted."""
    return np.unique(np.array([_digest(question(p)) for p in problems], np.uint64))


def question(problem: Problem) -> str:
    """What a problem asks, however it is put: without system prompt, chat template and, where the task says
    so, instruction."""
    if problem.question:
        return problem.question
    if isinstance(problem.prompt, str):
        return problem.prompt.strip()
    return "\n".join(str(message["content"]) for message in problem.prompt
                     if message["role"] != "system").strip()


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:8])


def read_seen(folder: str | Path) -> np.ndarray | None:
    """What the weights in `folder` were trained on; None where nothing says so. Raises DataError for a
    damaged file."""
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        return np.load(path, allow_pickle=False).astype(np.uint64, casting="safe")
    except (ValueError, TypeError, EOFError) as e:
        raise DataError(f"{path} is damaged: {e}", "copy it again from where these weights come from") from e


def write_seen(folder: str | Path, seen: np.ndarray) -> None:
    np.save(Path(folder) / FILE, seen)


def check_unseen(held_out: np.ndarray, seen: np.ndarray, by: str) -> None:
    """Raise DataError where the weights, trained `by` somebody, know held-out problems."""
    if known := np.isin(held_out, seen).sum():
        raise DataError(
            f"task: {known} of {len(held_out)} held-out problems are among those that {by} was trained on",
            "leave task.seed, task.options and the files as they were there, or hold out problems of another task",
        )
