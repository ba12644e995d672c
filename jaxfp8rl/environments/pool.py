"""The processes in which environments play, each killed if an answer is overdue.

A process that dies or is killed costs the trajectory that it was asked about, and another takes its place.
What else it held plays on there: it is asked again what it was asked, and is lost only if it does not answer
as it did.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from jaxfp8rl.environments.protocol import Answer
from jaxfp8rl.environments.world import World
from jaxfp8rl.errors import ConfigError, UserError
from jaxfp8rl.rewards.process import NO_DEADLINE, LineProcess
from jaxfp8rl.rewards.runner import MOST_WORKERS

log = logging.getLogger(__name__)
GRACE_S = 1.0  # an `async` answer that is overdue is given up by the process itself


class Ask(NamedTuple):
    """A question to the environment of an episode: {"do": "reset", "problem"}, {"do": "step", "action"}, or
    {"do": "finish"} for the reward that is still due."""

    episode: int
    message: dict[str, Any]


class Pool:
    """`workers` processes of `world`'s environment, 0 for one a core, at most 8; each works on up to
    `concurrency` answers at once. Calls may come from several threads, one after the other."""

    def __init__(self, world: World, workers: int = 0, concurrency: int = 1):
        self._world, self._concurrency = world, concurrency
        self._lock, self._episodes, self._asked = threading.Lock(), 0, 0
        self._home: dict[int, _Process | None] = {}  # of an episode; None: its process is gone
        self._told: dict[int, list[tuple[dict, Answer]]] = {}  # what each has answered
        workers = workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        self._processes = [self._start() for _ in range(workers)]

    def wait_until_ready(self) -> None:
        """Block until each process has made the environment. Raises ConfigError if one cannot."""
        with self._lock:
            while not all(p.ready for p in self._processes):
                self._collect({})

    def begin(self, count: int) -> range:
        """Numbers for new episodes."""
        with self._lock:
            first, self._episodes = self._episodes, self._episodes + count
            return range(first, first + count)

    def ask(self, asks: Sequence[Ask]) -> list[Answer | str]:
        """The environment's answer to each, or why there is none: "timeout", "crash", "lost", or "error:
        ...".

        Raises ConfigError if a process cannot start again, RuntimeError after `close`.
        """
        with self._lock:
            if not self._processes:
                raise RuntimeError("this Pool is closed")
            found = self._asked_once(asks)
            lost = [i for i, answer in enumerate(found) if answer == "lost"]
            while lost:  # with each round fewer: one that is asked first is not lost with its process
                back = self._played_again([asks[i].episode for i in lost])
                again = [i for i in lost if asks[i].episode in back]
                for i, answer in zip(again, self._asked_once([asks[i] for i in again])):
                    found[i] = answer
                still = [i for i in again if found[i] == "lost"]
                lost = still if len(still) < len(lost) else []
            for ask, answer in zip(asks, found):
                if isinstance(answer, Answer):
                    self._told.setdefault(ask.episode, []).append((ask.message, answer))
            return found

    def _asked_once(self, asks: Sequence[Ask]) -> list[Answer | str]:
        found: dict[int, Answer | str] = {}
        todo = collections.deque(enumerate(asks))
        try:
            while todo or any(p.jobs for p in self._processes):
                self._hand_out(todo, found)
                if any(p.jobs for p in self._processes) or todo:
                    self._collect(found)
        except BaseException:  # a late answer must not be taken for an answer of the next call
            for process in [p for p in self._processes if p.jobs]:
                self._replace(process)
            raise
        return [found[i] for i in range(len(asks))]

    def _played_again(self, episodes: Sequence[int]) -> set[int]:
        """Those of the episodes that another process answers as their own did, as far as it had come."""
        same = {e for e in episodes if self._told.get(e)}
        for turn in range(max((len(self._told[e]) for e in same), default=0)):
            now = [e for e in episodes if e in same and turn < len(self._told[e])]
            answers = self._asked_once([Ask(e, self._told[e][turn][0]) for e in now])
            same -= {e for e, answer in zip(now, answers) if answer != self._told[e][turn][1]}
        return same

    def forget(self, episodes: Sequence[int]) -> None:
        """These are over."""
        with self._lock:
            for episode in episodes:
                self._told.pop(episode, None)
                if process := self._home.pop(episode, None):
                    # it died while idle; the next question to it finds out
                    with contextlib.suppress(OSError):
                        process.write({"id": 0, "episode": episode, "do": "forget"})

    def close(self) -> None:
        """Kill the processes and whatever they started. Safe to call twice."""
        with self._lock:
            for process in self._processes:
                process.kill()
            self._processes = []

    def _start(self) -> _Process:
        return _Process(json.dumps(dataclasses.asdict(self._world)), self._world.timeout_s)

    def _replace(self, process: _Process) -> None:
        process.kill()
        self._processes[self._processes.index(process)] = self._start()
        for episode in [e for e, home in self._home.items() if home is process]:
            self._home[episode] = None

    def _hand_out(self, todo: collections.deque, found: dict[int, Answer | str]) -> None:
        """Send each question whose process has room for it."""
        for _ in range(len(todo)):
            i, ask = todo.popleft()
            process = self._process_of(ask)
            if process == "lost":
                found[i] = "lost"
            elif isinstance(process, _Process) and process.ready and len(process.jobs) < self._concurrency:
                self._send(process, i, ask, todo)
            else:
                todo.append((i, ask))

    def _process_of(self, ask: Ask) -> _Process | str | None:
        """That of its episode, or for a new one the least busy; "lost" if it is gone."""
        if ask.message["do"] == "reset" and self._home.get(ask.episode) is None:
            ready = [p for p in self._processes if p.ready]
            return min(ready, key=lambda p: len(p.jobs)) if ready else None
        return self._home.get(ask.episode) or "lost"

    def _send(self, process: _Process, i: int, ask: Ask, todo: collections.deque) -> None:
        self._asked += 1
        try:
            process.ask(self._asked, i, ask, self._world.timeout_s + GRACE_S * (self._concurrency > 1))
            self._home[ask.episode] = process
        except OSError:  # it died while idle
            self._replace(process)
            todo.append((i, ask))

    def _collect(self, found: dict[int, Answer | str]) -> None:
        """Wait for the next answer, exit or deadline of a process, and handle each that has occurred."""
        seconds = max(0.0, min(p.due for p in self._processes) - time.monotonic())
        answered = wait([p.sock for p in self._processes], None if seconds == NO_DEADLINE else seconds)
        for process in list(self._processes):
            why = None
            if process.sock in answered:
                try:
                    found.update(process.answers())
                except UserError:  # it says why it cannot start
                    raise
                except (EOFError, ValueError):  # dead, or it wrote what is no answer
                    why = "crash"
            if why is None and time.monotonic() >= process.due:
                why = "timeout"
            if why:
                found.update(self._failed(process, why))

    def _failed(self, process: _Process, why: str) -> Iterator[tuple[int, str]]:
        """Replace a process that died or is overdue. Raises ConfigError if it never started."""
        if not process.ready:
            raise ConfigError(f"the process of the environment did not start ({why}): {process.last_words()}",
                              "make the environment by hand in a fresh Python")
        log.warning("an environment's process was replaced (%s); it held %d trajectories", why,
                    sum(home is process for home in self._home.values()))
        now, words = time.monotonic(), process.last_words()
        jobs = list(process.jobs.values())
        self._replace(process)
        for i, due in jobs:
            yield i, f"crash: {words[:200]}" if why == "crash" else "timeout" if now >= due else "lost"


class _Process(LineProcess):
    """jobs: by the number of a question, (its place in the call, its time limit)."""

    def __init__(self, world_json: str, timeout_s: float):
        super().__init__("jaxfp8rl.environments.child", [world_json], timeout_s)
        self.jobs: dict[int, tuple[int, float]] = {}

    @property
    def due(self) -> float:
        return min([self.deadline, *(due for _, due in self.jobs.values())])

    def ask(self, number: int, i: int, ask: Ask, seconds: float) -> None:
        self.write({"id": number, "episode": ask.episode, **ask.message})
        self.jobs[number] = i, time.monotonic() + seconds

    def answers(self) -> Iterator[tuple[int, Answer | str]]:
        """Raises EOFError, or ValueError for an answer to nothing that was asked."""
        for message in self.read():
            number = message.pop("id")
            if number not in self.jobs:
                raise ValueError(f"an answer to question {number}, which was not asked")
            i, _ = self.jobs.pop(number)
            yield i, message["error"] if "error" in message else Answer(**message)
