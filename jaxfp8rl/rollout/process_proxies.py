"""Proxies of the engine, the transport and the rewards for a learner of several processes.

Only the first process has them, and it alone samples and scores (jaxfp8rl.rollout.shared_batches). Of the
rest, the proxies broadcast the results to all processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from bridges.api import (
    Capabilities,
    Completion,
    EngineFormats,
    GenRequest,
    Health,
    PublishReceipt,
    RolloutEngine,
    WeightSource,
    WeightTransport,
)
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.distributed.process_group import ProcessGroup
from jaxfp8rl.rewards.runner import RewardRunner, Score

World = tuple[RewardRunner, RolloutEngine, WeightTransport]


def with_proxies(group: ProcessGroup, make: Callable[[], World], outlet: Any = None) -> World:
    """The parts that `make` builds. With several processes, the first builds them and each gets proxies.
    outlet: of this process, through which it sends its part of a publish, if the transport has any."""
    if group.count == 1:
        return make()
    rewards, engine, transport = make() if group.first else (None,) * 3
    proxies: Any = _Rewards(group, rewards), _Engine(group, engine), _Transport(group, transport, outlet)
    return proxies  # each has the methods of its protocol that the loop calls


class _RankZeroProxy:
    """A part that only the first process has. `_here` calls a method there without telling the others."""

    def __init__(self, group: ProcessGroup, part: Any):
        self._group, self._part = group, part

    def _here(self, name: str) -> None:
        if self._part is not None:
            getattr(self._part, name)()

    def close(self) -> None:
        self._here("close")


class _Rewards(_RankZeroProxy):
    def score(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        """In the first process alone, like `generate`: what all need of the result is shared later."""
        return self._part.score(items)


class _Engine(_RankZeroProxy):
    def __init__(self, group: ProcessGroup, engine: Any):
        super().__init__(group, engine)
        fields = group.broadcast(lambda: dataclasses.asdict(engine.capabilities()))
        self._capabilities = Capabilities(**fields | {"formats": EngineFormats(**fields["formats"])})

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        """In the first process alone."""
        return self._part.generate(requests)

    def pause(self) -> None:
        self._here("pause")

    def resume(self) -> None:
        self._here("resume")

    def sleep(self) -> None:
        self._here("sleep")

    def wake(self) -> None:
        self._here("wake")

    def health(self) -> Health:
        return self._part.health() if self._part is not None else Health(True)

    @property
    def restarts(self) -> int:
        return getattr(self._part, "restarts", 0)

    def weight_version(self) -> int | None:
        return self._group.broadcast(lambda: self._part.weight_version())


class _Transport(_RankZeroProxy):
    """A transport that is already open. While the other processes wait for the receipt, they serve the first
    one's requests to gather sharded arrays (ProcessGroup.lend), or send their own parts by an outlet
    (ProcessGroup.serve)."""

    def __init__(self, group: ProcessGroup, part: Any, outlet: Any = None):
        super().__init__(group, part)
        self._outlet = outlet

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        if self._outlet is not None:
            self._outlet.source = source
        fields = self._group.broadcast(lambda: dataclasses.asdict(self._part.publish(source, version)))
        return PublishReceipt(**fields | {"caches_reset": tuple(fields["caches_reset"])})

    def verify(self, receipt: PublishReceipt) -> None:
        if self._part is not None:
            self._part.verify(receipt)

    def close(self) -> None:
        super().close()
        if self._outlet is not None:
            self._outlet.close()
