"""Requests in flight in served engines, which a publish interrupts and which go on after it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from bridges.api import Completion, GenRequest
from bridges.served.parts import Part
from bridges.served.vllm_client import VllmClient

POLL_SECONDS = 0.01


class Flights:
    """What `bridges.api.InFlight` has over a RolloutEngine, by a client."""

    def __init__(self, client: VllmClient):
        self.client, self._landed = client, threading.Event()
        self._groups: dict[str, tuple[list[Part], Future[list[Completion]]]] = {}

    def submit(self, requests: Sequence[GenRequest], begun: Sequence[Sequence[Completion]] = ()) -> None:
        """See InFlight. Raises as VllmClient.start."""
        self.client.require_usable(requests)
        for number, r in enumerate(requests):
            before = begun[number] if number < len(begun) else ()
            can = self.client.capabilities()
            parts = [Part(r, i, can, before[i] if before else None) for i in range(r.n)]
            future = self.client.start(r, parts)
            self._groups[r.request_id] = parts, future
            future.add_done_callback(lambda _: self._landed.set())

    def poll(self) -> list[list[Completion]]:
        """Those that are done since the last call, after a moment if there is none. Raises what ended one."""
        self.client.require_usable([])
        self._landed.wait(POLL_SECONDS)
        self._landed.clear()
        ready = [name for name, (_, future) in self._groups.items() if future.done()]
        return [self._groups.pop(name)[1].result() for name in ready]

    def partial(self) -> dict[str, list[Completion]]:
        return self.client.in_loop(
            lambda: {name: [part.so_far() for part in parts] for name, (parts, _) in self._groups.items()})

    def cancel(self, request_ids: Sequence[str]) -> None:
        for _, future in filter(None, [self._groups.pop(name, None) for name in request_ids]):
            future.cancel()
