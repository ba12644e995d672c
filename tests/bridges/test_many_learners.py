"""Several processes of a learner, each of which sends its own shards: as threads, whose groups are joined by
sockets, and as processes of JAX. The engine's ranks are plain torch modules."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("uvicorn")

from linked_groups import of_each  # noqa: E402
from plugin_server import Engine, serving  # noqa: E402
from test_vllm_plugin import TOKEN, guarded, held  # noqa: E402, F401

from bridges.api import BridgeError, ManifestMismatch, ParamMeta, PublishFailed  # noqa: E402
from bridges.served.senders import Outlet, SharedMemory  # noqa: E402
from bridges.served.served_transport import ServedTransport  # noqa: E402
from bridges.sources.array_source import ArraySource, random_source  # noqa: E402
from bridges.transports.safetensors_file import host_array  # noqa: E402
from bridges.vllm_plugin import pieces  # noqa: E402
from jaxfp8rl.errors import ProcessFailed  # noqa: E402
from jaxfp8rl.rollout.process_proxies import _Transport  # noqa: E402

BY_COLUMNS = "o_proj", "down_proj"


@dataclasses.dataclass(frozen=True)
class Shards(ArraySource):
    """What `processes` hold in turn of quarters of each matrix, by rows or columns; of vectors all hold all."""

    processes: int = 2

    def held(self):
        return [self._of(m) for m in self.metas]

    def _of(self, m: ParamMeta):
        if len(m.shape) < 2:
            return [(p, pieces.whole(m)) for p in range(self.processes)]
        axis = int(m.name.startswith(BY_COLUMNS))
        edges = [i * m.shape[axis] // 2 for i in range(3)]
        boxes = [tuple((a, b) if i == axis else (0, n) for i, n in enumerate(m.shape)) for a, b in zip(edges, edges[1:])]
        return [(i % self.processes, box) for i, box in enumerate(boxes)]

    def boxes(self, wanted):
        for m, of in zip(self.metas, wanted):
            yield [np.ascontiguousarray(host_array(self.arrays[m.name])[pieces.taken(box)]) for box in of]


@contextlib.contextmanager
def engines(count: int = 1, ranks: int = 4):
    with contextlib.ExitStack() as stack:
        made = [Engine(ranks) for _ in range(count)]
        yield made, [stack.enter_context(serving(engine)) for engine in made]


def published(urls: list[str], sources, count: int = 2, **options) -> list:
    """What each process gets of publishes of `sources`, each a function of the process's number."""

    def run(group):
        outlet = Outlet(group.number, options.get("folder"))
        transport = ServedTransport(TOKEN, urls=urls, outlet=outlet, learners=group.serve(outlet), **options)
        if group.first:
            transport.open()
        proxy, receipts = _Transport(group, transport if group.first else None, outlet), []
        try:
            for version, source in enumerate(sources, 1):
                receipts.append(proxy.publish(source(group.number), version))
        finally:
            proxy.close()
        return receipts

    return of_each(run, count)


def alone(urls: list[str], source) -> str:
    with contextlib.closing(ServedTransport(TOKEN, urls=urls)) as transport:
        transport.open()
        return transport.publish(source, 9).content


@pytest.mark.parametrize("kind, processes, slot_bytes", [
    ("shared_memory", 2, 2**20), ("shared_memory", 3, 9000), ("file", 2, 50000)])
def test_what_several_send_is_what_one_would(kind, processes, slot_bytes, tmp_path):
    with engines(2) as (made, urls):
        with contextlib.closing(ServedTransport(TOKEN, urls=urls)) as transport:
            transport.open()
            metas = transport.expected_manifest()
        whole = [random_source(metas, seed) for seed in (1, 2)]
        sources = [lambda number, s=s: Shards(s.metas, s.arrays, processes) for s in whole]
        found = published(urls, sources, processes, kind=kind, slot_bytes=slot_bytes, folder=tmp_path)
        for engine in made:
            for meta in metas:
                want = host_array(whole[1].arrays[meta.name])
                np.testing.assert_array_equal(held(engine, meta.name).view(np.uint8), want.view(np.uint8), meta.name)
        assert found == [found[0]] * processes, "all have the receipt"
        assert [r.content for r in found[0]] == [alone(urls, s) for s in whole]
    assert not list(tmp_path.glob("jaxfp8rl-*")), "nothing is left"


