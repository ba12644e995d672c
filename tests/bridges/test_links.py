"""Weights from process to process without a file: what goes through the slots, its proof, and what becomes of
a broken link."""

from __future__ import annotations

import errno
import os
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridges.api import BridgeError, EngineUnhealthy, ParamMeta, PublishFailed, StackRow
from bridges.conformance import CHECKS, EngineUnderTest
from bridges.engines.fake_engine import FakeEngine, FakeTransport
from bridges.proof import manifest
from bridges.proof.byte_digest import host_digest
from bridges.served import links
from bridges.served.linked import LinkedWeights, _SentFromGpu, _SentFromHost, send
from bridges.served.remote_direct import RemoteDirect
from bridges.served.remote_engine import Deadlines, RemoteEngine
from bridges.sources.array_source import ArraySource, random_source

TOKEN = "a token of the tests, 32 letters"
FP8 = ParamMeta("w", "float8_e4m3fn", (33, 40), "weight", (128, 128))
METAS = (ParamMeta("a", "bfloat16", (7, 13)), FP8, ParamMeta("s", "float32", ()),
         ParamMeta("b", "float32", (3, 5, 11)))


@pytest.fixture(params=links.HOST_LINKS)
def under_test(request, serving, tmp_path):
    """An engine behind a server in a thread of this process, and a link whose slots are smaller than a
    tensor."""
    engine, transport = FakeEngine(), FakeTransport(proof=True)
    transport.open(engine)
    with serving(engine, transport, tmp_path) as url:
        remote, direct = RemoteEngine(url, TOKEN, Deadlines(2.0, 5.0, 5.0, 30.0)), RemoteDirect(
            request.param, slot_bytes=700)
        direct.open(remote)
        assert os.listdir(tmp_path) == [], "what is mapped needs no name"
        yield EngineUnderTest(remote, direct,
                              lambda seed: random_source(remote.expected_manifest(), seed, 1.0))
        direct.close()


def test_conformance(under_test):
    for check in CHECKS:
        check(under_test)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 5))
def test_every_byte_has_one_place_and_tensors_begin_aligned(sizes, slots_of_256):
    metas = [ParamMeta(str(i), "uint8", (17 * n,)) for i, n in enumerate(sizes)]
    slot_bytes, filled = 256 * slots_of_256, {m.name: 0 for m in metas}
    for bucket in links.buckets(metas, slot_bytes):
        end = 0
        for p in bucket:
            assert p.at >= end and p.at + (end := p.at + p.size) - p.at <= slot_bytes and p.size > 0
            assert p.start == filled[p.name] and (p.start or p.at % links.ALIGN == 0)
            filled[p.name] += p.size
    assert filled == {m.name: m.shape[0] for m in metas}


def test_the_host_digests_as_the_gpu_does():
    from bridges.proof.digest import tensor_digests

    for name, array in random_source(METAS, 3):
        want = np.asarray(tensor_digests([jnp.asarray(array)]))[0]
        assert host_digest(array).tolist() == want.tolist(), name


def test_what_leaves_from_a_gpu_is_what_leaves_from_the_host():
    """The GPU's reader, on JAX arrays of this CPU, rows of stacks among them: the same bytes and digests."""
    metas = tuple(ParamMeta(f"model.layers.{i}.{n}", "float8_e4m3fn", (6, 8)) for i in range(2)
                  for n in "ab") + METAS
    plain = random_source(metas, 1)
    stacks = {n: jnp.stack([jnp.asarray(plain.arrays[f"model.layers.{i}.{n}"]) for i in range(2)])
              for n in "ab"}
    stacks["a"] = stacks["a"].reshape(1, 2, 6, 8)  # as experts lie
    rows = {f"model.layers.{i}.{n}": StackRow(stacks[n], (0, i) if n == "a" else i) for i in range(2)
            for n in "ab"}
    on_device = ArraySource(metas, {name: jnp.asarray(x) for name, x in plain.arrays.items()} | rows)
    host, gpu = _SentFromHost(metas), _SentFromGpu(metas)
    for name, a, b in zip(plain.arrays, host.read(plain), gpu.read(on_device), strict=True):
        assert a.tobytes() == b.numpy().tobytes(), name
    assert host.digests().tolist() == gpu.digests().tolist()
    with pytest.raises(ValueError, match="but its manifest says"):
        list(_SentFromGpu(metas).read(ArraySource(metas, on_device.arrays | {"a": jnp.zeros((7, 12))})))


