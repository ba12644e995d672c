"""Scores a batch of completions without trusting the scorer: each item has a clock, and what overruns it is killed.

Scorers run in fresh Python processes, never in forks of a process that has loaded JAX. A process that overruns or dies
costs one undefined score; it is replaced and the rest of the batch goes on.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Self

from jaxfp8rl.data.tasks import Problem, Task, as_json
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.rewards.child import Score, score_one

__all__ = ["RewardRunner", "Score"]

log = logging.getLogger(__name__)
_START_TIMEOUT_S = 120.0  # importing a scorer's libraries on a busy machine takes many seconds
_PEACE = float("inf")
MOST_WORKERS = 8
STDERR_BYTES = 2**20  # of what a scorer wrote, from which its last words are read


class RewardRunner:
    """Scores (problem, text) pairs of one task; cheap scorers run here, the others in `workers` child processes, 0 standing for
    one a core but at most 8.

    `timeout_s` is wall clock per item, in seconds. `counts` adds up outcomes ("ok", "timeout", "crash", "error") over the
    runner's life. Use it as a context manager, or call `close`.
    """

    def __init__(self, task: Task, timeout_s: float = 5.0, workers: int = 1):
        self.counts: collections.Counter[str] = collections.Counter()
        self._task, self._timeout_s, self._lock = task, timeout_s, threading.Lock()
        workers = workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        self._children = [self._start() for _ in range(workers)] if task.in_child else []
        self._closed = False

    def wait_until_ready(self) -> None:
        """Block until each child has loaded the scorer, so that one that cannot be is known before an engine starts.

        Raises ConfigError as `score` does.
        """
        with self._lock:
            while not all(c.ready for c in self._children):
                self._collect([], [])

    def score(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        """One Score an item, in order. Blocks for at most `timeout_s` an item and the start of a replacement.

        Raises ConfigError when the scorer cannot be loaded in the child process, RuntimeError after `close`.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("this RewardRunner is closed")
            scores = self._score_in_children(items) if self._task.in_child else [score_one(self._task, *i) for i in items]
        self.counts.update(s.why.partition(":")[0] for s in scores)
        if errors := collections.Counter(s.why for s in scores if s.why.startswith("error")):
            why = errors.most_common(1)[0][0]  # it may hold what the model wrote: quoted, and not at any length
            log.warning("the scorer failed at %d of %d completions, whose scores are undefined; most often: %.200r",
                        errors.total(), len(scores), why)  # fmt: skip
        return scores

    def close(self) -> None:
        """Kill the child processes and what they started. Safe to call twice."""
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()
            self._children = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _start(self) -> _Child:
        return _Child(as_json(self._task), self._timeout_s)

    def _replace(self, child: _Child) -> None:
        child.kill()
        self._children[self._children.index(child)] = self._start()

    def _score_in_children(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        scores: list[Score | None] = [None] * len(items)
        todo = collections.deque(range(len(items)))
        try:
            while todo or any(c.job is not None for c in self._children):
                self._hand_out(todo, items)
                self._collect(scores, items)
        except BaseException:  # a late answer must not be taken for that of the next batch
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
            except OSError:  # it died while idle, which is no fault of this item
                self._replace(child)

    def _collect(self, scores: list[Score | None], items: Sequence[tuple[Problem, str]]) -> None:
        """Wait for the next answer, death or deadline, and act on all that have come."""
        patience = max(0.0, min(c.deadline for c in self._children) - time.monotonic())
        answered = wait([c.sock for c in self._children], None if patience == _PEACE else patience)
        for child in list(self._children):
            job, why = child.job, None
            if child.sock in answered:
                try:
                    message = child.receive()
                except EOFError:
                    why = "crash"
                else:
                    if message and job is not None:
                        scores[job] = Score(**message)
            if why is None and time.monotonic() >= child.deadline:
                why = "timeout"
            if why:
                self._bury(child, job, why, scores, items)

    def _bury(self, child: _Child, job: int | None, why: str, scores: list, items: Sequence[tuple[Problem, str]]) -> None:
        if not child.ready:
            raise ConfigError(f"the scoring process did not start ({why}): {child.last_words()}",
                              "run the scorer by hand in a fresh Python")
        if job is not None:
            scores[job] = Score(None, why)
            log.warning("scoring of problem %s: %s; its score is undefined", items[job][0].id, why)
        self._replace(child)


class _Child:
    """One scoring process. `job`: index of the item it works on. `deadline`: of that item, or of its own start."""

    def __init__(self, task_json: str, timeout_s: float):
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(timeout_s)
        self.job: int | None = None
        self.ready = False
        self.deadline = time.monotonic() + _START_TIMEOUT_S
        self._timeout_s, self._buffer = timeout_s, b""
        self._stderr = tempfile.TemporaryFile()  # closed by kill()
        argv = [sys.executable, "-P", "-m", "jaxfp8rl.rewards.child", str(theirs.fileno()), str(timeout_s), task_json]
        with theirs:
            # A session of its own, so that one signal reaches whatever the scorer forks.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._stderr,
                pass_fds=[theirs.fileno()], start_new_session=True, env=_child_environment())

    def send(self, job: int, problem: Problem, text: str) -> None:
        """Give it an item. Raises OSError when it is dead or does not read."""
        if os.fstat(self._stderr.fileno()).st_size > STDERR_BYTES:  # what a scorer prints at each call is kept of the last ones
            self._stderr.seek(0)  # of both: the place is the file's, which it inherited
            self._stderr.truncate()
        line = json.dumps({"problem": dataclasses.asdict(problem), "text": text}) + "\n"
        self.sock.sendall(line.encode())
        self.job, self.deadline = job, time.monotonic() + self._timeout_s

    def receive(self) -> dict | None:
        """A score, or None when the message is not whole yet or only says that the child is ready. Raises EOFError."""
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        self._buffer += data
        if not self._buffer.endswith(b"\n"):
            return None
        message, self._buffer = json.loads(self._buffer), b""
        if "fatal" in message:
            raise ConfigError(message["fatal"], message.get("next_step", "run the scorer by hand in a fresh Python"))
        was_ready, self.ready = self.ready, True
        self.job, self.deadline = None, _PEACE
        return message if was_ready else None

    def last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote no error message"

    def kill(self) -> None:
        try:  # before wait(): until it is reaped, its number cannot belong to anyone else
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self.sock.close()
        self._stderr.close()


# Rather a name too many. Neither PWD, which is a folder, nor what only begins as such words do, as PATH and TOKENIZERS.
_SECRET = re.compile(r"PASSW|PASSPHRASE|SECRET|CREDENTIAL|(TOKEN|KEY|PASS|CRED)S?(?![A-Z])|(_PWD|(?<![A-Z])PAT)(?![A-Z])",
                     re.IGNORECASE)  # fmt: skip


def _child_environment() -> dict[str, str]:
    """This process's modules, no GPU, one thread a library: scorers must not slow the learner. And none of its secrets."""
    kept = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
