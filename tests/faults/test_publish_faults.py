"""Faults of a publish, by their rows in docs/faults.md. The numpy engine plays the engine's part, also behind
the guard and the receiver of a served one; the same faults in vLLM itself are in tests/bridges and tests/gpu,
where the table says so."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import re
import threading
import time
import types
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("uvicorn")

from bigram_server import published_to
from faulty_engine import FaultyEngine, FaultyTransport

from bridges.api import (
    BridgeError,
    EngineDirty,
    EngineFormats,
    EngineUnhealthy,
    ManifestMismatch,
    ParamMeta,
    PublishFailed,
)
from bridges.conformance import EngineUnderTest
from bridges.conformance.broken_sources import MISMATCHES
from bridges.engines.embedded_engine import EmbeddedEngine, EngineModel
from bridges.engines.fake_engine import EMBED, HEAD, FakeEngine, FakeTransport
from bridges.engines.vllm_engine import SLEEP_LEVEL, VllmEngine
from bridges.engines.vllm_in_flight import Flights
from bridges.engines.weight_state import WeightState
from bridges.proof import manifest
from bridges.served import ways
from bridges.served.served_control import Server
from bridges.sources.array_source import ArraySource, random_source
from bridges.transports.embedded import EmbeddedTransport
from bridges.transports.vllm_reload import VllmReload
from bridges.vllm_plugin.publishes import PUBLISH
from bridges.vllm_plugin.receiver import Receiver

SLOT = 512  # bytes: the engine's two tensors of 2048 each make eight buckets
WAYS = {"in one process": None, "by file": "file", "by memory": "shared_memory"}
SERVED = [name for name, kind in WAYS.items() if kind]


@pytest.fixture(params=WAYS)
def under_test(request, monkeypatch, tmp_path):
    """A numpy engine, and a way to publish to it that proves what arrived: a transport in this process, or
    that of served engines. `e.real`: the engine itself."""
    if kind := WAYS[request.param]:
        with published_to(tmp_path, monkeypatch, kind, slot_bytes=SLOT) as e:
            yield e
    else:
        engine, transport = FaultyEngine(), FaultyTransport(proof=True)
        transport.open(engine)
        e = EngineUnderTest(engine, transport,
                            lambda seed: random_source(engine.expected_manifest(), seed, 1.0))
        e.real = engine
        yield e


def assert_dirty_until_published(e: EngineUnderTest) -> None:
    assert e.engine.weight_version() is None
    with pytest.raises(EngineDirty, match="publish a full set of weights first"):
        e.sample()
    assert e.publish(0).version == e.engine.weight_version() == e.sample()[0].version_spans[0].version


# 16: the engine dies between chunks


class Dying(ArraySource):
    """A source that breaks off before the tensor `die_at`."""

    die_at = 0

    def __iter__(self):
        for i, pair in enumerate(super().__iter__()):
            if i == self.die_at:
                raise ConnectionError(f"the link died at tensor {i}")
            yield pair


@pytest.mark.parametrize("tensor", [0, 1])
def test_row_16_death_at_any_tensor_leaves_the_version_where_it_was(under_test, tensor):
    first, good = under_test.publish(0), under_test.source(1)
    dying = Dying(good.metas, good.arrays)
    dying.die_at = tensor
    with pytest.raises(PublishFailed, match=f"the link died at tensor {tensor}"):
        under_test.transport.publish(dying, next(under_test.versions))
    if getattr(under_test.transport, "_kind", "") == "file":  # it is written before the engine stops
        spans = under_test.sample()[0].version_spans
        assert under_test.engine.weight_version() == spans[0].version == first.version
        return
    assert_dirty_until_published(under_test)


@pytest.mark.parametrize("under_test", ["by memory"], indirect=True)
@pytest.mark.parametrize("side", ["the engine's", "the learner's"])
def test_row_16_death_at_any_bucket(under_test, side, monkeypatch):
    """Of the engine's rank, or of the connection to it."""
    receive, call = Receiver._receive, Server.call
    for n in range(8):
        under_test.publish(0)

        def die(receiver, bucket, path, n=n):
            if bucket == n:
                raise ConnectionError(f"died at bucket {n}")
            receive(receiver, bucket, path)

        def cut_off(server, path, *args, n=n, **kwargs):
            if not path.startswith(PUBLISH):
                return call(server, path, *args, **kwargs)
            concurrent.futures.ThreadPoolExecutor(1).submit(call, server, path, *args, **kwargs)
            while under_test.transport._turns.emptied([0]) < n:
                time.sleep(1e-4)
            raise EngineUnhealthy(f"died at bucket {n}")

        with monkeypatch.context() as patch, pytest.raises(PublishFailed, match=f"died at bucket {n}"):
            if side == "the engine's":
                patch.setattr(Receiver, "_receive", die)
            else:
                patch.setattr(Server, "call", cut_off)
            under_test.publish(1)
        assert_dirty_until_published(under_test)