class Ends:
    """Both ends of a shared_memory link in this process."""

    def __init__(self, folder, seconds: float = 5.0):
        def accept(said):
            self.receiver = links.accept(said, folder)

        self.sender = links.connect("shared_memory", folder, len(METAS), 512, seconds, accept)
        self.until = time.monotonic() + seconds
        self.got, self.error = {}, None

    def transfer(self, source, spoil=lambda link: None):
        def receive():
            try:
                for name, array in LinkedWeights(self.receiver, METAS, self.until):
                    self.got[name] = array
            except Exception as e:
                self.error = e

        thread = threading.Thread(target=receive)
        thread.start()
        try:
            send(self.sender, source, METAS, self.until, lambda: spoil(self.sender))
        except Exception:
            self.sender.stop()
            raise
        finally:
            thread.join()


def test_every_byte_arrives_of_any_dtype_and_shape(tmp_path):
    ends, source = Ends(tmp_path), random_source(METAS, 0)
    for seed in (0, 1):
        ends.sender.mailbox.clear()
        source = random_source(METAS, seed)
        ends.transfer(source)
        assert ends.error is None
        for name, want in source:
            assert ends.got[name].dtype == want.dtype and ends.got[name].tobytes() == want.tobytes()
            assert ends.got[name].shape == want.shape


def test_a_byte_that_changes_on_the_way_is_found(tmp_path):
    ends, original = Ends(tmp_path), links.Link.send

    def flip(link, k):
        link.slots[k % links.SLOTS][5] ^= 1
        original(link, k)

    ends.sender.send = flip.__get__(ends.sender)
    ends.transfer(random_source(METAS, 0))
    assert isinstance(ends.error, BridgeError) and "did not arrive as it was sent" in str(ends.error)


def test_whoever_waits_is_told_when_the_other_gives_up_or_is_late(tmp_path):
    good = random_source(METAS, 0)
    ends = Ends(tmp_path)
    with pytest.raises(KeyError):
        ends.transfer(ArraySource(METAS, {"a": good.arrays["a"]}))
    assert isinstance(ends.error, EngineUnhealthy) and "the other side gave up" in str(ends.error)
    ends = Ends(tmp_path, seconds=0.2)
    with pytest.raises(EngineUnhealthy, match="room for bucket 2 did not come by the deadline"):
        send(ends.sender, good, METAS, ends.until, lambda: None)
    with pytest.raises(EngineUnhealthy, match="bucket 0 did not come by the deadline"):
        ends.sender.mailbox.clear()
        list(LinkedWeights(ends.receiver, METAS, time.monotonic() + 0.1))


def test_a_folder_without_room_is_refused_and_left_clean(serving, tmp_path, monkeypatch):
    """Known when room is asked for: a write to a file with holes would end the process."""

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    engine, transport = FakeEngine(), FakeTransport()
    transport.open(engine)
    with serving(engine, transport, tmp_path) as url:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(BridgeError, match="no link shared_memory to the engine: .*No space left") as e:
            RemoteDirect("shared_memory").open(RemoteEngine(url, TOKEN))
        assert "files always work" in e.value.next_step and os.listdir(tmp_path) == []
        monkeypatch.undo()
        direct = RemoteDirect("shared_memory")
        direct.open(RemoteEngine(url, TOKEN))
        assert direct._link.slot_bytes == 4096, "no more than the model takes"
        direct.close()


@pytest.mark.parametrize("kind", links.HOST_LINKS)
def test_a_folder_that_is_not_the_servers_is_refused_and_left_clean(serving, tmp_path, kind):
    (here := tmp_path / "here").mkdir(), (there := tmp_path / "there").mkdir()
    engine, transport = FakeEngine(), FakeTransport()
    transport.open(engine)
    with serving(engine, transport, there) as url:
        with pytest.raises(BridgeError, match=f"{there}, .* is not the one that the learner uses"):
            RemoteDirect(kind, here).open(RemoteEngine(url, TOKEN))
    assert os.listdir(there) == []


def test_what_cannot_be_linked_is_refused(serving, tmp_path):
    with pytest.raises(BridgeError, match="there is no link 'pigeon'"):
        RemoteDirect("pigeon")
    engine, transport = FakeEngine(), FakeTransport()
    transport.open(engine)
    with serving(engine, transport, tmp_path) as url:
        remote = RemoteEngine(url, TOKEN)
        with pytest.raises(BridgeError,
                           match="FakeTransport takes weights over shared_memory or gloo, not over nccl"):
            remote.call("connect", said={"kind": "nccl", "name": "x", "tensors": 2, "slot_bytes": 512})
        with pytest.raises(BridgeError, match="named '../x'"):
            remote.call("connect", said={"kind": "gloo", "name": "../x", "tensors": 2, "slot_bytes": 512})
        remote.call("begin", version=1, tensors=_packed(engine))
        with pytest.raises(PublishFailed, match="there is no link"):
            remote.call("receive", version=1, digest=manifest.digest(engine.expected_manifest()), within=1.0)


def _packed(engine: FakeEngine) -> list[dict]:
    from bridges.served import wire

    return wire.pack_manifest(engine.expected_manifest())
