"""Served engines as a run needs them: a rollout engine and the transport into it, as one.

A replica that has died while others sample is brought back in the background: started anew if it is a child
of this run, and given the last version again. If the learner may overwrite that version meanwhile (`replay`
is False), the replica waits for the next publish. A publish goes to all replicas that are there. One that
dies in the middle of it is left out, and the others get the publish again in full.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Literal

from bridges.admission import ADMIT
from bridges.api import (
    BridgeError,
    Capabilities,
    Completion,
    EngineDirty,
    EngineUnhealthy,
    GenRequest,
    Health,
    ManifestMismatch,
    ParamMeta,
    PublishFailed,
    PublishReceipt,
    RolloutEngine,
    WeightSource,
    first_line,
)
from bridges.inside_vllm import device_pool
from bridges.order import HOW
from bridges.served.parts import Part
from bridges.served.serve_process import ServeProcesses
from bridges.served.served_transport import ServedTransport
from bridges.served.vllm_client import Deadlines, VllmClient

log = logging.getLogger(__name__)
POLL_SECONDS = 0.1
LANDED_SECONDS = 0.01  # how long `poll` waits for a completion
DEADLINES = Deadlines()


class ServedEngines:
    """InFlight and WeightTransport over `urls`, or over `processes`, which it closes.

    transport: makes the way into the replicas at some of the addresses. restarts: how many starts of dead
    children a run may see in all. replay: the source of a publish stays as it is while `generate` runs, so
    that a replica that returns meanwhile can be given it again. sleep: what `sleep` gives back, of replicas
    that were started with `--enable-sleep-mode`.

    Raises as VllmClient does.
    """

    publish_pauses = True  # its transport does, once it has read what the learner holds

    def __init__(self, token: str, transport: Callable[[Sequence[str]], ServedTransport], *,
                 urls: Sequence[str] = (), processes: ServeProcesses | None = None,
                 deadlines: Deadlines = DEADLINES, connections: int = 1024, order: HOW = "fifo",
                 admit: ADMIT = "all",
                 token_file: str = "its engine", restarts: int = 0, replay: bool = True,
                 sleep: Literal["off", "keep_weights", "drop_weights"] = "off"):
        self._processes, self._make, self._replay = processes, transport, replay
        self._budget, self.restarts, self._closed = restarts, 0, False
        self._sleep, self._asleep = sleep, False
        self._published: tuple[WeightSource, int] | None = None
        self._transport: ServedTransport | None = None
        self._to: tuple[str, ...] = ()  # the replicas that the transport is open on
        self._publishing = threading.RLock()  # held by who publishes, and by who ends a `generate`
        self._waiting = False  # a publish waits for a replica to return
        self._sampling, self._counting = 0, threading.Lock()
        self._landed = threading.Event()
        self._groups: dict[str, tuple[list[Part], Future[list[Completion]]]] = {}  # those submitted
        self.client = VllmClient(processes.urls if processes else urls, token, deadlines,
                                 connections=connections, order=order, admit=admit, token_file=token_file,
                                 revive=self._revive)

    def capabilities(self) -> Capabilities:
        return self.client.capabilities()

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        """See RolloutEngine and VllmClient.generate."""
        self._require_awake()
        with self._kept_source():
            if self._replay:
                self.client.try_again()  # those that returned between two calls
            return self.client.generate(requests)

    def submit(self, requests: Sequence[GenRequest], begun: Sequence[Sequence[Completion]] = ()) -> None:
        """See InFlight. Raises as VllmClient.start."""
        self._require_awake()
        self.client.require_usable(requests)
        for number, r in enumerate(requests):
            before = begun[number] if number < len(begun) else ()
            can = self.client.capabilities()
            parts = [Part(r, i, can, before[i] if before else None) for i in range(r.n)]
            future = self.client.start(r, parts)
            self._groups[r.request_id] = parts, future
            future.add_done_callback(lambda _: self._landed.set())

    def poll(self) -> list[list[Completion]]:
        """Those that are done since the last call, after a moment if there is none. Raises what ended one.
        Where no replica is up and one lacks but weights, the last ones are published again: who polls lets
        the learner wait."""
        replicas = self.client.replicas
        if self._published and all(r.down for r in replicas) and any(r.lost is EngineDirty for r in replicas):
            self.publish(*self._published)
        self.client.require_usable([])
        self._landed.wait(LANDED_SECONDS)
        self._landed.clear()
        ready = [name for name, (_, future) in self._groups.items() if future.done()]
        for name in ready:
            if (error := self._groups[name][1].exception()) is not None:
                del self._groups[name]
                raise error  # the others stay, for the next call or for `partial`
        return [self._groups.pop(name)[1].result() for name in ready]

    def partial(self) -> dict[str, list[Completion]]:
        return self.client.in_loop(
            lambda: {name: [part.so_far() for part in parts] for name, (parts, _) in self._groups.items()})

    def cancel(self, request_ids: Sequence[str]) -> None:
        for _, future in filter(None, [self._groups.pop(name, None) for name in request_ids]):
            future.cancel()

    def _require_awake(self) -> None:
        if self._asleep:
            raise BridgeError("the engines are asleep", "call wake() first")

    @contextlib.contextmanager
    def _kept_source(self) -> Iterator[None]:
        """While it lasts, the last version may be published again; it ends when none is."""
        with self._counting:
            self._sampling += 1
        try:
            yield
        finally:
            with self._publishing if self._replay else contextlib.nullcontext(), self._counting:
                self._sampling -= 1

    # Publishing

    def open(self, engine: RolloutEngine) -> None:
        """It is open on itself."""

    def expected_manifest(self) -> tuple[ParamMeta, ...]:
        """Every tensor that a publish must bring, in checkpoint layout."""
        with self._publishing:
            return self._opened(self._present()).expected_manifest()

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """See WeightTransport. Raises PublishFailed when no replica is left to publish to."""
        with self._publishing:
            before, self._published, dirty = self._published, None, self.client.dirty
            try:
                receipt = self._publish(source, version)
            except ManifestMismatch as e:
                if self.client.dirty != dirty:  # one has died since, and the next was refused its weights
                    raise PublishFailed(f"an engine was started anew and holds no weights: {first_line(e)}",
                                        e.next_step) from e
                self._published = before  # the engines go on as they were
                raise
            self._published = source, version
            return receipt

    def _publish(self, source: WeightSource, version: int) -> PublishReceipt:
        while True:
            present = self._present()
            try:
                return self._opened(present).publish(source, version)
            except ManifestMismatch:
                raise
            except BridgeError as e:
                self.client.dirty = f"the publish of version {version} has not finished"
                self._close_transport()
                if not self._lay_down(present, e):
                    if isinstance(e, PublishFailed):
                        raise
                    raise PublishFailed(f"version {version} broke off: {first_line(e)}",
                                        e.next_step or "publish again in full") from e

    def _present(self) -> tuple[str, ...]:
        """The replicas that can be published to: those that are up, and those that only lack weights. Waits
        while there is none and one may return. Raises PublishFailed when none can."""
        until, replicas = time.monotonic() + self.client.deadlines.down, self.client.replicas
        self._waiting = True
        try:
            while not (present := tuple(r.url for r in replicas if not r.down or r.lost is EngineDirty)):
                if all(r.lost for r in replicas) or time.monotonic() > until:
                    raise PublishFailed(f"no engine is left: {self.client.health().detail}",
                                        "see the engines' logs; go on with --resume")
                time.sleep(POLL_SECONDS)
        finally:
            self._waiting = False
        return present

    def _lay_down(self, urls: Sequence[str], error: BridgeError) -> bool:
        """Put down those of the replicas that do not answer -> whether there are any."""
        dead = [url for url in urls if not self._answers(url)]
        for url in dead:
            self.client.put_down(url, first_line(error))
        return bool(dead)

    def _answers(self, url: str) -> bool:
        """Whether the engine behind the server answers, too: a server does so while its engine hangs."""
        if self._processes and not self._processes.alive(self._processes.urls.index(url)):
            return False
        try:
            self.client.version_of(url)
            self.client.call(url, "/is_paused")
        except EngineUnhealthy:
            return False
        return True

    def _opened(self, urls: Sequence[str]) -> ServedTransport:
        if self._transport is None or self._to != tuple(urls):
            self._close_transport()
            transport = self._make(urls)
            transport.open(self.client)  # which is told who is left out, and who holds a publish
            self._transport, self._to = transport, tuple(urls)
        return self._transport

    def _close_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport, self._to = None, ()

    def verify(self, receipt: PublishReceipt) -> None:
        with self._publishing:
            if self._transport is not None and not self.client.dirty:
                return self._transport.verify(receipt)
            # a replica has been given it since: by another transport, which proved it
            if self.client.dirty or self.weight_version() != receipt.version:
                raise PublishFailed(self.client.dirty or f"the engines do not hold version {receipt.version}",
                                    "publish again in full")

    # Replicas that died

    def _revive(self, url: str) -> None:
        """Bring the replica at `url` back, in a thread of its own. Raises EngineDirty where that takes a
        publish, EngineUnhealthy where it is lost."""
        self._start_again(url)
        while not self._publishing.acquire(timeout=POLL_SECONDS):
            if self._waiting:
                raise EngineDirty("a publish waits for it")
        try:
            self._give_again(url)
        finally:
            self._publishing.release()

    def _give_again(self, url: str) -> None:
        published = self._published
        if published and self.client.version_of(url) == published[1]:
            return
        self._close_transport()  # a server that was started anew knows nothing of its lease
        with self._counting:
            if published is None or not (self._replay and self._sampling):
                raise EngineDirty("it waits for the next publish")
        with contextlib.closing(self._make([url])) as transport:
            transport.open()
            transport.publish(*published)
        log.warning("the engine at %s has version %d again", url, published[1])

    def _start_again(self, url: str) -> None:
        """Until it answers: as a child of this run it is started anew if it has died, or hangs."""
        until = time.monotonic() + self.client.deadlines.down
        if self._processes is None:
            while not self._answers(url):
                if self._closed or time.monotonic() > until:
                    raise EngineUnhealthy(f"not back after {self.client.deadlines.down:g} s")
                time.sleep(POLL_SECONDS)
            return
        i = self._processes.urls.index(url)
        while not self._answers(url):
            if self._closed:
                raise EngineUnhealthy("the engines are closed", "build new ones")
            with self._counting:
                if self.restarts >= self._budget:
                    raise EngineUnhealthy(
                        f"engines have been started anew {self.restarts} times, which is all they may be")
                self.restarts += 1
            log.warning("the engine at %s is started anew, %d of %d times", url, self.restarts, self._budget)
            try:
                self._processes.start(i)
                self._processes.wait_until_ready(self.client.deadlines.down, only=i)
            except EngineUnhealthy as e:
                log.warning("the engine at %s did not start: %s", url, first_line(e))

    # The rest of a RolloutEngine

    def health(self) -> Health:
        return self.client.health()

    def metrics(self) -> dict[str, float]:
        """See VllmClient."""
        return self.client.metrics()

    def weight_version(self) -> int | None:
        return self.client.weight_version()

    def pause(self, keep_cache: bool = True) -> None:
        """Freeze what is in flight. The transport was made to keep its cache or not."""
        self.client.pause()

    def resume(self) -> None:
        self.client.resume()

    def sleep(self) -> None:
        """Give back the memory of the replicas' caches, or also of their weights; refuse to generate until
        `wake`."""
        if self._sleep == "off":
            return
        with self._publishing:
            self._opened(self._present()).post(f"/sleep?level={1 if self._sleep == 'keep_weights' else 2}")
            self._asleep = True
            if self._sleep == "drop_weights":
                self.client.dirty = "sleep() dropped their weights"

    def wake(self) -> None:
        """Take the memory back. If the weights were dropped, that of the caches follows with the next
        publish.

        Raises EngineUnhealthy if there is none.
        """
        if not self._asleep:
            return
        device_pool.give_back()
        with self._publishing:
            try:
                self._opened(self._present()).post("/wake_up" + "?tags=weights"
                                                   * (self._sleep == "drop_weights"))
            except PublishFailed as e:
                raise EngineUnhealthy(f"the engines could not take back their memory: {first_line(e)}",
                                      device_pool.LEAVE_MORE) from e
            self._asleep = False

    def close(self) -> None:
        """At once, also where another thread samples: that fails. Idempotent."""
        if not self._closed:
            self._closed = True
            with contextlib.ExitStack() as ends:  # each, whatever another raises: the last first
                if self._processes:
                    ends.callback(self._processes.close)
                ends.callback(self._close_transport)
                ends.callback(self.client.close)
