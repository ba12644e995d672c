"""What a scorer's answer is worth: a number, or, where it has none, why, and whose fault that is.

A scorer that breaks on what the model wrote has said that it is no answer, and the model must not escape with
it: it scores 0. But a scorer that is broken has said nothing. The reference answer tells the two apart: only
the latter breaks on that as well.
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
    """`value` None: undefined. `why` begins with one of

    ok; malformed: what the model wrote broke the scorer, which takes the reference answer, 0; none: the
    scorer returned None; error: the scorer is broken; unreachable: what it asks is; timeout; crash.

    `parts`: of several named rewards the value of each.
    """

    value: float | None
    why: str
    parts: dict[str, float | None] = dataclasses.field(default_factory=dict)


def judge(task: Task, problem: Problem, text: str) -> Score:
    """Score one completion. Raises MemoryError where this process has no memory left: it is not to be asked
    again."""
    try:
        return _defined(task.score(problem, text))
    except OSError as e:  # a server that cannot be reached says nothing of what the model wrote
        return Score(None, f"unreachable: {_said(e)}")
    except Exception as e:
        if isinstance(e, MemoryError) and _memory_is_full():
            raise
        return Score(None, f"error: {_said(e)}") if _is_broken(task, problem) else Score(
            0.0, f"malformed: {_said(e)}")


def total(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """Several rewards as one: the sum by weight of those that are not None; undefined where one failed, or
    all are None."""
    if "" in scores:
        return scores[""]
    parts = {name: score.value for name, score in scores.items()}
    known = {name: value for name, value in parts.items() if value is not None}
    first = {score.why.partition(":")[0]: f"{score.why} ({name})" for name, score in reversed([*scores.items()])}
    if failed := next((first[kind] for kind in ("timeout", "crash", "error", "unreachable") if kind in first),
                      None):
        return Score(None, failed, parts)
    if not known:
        return Score(None, first["none"], parts)
    return Score(sum(weights[name] * value for name, value in known.items()), first.get("malformed", "ok"),
                 parts)


def _defined(value: Any) -> Score:
    """Whatever is one finite number: bool, int, Decimal, those of numpy and torch."""
    if value is None:
        return Score(None, "none: the scorer returned None")
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(
            f"the scorer returned {value!r:.60}, {type(value).__name__}, where a number was to be")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"the scorer returned {number}")
    return Score(number, "ok")


def _is_broken(task: Task, problem: Problem) -> bool:
    """It breaks on the reference answer, too, which is well-formed."""
    try:
        _defined(task.score(problem, task.demonstrate(problem, np.random.default_rng(0))))
        return False
    except Exception:
        return True


def _said(e: Exception) -> str:
    """The exception, and where in the scorer it was raised."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(OURS)]
    return f"{type(e).__name__}: {e}" + (f" ({Path(frames[0].filename).name}:{frames[0].lineno})" if frames
                                         else "")


def _memory_is_full() -> bool:
    """Whether it is near its limit. Else somebody asked for far too much, or nested so deep that Python's
    parser gave up."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return limit != resource.RLIM_INFINITY and pages * resource.getpagesize() > limit // 2
