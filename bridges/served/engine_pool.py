"""Several engines as one: requests are shared out among them, every publish goes to all, and what one lacks
all lack."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bridges.api import (
    BridgeError,
    Capabilities,
    Completion,
    EngineDirty,
    GenRequest,
    Health,
    ManifestMismatch,
    PublishFailed,
    PublishReceipt,
    RolloutEngine,
    WeightSource,
    WeightTransport,
)


class Member(NamedTuple):
    """An engine of a pool, and the transport that is open on it."""

    engine: RolloutEngine
    transport: WeightTransport


class EnginePool:
    """A RolloutEngine and the WeightTransport into it, as one, over `members` that are alike. The pool closes
    them.

    Request i of a call goes to member i modulo their number; all sample at once. A publish goes to one after
    the other, whose links would share the learner's bandwidth anyway; if one fails the pool is dirty, though
    others may hold the new version: the next publish in full heals it.

    Raises BridgeError where members are not alike.
    """

    def __init__(self, members: Sequence[Member]):
        self.members, self._dirty = tuple(members), "nothing has been published"
        self._threads = concurrent.futures.ThreadPoolExecutor(len(self.members), "engine")
        if len(found := {repr(m.engine.capabilities()) for m in self.members}) > 1:
            self.close()
            raise BridgeError(f"engines of a pool are alike, these are not: {'; '.join(sorted(found))}",
                              "build them alike")

    @classmethod
    def start(cls, starters: Sequence[Callable[[], Member]]) -> EnginePool:
        """Of what the starters make, side by side. If one raises, that is raised, and the others are
        closed."""
        with concurrent.futures.ThreadPoolExecutor(len(starters)) as threads:
            made = [threads.submit(start) for start in starters]
        failed = next((error for m in made if (error := m.exception())), None)
        if failed is None:
            return cls([m.result() for m in made])
        _close([m.result() for m in made if not m.exception()])
        raise failed

    @property
    def restarts(self) -> int:
        """How often members that start anew have done so."""
        return sum(getattr(m.engine, "restarts", 0) for m in self.members)

    def capabilities(self) -> Capabilities:
        return self.members[0].engine.capabilities()

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        """See RolloutEngine. Raises what the first of the members raised, when all of them are done."""
        if self._dirty:
            raise EngineDirty(f"the engines have no usable weights: {self._dirty}",
                              "publish a full set of weights first")
        count = len(self.members)
        shares = [requests[i::count] for i in range(count)]
        answers = self._all(lambda i, m: m.engine.generate(shares[i]) if shares[i] else [])
        return [answers[i % count][i // count] for i in range(len(requests))]

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """See WeightTransport. `source` is read once a member. The receipt is of one member; `seconds` of all
        together."""
        before, receipts = self._dirty, []
        self._dirty = f"the publish of version {version} has not finished"
        try:
            for m in self.members:
                receipts.append(m.transport.publish(source, version))
        except ManifestMismatch:
            if not receipts:  # before a byte moved anywhere
                self._dirty = before
            raise
        if len({(r.digest, r.content) for r in receipts}) > 1:
            raise PublishFailed(f"version {version}: the engines do not hold the same bytes",
                                "publish again in full")
        self._dirty = ""
        return dataclasses.replace(receipts[0], seconds=sum(r.seconds for r in receipts))

    def verify(self, receipt: PublishReceipt) -> None:
        self._all(lambda i, m: m.transport.verify(receipt))

    def pause(self) -> None:
        self._all(lambda i, m: m.engine.pause())

    def resume(self) -> None:
        self._all(lambda i, m: m.engine.resume())

    def sleep(self) -> None:
        self._all(lambda i, m: m.engine.sleep())

    def wake(self) -> None:
        self._all(lambda i, m: m.engine.wake())

    def health(self) -> Health:
        said = [m.engine.health() for m in self.members]
        return Health(all(h.ok for h in said),
                      "; ".join(f"engine {i}: {h.detail}" for i, h in enumerate(said) if h.detail))

    def weight_version(self) -> int | None:
        """None unless all have the same."""
        versions = set(self._all(lambda i, m: m.engine.weight_version()))
        return versions.pop() if len(versions) == 1 and not self._dirty else None

    def open(self, engine: RolloutEngine) -> None:
        """It is open on itself."""

    def close(self) -> None:
        """Side by side, and at once: a generation in progress fails."""
        self._dirty = "they are closed"
        # what waits its turn is not cancelled: it fails, and whoever waits for it is told
        self._threads.shutdown(wait=False)
        _close(self.members)

    def _all(self, call: Callable[[int, Member], Any]) -> list[Any]:
        """`call` on every member at once. Nothing is left running when it raises."""
        try:
            done = [self._threads.submit(call, i, m) for i, m in enumerate(self.members)]
        except RuntimeError as e:
            raise BridgeError("the engines are closed", "build new ones") from e
        concurrent.futures.wait(done)
        return [d.result() for d in done]


def _close(members: Sequence[Member]) -> None:
    def close(m: Member) -> None:
        m.transport.close()
        if m.engine is not m.transport:
            m.engine.close()

    with concurrent.futures.ThreadPoolExecutor(max(len(members), 1)) as threads:
        for done in [threads.submit(close, m) for m in members]:
            done.result()
