"""Publish weights into stock `vllm serve` processes with the plugin: one or several, each of one or several
ranks.

    prepare  take what is needed from each server: what its ranks hold. Compare manifests. The learner digests
             what it holds already, and fills its slots
    start    freeze requests in flight: the engines are dirty from here on
    send     bucket by bucket: each rank writes its part where its kernels read
    finish   each rank compares its live bytes with the digests of the learner's; the version is set, and
             requests go on under the new weights

The last three are one call of each server: nothing stands still for the way there and back. If the digests
are made on the way, a second call brings them.

A server that does not answer is left out while others do, and taken in again by the first publish that it
answers.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bridges.api import (
    BridgeError,
    Cut,
    EngineUnhealthy,
    ManifestMismatch,
    ParamMeta,
    PublishFailed,
    PublishReceipt,
    RolloutEngine,
    WeightSource,
    first_line,
)
from bridges.inside_vllm.shards import Shard
from bridges.proof import manifest
from bridges.proof.byte_digest import Content
from bridges.proof.publishing import failing, opened, receipt
from bridges.served.background import in_background, together
from bridges.served.outlet import Outlet
from bridges.served.served_control import Server
from bridges.served.ways import place_of
from bridges.vllm_plugin import pieces, slots
from bridges.vllm_plugin.publishes import PUBLISH
from bridges.vllm_plugin.receiver import shards_of
from bridges.vllm_plugin.turns import Turns, rest

PUBLISH_SECONDS = 600.0
# HF name -> (a rank's shard, whether a publish may leave the tensor out)
Shards = dict[str, tuple[Shard, bool]]
Calls = dict[Server, concurrent.futures.Future]


class ServedTransport:
    """WeightTransport into servers of one host or many.

    token: of the servers. kind: "shared_memory" or "file" (engines of this host, weights in its memory),
    "cuda_ipc" (engines on GPUs of this host), "nccl" (engines on GPUs anywhere). cache: "recompute" computes
    the prefix of running requests again under the new weights; "keep" leaves their cache and the prefix cache
    as they are, so that a new request with an old prefix needs a `cache_salt` of its own. staged_bytes: of
    the learner's memory, for slots that are filled before the engines stop; two slots it has always. folder:
    where files lie, for ways that have some. holder: who this learner is, for a second one.

    phases: the seconds of each step of the last publish, by its name above, at the slowest server.

    Of a learner of several processes the first has the transport. learners(method, *arguments) calls a method
    of the Outlet of each -> what they return, in their order; outlet: that of the first. Each process gives
    its outlet the source before the publish (`jaxfp8rl.distributed.process_group.ProcessGroup.serve`).
    """

    def __init__(self, token: str, kind: str = "shared_memory", *, urls: Sequence[str] = (),
                 cache: Literal["recompute", "keep"] = "recompute", slot_bytes: int = slots.SLOT_BYTES,
                 staged_bytes: int = 0, folder: str | Path | None = None, holder: str = "",
                 seconds: float = PUBLISH_SECONDS, outlet: Outlet | None = None,
                 learners: Callable[..., list[Any]] | None = None):
        self._token, self._kind, self._urls, self._cache = token, kind, tuple(urls), cache
        self._slot_bytes, self._staged_bytes = slot_bytes, staged_bytes
        self._holder, self._seconds = holder, seconds
        self.phases: dict[str, float] = {}
        self._servers: list[Server] = []
        self._out: dict[Server, str] = {}  # servers that are left out, and why
        self._shards: dict[Server, list[Shards]] = {}  # by rank
        self._last: Calls = {}  # each server's
        self._engine: Any = None
        self._outlet, self._folder = outlet or Outlet(folder=folder), folder
        self._turns: Turns | None = None  # with ranks of this host, which share slots with the learner
        self._learners = learners or (lambda method, *args: [getattr(self._outlet, method)(*args)])
        self._published: PublishReceipt | None = None

    def open(self, engine: RolloutEngine | None = None) -> None:
        """Take the lease of each server, and ask what its ranks hold.

        engine: a client whose `replicas` name the servers, unless `urls` do. Raises BridgeError if there is
        no server, if one runs without the plugin, and, naming the other, if another learner has the lease.
        """
        urls = self._urls or tuple(r.url for r in getattr(engine, "replicas", ()))
        if not urls:
            raise BridgeError("no server to publish to", "give urls=[...], or a client of vllm serve")
        self._engine, self._servers = engine, [Server(url, self._token, self._holder) for url in urls]
        self._names, self._held = (), ()
        try:
            for server in self._servers:
                self._take(server)
        except BaseException:
            self.close()
            raise

    def _take(self, server: Server) -> None:
        server.take()
        said = server.call("/jaxfp8rl", method="GET", seconds=120.0)
        self._shards[server] = [shards_of(rank) for rank in said["ranks"]]
        self._out.pop(server, None)
        self._names = ()  # the way is opened again, with this server

    def _take_again(self) -> None:
        """Servers that were left out and answer now, and those that have started anew."""
        for server in self._opened():
            if server in self._out or server.lost:
                try:
                    self._take(server)
                except EngineUnhealthy as e:
                    self._leave_out(server, e)

    def _leave_out(self, server: Server, error: BaseException) -> None:
        """Raises `error` unless another server is left. All ranks of a group of NCCL are needed."""
        self._out[server] = first_line(error)
        if self._kind == "nccl" or not self._up():
            raise error
        if self._engine:
            self._engine.put_down(server.url, self._out[server])

    def _up(self) -> list[Server]:
        return [s for s in self._servers if s not in self._out]

    def expected_manifest(self) -> tuple[ParamMeta, ...]:
        """Every tensor that a publish must bring, in checkpoint layout."""
        shards = self._shards[self._opened()[0]][0]
        return tuple(shard.meta for shard, optional in shards.values() if not optional)

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """Write every tensor of `source` to all ranks of all servers, verify it there, and declare `version`
        current.

        Raises ManifestMismatch before a byte moves, and PublishFailed if the source fails before the engines
        are paused; both leave these as they were. Raises PublishFailed later, which leaves them dirty and
        paused until the next full publish.
        """
        metas, start = source.manifest(), time.perf_counter()
        self._take_again()
        self._check(metas)
        before, self._published, self._outlet.source = self._published, None, source
        with failing(f"version {version} broke off"):
            self._connect(metas, anew=before is None)  # the ways of a publish that has failed may be broken
            digested = all(self._learners("begin"))
            self.phases = {"prepare": time.perf_counter() - start}
            self._mark(f"the publish of version {version} has not finished")
            whole = self._send(str(version), digested)
        self._mark(None)
        caches = () if self._cache == "keep" else ("prefix",)
        self._published = receipt(metas, version, start, caches, self._content.of(whole))
        return self._published

    def _check(self, metas: Sequence[ParamMeta]) -> None:
        """Raise ManifestMismatch unless all ranks expect what the source has."""
        given = {m.name for m in metas}
        for server in self._up():
            for shards in self._shards[server]:
                manifest.check(metas, [s.meta for s, optional in shards.values()
                                       if not optional or s.meta.name in given])

    def _mark(self, dirty: str | None) -> None:
        """Tell the client, if there is one, whether the engines hold a whole publish."""
        if self._engine and dirty:
            self._engine.dirty = dirty
        elif self._engine:
            self._engine.published([s.url for s in self._up()])

    def _connect(self, metas: Sequence[ParamMeta], anew: bool) -> None:
        """Open the way, unless it is open for these tensors and these holders. Raises ManifestMismatch if a
        process of the learner would send something else than the first expects."""
        names, held, up = tuple(m.name for m in metas), self._outlet.held(), self._up()
        if not anew and (names, held) == (self._names, self._held):
            return
        self._cuts = list(dict.fromkeys([tuple(map(pieces.whole, metas)),
                                         *(cuts for s in up for cuts in self._cuts_of(s, names))]))
        ranks = [len(self._shards[s]) for s in up]
        first = dict(zip(up, np.cumsum([0, *ranks]).tolist()))
        opened = self._learners("open", self._kind, self._slot_bytes, self._staged_bytes, self._cuts)
        if other := [i for i, said in enumerate(opened) if said["plan"] != opened[0]["plan"]]:
            raise ManifestMismatch(f"process {other[0]} of the learner would send other tensors, or other "
                                   "parts of them, than the first expects; no byte was written",
                                   "start all processes with the same config and the same mesh")
        self._ranks = {s: range(first[s], first[s] + len(self._shards[s])) for s in up}
        with self._taking_turns() as path:
            common = {"kind": self._kind, "names": names, "slot_bytes": self._outlet.slot_bytes,
                      "slot_count": self._outlet.slots, "senders": opened,
                      "sent": pieces.packed(self._outlet.sent), "ranks": sum(ranks), "turns": path}

            def accept() -> None:
                self._all(lambda s: s.call("/init_weight_transfer_engine", {
                    "init_info": common | {"first_rank": first[s]}}))

            together(lambda: self._learners("meet", opened, sum(ranks)), accept)
        self._names, self._held, self._content = names, held, Content(names)

    @contextlib.contextmanager
    def _taking_turns(self) -> Iterator[str]:
        """The path of new turns, while the ranks open them; "" for ways that need none."""
        self._leave_turns()
        if self._kind not in slots.OF_ONE_HOST:
            yield ""
            return
        path = place_of(self._folder) / f"jaxfp8rl-turns-{secrets.token_hex(8)}"
        self._turns = Turns.made(path)
        try:
            yield str(path)
        finally:
            path.unlink()

    def _leave_turns(self) -> None:
        if self._turns is not None:
            self._turns.close()
        self._turns = None

    def _cuts_of(self, server: Server, names: Sequence[str]) -> list[tuple[Cut, ...]]:
        """By rank: what it holds of each tensor."""
        return [tuple(of_rank[name][0].cut for name in names) for of_rank in self._shards[server]]

    def _send(self, version: str, digested: bool) -> np.ndarray:
        """All buckets and the digests -> those of the whole tensors, [n, 2] uint32. digested: whether they
        are made already.

        One call brings all buckets, of which the ranks wait for each, and the digests and the version if they
        are made.
        """
        rounds, digests, k = self._outlet.rounds, self._digests() if digested else None, 0
        if self._turns:
            self._turns.begin()
        calls = self._told(lambda s: {"buckets": [0, rounds]} | self._of_ranks(s, digests),
                           version if digested else "")
        try:
            for k in range(rounds):
                self._await_slots(k, calls)
                self._learners("fill", k)
                if self._turns:
                    self._turns.filled(k + 1)
                if self._kind == "nccl":
                    self._learners("send", k)
            made = self._digests() if digests is None else digests
            self._timed(calls)
        except BaseException:
            self._free_ranks(k, calls)
            raise
        if digests is None:
            self._timed(self._told(lambda s: self._of_ranks(s, made), version))
        return made[0]

    def _timed(self, calls: Calls) -> None:
        """Wait for calls of `_told`, and add what each step took."""
        self._answered(calls)
        for name in ("start", "send", "finish"):
            took = max(call.result()[name] for server, call in calls.items() if server not in self._out)
            self.phases[name] = self.phases.get(name, 0.0) + took

    def _free_ranks(self, k: int, calls: Calls) -> None:
        """A publish broke off at bucket k: let no rank wait for the others. What NCCL still brings is without
        proof, like the rest."""
        if self._turns:
            self._turns.break_off()
        elif self._kind == "nccl" and not _done(calls):
            with contextlib.suppress(Exception):  # another process is gone, or a rank
                for left in range(k, self._outlet.rounds):
                    self._learners("send", left)

    def _digests(self) -> np.ndarray:
        """[cuts, n, 2] uint32 of all processes."""
        return np.stack(self._learners("digests")).sum(axis=0, dtype=np.uint32)

    def _told(self, info: Callable[[Server], dict[str, Any]], version: str) -> Calls:
        """A publish, or a part of one, of all servers that are there, under way. version: "" before its
        end."""
        path = f"{PUBLISH}?cache={'keep' if self._cache == 'keep' else 'drop'}"

        def begun(server: Server) -> concurrent.futures.Future:
            body = {"update_info": info(server), "weight_version": version}
            return self._in_turn(server, lambda: server.call(path, body, self._seconds))

        return {s: begun(s) for s in self._up()}

    def _in_turn(self, server: Server, call: Callable[[], Any]) -> concurrent.futures.Future:
        """The result of `call`, which begins when the call before it of this server is done. A call that
        hangs does not keep this process from its end."""
        self._last[server] = in_background(call, self._last.get(server))
        return self._last[server]

    def _await_slots(self, k: int, calls: Calls) -> None:
        """Wait until the slots of round k are empty at all ranks that are there. A broadcast of NCCL waits
        for them by itself. Raises what a server refused."""
        begun = time.monotonic()
        while True:
            self._answered(_done(calls))
            ranks = [r for s in self._up() for r in self._ranks[s]]
            if not self._turns or self._turns.emptied(ranks) > k - self._outlet.slots:
                return
            rest(time.monotonic() - begun)

    def _of_ranks(self, server: Server, digests: np.ndarray | None) -> dict[str, Any]:
        """Of the digests [cuts, n, 2] those of a server's ranks: rank -> base64 of its table."""
        if digests is None:
            return {}
        tables = (digests[self._cuts.index(cuts)] for cuts in self._cuts_of(server, self._names))
        return {"digests": {str(rank): base64.b64encode(t.astype("<u4").tobytes()).decode()
                            for rank, t in enumerate(tables)}}

    def post(self, path: str) -> None:
        """POST to a control route of all servers that are there, with the lease. Raises as `Server.call`."""
        self._opened()
        self._all(lambda s: s.call(path, seconds=self._seconds))

    def verify(self, receipt: PublishReceipt) -> None:
        """Have all ranks read their bytes again.

        Raises PublishFailed if the receipt is not that of the last publish, or if bytes have changed since,
        which leaves that engine dirty.
        """
        self._opened()
        if receipt != self._published:
            raise PublishFailed(f"the receipt of version {receipt.version} is not that of the last publish",
                                "publish again")
        said = self._all(lambda s: s.call("/weight_info", method="GET"))
        if wrong := [(s.url, x["weight_version"]) for s, x in said.items()
                     if x["weight_version"] != str(receipt.version)]:
            raise PublishFailed(f"{wrong[0][0]} holds version {wrong[0][1]}, the receipt says "
                                f"{receipt.version}",
                                "publish again")
        self._all(lambda s: s.call("/jaxfp8rl/verify", seconds=self._seconds))

    def close(self) -> None:
        """Give the leases back. Idempotent."""
        for server in self._servers:
            server.release()
        self._outlet.close()  # other processes close theirs
        self._leave_turns()
        self._servers, self._last, self._out = [], {}, {}

    def _opened(self) -> list[Server]:
        return opened(self._servers)

    def _all(self, call: Callable[[Server], Any]) -> dict[Server, Any]:
        """What `call` returns for each server, side by side. Raises the first error once all have
        answered."""
        calls = {s: self._in_turn(s, lambda s=s: call(s)) for s in self._up()}
        self._answered(calls)
        return {s: c.result() for s, c in calls.items() if s not in self._out}

    def _answered(self, calls: Calls) -> None:
        """Wait for calls. A server that did not answer is left out; what another refused is raised."""
        for server, error in [(s, c.exception()) for s, c in calls.items()]:
            if error is None or server in self._out:
                continue
            if not isinstance(error, EngineUnhealthy):
                raise error
            self._leave_out(server, error)


def _done(calls: Calls) -> Calls:
    return {s: c for s, c in calls.items() if c.done()}
