"""Turn a scorer's result or exception into a Score.

A scorer may raise because the completion is malformed. Such a completion scores 0, or the model would learn
to avoid low scores by malformed answers. A broken scorer raises too, but then the score is undefined. The
reference answer tells the two apart: only a broken scorer fails on it as well.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxfp8rl.data.problem import Problem
    from jaxfp8rl.data.task import Task

OURS = str(Path(__file__).parents[1])


@dataclasses.dataclass(frozen=True)
class Score:
    """The score of a completion. `value`: None if undefined. `parts`: the value of each named reward.

    `why` begins with the outcome:

    ok           the scorer returned a number
    malformed    the scorer failed on the completion but accepts the reference answer; value 0
    none         the scorer returned None
    error        the scorer is broken
    unreachable  a server that the scorer asks did not answer
    timeout      the scorer took too long
    crash        the scoring process died
    """

    value: float | None
    why: str
    parts: dict[str, float | None] = dataclasses.field(default_factory=dict)


def judge(task: Task, problem: Problem, text: str) -> Score:
    """Score one completion. Raises MemoryError if this process has no memory left and has to be replaced."""
    try:
        return _defined(task.score(problem, text))
    except OSError as e:  # an unreachable server says nothing about the completion
        return Score(None, f"unreachable: {_described(e)}")
    except Exception as e:
        if isinstance(e, MemoryError) and _memory_is_full():
            raise
        if _is_broken(task, problem):
            return Score(None, f"error: {_described(e)}")
        return Score(0.0, f"malformed: {_described(e)}")


def total(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """The weighted sum of several rewards. Rewards that are None are left out; the sum is undefined if a
    reward failed or if all are None."""
    if "" in scores:
        return scores[""]
    parts = {name: score.value for name, score in scores.items()}
    known = {name: value for name, value in parts.items() if value is not None}
    first = {score.why.partition(":")[0]: f"{score.why} ({name})"
             for name, score in reversed([*scores.items()])}
    if failed := next((first[kind] for kind in ("timeout", "crash", "error", "unreachable") if kind in first),
                      None):
        return Score(None, failed, parts)
    if not known:
        return Score(None, first["none"], parts)
    return Score(sum(weights[name] * value for name, value in known.items()), first.get("malformed", "ok"),
                 parts)


def _defined(value: Any) -> Score:
    """The Score of a scorer's return value: any single finite number, such as bool, int, Decimal, or a scalar
    of numpy or torch. Raises TypeError or ValueError for another value."""
    if value is None:
        return Score(None, "none: the scorer returned None")
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(
            f"the scorer returned {value!r:.60} ({type(value).__name__}) instead of a number")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"the scorer returned {number}")
    return Score(number, "ok")


def _is_broken(task: Task, problem: Problem) -> bool:
    """Whether the scorer also fails on the reference answer, which is well-formed."""
    try:
        _defined(task.score(problem, task.demonstrate(problem, np.random.default_rng(0))))
        return False
    except Exception:
        return True


def _described(e: Exception) -> str:
    """The exception and the line of the scorer that raised it."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(OURS)]
    return f"{type(e).__name__}: {e}" + (f" ({Path(frames[0].filename).name}:{frames[0].lineno})" if frames
                                         else "")


def _memory_is_full() -> bool:
    """Whether this process uses more than half of its memory limit. Otherwise a MemoryError came from a
    single huge allocation, or from nesting too deep for Python's parser."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return limit != resource.RLIM_INFINITY and pages * resource.getpagesize() > limit // 2
