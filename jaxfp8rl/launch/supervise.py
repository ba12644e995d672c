"""Start the jobs of a plan in order, wait for the learner, and end everything with it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from jaxfp8rl.errors import ProcessFailed
from jaxfp8rl.launch.children import Child, Restarted, last_lines
from jaxfp8rl.launch.jobs import Job, Plan

POLL_SECONDS = 0.3
READY_SECONDS = 900.0
OTHERS_SECONDS = 300.0  # for the other learners, when one has ended: JAX misses it by then


class Running(Protocol):
    """A job that was started. poll: its exit code, None while it runs. end: with all that it started."""

    def poll(self) -> int | None: ...
    def signal(self, number: int) -> None: ...
    def end(self) -> None: ...


def run_here(plan: Plan) -> int:
    """Run the plan as children of this process -> the learner's exit code. The output of the first learner
    is this command's; that of the others goes to logs in the plan's folder."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    log = lambda job: plan.folder / f"{job.name.replace(' ', '-')}.log"
    return supervised(
        plan, lambda job: Restarted(job, log(job), plan.restarts),
        lambda job: Child(job, log(job) if job.need.number else None), log)


def supervised(plan: Plan, engine: Callable[[Job], Running], learner: Callable[[Job], Running],
               log: Callable[[Job], Path]) -> int:
    """Start the engines, then the learners, each by its function -> the learner's exit code. When it returns
    or raises, nothing runs any more. Raises ProcessFailed if an engine does not become ready."""
    with contextlib.ExitStack() as stack, _asked_to_stop() as asked:
        def started(start: Callable[[Job], Running], job: Job) -> Running:
            running = start(job)
            ends.append(running.end)
            return running

        ends: list[Callable[[], None]] = []
        stack.callback(lambda: _side_by_side(ends))
        stack.callback(lambda: Path(plan.token_file).unlink(missing_ok=True) if plan.engines else None)
        engines = [started(engine, job) for job in plan.engines]
        _wait_until_ready(plan, engines, log, asked)
        learners = [] if asked else [started(learner, job) for job in plan.learners]
        return _watch(learners, engines, asked)


def _watch(learners: Sequence[Running], engines: Sequence[Running], asked: list[int]) -> int:
    """The first learner's exit code, or that of another which failed, when all have ended. A signal goes to
    all learners, which save and end; after a second one nothing is waited for."""
    told, until = 0, float("inf")
    while True:
        codes = [running.poll() for running in learners]
        for running in engines:
            running.poll()  # starts it again
        if all(code is not None for code in codes) or len(asked) > 1 or time.monotonic() > until:
            return _exit_code(codes, asked)
        if any(code is not None for code in codes):
            until = min(until, time.monotonic() + OTHERS_SECONDS)
        if len(asked) > told:
            told = len(asked)
            for running in learners:
                running.signal(asked[-1])
        time.sleep(POLL_SECONDS)


def _exit_code(codes: Sequence[int | None], asked: Sequence[int]) -> int:
    """The first failure; 0 if the first learner has none, though others may not have ended."""
    if failed := [code for code in codes if code]:
        return failed[0]
    return 0 if codes and codes[0] == 0 else 128 + asked[0]


def _wait_until_ready(plan: Plan, engines: Sequence[Running], log: Callable[[Job], Path],
                      asked: list[int]) -> None:
    until, left = time.monotonic() + READY_SECONDS, list(zip(plan.engines, engines))
    token = Path(plan.token_file).read_text() if left else ""
    while left and not asked:
        for job, running in list(left):
            if (code := running.poll()) is not None or time.monotonic() > until:
                late = f"took over {READY_SECONDS:g} s"
                how = late if code is None else f"ended with exit status {code}"
                raise ProcessFailed(f"{job.name} {how} before it was ready{last_lines(log(job))}",
                                    f"see {log(job)}", exit_code=5)
            if answers(job.address, token):
                print(f"{job.name} is ready at {job.address}", flush=True)
                left.remove((job, running))
        time.sleep(POLL_SECONDS if left else 0)


def answers(url: str, token: str) -> bool:
    """Whether an engine serves there."""
    request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
            return answer.status == 200
    except (OSError, ValueError):
        return False


def _side_by_side(ends: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=end) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """The numbers of the signals to end that have come, meanwhile."""
    asked: list[int] = []
    before = {s: signal.signal(s, lambda number, _: asked.append(number))
              for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
