"""Sampling whose progress is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bridges.api import Completion, GenRequest, Health, InFlight
from jaxfp8rl.environments.player import Generates, Player

Told = Callable[[int, int], None]  # called with (requests that are done, all requests)


class Watched:
    """Samples as `sampler` does and tells how many requests are done, as often as that changes."""

    def __init__(self, sampler: Generates, told: Told):
        self._sampler, self._told = sampler, told

    def generate(self, requests: Sequence[GenRequest], /) -> list[list[Completion]]:
        """See RolloutEngine. After an exception or an interruption nothing of it is left in the engine."""
        self._told(0, len(requests))
        if isinstance(self._sampler, Player):
            return self._sampler.generate(requests, self._told)
        if isinstance(self._sampler, InFlight):
            return self._polled(self._sampler, requests)
        answers = self._sampler.generate(requests)
        self._told(len(requests), len(requests))
        return answers

    def _polled(self, engine: InFlight, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        done: dict[str, list[Completion]] = {}
        try:
            engine.submit(requests)
            while len(done) < len(requests):
                if found := engine.poll():
                    done |= {completions[0].request_id: completions for completions in found}
                    self._told(len(done), len(requests))
        except BaseException:
            engine.cancel([r.request_id for r in requests if r.request_id not in done])
            raise
        return [done[r.request_id] for r in requests]

    def health(self) -> Health:
        return self._sampler.health()
