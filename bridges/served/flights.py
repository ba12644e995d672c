"""Requests in flight to served engines (`bridges.api.InFlight`): submitted now, polled later, and interrupted
by publishes."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from bridges.api import Completion, GenRequest
from bridges.served.vllm_client import VllmClient

POLL_SECONDS = 0.2  # for which `poll` waits at most


class Flight(NamedTuple):
    """A request and what it began with."""

    request: GenRequest
    begun: Sequence[Completion]
    future: Future[list[Completion]]


class Flights:
    """What was submitted to `client` and has not been polled. Of one thread."""

    def __init__(self, client: VllmClient):
        self._client, self._flying = client, dict[str, Flight]()

    def submit(self, requests: Sequence[GenRequest], begun: Sequence[Sequence[Completion]] = ()) -> None:
        for r, so_far in itertools.zip_longest(requests, begun, fillvalue=()):
            assert isinstance(r, GenRequest)
            self._flying[r.request_id] = Flight(r, so_far, self._client.start(r, so_far))

    def poll(self) -> list[list[Completion]]:
        """Those that are done, after a moment at most. Raises what one of them raised."""
        futures = [flight.future for flight in self._flying.values()]
        concurrent.futures.wait(futures, POLL_SECONDS, concurrent.futures.FIRST_COMPLETED)
        done = [name for name, flight in self._flying.items() if flight.future.done()]
        return [self._flying.pop(name).future.result() for name in done]

    def partial(self) -> dict[str, list[Completion]]:
        """What they began with: an engine tells the tokens of a completion when it is done."""
        return {name: list(f.begun) or [_nothing(f.request, i) for i in range(f.request.n)]
                for name, f in self._flying.items()}

    def cancel(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            if flight := self._flying.pop(name, None):
                flight.future.cancel()


def _nothing(r: GenRequest, index: int) -> Completion:
    return Completion(r.request_id, index, np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", ())
