"""Served engines as a run has them: publishes to all, replicas that die and return, and what is left out
meanwhile. Stand-ins serve; a transport writes into their engines."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
from stand_in import TOKEN, StandIn
from test_vllm_client import request, until

from bridges.api import (
    EngineDirty,
    EngineUnhealthy,
    PublishFailed,
    RolloutEngine,
    WeightTransport,
)
from bridges.conformance import CHECKS, EngineUnderTest
from bridges.engines.fake_engine import HEAD, FakeEngine, FakeTransport
from bridges.served.served_engines import ServedEngines
from bridges.served.vllm_client import Deadlines
from bridges.sources.array_source import random_source

METAS = FakeEngine().expected_manifest()
QUICK = Deadlines(connect=0.5, generate=5.0, call=2.0, down=3.0)


class Fleet:
    """Stand-ins as children of a run (`ServeProcesses`), and the way into them. dies: the replica that ends
    when a publish reaches it."""

    def __init__(self, count: int, seconds: float = 0.0, token_seconds: float = 0.0):
        self.how = {"seconds": seconds, "token_seconds": token_seconds}
        self.started, self.dies, self.open = 0, None, set()
        self.leaves_out = False
        self.servers = [StandIn(FakeEngine(seed=i), **self.how) for i in range(count)]
        self.urls = tuple(s.url for s in self.servers)

    def alive(self, i):
        return self.servers[i].alive

    def kill(self, i):
        self.servers[i].close()

    def kill_when_asked(self, i):
        def kill():
            until(lambda: self.servers[i].asked)
            self.kill(i)

        threading.Thread(target=kill).start()

    def start(self, i):
        self.kill(i)
        self.started += 1
        port = int(self.urls[i].rpartition(":")[2])
        self.servers[i] = StandIn(FakeEngine(seed=i), **self.how, port=port)

    def wait_until_ready(self, seconds, only):
        until(lambda: self.alive(only))

    def close(self):
        for i in range(len(self.servers)):
            self.kill(i)

    def transport(self, urls):
        return Way(self, urls)

    def versions(self):
        return [s.engine.weight_version() for s in self.servers]


class Way:
    """A ServedTransport in this process. One may be open on a replica at a time, as the lease has it."""

    def __init__(self, fleet, urls):
        self.fleet, self.at = fleet, [fleet.urls.index(u) for u in urls]
        self.ways = []

    def open(self, engine=None):
        self.engine = engine
        assert not self.fleet.open & set(self.at), "the lease of another transport"
        self.fleet.open |= set(self.at)
        for i in self.at:
            self.ways.append(FakeTransport(proof=True))
            self.ways[-1].open(self.fleet.servers[i].engine)

    def expected_manifest(self):
        return METAS

    def publish(self, source, version):
        if self.fleet.dies in self.at:
            self.fleet.kill(self.fleet.dies)
        held = []
        for i, way in zip(self.at, self.ways):
            if self.fleet.alive(i):
                receipt = way.publish(source, version)
                held.append(self.fleet.urls[i])
            elif self.fleet.leaves_out and len(self.at) > 1:
                self.engine.put_down(self.fleet.urls[i], "no answer")
            else:
                self.fleet.dies = None
                raise PublishFailed(f"version {version} broke off") from EngineUnhealthy("no answer")
        if self.engine:
            self.engine.published(held)
        return receipt

    def verify(self, receipt):
        for way in self.ways:
            way.verify(receipt)

    def close(self):
        self.fleet.open -= set(self.at if self.ways else ())
        self.ways = []


@contextlib.contextmanager
def run(count=2, seconds=0.0, token_seconds=0.0, **kwargs):
    fleet = Fleet(count, seconds, token_seconds)
    engine = ServedEngines(TOKEN, fleet.transport, processes=fleet, deadlines=QUICK, **{"restarts": 3} | kwargs)
    with contextlib.closing(engine):
        yield fleet, engine, lambda version, seed=0: engine.publish(random_source(METAS, seed, 1.0), version)


@pytest.fixture(scope="module")
def under_test():
    with run(token_seconds=0.005) as (_, engine, _):
        yield EngineUnderTest(engine, engine, lambda seed: random_source(METAS, seed, 1.0))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, under_test):
    check(under_test)


def test_keeps_the_contracts(under_test):
    assert isinstance(under_test.engine, RolloutEngine) and isinstance(under_test.engine, WeightTransport)
    assert under_test.engine.expected_manifest() == METAS


def test_a_replica_killed_while_it_samples_returns_at_the_last_version():
    with run(seconds=0.15) as (fleet, engine, publish):
        publish(1), publish(2, seed=5)
        fleet.kill_when_asked(0)
        groups = engine.generate([request(i, 2, seed=i) for i in range(6)])
        versions = {s.version for g in groups for c in g for s in c.version_spans}
        assert [len(g) for g in groups] == [2] * 6 and versions == {2}
        until(lambda: fleet.started == engine.restarts == 1)
        done = threading.Event()

        def sample():  # the next step, in which it is given its weights if it has not got them yet
            while not done.is_set():
                engine.generate([request()])

        thread = threading.Thread(target=sample)
        thread.start()
        until(lambda: fleet.versions() == [2, 2])
        done.set()
        thread.join()
        until(lambda: engine.health().detail == "")
        heads = [s.engine.weight(HEAD) for s in fleet.servers]
        np.testing.assert_array_equal(*heads)
        assert publish(3).version == 3 and fleet.versions() == [3, 3]


def test_weights_are_not_given_again_when_the_learner_may_have_changed_them():
    with run(seconds=0.3, replay=False) as (fleet, engine, publish):
        publish(1)
        fleet.kill_when_asked(1)
        engine.generate([request(i) for i in range(6)])
        until(lambda: fleet.started == 1)
        until(lambda: engine.client.replicas[1].lost is EngineDirty)
        assert fleet.versions() == [1, None] and "waits for the next publish" in engine.health().detail
        engine.generate([request(i) for i in range(3)])
        publish(2)
        assert fleet.versions() == [2, 2] and engine.health().detail == ""


def test_after_a_step_its_weights_are_not_read_any_more():
    """The learner may overwrite them: a replica that returns between two steps waits."""
    with run() as (fleet, engine, publish):
        publish(1)
        fleet.kill(0)
        engine.client.put_down(fleet.urls[0], "killed")
        until(lambda: engine.client.replicas[0].lost is EngineDirty)
        assert fleet.versions() == [None, 1]
        until(lambda: len(engine.generate([request()])) == 1 and fleet.versions() == [1, 1])


@pytest.mark.parametrize("leaves_out", [False, True], ids=["fails", "leaves it out"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_replica_that_dies_in_a_publish_is_left_out_and_the_last_one_is_waited_for(count, leaves_out):
    """The way fails as a whole, as NCCL's does, or leaves the one out and says so."""
    with run(count) as (fleet, engine, publish):
        fleet.leaves_out = leaves_out
        publish(1)
        fleet.dies = 0
        publish(2)
        until(lambda: set(fleet.versions()) == ({2} if count == 1 else {None, 2}))
        assert engine.generate([request()])[0][0].version_spans[0].version == 2
        publish(3)
        until(lambda: fleet.versions() == [3] * count or publish(4))