# 17: tensors missing, too many, renamed, reshaped, recast


def test_row_17_every_difference_is_listed_before_a_byte_moves(under_test):
    under_test.publish(0)
    before = under_test.real.content()
    for what, edit in MISMATCHES.items():
        metas = tuple(edit(list(under_test.source(1).manifest())))
        difference = manifest.differences(metas, under_test.real.expected_manifest())[0]
        with pytest.raises(ManifestMismatch, match=re.escape(difference)):
            # no array: reading one would be a KeyError
            under_test.transport.publish(ArraySource(metas, {}), 9)
        assert under_test.real.content() == before, what
    embed, head = under_test.source(0).manifest()
    metas = (dataclasses.replace(embed, shape=(8, 64), dtype="bfloat16"),
             dataclasses.replace(head, name="lm_head.wait"))
    with pytest.raises(ManifestMismatch) as e:
        under_test.transport.publish(ArraySource(metas, {}), 9)
    assert str(e.value).splitlines()[1:-1] == [
        "  lm_head.wait: in the source, unknown to the engine",
        "  lm_head.weight: in the engine, missing from the source",
        "  model.embed_tokens.weight: dtype bfloat16 in the source, float32 in the engine",
        "  model.embed_tokens.weight: shape (8, 64) in the source, (64, 8) in the engine",
    ]
    under_test.sample()


# 18: a tensor is lost and nobody says so


@pytest.mark.parametrize("tensor", [EMBED, HEAD])
def test_row_18_a_tensor_lost_in_silence_is_found_by_the_proof(under_test, tensor, monkeypatch):
    under_test.publish(0)
    under_test.real.faults.drop_tensor = tensor
    moves = Receiver._moves
    losing = lambda *args: [move for move in moves(*args) if move.meta.name != tensor]

    with monkeypatch.context() as patch, pytest.raises(
            PublishFailed, match=f"{tensor} differs from (the tensor sent|what the learner sent)"):
        patch.setattr(Receiver, "_moves", losing)
        for rank in getattr(under_test, "server", under_test).__dict__.get("ranks", ()):
            rank.receiver._copies.clear()  # which lose nothing yet
        under_test.publish(1)
    under_test.real.faults.drop_tensor = None
    assert_dirty_until_published(under_test)


@pytest.mark.parametrize("under_test", ["by memory"], indirect=True)
@pytest.mark.parametrize("bucket", [0, 3, 7])
def test_row_18_a_byte_changed_on_the_way_is_found(under_test, bucket, monkeypatch):
    fill = ways.SharedMemory.fill

    def spoil(sender, k, piece, tensor):
        fill(sender, k, piece, tensor)
        if k == bucket:
            sender._slots[k % ways.slots.SLOTS, piece.at + 17] ^= 4

    with monkeypatch.context() as patch, pytest.raises(PublishFailed,
                                                       match="differs from what the learner sent"):
        patch.setattr(ways.SharedMemory, "fill", spoil)
        under_test.publish(1)
    assert_dirty_until_published(under_test)


# 19: a stale prefix cache


def test_row_19_the_cache_goes_with_the_weights_and_the_receipt_says_so(under_test):
    """After a publish the engine says, of a prompt it had cached, what an engine says that never saw another
    version."""
    under_test.publish(0)
    under_test.sample(temperature=0.0)
    assert under_test.publish(1).caches_reset == ("prefix",)
    cold, transport = FakeEngine(), FakeTransport()
    transport.open(cold)
    transport.publish(under_test.source(1), 1)
    want = EngineUnderTest(cold, transport, under_test.source).sample(temperature=0.0)[0]
    have = under_test.sample(temperature=0.0)[0]
    assert have.token_ids.tobytes() == want.token_ids.tobytes() and have.logprobs.tobytes(
        ) == want.logprobs.tobytes()


