"""Scores a batch of completions without trusting the scorer: each item has a timeout, and a scoring process
that exceeds it is killed.

Scorers run in fresh Python processes, never in forks of a process that has loaded JAX. A process that
times out or dies costs one undefined score; it is replaced, and the rest of the batch continues.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Self

from jaxfp8rl.data.file_task import FileTask
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.task import Task
from jaxfp8rl.data.tasks import as_json, named
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.rewards.process import NO_DEADLINE, LineProcess
from jaxfp8rl.rewards.scoring import Score, judge, total

__all__ = ["RewardRunner", "Score"]

log = logging.getLogger(__name__)
MOST_WORKERS = 8


class RewardRunner:
    """Scores (problem, text) pairs of one task with each of its rewards.

    Cheap scorers and functions of this process run here, the others in `workers` child processes; 0 means one
    a core, at most 8. `timeout_s` is the wall-clock limit per item, in seconds. `counts` counts the outcomes
    (the first word of `Score.why`) over the runner's life. Use it as a context manager, or call `close`.
    """

    def __init__(self, task: Task, timeout_s: float = 5.0, workers: int = 1):
        self.counts: collections.Counter[str] = collections.Counter()
        self._task, self._timeout_s, self._lock = task, timeout_s, threading.Lock()
        tasks, self._weights = named(task), {r.name: r.weight for r in getattr(task, "rewards", ())}
        self._here = {name: t for name, t in tasks.items() if not t.in_child}
        self._there = [name for name in tasks if name not in self._here]
        self._warned_malformed = False
        for t in self._here.values():
            t.load_scorer()
        workers = workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        self._children = [self._start() for _ in range(workers)] if self._there else []
        self._closed = False

    def wait_until_ready(self) -> None:
        """Block until each child has loaded the scorer, so that a scorer that cannot be loaded is reported
        before an engine starts.

        Raises ConfigError as `score` does.
        """
        with self._lock:
            while not all(c.ready for c in self._children):
                self._collect([], [])

    def score(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        """One Score an item, in order. Each item takes at most `timeout_s`, plus the start of a new process
        if it fails.

        Raises ConfigError if the scorer cannot be loaded in the child process, RuntimeError after `close`.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("this RewardRunner is closed")
            found = self._score_in_children(items) if self._there else [{} for _ in items]
            for item, by_name in zip(items, found):
                by_name |= {name: self._score_here(task, *item) for name, task in self._here.items()}
        for name in (*self._here, *self._there):
            _mark_malformed(items, found, name)
        scores = [total(by_name, self._weights) for by_name in found]
        self.counts.update(s.why.partition(":")[0] for s in scores)
        self._report(scores)
        return scores

    def close(self) -> None:
        """Kill the child processes and the processes that they started. Safe to call twice."""
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()
            self._children = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _score_here(self, task: Task, problem: Problem, text: str) -> Score:
        """Score in this process. A function passed to `train` runs in a thread; since a thread cannot be
        stopped, one that times out is abandoned."""
        if not isinstance(task, FileTask) or task.scorer == "exact":
            return judge(task, problem, text)
        found: list[Score] = []

        def work() -> None:
            with contextlib.suppress(SystemExit):
                found.append(judge(task, problem, text))

        thread = threading.Thread(target=work, name="scorer", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        return found[0] if found else Score(None, "timeout" if thread.is_alive() else "crash")

    def _report(self, scores: Sequence[Score]) -> None:
        """Log the scorer's most frequent failure, quoted and shortened, since it may contain text of the
        model."""
        kinds = ("error", "unreachable")
        if errors := collections.Counter(s.why for s in scores if s.why.startswith(kinds)):
            log.warning(
                "the scorer failed on %d of %d completions, whose scores are undefined; most often: %.200r",
                errors.total(), len(scores), errors.most_common(1)[0][0])
        malformed = [s.why for s in scores if s.why.startswith("malformed")]
        if malformed and not self._warned_malformed:
            self._warned_malformed = True
            log.warning(
                "the scorer failed on %d of %d completions, which score 0 because it accepts "
                "the reference answer; the first: %.200r; later ones are only counted in reward/malformed",
                len(malformed), len(scores), malformed[0])

    def _start(self) -> _Child:
        return _Child(as_json(self._task), self._timeout_s)

    def _replace(self, child: _Child) -> None:
        child.kill()
        self._children[self._children.index(child)] = self._start()

    def _score_in_children(self, items: Sequence[tuple[Problem, str]]) -> list[dict[str, Score]]:
        scores: list[dict[str, Score]] = [{} for _ in items]
        todo = collections.deque(range(len(items)))
        try:
            while todo or any(c.job is not None for c in self._children):
                self._hand_out(todo, items)
                self._collect(scores, items)
        except BaseException:  # a late answer must not be taken for an answer of the next batch
            for child in [c for c in self._children if c.job is not None]:
                self._replace(child)
            raise
        return scores

    def _hand_out(self, todo: collections.deque[int], items: Sequence[tuple[Problem, str]]) -> None:
        for child in [c for c in self._children if c.ready and c.job is None]:
            if not todo:
                return
            try:
                child.send(todo[0], *items[todo[0]])
                todo.popleft()
            except OSError:  # the child died while idle, so this item did not cause it
                self._replace(child)

    def _collect(self, scores: list[dict[str, Score]], items: Sequence[tuple[Problem, str]]) -> None:
        """Wait for the next answer, exit or deadline of a child, and handle each that has occurred."""
        seconds = max(0.0, min(c.deadline for c in self._children) - time.monotonic())
        answered = wait([c.sock for c in self._children], None if seconds == NO_DEADLINE else seconds)
        for child in list(self._children):
            job, why = child.job, None
            if child.sock in answered:
                try:
                    message = child.receive()
                except EOFError:
                    why = "crash"
                else:
                    if message and job is not None:
                        scores[job] = {name: Score(**score) for name, score in message.items()}
            if why is None and time.monotonic() >= child.deadline:
                why = "timeout"
            if why:
                self._fail(child, job, why, scores, items)

    def _fail(self, child: _Child, job: int | None, why: str, scores: list,
              items: Sequence[tuple[Problem, str]]) -> None:
        """Replace a child that died or timed out; its item has no score. Raises ConfigError if it never
        started."""
        if not child.ready:
            raise ConfigError(f"the scoring process did not start ({why}): {child.last_words()}",
                              "run the scorer by hand in a fresh Python")
        if job is not None:
            scores[job] = {name: Score(None, why) for name in self._there}
            log.warning("scoring of problem %s: %s; its score is undefined", items[job][0].id, why)
        self._replace(child)


def _mark_malformed(items: Sequence[tuple[Problem, str]], found: Sequence[dict[str, Score]],
                    name: str) -> None:
    """Change an "error" to "malformed", with score 0, where the scorer scored another completion of the
    problem.

    A working scorer may fail on the reference answer, which need not look like a completion, so that `judge`
    takes the scorer for broken. A score for another completion of the same problem shows that it works.
    """
    scored = {problem.id for (problem, _), by_name in zip(items, found)
              if by_name[name].why in ("ok", "none")}
    for (problem, _), by_name in zip(items, found):
        kind, _, rest = by_name[name].why.partition(": ")
        if kind == "error" and problem.id in scored:
            by_name[name] = Score(0.0, f"malformed: {rest}")


class _Child(LineProcess):
    """One scoring process. `job`: the index of its current item, to whose time limit `deadline` is set."""

    def __init__(self, task_json: str, timeout_s: float):
        super().__init__("jaxfp8rl.rewards.child", [str(timeout_s), task_json], timeout_s)
        self.job: int | None = None
        self._timeout_s = timeout_s

    def send(self, job: int, problem: Problem, text: str) -> None:
        """Send an item to the process. Raises OSError if it is dead or does not read."""
        self.write({"problem": dataclasses.asdict(problem), "text": text})
        self.job, self.deadline = job, time.monotonic() + self._timeout_s

    def receive(self) -> dict | None:
        """The scores by name, or None if they have not arrived whole. Raises as `read` does."""
        answers = self.read()
        if not answers:
            return None
        self.job, self.deadline = None, NO_DEADLINE
        return answers[0]
