"""The order of requests: one thread computes; each model's requests run by their sequence numbers."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxfp8rl.serving.refusal import Refused

REMEMBERED = 4096  # requests of a model whose repetition is recognised


class Job(NamedTuple):
    """Work with the future of its answer. Jobs with the same `together`, unless it is None, are given to
    `run` at once."""

    run: Callable[[list[Any]], list[Any]]
    argument: Any
    future: Future
    together: str | None = None


class Worker:
    """The thread that computes. It takes the oldest job, and with it all that can be computed together."""

    def __init__(self, most_together: int):
        self._most, self._jobs, self._ready = most_together, deque[Job](), threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._work, name="serve-training", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._ready:
            self._jobs.append(job)
            self._ready.notify()

    def waiting(self) -> int:
        return len(self._jobs)

    def close(self) -> None:
        """End the thread, after the job that it computes; all others are cancelled."""
        with self._ready:
            self._open = False
            self._ready.notify()
        self._thread.join()
        for job in self._jobs:
            job.future.cancel()

    def _work(self) -> None:
        while jobs := self._next():
            answers: list[Any]
            try:
                answers = jobs[0].run([job.argument for job in jobs])
            except BaseException as e:  # whatever it is, it is the answer
                answers = [e] * len(jobs)
            for job, answer in zip(jobs, answers):
                if isinstance(answer, BaseException):
                    job.future.set_exception(answer)
                else:
                    job.future.set_result(answer)

    def _next(self) -> list[Job]:
        """The next jobs that are computed together; none when the thread is to end."""
        with self._ready:
            while self._open and not self._jobs:
                self._ready.wait()
            if not self._open:
                return []
            first = self._jobs.popleft()
            same = [j for j in self._jobs if first.together is not None and j.together == first.together]
            taken = [first, *same[: self._most - 1]]
            gone = set(map(id, taken))
            self._jobs = deque(j for j in self._jobs if id(j) not in gone)
            if jobs := [j for j in taken if j.future.set_running_or_notify_cancel()]:
                return jobs
        return self._next()


class Order:
    """The requests of one model, which run in the order of their numbers, beginning with 1.

    A request whose number is not next waits for those before it, for `patience` seconds at most. The same
    request may be sent again. Called from one thread.
    """

    def __init__(self, worker: Worker, patience: float):
        self._worker, self._patience, self._next = worker, patience, 1
        self._waiting: dict[int, tuple[float, Job]] = {}
        self._seen: OrderedDict[int, bytes] = OrderedDict()

    def submit(self, number: int, body: bytes, job: Job) -> bool:
        """Take a request; False if the same request came before. Raises Refused for a number that another
        request had."""
        digest = hashlib.sha256(body).digest()
        if self._seen.get(number) == digest:
            return False
        if number in self._seen or number < self._next:
            raise Refused(f"seq_id {number} is out of order: another request had it, or came after it; the "
                          f"next is {self._next}", "number the requests of a model 1, 2, 3, ..., each once")
        self._seen[number] = digest
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        self._waiting[number] = time.monotonic() + self._patience, job
        self._release()
        return True

    def _release(self) -> None:
        while self._next in self._waiting:
            self._worker.submit(self._waiting.pop(self._next)[1])
            self._next += 1

    def give_up(self, now: float) -> None:
        """Fail the requests that have waited too long for one before them. What comes after goes on without
        the requests that never came."""
        late = [n for n, (until, _) in self._waiting.items() if until <= now]
        for n in sorted(n for n in self._waiting if late and n <= max(late)):
            self._waiting.pop(n)[1].future.set_exception(Refused(
                f"seq_id {n} waited {self._patience:g} s for seq_id {self._next}, which never came, or was "
                "refused before its number was read", "send the requests of a model in order, 1, 2, 3, ..."))
        self._next = max([self._next - 1, *late]) + 1
        self._release()

    def fail(self, error: Refused) -> None:
        """Fail all that waits."""
        for _, job in self._waiting.values():
            job.future.set_exception(error)
        self._waiting.clear()