def test_row_19_an_engine_that_cannot_reset_its_cache_stays_dirty():
    engine = half_a_vllm(reset_prefix_cache=lambda: False)
    engine._state.begin(3)
    with pytest.raises(EngineUnhealthy, match="refused to reset its prefix cache"):
        engine.commit(3, "digest")
    assert engine.weight_version() is None


def test_a_reload_that_the_engine_breaks_off_at_its_end_is_a_failed_publish():
    engine, transport = reloading(METAS, reset_prefix_cache=lambda: False)
    with pytest.raises(PublishFailed,
                       match="version 1 arrived but is not in use: vLLM refused to reset") as e:
        transport.publish(random_source(METAS, 0, convert=jnp.asarray), 1)
    assert isinstance(e.value.__cause__, EngineUnhealthy) and engine.weight_version() is None


METAS = (ParamMeta("w.weight", "float8_e4m3fn", (128, 128), "weight", (128, 128)),
         ParamMeta("w.weight_scale_inv", "float32", (1, 1), "block_scale", (128, 128)))


def reloading(metas, **llm) -> tuple[VllmEngine, VllmReload]:
    """Half a vLLM whose reload takes whatever comes, and the transport to it."""
    pytest.importorskip("torch")
    scripted = {"collective_rpc": lambda name, kwargs: list(kwargs["weights_iterator"]),
                "apply_model": lambda function: [None]}
    engine, transport = half_a_vllm(**{"reset_prefix_cache": lambda: True} | scripted | llm), VllmReload()
    engine._manifest, engine._tied, engine.kv_scale_places = metas, {}, ()
    transport.open(engine)
    return engine, transport


def embedded(metas) -> tuple[EmbeddedEngine, EmbeddedTransport]:
    """The embedded engine around no model."""
    model = EngineModel(metas, dict, None, None, None, None, EngineFormats(*["float32"] * 4), 8)
    engine, transport = EmbeddedEngine(model, max_model_len=8), EmbeddedTransport()
    transport.open(engine)
    return engine, transport


def half_a_vllm(how: str = "off", **llm) -> VllmEngine:
    """A VllmEngine with a scripted vLLM inside: for what the real one does on a GPU alone, or never when it
    is well."""
    engine = object.__new__(VllmEngine)
    engine._state, engine._sick, engine._broken, engine._asleep, engine._cache_asleep = WeightState(
        ), "", False, False, False
    engine._flights = Flights(None, lambda *_: None, lambda *_: None)
    engine._sleep_level, engine._llm = SLEEP_LEVEL[how], types.SimpleNamespace(**llm)
    return engine


# 20: a scale that is stale or zero


@pytest.mark.parametrize("role", ["block_scale", "kv_scale"])
def test_row_20_scales_are_in_the_manifest_by_role(role):
    weight = ParamMeta("w", "float8_e4m3fn", (128, 128), "weight", (128, 128))
    scale = ParamMeta("w_scale", "float32", (1, 1), role, (128, 128) if role == "block_scale" else None)
    with pytest.raises(ManifestMismatch, match="w_scale: in the engine, missing from the source"):
        manifest.check([weight], [weight, scale])
    with pytest.raises(ManifestMismatch, match=f"w_scale: role weight in the source, {role} in the engine"):
        manifest.check([weight, dataclasses.replace(scale, role="weight")], [weight, scale])


@pytest.mark.parametrize("value, unsound",
                         [(1e-30, 0), (1.0, 0), (0.0, 1), (-1.0, 1), (np.inf, 1), (np.nan, 1), (-0.0, 1)])
def test_row_20_a_scale_that_is_not_positive_and_finite_is_counted_where_it_lies(value, unsound):
    from bridges.proof.digest import checked_row_digests

    scales = jnp.ones((4, 8), jnp.float32).at[1, 3].set(value)
    assert np.asarray(checked_row_digests([scales[None]],
                                          (((0, 2, True), (2, 4, True)),)))[:, 2].tolist() == [unsound, 0]
    assert np.asarray(checked_row_digests([scales[None]],
                                          (((0, 4, False),),)))[0, 2] == 0, "any value is sound of a weight"


