"""The plugin of vLLM and the learner's side of it, with plain torch modules for the model of each rank. Stock
`vllm serve` is in test_vllm_serve.py."""

from __future__ import annotations

import contextlib
import threading
import time

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("uvicorn")

import plugin_server  # noqa: E402
from plugin_server import TOKEN, Engine, serving, with_token, without_vllm  # noqa: E402

from bridges.api import BridgeError, EngineUnhealthy, ManifestMismatch, ParamMeta, PublishFailed  # noqa: E402
from bridges.served import served_control  # noqa: E402
from bridges.served.served_control import Server  # noqa: E402
from bridges.served.served_transport import ServedTransport  # noqa: E402
from bridges.served.ways import way  # noqa: E402
from bridges.sources.array_source import ArraySource, random_source  # noqa: E402
from bridges.vllm_plugin.pieces import taken  # noqa: E402
from bridges.vllm_plugin.publishes import PUBLISH  # noqa: E402


@pytest.fixture(autouse=True)
def guarded(tmp_path, monkeypatch):
    with_token(tmp_path, monkeypatch)
    without_vllm(monkeypatch)


@pytest.fixture
def served():
    """A function (ranks, and options of the transport) -> (the engine, an open transport)."""
    with contextlib.ExitStack() as stack:
        def make(ranks=1, engines=1, kv_scales=False, **options):
            made = [Engine(ranks, kv_scales) for _ in range(engines)]
            urls = [stack.enter_context(serving(engine)) for engine in made]
            transport = stack.enter_context(contextlib.closing(ServedTransport(TOKEN, urls=urls, **options)))
            transport.open()
            return (made[0] if engines == 1 else made), transport

        yield make


def held(engine: Engine, name: str) -> np.ndarray:
    """The whole tensor, put together from the bytes of all ranks."""
    whole = None
    for rank in engine.ranks:
        shard, live = rank.receiver._shards[name], rank.receiver._live[name].tensor
        array = live.contiguous().view(torch.uint8).numpy().view(getattr(ml_dtypes,
                                                                         shard.meta.dtype, shard.meta.dtype))
        whole = np.zeros(shard.meta.shape, array.dtype) if whole is None else whole
        whole[taken(shard.cut)] = array
    return whole


@pytest.mark.parametrize("ranks, kind, slot_bytes", [
    (1, "shared_memory", 2**20), (2, "shared_memory", 30000), (4, "shared_memory", 9000), (2, "file", 50000)])
def test_every_rank_holds_its_part_of_what_was_published(served, ranks, kind, slot_bytes, tmp_path):
    engine, transport = served(ranks, kind=kind, slot_bytes=slot_bytes, folder=tmp_path)
    metas = transport.expected_manifest()
    assert [m.shape for m in metas] == [m.shape for m in plugin_server.metas()]
    for version in (1, 2):
        source = random_source(metas, version, convert=jnp.asarray)
        receipt = transport.publish(source, version)
        for meta in metas:
            np.testing.assert_array_equal(held(engine, meta.name).view(np.uint8),
                                          np.asarray(source.arrays[meta.name]).view(np.uint8),
                                          err_msg=meta.name)
        assert (engine.version, engine.paused, engine.resets) == (str(version), False, version)
    transport.verify(receipt)
    assert receipt.tensors == len(metas) and receipt.caches_reset == ("prefix",)
    assert not [p for p in tmp_path.glob("jaxfp8rl-*") if p.is_file()], "what is mapped needs no name"


def test_receipts_do_not_depend_on_the_number_of_ranks(served):
    receipts = []
    for ranks in (1, 2):
        _, transport = served(ranks)
        receipts.append(transport.publish(random_source(transport.expected_manifest(), 5), 5))
    assert receipts[0].content == receipts[1].content and receipts[0].digest == receipts[1].digest


def test_two_servers_are_written_side_by_side(served):
    engines, transport = served(2, engines=2)
    transport.publish(random_source(transport.expected_manifest(), 1), 1)
    for name in engines[0].ranks[0].receiver._shards:
        np.testing.assert_array_equal(held(engines[0], name).view(np.uint8),
                                      held(engines[1], name).view(np.uint8))


