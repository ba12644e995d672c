"""An engine that may die: it is started anew, gets the weights of the version it had, and is asked again what
it left open."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from bridges.api import (
    Capabilities,
    Completion,
    EngineUnhealthy,
    GenRequest,
    Health,
    ManifestMismatch,
    PublishFailed,
    PublishReceipt,
    RolloutEngine,
    WeightSource,
    WeightTransport,
)

log = logging.getLogger(__name__)
PAUSE_SECONDS = 10.0  # after a start that failed: the memory of the engine before may not be free yet


class SupervisedEngine:
    """A RolloutEngine and the WeightTransport into it, as one. `start` makes both, the transport open on the
    engine.

    A call to an engine that has died, whatever its exit status, or that gives no answer by its deadline, is
    made once more to another one; what kills two engines in a row is no accident and is raised. `restarts`
    counts up to `budget`, over the engine's life, starts that failed, too. The source of a publish is read
    again when a version is published again: it must keep its tensors until the next publish, or until nothing
    is generated any more. `current`: the engine as it is now.
    """

    def __init__(self, start: Callable[[], tuple[RolloutEngine, WeightTransport]], budget: int):
        self._start, self._budget, self.restarts = start, budget, 0
        self._published: tuple[WeightSource, int] | None = None
        self._closed = False
        self.current, self._transport = start()

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        """See RolloutEngine. All requests are asked again: with their own seeds they are answered as they
        would have been."""
        return self._insist(lambda: self.current.generate(requests))

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """See WeightTransport. One that broke off because the engine died is made again, to the next
        engine."""
        before, restarts, self._published = self._published, self.restarts, None
        try:
            receipt = self._publish(source, version)
        except ManifestMismatch as e:
            if self.restarts > restarts:
                message = str(e).partition("\n  next step:")[0]
                raise PublishFailed(f"the engine was started anew and holds no weights: {message}",
                                    e.next_step) from e
            self._published = before  # the engine goes on as it was
            raise
        self._published = source, version
        return receipt

    def _publish(self, source: WeightSource, version: int) -> PublishReceipt:
        try:
            return self._insist(lambda: self._transport.publish(source, version), again=False)
        except PublishFailed as e:
            if not _of_engine(e):
                raise
            self._replace(e)
            return self._transport.publish(source, version)

    def verify(self, receipt: PublishReceipt) -> None:
        self._insist(lambda: self._transport.verify(receipt))

    def pause(self) -> None:
        self._insist(lambda: self.current.pause())

    def resume(self) -> None:
        self._insist(lambda: self.current.resume())

    def sleep(self) -> None:
        self._insist(lambda: self.current.sleep())

    def wake(self) -> None:
        """A publish follows: of the version before, its source may have nothing any more."""
        self._insist(lambda: self.current.wake(), again=False)

    def _insist(self, call: Callable[[], Any], again: bool = True) -> Any:
        """`call`, and once more with another engine, to which the last version is published `again`."""
        try:
            return call()
        except EngineUnhealthy as e:
            self._replace(e, again)
            return call()

    def _replace(self, error: Exception, again: bool = False) -> None:
        """Another engine, tried until one is up, with the last version if `again`, or the budget is spent."""
        while error:
            if self._closed:  # which is why
                raise EngineUnhealthy("the engine is closed", "build a new one") from error
            said = str(error).partition("\n")[0]
            if self.restarts == self._budget:
                raise EngineUnhealthy(
                    f"{said}; the engine has been started anew {self.restarts} times, which is all it may be",
                    "see its standard error; continue with --resume") from error
            self.restarts += 1
            log.warning("the engine is started anew, %d of %d times: %s", self.restarts, self._budget, said)
            self._end()
            error = self._failure(again)

    def _failure(self, again: bool) -> Exception | None:
        """Why the next engine did not come up, or None. Any error of its start may pass: the same has been
        made before."""
        up = False
        try:
            self.current, self._transport = self._start()
            up = True
            if self._closed:  # meanwhile
                self._end()
                return EngineUnhealthy("the engine was closed while it started")
            if again and self._published:
                self._transport.publish(*self._published)
        except Exception as e:
            if up and not _of_engine(e):
                raise
            time.sleep(PAUSE_SECONDS)
            return e
        return None

    def capabilities(self) -> Capabilities:
        return self.current.capabilities()

    def health(self) -> Health:
        return self.current.health()

    def weight_version(self) -> int | None:
        return self.current.weight_version()

    def open(self, engine: RolloutEngine) -> None:
        """It is open on itself."""

    def close(self) -> None:
        """For good, also where another thread is in a call: that fails."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        self._transport.close()
        self.current.close()


def _of_engine(error: Exception) -> bool:
    """Whether another engine may do better. Health does not tell: a server answers while its engine hangs,
    and what was unfit to learn from says nothing about this publish."""
    return isinstance(error, EngineUnhealthy) or isinstance(error.__cause__, EngineUnhealthy)
