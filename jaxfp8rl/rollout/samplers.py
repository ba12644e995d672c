"""How admitted groups get their completions: whole between two publishes, or in flight across them.

An engine that only has `generate` samples whole groups: a publish waits until those submitted are done. It
does so in a thread beside the learner, or when the step asks. An engine that is `InFlight` goes on with its
completions after a publish, which interrupts it for as long as the weights take to write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from bridges.api import EngineUnhealthy, InFlight
from jaxfp8rl.environments.player import Generates
from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.rollout.queue import Ticket

Judge = Callable[[Sequence[Ticket], Clock], None]  # scores the groups of tickets that are done


class Sampler(Protocol):
    """What a pipeline asks of an engine."""

    def submit(self, tickets: Sequence[Ticket], version: int) -> None:
        """Sample these groups at `version` or, in flight, from it on."""
        ...

    def wait(self, ready: Callable[[], bool], clock: Clock) -> None:
        """Sample until `ready` is true."""
        ...

    def hold(self, clock: Clock) -> None:
        """Return once the weights may be written."""
        ...

    def release(self) -> None:
        """The weights are written: go on."""
        ...

    def cancel(self, tickets: Sequence[Ticket]) -> None: ...

    def refresh(self) -> None:
        """Give the tickets in flight what has been sampled of them."""
        ...


class _Job:
    """Groups that one call of `generate` samples."""

    def __init__(self, tickets: Sequence[Ticket]):
        self.tickets, self.finished, self.error = list(tickets), threading.Event(), None

    def run(self, engine: Generates, judge: Judge, clock: Clock) -> None:
        """Sample and score the groups. An exception is kept for the learner's thread."""
        try:
            with clock("rollout"):
                answers = engine.generate([t.request for t in self.tickets])
            for ticket, completions in zip(self.tickets, answers, strict=True):
                ticket.completions = tuple(completions)
            judge(self.tickets, clock)
            for ticket in self.tickets:
                ticket.done = True
        except BaseException as e:  # raised where the groups are taken
            self.error = e
        finally:
            self.finished.set()


class WholeGroups:
    """A Sampler of any engine, by calls of `size` groups. `beside`: in a thread, so that the engine samples
    while the learner learns."""

    def __init__(self, engine: Generates, judge: Judge, size: int, beside: bool):
        self._engine, self._judge, self._size = engine, judge, size
        self._beside, self._jobs = beside, list[_Job]()
        self._thread: threading.Thread | None = None

    def _work(self, jobs: Sequence[_Job], before: threading.Thread | None) -> None:
        if before:
            before.join()
        for job in jobs:
            clock = Clock()
            for ticket in job.tickets:
                ticket.clock = clock
            job.run(self._engine, self._judge, clock)

    def submit(self, tickets: Sequence[Ticket], version: int) -> None:
        for ticket in tickets:  # what another kind of engine had begun is sampled anew
            ticket.version, ticket.completions = version, ()
        jobs = [_Job(tickets[at : at + self._size]) for at in range(0, len(tickets), self._size)]
        self._jobs += jobs
        if self._beside and jobs:
            arguments = jobs, self._thread
            self._thread = threading.Thread(target=self._work, args=arguments, name="rollout", daemon=True)
            self._thread.start()

    def wait(self, ready: Callable[[], bool], clock: Clock) -> None:
        while self._jobs and not ready():
            self._finish(clock)

    def hold(self, clock: Clock) -> None:
        self.wait(lambda: False, clock)

    def _finish(self, clock: Clock) -> None:
        """Finish the first job. Raises the exception that it raised."""
        job = self._jobs.pop(0)
        if self._beside:
            with clock("wait"):
                job.finished.wait()
        else:
            job.run(self._engine, self._judge, clock)
        if job.error:
            raise job.error

    def release(self) -> None:
        """Nothing was interrupted."""

    refresh = release

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Nothing is in flight when a step drops groups."""


class Interrupted:
    """A Sampler of an engine whose completions go on after a publish. `recompute_kv`: their keys and values
    are computed again by the new weights."""

    def __init__(self, engine: InFlight, recompute_kv: bool):
        self._engine, self._recompute = engine, recompute_kv
        self._publish_pauses = getattr(engine, "publish_pauses", False)
        self._flying: dict[str, Ticket] = {}

    def submit(self, tickets: Sequence[Ticket], version: int) -> None:
        for ticket in tickets:
            self._flying[ticket.request.request_id] = ticket
        self._engine.submit([t.request for t in tickets], [t.completions for t in tickets])

    def wait(self, ready: Callable[[], bool], clock: Clock) -> None:
        with clock("rollout"):
            while not ready():
                if not self._flying:
                    raise EngineUnhealthy("no group is in flight, and the step has too few",
                                          "resume from the last checkpoint with --resume")
                for completions in self._engine.poll():
                    ticket = self._flying.pop(completions[0].request_id)
                    ticket.completions, ticket.done = tuple(completions), True

    def hold(self, clock: Clock) -> None:
        """Freeze what is in flight, unless a publish does so by itself."""
        if self._flying and not self._publish_pauses:
            self._engine.pause(keep_cache=not self._recompute)

    def release(self) -> None:
        if self._flying and not self._publish_pauses:
            self._engine.resume()

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        gone = [t.request.request_id for t in tickets if not t.done]
        for name in gone:
            self._flying.pop(name, None)
        if gone:
            self._engine.cancel(gone)

    def refresh(self) -> None:
        for name, completions in self._engine.partial().items():
            if name in self._flying:
                self._flying[name].completions = tuple(completions)