def test_a_run_whose_restarts_are_spent_says_so():
    with run(1, restarts=0) as (fleet, engine, publish):
        publish(1)
        fleet.kill(0)
        with pytest.raises(EngineUnhealthy, match="no engine is left: .*started anew 0 times, which is all"):
            engine.generate([request()])
        with pytest.raises(PublishFailed, match="no engine is left"):
            publish(2)


def test_a_source_that_breaks_off_is_not_the_replicas_death():
    class Broken:
        def manifest(self):
            return METAS

        def __iter__(self):
            raise ZeroDivisionError("in the learner")

    with run() as (fleet, engine, publish):
        receipt = publish(1)
        with pytest.raises(PublishFailed, match="in the learner"):
            engine.publish(Broken(), 2)
        assert engine.restarts == 0 and engine.weight_version() is None
        with pytest.raises(EngineDirty):
            engine.generate([request()])
        with pytest.raises(PublishFailed, match="the publish of version 2 has not finished"):
            engine.verify(receipt)
        engine.verify(publish(3))


def test_closing_fails_what_is_sampled_at_once():
    with run(seconds=20) as (fleet, engine, publish):
        publish(1)
        failed = []

        def sample():
            try:
                engine.generate([request(i) for i in range(4)])
            except EngineUnhealthy as e:
                failed.append(e)

        thread = threading.Thread(target=sample)
        thread.start()
        until(lambda: sum(len(s.asked) for s in fleet.servers) == 4)
        begun = time.monotonic()
        engine.close()
        thread.join(5)
        assert failed and time.monotonic() - begun < 1.5 and not any(map(fleet.alive, range(2)))
