"""Stock `vllm serve` processes as one rollout engine: token ids in and out over HTTP.

    client = VllmClient(["http://127.0.0.1:8000", "http://127.0.0.1:8001"], read_token("token"))

A completion is one HTTP request, to the replica with the fewest in flight. The completions of one prompt go
to the same replica, which computes the prompt once, and so do the requests of one session until the next
publish: it has the keys and values of their prefix. A replica that dies, gives no answer by the deadline or
answers nonsense is down until `revive` has brought it back. Another replica is asked for what it had begun:
from the start, or by `start` after the tokens that have come. What the caller no longer waits for is
cancelled: its connection closes, and vLLM aborts it. `bridges.served.served_transport` publishes.

Needs httpx; neither torch nor vLLM. Calls may come from many threads at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import resource
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from bridges.admission import ADMIT
from bridges.api import (
    BridgeError,
    Capabilities,
    Completion,
    EngineDirty,
    EngineUnhealthy,
    GenRequest,
    Health,
    first_line,
)
from bridges.inside_vllm.sampling import check
from bridges.order import HOW, PATIENCE, Order
from bridges.served import token_api
from bridges.served.gate import Gate
from bridges.served.http_calls import BadAnswer, HttpCalls, RequestRefused, checked_url
from bridges.served.parts import Part
from bridges.served.replicas import Replica, Replicas
from bridges.served.rooms import METRICS, NEXT, Rooms, cache_of

ATTEMPTS = 3  # what ends so many replicas in a row is no accident
PROBE_SECONDS = 0.5
CLOSE_SECONDS = 60.0  # a deadline may be infinite


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Seconds: to connect, for one completion, for any other call, for a replica that is down to return."""

    connect: float = 5.0
    generate: float = 1800.0
    call: float = 60.0
    down: float = 600.0