def test_a_server_that_does_not_answer_is_left_out_until_it_does(served, monkeypatch):
    engines, transport = served(2, engines=2, slot_bytes=50_000)
    metas, call, gone = transport.expected_manifest(), Server.call, []

    def cut_off(self, path, *args, **kwargs):
        if self.url == transport._servers[1].url and (gone or path.startswith(PUBLISH)):
            gone.append(path)
            raise EngineUnhealthy("its process was killed")
        return call(self, path, *args, **kwargs)

    monkeypatch.setattr(Server, "call", cut_off)
    transport.publish(random_source(metas, 1), 1)
    transport.publish(random_source(metas, 2), 2)
    assert [e.version for e in engines] == ["2", "default"]
    monkeypatch.undo()
    receipt = transport.publish(random_source(metas, 3), 3)
    assert [e.version for e in engines] == ["3", "3"]
    transport.verify(receipt)
    monkeypatch.setattr(Server, "call", cut_off)
    monkeypatch.setattr(transport._servers[0], "call", lambda *a,
                        **k: cut_off(transport._servers[1], *a, **k))
    with pytest.raises(PublishFailed, match="its process was killed"):
        transport.publish(random_source(metas, 4), 4)


def test_a_server_that_hangs_in_a_publish_is_dirty_even_when_it_comes_round(served):
    engine, transport = served(seconds=0.4)
    source = random_source(transport.expected_manifest(), 1)
    receipt, hung = transport.publish(source, 1), threading.Event()
    engine.between = lambda: hung.wait(1.5)
    begun = time.monotonic()
    with pytest.raises(PublishFailed, match=f"version 2 broke off: .*{PUBLISH}.*: no answer within 0.4 s"):
        transport.publish(source, 2)
    assert time.monotonic() - begun < 1.2
    hung.set()
    assert "left in the middle of a publish" in refused_after(transport) and engine.version == "1"
    with pytest.raises(PublishFailed):
        transport.verify(receipt)
    engine.between = lambda: None
    transport.publish(source, 3)
    assert engine.version == "3"


def refused_after(transport: ServedTransport) -> str:
    """Why the engine does not resume, once it has come round."""
    with pytest.raises(PublishFailed) as e:
        transport._servers[0].call("/resume", seconds=5.0)
    return str(e.value)


def refused(transport: ServedTransport) -> str:
    """Why the engine gives no tokens."""
    with pytest.raises(PublishFailed) as e:
        transport._servers[0].call("/v1/completions")
    return str(e.value)


def test_a_flipped_byte_leaves_the_engine_dirty_until_the_next_full_publish(served):
    engine, transport = served(2)
    metas = transport.expected_manifest()
    transport.publish(random_source(metas, 1), 1)

    def flip():
        engine.models[1].down_proj.weight.view(torch.uint8)[3, 5] ^= 1

    engine.between = flip
    with pytest.raises(PublishFailed,
                       match="rank 1: down_proj.weight differs from what the learner sent .1 of 16"):
        transport.publish(random_source(metas, 2), 2)
    assert "rank 1: down_proj.weight differs" in refused(transport)
    assert engine.version == "1" and engine.paused, "no weights of two versions are served"
    engine.between = lambda: None
    transport.publish(random_source(metas, 3), 3)
    assert engine.version == "3"
    transport._servers[0].call("/v1/completions")


def test_weights_that_change_later_are_found(served):
    engine, transport = served()
    receipt = transport.publish(random_source(transport.expected_manifest(), 1), 1)
    engine.models[0].norm.weight[7] = 5.0
    with pytest.raises(PublishFailed, match="rank 0: norm.weight differs"):
        transport.verify(receipt)
    assert "norm.weight differs" in refused(transport)


def test_a_source_that_breaks_off_leaves_the_engine_dirty(served):
    engine, transport = served(2, slot_bytes=30000)
    metas = transport.expected_manifest()
    whole = random_source(metas, 1)
    transport.publish(whole, 1)

    class Half(ArraySource):
        def __iter__(self):
            stream = super().__iter__()
            for _ in range(4):
                yield next(stream)
            raise OSError("the learner's disk is gone")

    with pytest.raises(PublishFailed, match="version 2 broke off: the learner's disk is gone"):
        transport.publish(Half(metas, whole.arrays), 2)
    with pytest.raises(PublishFailed, match="rank 1: the learner broke off"):
        transport._servers[0].call("/resume")
    transport.publish(whole, 3)
    assert engine.version == "3"


@pytest.mark.parametrize("lasting", [True, False])
def test_what_the_learner_holds_is_digested_before_the_engine_stops(served, lasting):
    engine, transport = served(slot_bytes=30000)
    paused = []

    class Watching(ArraySource):
        def __iter__(self):
            for pair in super().__iter__():
                paused.append(engine.paused)
                yield pair

    source = random_source(transport.expected_manifest(), 1)
    watching = Watching(source.metas, source.arrays)
    object.__setattr__(watching, "lasting", lasting)
    receipt = transport.publish(watching, 1)
    assert any(paused) != lasting and len(paused) == len(source.metas)
    assert receipt.content == transport.publish(source, 2).content