@pytest.mark.parametrize("opened", [reloading, embedded])
@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_row_20_a_scale_that_is_not_positive_and_finite_is_refused_on_the_way(opened, value):
    """By the transports that do not read the engine back."""
    (engine, transport), good = opened(METAS), random_source(METAS, 0, convert=jnp.asarray)
    transport.publish(good, 1)
    bad = dataclasses.replace(good, arrays=good.arrays | {METAS[1].name: jnp.full((1, 1), value)})
    with pytest.raises(PublishFailed,
                       match="w.weight_scale_inv holds a scale that is not positive and finite"):
        transport.publish(bad, 2)
    assert engine.weight_version() is None
    assert transport.publish(good, 3).version == 3


# 21: an update overlaps generation


def test_row_21_a_publish_freezes_the_generation_in_flight(monkeypatch, tmp_path):
    """No byte moves while the engine samples, and each token says whose it is: requests go on at the new
    weights."""
    with published_to(tmp_path, monkeypatch, slot_bytes=SLOT, seconds=0.01) as e:
        first, done = e.publish(0), []
        thread = threading.Thread(target=lambda: done.extend(e.sample(n=2, max_tokens=60, temperature=0.0)))
        thread.start()
        lengths = lambda: [len(d.tokens) for drafts in list(e.real._drafts.values()) for d in drafts]
        while min(lengths(), default=0) < 5:
            time.sleep(0.01)
        assert e.engine.health().ok and e.engine.weight_version() == first.version, "answered meanwhile"
        sampled, receive = [], Receiver._receive
        monkeypatch.setattr(Receiver, "_receive", lambda *a: (sampled.append(lengths()), receive(*a)))
        second = e.publish(1)
        thread.join()
        assert len(sampled) == 8 and all(x == sampled[0] for x in sampled), "a byte moved under a generation"
        assert [[s.version for s in c.version_spans] for c in done] == [[first.version, second.version]] * 2
        assert sorted(c.version_spans[0].stop for c in done) == sorted(sampled[0])
        for c in done:
            at, weights = c.version_spans[0].stop, e.real
            last = [e.prompt()[-1], *c.token_ids.tolist()]
            best = [int((weights.weight(HEAD) @ weights.weight(EMBED)[t]).argmax()) for t in last[at:-1]]
            assert best == c.token_ids[at:].tolist(), "not of the new weights"


# 22 needs CUDA graphs: see docs/faults.md
# 23: buffers that outlive their use


@pytest.mark.parametrize("under_test", ["by memory"], indirect=True)
def test_row_23_no_view_is_left_of_what_was_sent(under_test):
    """The learner may donate its arrays once `publish` returns, and those made on the way go as it
    advances."""
    alive = []

    class Made:
        def manifest(self):
            return under_test.source(0).manifest()

        def __iter__(self):
            for name, array in under_test.source(0):
                assert sum(ref() is not None for ref in alive) <= 1, "of what was sent before"
                made = jnp.asarray(array)
                alive.append(weakref.ref(made))
                yield name, made
                del made

    under_test.transport.publish(Made(), 1)
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    under_test.sample()


# 24: no memory to wake


def test_row_24_memory_comes_back_in_the_order_in_which_it_is_needed():
    calls = []
    engine = half_a_vllm(
        "drop_weights", sleep=lambda level: calls.append(f"sleep {level}"),
        wake_up=lambda tags: calls.append(f"wake {tags}"),
        reset_prefix_cache=lambda: True,
    )
    for _ in range(2):
        engine.sleep()
        with pytest.raises(BridgeError, match="asleep"):
            engine.require_awake()
        engine.wake()
        engine.begin(1)
        calls.append("publish")
        engine.commit(1, "digest")
    assert calls == ["sleep 2", "wake ['weights']", "publish", "wake ['kv_cache']"] * 2
    engine.sleep()
    engine.wake()
    engine.sleep()  # nothing was published: the cache is woken for vLLM to go to sleep whole
    assert calls[8:] == ["sleep 2", "wake ['weights']", "wake ['kv_cache']", "sleep 2"]


def test_row_24_out_of_memory_names_the_knobs():
    def wake_up(tags):
        raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp")

    engine = half_a_vllm("keep_weights", sleep=lambda level: None, wake_up=wake_up)
    engine.sleep()
    with pytest.raises(EngineUnhealthy,
                       match="could not take back the memory of its weights and kv_cache") as e:
        engine.wake()
    for knob in ("rollout.kv_cache_gib", "train.rows_per_microbatch", "train.remat"):
        assert knob in e.value.next_step
    with pytest.raises(BridgeError, match="asleep"):
        engine.require_awake()
