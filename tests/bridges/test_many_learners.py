"""Several processes of a learner, each of which sends its own shards: as threads, whose groups are joined by
sockets, and as processes of JAX. The engine's ranks are plain torch modules."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("uvicorn")

import one_learner  # noqa: E402
from linked_groups import of_each  # noqa: E402
from plugin_server import Engine, Model, UnquantizedLinearMethod, kind, linear, serving  # noqa: E402
from test_vllm_plugin import TOKEN, guarded, held  # noqa: E402, F401

from benchmarks.processes import said_by_learners  # noqa: E402
from bridges.api import BridgeError, ManifestMismatch, ParamMeta, PublishFailed  # noqa: E402
from bridges.served.outlet import Outlet  # noqa: E402
from bridges.served.served_transport import ServedTransport  # noqa: E402
from bridges.served.ways import SharedMemory  # noqa: E402
from bridges.sources.array_source import ArraySource, random_source  # noqa: E402
from bridges.transports.safetensors_file import host_array  # noqa: E402
from bridges.vllm_plugin import pieces  # noqa: E402
from jaxfp8rl.distributed.mesh import ONE  # noqa: E402
from jaxfp8rl.errors import ProcessFailed  # noqa: E402
from jaxfp8rl.rollout.process_proxies import _Transport  # noqa: E402

BY_COLUMNS = "o_proj", "down_proj"


@dataclasses.dataclass(frozen=True)
class Shards(ArraySource):
    """What `processes` hold in turn of quarters of each matrix, by rows or columns; of vectors all hold
    all."""

    processes: int = 2

    def held(self):
        return [self._of(m) for m in self.metas]

    def _of(self, m: ParamMeta):
        if len(m.shape) < 2:
            return [(p, pieces.whole(m)) for p in range(self.processes)]
        axis = int(m.name.startswith(BY_COLUMNS))
        edges = [i * m.shape[axis] // 2 for i in range(3)]
        boxes = [tuple((a, b) if i == axis else (0, n) for i, n in enumerate(m.shape))
                 for a, b in zip(edges, edges[1:])]
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
                np.testing.assert_array_equal(held(engine, meta.name).view(np.uint8), want.view(np.uint8),
                                              meta.name)
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
    """The second process dies at the second bucket."""

    def open(self, number):
        self.number = number
        return super().open(number)

    def fill(self, k, piece, buffer):
        if (self.number, k) == (1, 1):
            raise KeyboardInterrupt
        super().fill(k, piece, buffer)


def test_a_process_that_dies_in_a_publish_leaves_the_engine_dirty_and_ends_all(monkeypatch):
    with engines() as ([engine], urls):
        source = random_source(metas_of(urls), 1)
        monkeypatch.setattr("bridges.served.ways.SharedMemory", Mortal)
        left, dead = published(urls, [lambda number: Shards(source.metas, source.arrays)], slot_bytes=30000)
        assert isinstance(dead, KeyboardInterrupt) and isinstance(left, PublishFailed)
        assert "version 1 broke off: another process is gone: process 1" in str(left)
        assert engine.version == "default" and engine.paused


@pytest.mark.parametrize("other", ["tensors", "mesh"])
def test_a_process_with_another_plan_is_refused_before_a_byte_moves(other):
    with engines() as ([engine], urls):
        source = random_source(metas_of(urls), 1)
        metas = tuple(dataclasses.replace(m, dtype="float16") if m.dtype == "bfloat16" else m
                      for m in source.metas)
        given = {"tensors": Shards(metas, source.arrays),
                 "mesh": Shards(source.metas, source.arrays, 1)}[other]
        first, second = published(urls, [lambda n: given if n else Shards(source.metas, source.arrays)])
        assert isinstance(first, ManifestMismatch) and isinstance(second, ProcessFailed)
        assert "process 1 of the learner would send other tensors, or other parts of them" in str(first)
        assert not engine.paused


def test_boxes_that_a_rank_s_digest_cannot_be_made_of_are_refused():
    meta = ParamMeta("x.weight", "bfloat16", (4, 6))
    outlet = Outlet()
    outlet.source = Halved((meta,), {})
    with pytest.raises(BridgeError, match="x.weight: columns .0, 3. of .0, 6. .* whole words"):
        outlet.open("shared_memory", 2**20, 0, [[pieces.whole(meta)]])


class Halved(Shards):
    def held(self):
        return [[(0, ((0, 4), (0, 3))), (0, ((0, 4), (3, 6)))]]


def metas_of(urls: list[str]) -> tuple[ParamMeta, ...]:
    with contextlib.closing(ServedTransport(TOKEN, urls=urls)) as transport:
        transport.open()
        return transport.expected_manifest()


class Decoder(torch.nn.Module):
    """The model of one_learner.py, as vLLM holds it on one of `ranks`."""

    packed_modules_mapping = Model.packed_modules_mapping

    def __init__(self, rank: int, ranks: int):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = words("VocabParallelEmbedding", rank, ranks)
        self.model.layers = torch.nn.ModuleList([layer(rank, ranks, i > 0)
                                                 for i in range(one_learner.LAYERS)])
        self.model.norm, self.lm_head = norm(one_learner.WIDTH), words("ParallelLMHead", rank, ranks)


def words(name: str, rank: int, ranks: int) -> torch.nn.Module:
    module, part = kind(name), -(-one_learner.VOCABULARY // 64) * 64 // ranks
    stop = min((rank + 1) * part, one_learner.VOCABULARY)
    module.shard_indices = types.SimpleNamespace(org_vocab_start_index=rank * part,
                                                 num_org_elements=stop - rank * part)
    module.org_vocab_size, module.quant_method = one_learner.VOCABULARY, UnquantizedLinearMethod()
    module.weight = parameter(part, one_learner.WIDTH)
    return module


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)


def norm(width: int) -> torch.nn.Module:
    module = kind("RMSNorm")
    module.weight = parameter(width)
    return module


def layer(rank: int, ranks: int, fp8: bool) -> torch.nn.Module:
    def made(name: str, rows: int, columns: int, **more) -> torch.nn.Module:
        module = linear(name, rank, ranks, rows, columns, **more)
        if not fp8:
            del module.weight_scale_inv
            module.weight, module.quant_method = parameter(rows, columns), UnquantizedLinearMethod()
        return module

    width, inner = one_learner.WIDTH, one_learner.INNER // ranks
    heads = one_learner.HEADS * one_learner.HEAD // ranks
    found, attention, mlp = (torch.nn.Module() for _ in range(3))
    attention.qkv_proj = made("QKVParallelLinear", 3 * heads, width, num_kv_head_replicas=1,
                              output_partition_sizes=[heads] * 3)
    attention.o_proj = made("RowParallelLinear", width, heads)
    attention.q_norm, attention.k_norm = norm(one_learner.HEAD), norm(one_learner.HEAD)
    mlp.gate_up_proj = made("MergedColumnParallelLinear", 2 * inner, width,
                            output_partition_sizes=[inner, inner])
    mlp.down_proj = made("RowParallelLinear", width, inner)
    found.self_attn, found.mlp = attention, mlp
    found.input_layernorm, found.post_attention_layernorm = norm(width), norm(width)
    return found


def learners(url: str, folder: Path, config: str, *ways: str, devices: int) -> list[list[str]]:
    """The contents of the receipts that each of two processes with `devices` says, a line for each way."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, one_learner.__file__, "2", url, TOKEN, str(folder), config, *ways]
    said = said_by_learners(command, [environment] * 2, 240)
    lines = [[line for line in text.splitlines() if len(line) == 129] for text in said]
    assert lines[0] == lines[1] and len(lines[0]) == len(ways), said
    return lines[0]


@pytest.mark.slow
def test_two_processes_of_jax_publish_what_one_device_does(tmp_path):
    """Each has two of four devices, over which every matrix is spread; it sends its own parts."""
    with engines() as ([engine], [url]):
        engine.models = [Decoder(rank, 4) for rank in range(4)]
        said = learners(url, tmp_path, "", "shared_memory", "file", devices=2)
        one = [alone([url], source) for source in one_learner.sources(ONE)]
    assert one[0] == one[1], "the masters, quantised on the way, are the policy"
    assert said == [" ".join(one)] * 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_publish_into_stock_vllm_at_two_ranks(tmp_path, monkeypatch):
    stock_server = pytest.importorskip("stock_server")
    monkeypatch.undo()  # vLLM is there
    paths, model = stock_server.installed(tmp_path), stock_server.model_folder(tmp_path)
    config = str(tmp_path / "bf16" / "config.json")
    with stock_server.serving(paths, model, tmp_path, 2) as url:
        said = learners(url, tmp_path, config, "shared_memory", "file", devices=1)
        one = [alone([url], source) for source in one_learner.sources(ONE, config)]
    assert said == [" ".join(one)] * 2 and one[0] == one[1]
