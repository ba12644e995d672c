"""Publish weights into stock `vllm serve` processes with the plugin: one or several, each of one or several
ranks.

    begin    take what is needed from each server: what its ranks hold. Compare manifests
    pause    freeze requests in flight, and start: the engines are dirty from here on
    send     bucket by bucket: each rank writes its part where its kernels read
    finish   each rank compares its live bytes with the digests of the learner's; the version is set
    resume   requests go on under the new weights
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bridges.api import (
    BridgeError,
    EngineUnhealthy,
    ParamMeta,
    PublishFailed,
    PublishReceipt,
    RolloutEngine,
    WeightSource,
)
from bridges.inside_vllm.shards import Cut, Shard, taken
from bridges.proof import manifest
from bridges.proof.byte_digest import content
from bridges.served.senders import sender
from bridges.served.served_control import Server
from bridges.vllm_plugin import slots
from bridges.vllm_plugin.receiver import shards_of

PUBLISH_SECONDS = 600.0


class ServedTransport:
    """WeightTransport into servers of one host or many.

    token: of the servers. kind: "shared_memory" or "file" (engines of this host, weights in its memory),
    "cuda_ipc" (engines on GPUs of this host), "nccl" (engines on GPUs anywhere). cache: "recompute" computes the
    prefix of running requests again under the new weights; "keep" leaves their cache and the prefix cache as they
    are, so that a new request with an old prefix needs a `cache_salt` of its own. folder: where files lie, for
    ways that have some. holder: who this learner is, for a second one.
    """

    def __init__(self, token: str, kind: str = "shared_memory", *, urls: Sequence[str] = (),
                 cache: Literal["recompute", "keep"] = "recompute", slot_bytes: int = slots.SLOT_BYTES,
                 folder: str | Path | None = None, holder: str = "", seconds: float = PUBLISH_SECONDS):
        self._token, self._kind, self._urls, self._cache = token, kind, tuple(urls), cache
        self._slot_bytes, self._folder, self._holder, self._seconds = slot_bytes, folder, holder, seconds
        self._servers: list[Server] = []
        self._engine: Any = None
        self._sender: Any = None
        self._published: PublishReceipt | None = None

    def open(self, engine: RolloutEngine | None = None) -> None:
        """Take the lease of each server, and ask what its ranks hold.

        engine: a client whose `replicas` name the servers, unless `urls` do. Raises BridgeError if there is no
        server, if one runs without the plugin, and, naming the other, if another learner has the lease.
        """
        urls = self._urls or tuple(r.url for r in getattr(engine, "replicas", ()))
        if not urls:
            raise BridgeError("no server to publish to", "give urls=[...], or a client of vllm serve")
        self._engine, self._servers = engine, [Server(url, self._token, self._holder) for url in urls]
        self._threads = [concurrent.futures.ThreadPoolExecutor(1, f"publish {url}") for url in urls]
        try:
            self._all(Server.take)
            self._shards = [[shards_of(r) for r in said["ranks"]] for said in self._all(_home)]
        except BaseException:
            self.close()
            raise
        self._names: tuple[str, ...] = ()

    def expected_manifest(self) -> tuple[ParamMeta, ...]:
        """Every tensor that a publish must bring, in checkpoint layout."""
        return tuple(shard.meta for shard, optional in self._opened()[0][0].values() if not optional)

    def optional_manifest(self) -> tuple[ParamMeta, ...]:
        """Tensors that a publish may bring: the scales of FP8 attention."""
        return tuple(shard.meta for shard, optional in self._opened()[0][0].values() if optional)

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """Write every tensor of `source` to all ranks of all servers, verify it there, and declare `version`
        current.

        Raises ManifestMismatch before a byte moves, which leaves the engines unchanged, and PublishFailed later,
        which leaves them dirty and paused until the next full publish.
        """
        metas, start = source.manifest(), time.perf_counter()
        self._check(metas)
        self._published = None
        try:
            self._connect(metas)
            self._all(lambda s: s.call("/pause?mode=keep", seconds=self._seconds))
            self._mark(f"the publish of version {version} has not finished")
            self._all(lambda s: s.call("/start_weight_update", seconds=self._seconds))
            whole = self._send(source, metas)
            path = "/finish_weight_update" + ("?cache=keep" if self._cache == "keep" else "")
            self._all(lambda s: s.call(path, {"weight_version": str(version)}, self._seconds))
            self._all(lambda s: s.call("/resume"))
        except PublishFailed:
            self._names = ()  # the ways may be broken: they are opened again
            raise
        except Exception as e:  # whatever the source raised, or a server
            self._names = ()
            next_step = getattr(e, "next_step", "") or "repair the source and publish again in full"
            raise PublishFailed(f"version {version} broke off: {str(e).partition('\n')[0]}", next_step) from e
        self._mark(None)
        digest = content([m.name for m in metas], whole)
        caches = () if self._cache == "keep" else ("prefix",)
        self._published = PublishReceipt(version, len(metas), manifest.nbytes(metas), manifest.digest(metas),
                                         time.perf_counter() - start, caches, digest)
        return self._published

    def _check(self, metas: Sequence[ParamMeta]) -> None:
        """Raise ManifestMismatch unless all ranks expect what the source has."""
        given = {m.name for m in metas}
        for ranks in self._opened():
            for shards in ranks:
                manifest.check(metas, [s.meta for s, optional in shards.values()
                                       if not optional or s.meta.name in given])

    def _mark(self, dirty: str | None) -> None:
        """Tell the client, if there is one, whether the engines hold a whole publish."""
        if dirty and hasattr(self._engine, "dirty"):
            self._engine.dirty = dirty
        elif not dirty and hasattr(self._engine, "published"):
            self._engine.published()

    def _connect(self, metas: Sequence[ParamMeta]) -> None:
        """Open the way, unless it is open for these tensors."""
        names = tuple(m.name for m in metas)
        if names == self._names:
            return
        if self._sender is not None:
            self._sender.close()
        self._sender = sender(self._kind, min(self._slot_bytes, slots.room(metas)), self._folder)
        firsts = np.cumsum([1, *map(len, self._shards)])

        def accept(said: dict[str, Any]) -> None:
            common = said | {"names": names, "slot_bytes": self._sender.slot_bytes}
            self._all(lambda s: s.call("/init_weight_transfer_engine", {"init_info": common | (
                {"first_rank": int(firsts[self._servers.index(s)])} if self._kind == "nccl" else {})}))

        self._sender.connect(accept, int(firsts[-1]) - 1)
        self._names = names

    def _send(self, source: WeightSource, metas: Sequence[ParamMeta]) -> np.ndarray:
        """All buckets, and with the last the digests -> those of the whole tensors, [n, 2] uint32."""
        plan = slots.plan(metas, self._sender.slot_bytes)
        stream, proof = self._sender.tensors(source, metas), _Proof(metas, self._shards)
        tensor, at, calls = None, -1, []
        for k, bucket in enumerate(plan):
            _answered(calls[: max(len(calls) - slots.SLOTS + 1, 0)])  # the slot of bucket k is empty
            for piece in bucket:
                if piece.tensor != at:
                    tensor, at = next(stream), piece.tensor
                    proof.add(at, tensor, self._sender.digest)
                self._sender.fill(k, piece, tensor)
            if last := k + 1 == len(plan):
                for _ in stream:  # there is no more, and the source is asked whether it thinks so, too
                    pass
            calls.append([thread.submit(server.call, "/update_weights", {"update_info": {
                "bucket": k, "digests": proof.of_server(i) if last else None}}, self._seconds)
                for i, (thread, server) in enumerate(zip(self._threads, self._servers))])
            self._sender.send(k)
        _answered(calls)
        return proof.whole

    def verify(self, receipt: PublishReceipt) -> None:
        """Have all ranks read their bytes again.

        Raises PublishFailed if the receipt is not that of the last publish, or if bytes have changed since, which
        leaves that engine dirty.
        """
        self._opened()
        if receipt != self._published:
            raise PublishFailed(f"the receipt of version {receipt.version} is not that of the last publish",
                                "publish again")
        said = self._all(lambda s: s.call("/weight_info", method="GET"))
        if wrong := [(s.url, x["weight_version"]) for s, x in zip(self._servers, said)
                     if x["weight_version"] != str(receipt.version)]:
            raise PublishFailed(f"{wrong[0][0]} holds version {wrong[0][1]}, the receipt says {receipt.version}",
                                "publish again")
        self._all(lambda s: s.call("/jaxfp8rl/verify", seconds=self._seconds))

    def close(self) -> None:
        """Give the leases back. Idempotent."""
        for server in self._servers:
            server.release()
        for thread in getattr(self, "_threads", ()):
            thread.shutdown(wait=False)
        if self._sender is not None:
            self._sender.close()
        self._servers, self._threads, self._sender = [], [], None

    def _opened(self) -> list[list[dict[str, tuple[Shard, bool]]]]:
        if not self._servers:
            raise BridgeError("the transport is not open", "call open(engine) first")
        return self._shards

    def _all(self, call: Callable[[Server], Any]) -> list[Any]:
        """What `call` returns for each server, side by side. Raises the first error once all have answered."""
        calls = [thread.submit(call, server) for thread, server in zip(self._threads, self._servers)]
        concurrent.futures.wait(calls)
        return [c.result() for c in calls]


class _Proof:
    """Digests of the parts that the ranks hold, each computed once."""

    def __init__(self, metas: Sequence[ParamMeta], shards: list[list[dict[str, tuple[Shard, bool]]]]):
        self._metas = metas
        self._cuts = [[[ranks[m.name][0].cut for m in metas] for ranks in server] for server in shards]
        self._tables = [[np.zeros((len(metas), 2), np.uint32) for _ in server] for server in shards]
        self.whole = np.zeros((len(metas), 2), np.uint32)

    def add(self, i: int, tensor: Any, digest: Callable[[Any], np.ndarray]) -> None:
        made: dict[Cut, np.ndarray] = {}
        whole = tuple((0, n) for n in self._metas[i].shape)
        for cut, table in self._places(i):
            if cut not in made:
                made[cut] = digest(tensor if cut == whole else tensor[taken(cut)])
            table[i] = made[cut]
        self.whole[i] = made[whole] if whole in made else digest(tensor)

    def _places(self, i: int) -> Iterator[tuple[Cut, np.ndarray]]:
        for cuts, tables in zip(self._cuts, self._tables):
            yield from ((of_rank[i], table) for of_rank, table in zip(cuts, tables))

    def of_server(self, i: int) -> dict[str, str]:
        """Rank -> base64 of its table."""
        return {str(rank): base64.b64encode(t.astype("<u4").tobytes()).decode()
                for rank, t in enumerate(self._tables[i])}


def _home(server: Server) -> Any:
    return server.call("/jaxfp8rl", method="GET", seconds=120.0)


def _answered(calls: list[list[concurrent.futures.Future]]) -> None:
    """Wait for calls. Raises the first error, of a server's refusal before one of no answer."""
    errors = [e for bucket in calls for c in bucket if (e := c.exception()) is not None]
    with contextlib.suppress(StopIteration):
        raise next(e for e in errors if not isinstance(e, EngineUnhealthy))
    if errors:
        raise errors[0]
