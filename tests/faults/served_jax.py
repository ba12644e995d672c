"""The embedded engine as a served one: a StandIn serves it over HTTP in this process, and it can die, weights
and all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "bridges"))

from stand_in import TOKEN, StandIn

from bridges.api import RolloutEngine, WeightTransport
from bridges.engines.embedded_engine import EmbeddedEngine
from bridges.served.served_engines import ServedEngines
from bridges.served.vllm_client import Deadlines


class Mortal(StandIn):
    """dies: is asked of each request for a completion whether the server ends instead of answering."""

    def __init__(self, engine: EmbeddedEngine, port: int, dies: Callable[[], bool]):
        self._dies = dies
        super().__init__(engine, fault=self._answer_or_die, port=port)

    async def _answer_or_die(self, _, reader, writer):
        if self._dies():
            threading.Thread(target=self.close).start()
            await self.hold(reader, 60.0)
        self.answer(writer, *self._generate(self.asked[-1]))

    def close(self) -> None:
        super().close()
        self.engine.close()


class OneChild:
    """`ServeProcesses` with one child, and the way of weights into it."""

    def __init__(self, make: Callable[[], tuple[EmbeddedEngine, WeightTransport]], dies: Callable[[], bool]):
        self._make, self._dies = make, dies
        self._begin(0)
        self.urls = (self._server.url,)

    def _begin(self, port: int) -> None:
        engine, self._way = self._make()
        self._server = Mortal(engine, port, self._dies)

    def start(self, i: int) -> None:
        self._server.close()
        self._begin(self._server.port)

    def wait_until_ready(self, seconds: float, only: int) -> None:
        """It is."""

    def alive(self, i: int) -> bool:
        return self._server.alive

    def close(self) -> None:
        self._server.close()

    def transport(self, urls) -> Way:
        return Way(self)


class Way:
    def __init__(self, child: OneChild):
        self._child, self._client = child, None

    def open(self, client=None):
        self._client = client

    def publish(self, source, version):
        receipt = self._child._way.publish(source, version)
        if self._client:
            self._client.published()
        return receipt

    def verify(self, receipt):
        self._child._way.verify(receipt)

    def close(self):
        self._client = None


def served(make: Callable[[], tuple[EmbeddedEngine, WeightTransport]],
           dies: Callable[[], bool] = lambda: False,
           restarts: int = 3) -> tuple[RolloutEngine, WeightTransport]:
    """An engine that `make` makes, and makes again when it has died, as `rollout.engine = "served"` has
    it."""
    child = OneChild(make, dies)
    engine = ServedEngines(TOKEN, child.transport, processes=child, restarts=restarts,
                           deadlines=Deadlines(connect=5.0, generate=60.0, call=60.0, down=60.0))
    return engine, engine