class Late(Shards):
    """It breaks off."""

    def boxes(self, wanted):
        yield from [*super().boxes(wanted)][:4]
        raise OSError("the learner's disk is gone")


def test_a_process_that_fails_in_a_publish_leaves_the_engine_dirty_and_ends_all():
    with engines() as ([engine], urls):
        source = random_source(metas_of(urls), 1)
        broken = lambda number: (Late if number else Shards)(source.metas, source.arrays)
        first, second = published(urls, [broken], slot_bytes=30000)
        says = "version 1 broke off: process 1: OSError: the learner's disk is gone"
        assert isinstance(first, PublishFailed) and says in str(first)
        assert isinstance(second, ProcessFailed) and says in str(second)
        assert engine.paused and engine.version == "default"
        assert alone(urls, source), "the next full publish repairs it"


class Mortal(SharedMemory):
    """Its process dies at the second bucket."""

    def fill(self, k, piece, buffer):
        if k == 1:
            raise KeyboardInterrupt
        super().fill(k, piece, buffer)


def test_a_process_that_dies_in_a_publish_leaves_the_engine_dirty_and_ends_all(monkeypatch):
    with engines() as ([engine], urls):
        source = random_source(metas_of(urls), 1)

        def way(kind, slot_bytes, folder):
            made.append(1)
            return (SharedMemory, Mortal)[len(made) - 1](slot_bytes, folder)

        made = []
        monkeypatch.setattr("bridges.served.senders.way", way)
        found = published(urls, [lambda number: Shards(source.metas, source.arrays)], slot_bytes=30000)
        monkeypatch.undo()
        dead, left = sorted(found, key=lambda e: not isinstance(e, KeyboardInterrupt))
        assert isinstance(dead, KeyboardInterrupt) and isinstance(left, PublishFailed | ProcessFailed)
        assert engine.version == "default" and engine.paused


@pytest.mark.parametrize("other", ["tensors", "mesh"])
def test_a_process_with_another_plan_is_refused_before_a_byte_moves(other):
    with engines() as ([engine], urls):
        source = random_source(metas_of(urls), 1)
        metas = tuple(dataclasses.replace(m, dtype="float16") if m.dtype == "bfloat16" else m for m in source.metas)
        given = {"tensors": Shards(metas, source.arrays), "mesh": Shards(source.metas, source.arrays, 1)}[other]
        first, second = published(urls, [lambda n: given if n else Shards(source.metas, source.arrays)])
        assert isinstance(first, ManifestMismatch) and isinstance(second, ProcessFailed)
        assert "process 1 of the learner would send other tensors, or other parts of them" in str(first)
        assert not engine.paused


def test_boxes_that_a_rank_s_digest_cannot_be_made_of_are_refused():
    meta = ParamMeta("x.weight", "bfloat16", (4, 6))
    outlet = Outlet()
    outlet.source = Halved((meta,), {})
    with pytest.raises(BridgeError, match="x.weight: columns .0, 3. of .0, 6. .* whole words"):
        outlet.open("shared_memory", 2**20, [[pieces.whole(meta)]])


class Halved(Shards):
    def held(self):
        return [[(0, ((0, 4), (0, 3))), (0, ((0, 4), (3, 6)))]]


def metas_of(urls: list[str]) -> tuple[ParamMeta, ...]:
    with contextlib.closing(ServedTransport(TOKEN, urls=urls)) as transport:
        transport.open()
        return transport.expected_manifest()
