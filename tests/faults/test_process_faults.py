"""Faults of processes, by their rows in docs/faults.md: an engine that dies, a run that is told to go, that
hangs, that is not alone in its directory."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from bridges.api import (
    EngineDirty,
    EngineUnhealthy,
    GenRequest,
    ManifestMismatch,
    PublishFailed,
    SamplingParams,
)
from bridges.conformance import CHECKS, EngineUnderTest
from bridges.engines.fake_engine import FakeEngine, FakeTransport
from bridges.served import supervised_engine
from bridges.served.remote_engine import Deadlines, RemoteEngine, start
from bridges.served.remote_file import RemoteFile
from bridges.served.supervised_engine import SupervisedEngine
from bridges.served.wire import pack_error, unpack_error
from bridges.sources.array_source import random_source

TOKEN = "a token of the tests, 32 letters"
DEADLINES = Deadlines(2.0, 5.0, 5.0, 5.0)
REQUESTS = [GenRequest(f"r{i}", (1, 2, i), SamplingParams(6), 2, seed=i) for i in range(4)]


class Supervised:
    """A supervised fake engine whose processes have the faults of `script`, one entry a start, an error for
    one that fails; `pids`: those started."""

    def __init__(self, *script: dict, budget: int = 2):
        self.script, self.pids = iter(script), []
        self.engine = SupervisedEngine(self.start, budget)
        self.metas = self.engine.current.expected_manifest()

    def start(self):
        faults = next(self.script)
        if isinstance(faults, Exception):
            raise faults
        engine, transport = start("fake", deadlines=DEADLINES, faults=faults), RemoteFile()
        self.pids.append(engine.pid)
        transport.open(engine)
        return engine, transport

    def source(self, seed: int):
        return random_source(self.metas, seed, 1.0)

    def kill(self) -> None:
        os.kill(self.pids[-1], signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()


def sampled(groups) -> list:
    return [(c.token_ids.tobytes(), c.logprobs.tobytes(), c.version_spans) for group in groups for c in group]


@pytest.fixture(scope="module")
def undisturbed() -> list:
    with Supervised({}) as s:
        s.engine.publish(s.source(7), 3)
        return sampled(s.engine.generate(REQUESTS))


# 25: the engine dies in generate


@pytest.mark.parametrize("how", ["exit status 0", "SIGKILL"])
def test_row_25_a_dead_engine_is_known_at_once_and_another_answers_as_it_would_have(how, undisturbed):
    """An exit status of 0 is a death, too. The version is the one it had; what was asked is answered to the
    bit."""
    dying = {"exit_status": 0} if how == "exit status 0" else {"seconds": 30.0}
    with Supervised(dying, {}) as s:
        s.engine.publish(s.source(7), 3)
        if how == "SIGKILL":
            threading.Timer(0.3, s.kill).start()
        begun = time.monotonic()
        assert sampled(s.engine.generate(REQUESTS)) == undisturbed
        assert time.monotonic() - begun < 5 and s.engine.restarts == 1 and s.engine.weight_version() == 3
        assert len(set(s.pids)) == 2 and s.engine.health().ok


class Killing:
    """A source in which the second engine dies."""

    def __init__(self, s):
        self.s, self.inner = s, s.source(7)

    def manifest(self):
        return self.inner.manifest()

    def __iter__(self):
        if len(self.s.pids) == 2:
            self.s.kill()
        yield from self.inner


def test_row_25_an_engine_that_dies_between_calls_or_in_a_publish_is_replaced(undisturbed):
    with Supervised({}, {}, {}) as s:
        s.engine.publish(s.source(1), 2)
        s.kill()
        assert s.engine.generate(REQUESTS)[0][0].version_spans[0].version == 2  # the first restart
        receipt = s.engine.publish(Killing(s), 3)
        assert receipt.version == 3 and s.engine.restarts == 2
        s.engine.verify(receipt)
        assert sampled(s.engine.generate(REQUESTS)) == undisturbed


def test_row_25_an_engine_that_does_not_come_up_at_once_is_started_again(undisturbed, monkeypatch):
    """The memory of the one before was not free yet; then it died of the weights that it gets; then all is
    well."""
    monkeypatch.setattr(supervised_engine, "PAUSE_SECONDS", 0.0)
    with Supervised({}, ValueError("no memory is free"), {}, {}, RuntimeError("none"), budget=4) as s:
        s.engine.publish(Killing(s), 3)
        s.kill()
        assert sampled(s.engine.generate(REQUESTS)) == undisturbed
        assert s.engine.restarts == 3 and len(s.pids) == 3 and s.engine.weight_version() == 3
        s.kill()
        with pytest.raises(EngineUnhealthy,
                           match="none; the engine has been started anew 4 times, which is all it may be"):
            s.engine.generate(REQUESTS)


def test_an_engine_that_hangs_in_a_publish_is_replaced_though_its_server_answers(serving, tmp_path):
    hung = threading.Event()

    def start():
        engine, transport = FakeEngine(), FakeTransport()
        transport.open(engine)
        if not urls:
            engine.commit = lambda *_: hung.wait(20)
        urls.append(stack.enter_context(serving(engine, transport, tmp_path)))
        remote, way = RemoteEngine(urls[-1], TOKEN, Deadlines(1.0, 1.0, 0.3, 1.0),
                                   leave_running=True), RemoteFile()
        way.open(remote)
        return remote, way

    urls = []
    with contextlib.ExitStack() as stack:
        supervised = SupervisedEngine(start, 2)
        source = random_source(supervised.current.expected_manifest(), 0, 1.0)
        stack.callback(hung.set)  # before the servers are waited for
        assert supervised.publish(source,
                                  1).version == supervised.weight_version() == 1 and supervised.restarts == 1


class Scripted:
    """Supervised fake engines of this process. `fail`: what the next publish raises; `engines`: those
    started."""

    def __init__(self, kind=FakeEngine):
        self.kind, self.engines, self.fail = kind, [], None
        self.engine = SupervisedEngine(self.start, 2)
        self.metas = self.engine.current.expected_manifest()

    def start(self):
        self.engines.append(self.kind())
        transport = FakeTransport()
        transport.open(self.engines[-1])
        publish = transport.publish

        def scripted(source, version):
            fail, self.fail = self.fail, None
            if fail:
                raise fail
            return publish(source, version)

        transport.publish = scripted
        return self.engines[-1], transport

    def source(self, seed: int):
        return random_source(self.metas, seed, 1.0)

    def die(self) -> None:
        def dead(requests):
            raise EngineUnhealthy("no answer")

        self.engines[-1].generate = dead

    def version(self) -> int:
        return self.engine.generate(REQUESTS)[0][0].version_spans[0].version


def failed(cause: Exception | None) -> PublishFailed:
    error = PublishFailed("version 2 broke off")
    error.__cause__ = cause
    return unpack_error(pack_error(error))  # of an engine in another process


def test_a_refused_manifest_of_an_engine_started_anew_is_a_failed_publish():
    """The one before went on as it was; this one holds nothing, and must not be asked."""
    s = Scripted()
    s.engine.publish(s.source(0), 1)
    other = random_source(s.metas[:1], 0)
    with pytest.raises(ManifestMismatch):
        s.engine.publish(other, 2)
    assert s.version() == 1 and s.engine.restarts == 0
    s.fail = EngineUnhealthy("no answer")
    with pytest.raises(PublishFailed, match="started anew and holds no weights: the source's weights") as e:
        s.engine.publish(other, 2)
    assert "build both sides from the same config" in e.value.next_step and s.engine.weight_version() is None
    s.engine.publish(s.source(0), 3)
    assert s.version() == 3


@pytest.mark.parametrize("cause, restarts",
                         [(EngineUnhealthy("it hangs"), 1), (ValueError("the source"), 0), (None, 0)])
def test_the_cause_of_a_failed_publish_decides_and_not_what_was_sampled_before(cause, restarts):
    s = Scripted()
    s.engine.publish(s.source(0), 1)
    s.engines[-1]._sick = "a log-probability was nan"
    s.fail = failed(cause)
    with contextlib.nullcontext() if restarts else pytest.raises(PublishFailed):
        assert s.engine.publish(s.source(0), 2).version == 2
    assert s.engine.restarts == restarts


def test_what_is_published_again_is_what_the_engine_had():
    """Not what it refused, and nothing where it had nothing whole."""
    s = Scripted()
    s.engine.publish(s.source(0), 1)
    with pytest.raises(ManifestMismatch):
        s.engine.publish(random_source(s.metas[:1], 0), 2)
    assert s.version() == 1
    s.die()
    assert s.version() == 1 and s.engine.restarts == 1
    s.fail = failed(None)
    with pytest.raises(PublishFailed):
        s.engine.publish(s.source(0), 3)
    s.die()
    with pytest.raises(EngineDirty):
        s.version()


@pytest.mark.parametrize("when", ["it generates", "another starts"])
def test_an_engine_that_is_closed_is_not_started_anew(when):
    began, closed = threading.Event(), threading.Event()

    class Waiting(FakeEngine):
        def generate(self, requests):
            began.set()
            assert when == "another starts" or closed.wait(5)
            raise EngineUnhealthy("its process has ended")

        def close(self):
            super().close()
            closed.set()

    s, raised = Scripted(Waiting), []
    s.engine.publish(s.source(0), 1)
    if when == "another starts":
        start, inner = s.engine._start, s.engine.close
        s.engine._start = lambda: (inner(), start())[1]

    def generate():
        try:
            s.version()
        except EngineUnhealthy as e:
            raised.append(str(e))

    thread = threading.Thread(target=generate)
    thread.start()
    assert began.wait(5)
    if when == "it generates":
        s.engine.close()
    thread.join(5)
    assert raised == ["the engine is closed\n  next step: build a new one"]
    assert len(s.engines) == 1 + (when == "another starts") and all(
        "closed" in e.state.dirty for e in s.engines)


def test_row_25_what_kills_two_engines_in_a_row_is_raised_and_so_is_the_end_of_the_budget():
    with Supervised({"exit_status": 0}, {"exit_status": 1}, {}, budget=2) as s:
        s.engine.publish(s.source(7), 3)
        with pytest.raises(EngineUnhealthy,
                           match="generate: no answer.*its process has ended with exit status 1"):
            s.engine.generate(REQUESTS)
        assert s.engine.restarts == 1 and s.engine.generate(REQUESTS)
        s.kill()
        with pytest.raises(EngineUnhealthy,
                           match="ended by SIGKILL; the engine has been started anew 2 times, which is all"):
            s.engine.generate(REQUESTS)


def test_row_25_a_fault_that_is_not_the_engines_restarts_nothing():
    with Supervised({}) as s:
        with pytest.raises(EngineDirty):
            s.engine.generate(REQUESTS)
        with pytest.raises(PublishFailed):
            s.engine.publish(random_source(s.metas[:1], 0), 1)
        s.engine.publish(s.source(7), 3)
        with pytest.raises(ValueError, match="max_model_len"):
            s.engine.generate([GenRequest("long", (1,) * 400, SamplingParams(6), 1)])
        assert s.engine.restarts == 0


def test_a_supervised_engine_is_an_engine():
    with Supervised({}) as s:
        under_test = EngineUnderTest(s.engine, s.engine, s.source)
        for check in CHECKS:
            check(under_test)
