"""Weights by NCCL, without GPUs: threads of this process are the ranks of its group, and copy on the host."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("uvicorn")

from plugin_server import TOKEN, Engine, serving  # noqa: E402
from test_many_learners import Shards, published  # noqa: E402
from test_vllm_plugin import guarded, held  # noqa: E402, F401

from bridges.api import EngineUnhealthy, PublishFailed  # noqa: E402
from bridges.served import ways  # noqa: E402
from bridges.served.served_control import Server  # noqa: E402
from bridges.served.served_transport import ServedTransport  # noqa: E402
from bridges.served.ways import Nccl  # noqa: E402
from bridges.sources.array_source import ArraySource, random_source  # noqa: E402
from bridges.vllm_plugin import nccl, slots  # noqa: E402
from bridges.vllm_plugin.publishes import PUBLISH  # noqa: E402

SLOT = 30000


class Met:
    """What the ranks of a group share."""

    def __init__(self, world: int):
        self.barrier, self.buffer = threading.Barrier(world), None


class Group:
    """`nccl.Group` among threads. A broadcast waits for all ranks, as NCCL's does."""

    groups: dict[bytes, Met] = {}
    making = threading.Lock()

    def __init__(self, unique_id: bytes, rank: int, world: int, device: torch.device):
        with self.making:
            self._met = self.groups.setdefault(unique_id, Met(world))
        self._rank = rank
        self._met.barrier.wait(10)

    def broadcast(self, buffer: torch.Tensor, sender: int) -> None:
        try:
            if self._rank == sender:
                self._met.buffer = buffer
            self._met.barrier.wait(20)
            if self._rank != sender:
                buffer.copy_(self._met.buffer)
            self._met.barrier.wait(20)
        except threading.BrokenBarrierError as e:
            raise EngineUnhealthy("a broadcast to the engines did not end in time") from e

    def close(self) -> None:
        """The others see nothing of it."""


class OnHost(ways._OfHost, Nccl):
    """`Nccl` for boxes in the host's memory."""

    def begin(self, own):
        Nccl.begin(self, own)
        super().begin(own)

    def fill(self, k, piece, buffer):
        Nccl.fill(self, k, piece, torch.from_numpy(buffer.reshape(-1).view(np.uint8)))

    def filled(self, k):
        Nccl.filled(self, k)


@pytest.fixture(autouse=True)
def on_host(monkeypatch):
    ids = iter(range(100))
    monkeypatch.setattr(nccl, "Group", Group)
    monkeypatch.setattr(nccl, "unique_id", lambda: b"%d" % next(ids))
    monkeypatch.setattr(slots, "gpu_device", lambda gpu: torch.device("cpu"))
    monkeypatch.setattr(ways, "Nccl", OnHost)
    Group.groups.clear()


@contextlib.contextmanager
def served(ranks: int, engines: int = 1):
    with contextlib.ExitStack() as stack:
        made = [Engine(ranks) for _ in range(engines)]
        urls = [stack.enter_context(serving(engine)) for engine in made]
        transport = ServedTransport(TOKEN, "nccl", urls=urls, slot_bytes=SLOT)
        stack.callback(transport.close)
        transport.open()
        yield made, transport


def assert_held(engine: Engine, source: ArraySource) -> None:
    for name, array in source.arrays.items():
        np.testing.assert_array_equal(held(engine, name).view(np.uint8),
                                      np.asarray(array).view(np.uint8), name)


@pytest.mark.parametrize("lasting, calls", [(False, 2), (True, 1)])
def test_one_call_brings_all_buckets(monkeypatch, lasting, calls):
    """With the digests, if these are made before the engines stop."""
    asked, call = [], Server.call
    monkeypatch.setattr(Server, "call",
                        lambda self, path, *a, **k: (asked.append(path), call(self, path, *a, **k))[1])
    with served(2, engines=2) as (engines, transport):
        for version in (1, 2):
            source = random_source(transport.expected_manifest(), version)
            object.__setattr__(source, "lasting", lasting)
            asked.clear()
            receipt = transport.publish(source, version)
            publishes = [path for path in asked if path.startswith(PUBLISH)]
            assert len(publishes) == len(asked) - 2 * (version == 1) == 2 * calls
            assert transport._outlet.rounds > 9
            for engine in engines:
                assert_held(engine, source)
        transport.verify(receipt)


def test_a_source_that_breaks_off_lets_the_ranks_go():
    class Half(ArraySource):
        def __iter__(self):
            yield from list(super().__iter__())[:4]
            raise OSError("the learner's disk is gone")

    with served(2) as ([engine], transport):
        whole = random_source(transport.expected_manifest(), 1)
        begun = time.monotonic()
        with pytest.raises(PublishFailed, match="version 1 broke off: the learner's disk is gone"):
            transport.publish(Half(whole.metas, whole.arrays), 1)
        assert engine.paused and engine.version == "default"
        transport.publish(whole, 2)
        assert time.monotonic() - begun < 10 and engine.version == "2"
        assert_held(engine, whole)


def test_ranks_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr(nccl, "SECONDS", 0.2)
    monkeypatch.setattr(Group, "__init__", lambda *_: time.sleep(1))
    with served(2) as (_, transport):
        with pytest.raises(PublishFailed, match="broke off: the 2 ranks .* did not meet by NCCL in 0.2 s"):
            transport.publish(random_source(transport.expected_manifest(), 1), 1)


def test_each_process_broadcasts_its_own_boxes():
    engines = [Engine(4) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(serving(engine)) for engine in engines]
        with contextlib.closing(ServedTransport(TOKEN, urls=urls)) as transport:
            transport.open()
            whole = random_source(transport.expected_manifest(), 1)
            want = transport.publish(whole, 1).content
        [[first], [second]] = published(urls, [lambda number: Shards(whole.metas, whole.arrays)], kind="nccl",
                                        slot_bytes=SLOT)
    assert first == second and first.content == want
    for engine in engines:
        assert_held(engine, whole)