class VllmClient:
    """RolloutEngine over M replicas.

    connections: how many may be open at once, and at most half of this process's file descriptors; further
    completions wait for their turn, in this order (bridges.order). admit: "cache" hands a replica what its
    cache is expected to hold (bridges.admission), and has all tokens streamed. token_file: named where the
    token is refused. capabilities: of servers without the plugin, which cannot tell them. revive: called in a
    thread with the address of a replica that is down. It returns when the replica may be asked again, raises
    EngineDirty if that takes a publish, and any other BridgeError if the replica is lost. The default waits
    until the replica answers.

    Raises BridgeError for servers that are not alike, EngineUnhealthy for one that does not answer.
    """

    def __init__(self, urls: Sequence[str], token: str, deadlines: Deadlines = Deadlines(), *,
                 connections: int = 1024, order: HOW = "fifo", admit: ADMIT = "all",
                 token_file: str = "its engine",
                 capabilities: Capabilities | None = None,
                 revive: Callable[[str], None] | None = None):
        urls = [checked_url(url) for url in urls]
        if not urls or len(set(urls)) < len(urls):
            raise BridgeError(f"addresses of engines: {urls}", "give at least one, and each once")
        self.deadlines = deadlines
        self.dirty: str | None = None  # why the engines hold no whole publish, whatever they say
        self.version: int | None = None  # of the last publish
        self._sick, self._closed = "", False
        self._homes: dict[str, list[Replica]] = {}  # of sessions
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm client", daemon=True)
        self._thread.start()
        connections = min(connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._http = HttpCalls(token, token_file, deadlines.connect, connections)
        self._rooms: Rooms | None = None
        self._gate = Gate(connections, Order(order, PATIENCE * connections),
                          self._fitting if admit == "cache" else None)
        self._replicas = Replicas(urls, self._loop, revive or self._wait_for, deadlines.down, self._gate.look)
        self.replicas = self._replicas.all
        self._going = asyncio.Event()
        self._going.set()
        try:
            self._capabilities = capabilities or self._alike()
            if admit == "cache":
                self._rooms = self._known_rooms()
        except BaseException:
            self.close()
            raise

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work` in the loop's thread. It is cancelled if this thread is interrupted."""
        if self._closed:
            work.close()
            raise BridgeError("the engine is closed", "build a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError as e:
            raise EngineUnhealthy("the engine was closed meanwhile", "build a new one") from e
        finally:
            future.cancel()

    def call(self, url: str, path: str, body: Any = None, seconds: float = 0.0) -> Any:
        """What the replica at `url` answers to a POST of `body`, or to a GET without one, within `seconds`
        (default `deadlines.call`). Raises as HttpCalls.call does."""
        method = "GET" if body is None else "POST"
        return self._run(self._http.call(url + path, body, method, seconds or self.deadlines.call))

    # Sampling

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        """See RolloutEngine; ValueError for a request that does not fit. When one cannot be answered, all are
        cancelled."""
        self.require_usable(requests)
        return self._run(_all_of([self._group(self._whole(r), self._home(r)) for r in requests]))

    def start(self, r: GenRequest, parts: Sequence[Part]) -> Future[list[Completion]]:
        """Begin `parts`, the completions of `r`. To cancel the future cancels the requests. Raises as
        `generate`."""
        self.require_usable([r])
        return asyncio.run_coroutine_threadsafe(self._group(parts, self._home(r)), self._loop)

    def in_loop(self, work: Callable[[], Any]) -> Any:
        """What `work` returns in the thread in which answers arrive."""
        async def call() -> Any:
            return work()

        return self._run(call())

    def require_usable(self, requests: Sequence[GenRequest]) -> None:
        """Raise EngineDirty if a publish has not finished, ValueError for a request that does not fit."""
        if self.dirty:
            raise EngineDirty(f"the engines have no usable weights: {self.dirty}",
                              "publish a full set of weights first")
        for r in requests:
            check(r, self._capabilities)

    def _whole(self, r: GenRequest) -> list[Part]:
        return [Part(r, i, self._capabilities, streams=self._rooms is not None) for i in range(r.n)]

    def _home(self, r: GenRequest) -> list[Replica]:
        return self._homes.setdefault(r.session, []) if r.session else []

    async def _group(self, parts: Sequence[Part], home: list[Replica]) -> list[Completion]:
        return await _all_of([self._sample(part, home) for part in parts])

    async def _sample(self, part: Part, home: list[Replica]) -> Completion:
        """home: empty, or the replica that has its prompt; all of a group share it, and all of a session."""
        error = None
        async with self._gate.place(part.name, (part, home)):
            for _ in range(ATTEMPTS):
                if part.done:
                    break
                await self._going.wait()
                replica = await self._replicas.choose(home, part.take is not None)
                lives, replica.in_flight = replica.lives, replica.in_flight + 1
                try:
                    return self._seen(await self._asked(replica.url, part))
                except (EngineUnhealthy, EngineDirty, BadAnswer) as e:
                    error = e
                    part.keep()
                    self._replicas.put_down(replica, lives, first_line(e))
                finally:
                    replica.in_flight -= 1
            if part.done:  # before it was asked for, or by an answer whose end alone was missing
                return self._seen(part.done)
        if isinstance(error, EngineDirty):
            raise error
        raise EngineUnhealthy(f"request {part.name!r} was asked {ATTEMPTS} times in vain: "
                              f"{first_line(error)}",
                              "see the engines' logs") from error

    async def _asked(self, url: str, part: Part) -> Completion:
        body = part.body() | ({} if self.version is None else {"cache_salt": f"version {self.version}"})
        answer = await self._http.call(url + token_api.PATH, body, "POST", self.deadlines.generate, part.take)
        return part.completed(answer)

    def _seen(self, done: Completion) -> Completion:
        self._gate.order.finished(done.request_id, len(done.token_ids))
        if self._rooms:
            self._rooms.finished(len(done.token_ids))
        if problem := done.problem():
            self._sick = f"request {done.request_id!r}, completion {done.index}: {problem}"
        return done

    # What the caches hold

    def _known_rooms(self) -> Rooms:
        """Raises BridgeError for a replica that does not tell, or that returns the experts of each token,
        which no stream has."""
        if self._capabilities.routed_experts:
            raise BridgeError('rollout.admit = "cache" has completions streamed, and a stream of vLLM tells '
                              "no routed experts", 'set rollout.admit = "all", or moe.replay = "none"')
        return Rooms({r.url: cache_of(r.url, self._metrics_of(r.url)) for r in self.replicas})

    def _metrics_of(self, url: str) -> str:
        """What vLLM tells Prometheus. Raises as HttpCalls.call does."""
        raw = bytearray()
        try:
            self._run(self._http.call(url + METRICS, None, "GET", self.deadlines.call, raw.extend))
        except RequestRefused as e:
            raise BridgeError(f'rollout.admit = "cache": {first_line(e)}', NEXT) from e
        return raw.decode(errors="replace")

    def _fitting(self, inside: Sequence[tuple[Part, list[Replica]]],
                 waiting: Sequence[tuple[Part, list[Replica]]]) -> Sequence[int]:
        """Who may enter; each is bound to the replica whose cache is expected to hold it. All while none is
        up: they wait for one to return."""
        if not (self._rooms and (up := self._replicas.up())):
            return range(len(waiting))
        fitting = self._rooms.fitting(inside, waiting, up)
        for i, replica in fitting:
            waiting[i][1][:] = [replica]
        return [i for i, _ in fitting]

    def metrics(self) -> dict[str, float]:
        """Of the caches since it was last asked, where `admit` is "cache"; else {}."""
        if self._rooms is None:
            return {}
        for r in self.replicas:
            with contextlib.suppress(EngineUnhealthy):  # one that is down tells when it is back
                self._rooms.preempted(r.url, self._metrics_of(r.url))
        return self.in_loop(self._rooms.seen.metrics)

    # Who is up

    def put_down(self, url: str, why: str) -> None:
        """Ask the replica for nothing until `revive` has brought it back. For any thread."""
        replica = next(r for r in self.replicas if r.url == url)
        self.in_loop(lambda: self._replicas.put_down(replica, replica.lives, why))

    def try_again(self) -> None:
        """Call `revive` for the replicas that only lack weights. For any thread."""
        for r in self.replicas:
            if r.lost is EngineDirty:
                self._loop.call_soon_threadsafe(self._replicas.put_down, r, r.lives, r.down)

    def _wait_for(self, url: str) -> None:
        """Wait until it answers with the weights that it had."""
        until, said = time.monotonic() + self.deadlines.down, ""
        while time.monotonic() < until and not self._closed:
            try:
                if (have := self.version_of(url)) is not None and have == (self.version or have):
                    return
                raise EngineDirty(f"its weights are of version {have}, not {self.version}")
            except EngineUnhealthy as e:
                said = first_line(e)
            time.sleep(PROBE_SECONDS)
        raise EngineUnhealthy(f"not back after {self.deadlines.down:g} s: {said}")

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def _alike(self) -> Capabilities:
        """What each replica says, which must be the same."""
        said = {r.url: token_api.capabilities(self.call(r.url, token_api.HOME)) for r in self.replicas}
        (first, one), *others = said.items()
        for url, other in others:
            names = [f.name for f in dataclasses.fields(one)]
            if differ := ", ".join(n for n in names if getattr(one, n) != getattr(other, n)):
                raise BridgeError(f"the engines at {first} and {url} are not alike: they differ in {differ}",
                                  "start all engines with the same model and options")
        return one

    def health(self) -> Health:
        """Not ok when all are down, and once a completion was unfit to learn from, until the next publish."""
        up = bool(self._replicas.up()) and not self._closed
        return Health(up and not self._sick, "; ".join(filter(None, [self._sick, self._replicas.downs()])))

    def published(self, urls: Sequence[str] | None = None) -> None:
        """The replicas at `urls`, by default all, hold the whole of a publish."""
        self.dirty, self._sick, self._homes = None, "", {}  # what is cached is of other weights
        held = [r for r in self.replicas if urls is None or r.url in urls]
        self.version = self.version_of(held[0].url)
        self.in_loop(lambda: [self._replicas.returned(r) for r in held if r.lost])

    def weight_version(self) -> int | None:
        """None unless all replicas that are up name the same."""
        if self.dirty:
            return None
        said = {self.version_of(r.url) for r in self._replicas.up()}
        return said.pop() if len(said) == 1 else None

    def version_of(self, url: str) -> int | None:
        """The version of one replica's weights; None if they are of no learner. Raises EngineUnhealthy."""
        said = self.call(url, "/weight_info", seconds=self.deadlines.connect)
        version = str(said.get("weight_version")) if isinstance(said, dict) else ""
        return int(version) if version.isascii() and version.isdecimal() else None

    def pause(self) -> None:
        """Freeze what is in flight, and begin nothing until `resume`."""
        self.in_loop(self._going.clear)
        self._run(self._tell("/pause?mode=keep&clear_cache=false"))

    def resume(self) -> None:
        """Raises EngineDirty after a publish that has failed."""
        self.require_usable([])
        self._run(self._tell("/resume"))
        self.in_loop(self._going.set)

    async def _tell(self, path: str) -> None:
        """POST to all replicas that are up. One that does not answer is put down."""
        async def tell(replica: Replica) -> None:
            try:
                await self._http.call(replica.url + path, {}, "POST", self.deadlines.call)
            except EngineUnhealthy as e:
                self._replicas.put_down(replica, replica.lives, first_line(e))

        await _all_of([tell(r) for r in self._replicas.up()])

    def sleep(self) -> None:
        """Nothing: the engines have GPUs of their own."""

    wake = sleep

    def close(self) -> None:
        """Cancel what is in flight, which fails at once. The servers go on. Idempotent."""
        if self._closed:
            return
        self._closed = self._replicas.closed = True
        self.dirty = "the engine is closed"
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        self._loop.close()

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()


async def _all_of(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Their results. When one raises, the others are cancelled, and that is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(w) for w in work]
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from e.exceptions[0].__cause__
    return [task.result() for task in made]