@pytest.mark.parametrize("staged_bytes, left", [(0, True), (10**6, False)])
def test_staged_buckets_are_filled_before_the_engine_stops(served, staged_bytes, left):
    """Of a source that lies in memory; two slots are always filled ahead."""
    engine, transport = served(2, slot_bytes=30000, staged_bytes=staged_bytes)
    source = random_source(transport.expected_manifest(), 1)
    object.__setattr__(source, "lasting", True)
    filled, fill = [], transport._outlet._fill
    transport._outlet._fill = lambda k: (filled.append(engine.paused), fill(k))[1]
    for version in (1, 2):
        filled.clear()
        transport.publish(source, version)
        assert not any(filled[:2]) and any(filled) == left and len(filled) == transport._outlet.rounds > 2
        assert set(transport.phases) == {"prepare", "start", "send", "finish"}
        for name in source.arrays:
            np.testing.assert_array_equal(held(engine, name).view(np.uint8),
                                          np.asarray(source.arrays[name]).view(np.uint8))


def test_a_scale_of_nan_is_refused(served):
    engine, transport = served()
    source = random_source(transport.expected_manifest(), 1)
    source.arrays["o_proj.weight_scale_inv"][0, 1] = np.nan
    with pytest.raises(PublishFailed,
                       match="o_proj.weight_scale_inv holds a scale that is not positive and finite"):
        transport.publish(source, 1)


def test_scales_of_fp8_attention_reach_the_device_and_the_host(served, monkeypatch):
    """A publish may bring them or leave them."""
    attention = plugin_server.with_attention(monkeypatch)
    _, transport = served(2, kv_scales=True)
    must = transport.expected_manifest()
    may = tuple(ParamMeta(f"attn.{name}_scale", "float32", (), "kv_scale") for name in "kv")
    transport.publish(random_source(must, 1), 1)
    source = random_source(must + may, 2)
    receipt = transport.publish(source, 2)
    want = [float(source.arrays[m.name]) for m in may]
    assert [[m._k_scale.item(), m._v_scale.item()] for m in attention] == [want, want]
    assert [[m._k_scale_float, m._v_scale_float] for m in attention] == [want, want]
    attention[1]._v_scale_float = 3.0
    with pytest.raises(PublishFailed, match="rank 1: attn.v_scale is .* its copy on the host is 3.0"):
        transport.verify(receipt)


def test_another_model_is_refused_before_a_byte_moves(served):
    engine, transport = served()
    metas = transport.expected_manifest()
    with pytest.raises(ManifestMismatch, match="norm.weight: in the engine, missing from the source"):
        transport.publish(random_source(tuple(m for m in metas if m.name != "norm.weight"), 1), 1)
    assert not engine.paused


def test_a_second_learner_is_refused_and_told_of_the_first(served):
    _, transport = served(holder="the first learner")
    url = transport._servers[0].url
    with pytest.raises(BridgeError, match="the first learner is this engine's learner"):
        ServedTransport(TOKEN, urls=[url]).open()
    transport.close()
    second = ServedTransport(TOKEN, urls=[url])
    second.open()
    second.close()


def test_the_lease_is_renewed_while_its_holder_lives(served, monkeypatch):
    monkeypatch.setattr(served_control, "LEASE_SECONDS", 0.6)
    _, transport = served()
    url = transport._servers[0].url
    time.sleep(1.0)
    with pytest.raises(BridgeError, match="is this engine's learner"):
        Server(url, TOKEN).take()
    transport._servers[0]._ended.set()  # as if it had been killed
    time.sleep(0.8)
    successor = Server(url, TOKEN)
    successor.take()
    successor.release()


def test_a_wrong_token_and_a_server_without_the_plugin_are_told_apart(served):
    _, transport = served()
    with pytest.raises(BridgeError, match="refuses the token"):
        ServedTransport("another token of 32 letters, wrong", urls=[transport._servers[0].url]).open()
    with pytest.raises(BridgeError, match="is not the address of an engine"):
        ServedTransport(TOKEN, urls=["engine:80"]).open()
    with pytest.raises(BridgeError, match="no way 'pigeon' for weights"):
        way("pigeon", 1)
