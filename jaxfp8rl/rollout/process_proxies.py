"""Proxies of the engine, the transport and the rewards for a learner of several processes.

Only the first process has them; the proxies broadcast their results to all processes.
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
    VersionSpan,
    WeightSource,
    WeightTransport,
)
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.distributed.process_group import ProcessGroup
from jaxfp8rl.rewards.runner import RewardRunner, Score

World = tuple[RewardRunner, RolloutEngine, WeightTransport]


def with_proxies(group: ProcessGroup, make: Callable[[], World]) -> World:
    """The parts that `make` builds. With several processes, the first builds them and each gets proxies."""
    if group.count == 1:
        return make()
    rewards, engine, transport = make() if group.first else (None,) * 3
    proxies: Any = _Rewards(group, rewards), _Engine(group, engine), _Transport(group, transport)
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


def _fields(c: Completion) -> dict[str, Any]:
    """The fields of a completion as JSON types and arrays."""
    fields = {field.name: getattr(c, field.name) for field in dataclasses.fields(c)}
    return fields | {"version_spans": [dataclasses.astuple(span) for span in c.version_spans]}


def _completion(fields: dict[str, Any]) -> Completion:
    """The inverse of `_fields`."""
    spans = tuple(VersionSpan(*span) for span in fields.pop("version_spans"))
    return Completion(**fields, version_spans=spans)


class _Rewards(_RankZeroProxy):
    def score(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        return [Score(**s)
                for s in self._group.broadcast(lambda: [dataclasses.asdict(s)
                                                        for s in self._part.score(items)])]


class _Engine(_RankZeroProxy):
    def __init__(self, group: ProcessGroup, engine: Any):
        super().__init__(group, engine)
        fields = group.broadcast(lambda: dataclasses.asdict(engine.capabilities()))
        self._capabilities = Capabilities(**fields | {"formats": EngineFormats(**fields["formats"])})

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        answers = self._group.broadcast(lambda: [[_fields(c) for c in group]
                                            for group in self._part.generate(requests)])
        return [[_completion(fields) for fields in group] for group in answers]

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
    one's requests to gather sharded arrays (ProcessGroup.lend)."""

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        fields = self._group.broadcast(lambda: dataclasses.asdict(self._part.publish(source, version)))
        return PublishReceipt(**fields | {"caches_reset": tuple(fields["caches_reset"])})

    def verify(self, receipt: PublishReceipt) -> None:
        if self._part is not None:
            self._part.verify(receipt)
