"""Problems of a generator, in several processes if it is slow: reasoning-gym's countdown takes twenty seconds
for the 1,200 problems of a preset."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxfp8rl.data.problem import Problem

TRIED = 16  # problems that are generated here, to see how long the others would take
PATIENCE_S = 4.0  # a process takes about as long to import reasoning-gym
WORKERS = 8
CHILD = (sys.executable, "-P", "-W", "ignore", "-m", "jaxfp8rl.data.reasoning_gym_child")


def generated(problem: Callable[[int], Problem], count: int, task: dict[str, Any]) -> list[Problem]:
    """`problem(i)` for i in 0 .. `count` - 1. `task`: the fields, as JSON has them, from which another
    process makes the same problems."""
    began = time.perf_counter()
    found = [problem(i) for i in range(min(TRIED, count))]
    left, workers = range(len(found), count), min(WORKERS, len(os.sched_getaffinity(0)))
    seconds = (time.perf_counter() - began) / max(len(found), 1) * len(left)
    if seconds < PATIENCE_S or workers < 2:
        return found + [problem(i) for i in left]
    parts = [left[i * len(left) // workers: (i + 1) * len(left) // workers] for i in range(workers)]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        made = list(pool.map(functools.partial(_elsewhere, task), parts))
    for part, problems in zip(parts, made):
        # a process that failed: here it raises in its own words, or this process alone knows the generator
        found += [problem(i) for i in part] if problems is None else problems
    return found


def _elsewhere(task: dict[str, Any], part: Sequence[int]) -> list[Problem] | None:
    """The problems of `part`, from a process of their own; None if it failed."""
    if not part:
        return []
    words = [*CHILD, json.dumps(task), str(part[0]), str(part[-1] + 1)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return None if done.returncode else [read(line) for line in done.stdout.splitlines()]


def written(problem: Problem) -> str:
    """One line of JSON."""
    return json.dumps(dataclasses.asdict(problem))


def read(line: str) -> Problem:
    """The problem of a line. JSON has lists for the tuples of a chat and of the accepted answers."""
    fields = json.loads(line)
    chat = {} if isinstance(fields["prompt"], str) else {"prompt": tuple(fields["prompt"])}
    return Problem(**fields | {"alternatives": tuple(fields["alternatives"])} | chat)
