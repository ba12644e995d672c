"""Served engines as a run has them: publishes to all, replicas that die and return, and what is left out
meanwhile. Stand-ins serve; a transport writes into their engines."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time

import numpy as np
import pytest
from faulty_engine import FaultyEngine, FaultyTransport
from stand_in import TOKEN, StandIn
from test_vllm_client import request, until

from bridges.api import (
    BridgeError,
    EngineDirty,
    EngineUnhealthy,
    ManifestMismatch,
    PublishFailed,
    RolloutEngine,
    WeightTransport,
)
from bridges.conformance import CHECKS, EngineUnderTest
from bridges.engines.fake_engine import HEAD, FakeEngine
from bridges.served import vllm_client
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
        self.servers = [StandIn(FaultyEngine(seed=i), **self.how) for i in range(count)]
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
        self.servers[i] = StandIn(FaultyEngine(seed=i), **self.how, port=port)

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
            self.ways.append(FaultyTransport(proof=True))
            self.ways[-1].open(self.fleet.servers[i].engine)

    def expected_manifest(self):
        return METAS

    def publish(self, source, version):
        if self.fleet.dies in self.at:
            self.fleet.kill(self.fleet.dies)
        held = []
        for i, way in zip(self.at, self.ways):
            if self.fleet.alive(i) and not self.fleet.servers[i].hangs:
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
def run(count=2, seconds=0.0, call=QUICK.call, generate=QUICK.generate, token_seconds=0.0, **kwargs):
    fleet, deadlines = Fleet(count, seconds, token_seconds), dataclasses.replace(QUICK,
                                                                                 call=call, generate=generate)
    engine = ServedEngines(TOKEN, fleet.transport, processes=fleet, deadlines=deadlines,
                           **{"restarts": 3} | kwargs)
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


@pytest.mark.parametrize("killed", [1, 2])
def test_health_is_bad_only_while_no_replica_is_up(killed):
    """Replicas die between a publish and `resume`, after which a step asks for their health."""
    with run() as (fleet, engine, publish):
        publish(1)
        engine.pause()
        publish(2)
        for i in range(killed):
            fleet.kill(i)
        engine.resume()
        health = engine.health()
        assert health.ok == (killed < 2) and all(url in health.detail for url in fleet.urls[:killed]), health
        publish(3)
        assert engine.health().ok and engine.generate([request()])[0][0].version_spans[0].version == 3


@pytest.mark.parametrize("count", [1, 2])
def test_where_all_replicas_have_died_what_is_in_flight_waits_and_goes_on(count):
    """A run that samples beside its updates (replay is False) gives no weights again by itself, but waits in
    `poll`."""
    with run(count, token_seconds=0.01, replay=False) as (fleet, engine, publish):
        publish(1, seed=5)
        engine.submit([request(i, 2, max_tokens=40) for i in range(3)])
        until(lambda: any(len(c.token_ids) > 3 for group in engine.partial().values() for c in group))
        begun, landed = engine.partial(), []
        for i in range(count):
            fleet.kill(i)
        until(lambda: landed.extend(engine.poll()) or len(landed) == 3)
        assert engine.restarts == count and 1 in fleet.versions()
        for c in (c for group in landed for c in group):
            had = begun[c.request_id][c.index].token_ids
            assert c.problem() is None and len(c.token_ids) == 40, "nothing is lost"
            assert c.token_ids[: len(had)].tolist() == had.tolist() and {s.version
                                                                         for s in c.version_spans} == {1}
        publish(2)
        until(lambda: engine.health().detail == "" or publish(3))


def test_a_run_whose_restarts_are_spent_says_so():
    with run(1, restarts=0) as (fleet, engine, publish):
        publish(1)
        fleet.kill(0)
        with pytest.raises(EngineUnhealthy, match="no engine is left: .*started anew 0 times, which is all"):
            engine.generate([request()])
        with pytest.raises(PublishFailed, match="no engine is left"):
            publish(2)


class Broken:
    def manifest(self):
        return METAS

    def __iter__(self):
        raise ZeroDivisionError("in the learner")


def test_a_source_that_breaks_off_is_not_the_replicas_death():
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


def test_an_engine_that_hangs_is_started_anew_though_its_server_answers():
    """In a publish, and in a generation."""
    with run(1, call=0.3, generate=0.5) as (fleet, engine, publish):
        fleet.servers[0].hangs = True
        assert publish(1).version == 1 and engine.restarts == 1
        fleet.servers[0].hangs, fleet.servers[0].seconds = True, 20.0
        assert engine.generate([request()])[0][0].version_spans[0].version == 1 and engine.restarts == 2


def test_what_is_published_again_is_what_the_engines_had():
    """Not what they refused, and nothing where they had nothing whole."""
    with run(1) as (fleet, engine, publish):
        publish(1)
        with pytest.raises(ManifestMismatch):
            engine.publish(random_source(METAS[:1], 0, 1.0), 2)
        fleet.kill(0)
        assert engine.generate([request()])[0][0].version_spans[0].version == 1 and engine.restarts == 1
        with pytest.raises(PublishFailed):
            engine.publish(Broken(), 3)
        fleet.kill(0)
        engine.client.put_down(fleet.urls[0], "killed")
        with pytest.raises(EngineDirty):
            engine.generate([request()])


def test_a_refused_manifest_of_an_engine_started_anew_is_a_failed_publish():
    """The one before went on as it was; this one holds nothing, and must not be asked."""
    with run(1) as (fleet, engine, publish):
        publish(1)
        fleet.dies = 0
        with pytest.raises(PublishFailed,
                           match="started anew and holds no weights: the source's weights") as e:
            engine.publish(random_source(METAS[:1], 0, 1.0), 2)
        assert "build both sides from the same config" in e.value.next_step
        assert engine.weight_version() is None
        assert publish(3).version == 3


def test_engines_that_are_closed_are_not_started_anew():
    with run(1) as (fleet, engine, publish):
        publish(1)
        starting, start = threading.Event(), fleet.start
        fleet.start = lambda i: (starting.set(), engine.close(), start(i), fleet.close())
        fleet.kill(0)
        with pytest.raises(EngineUnhealthy, match="closed"):
            engine.generate([request()])
        until(starting.is_set)
        time.sleep(0.2)
        assert engine.restarts == 1 and not fleet.alive(0)


def test_sleep_gives_memory_back_and_wake_takes_it(monkeypatch):
    posts = []
    monkeypatch.setattr(Way, "post", lambda self, path: posts.append(path), raising=False)
    for how, asked in (("off", []), ("keep_weights", ["/sleep?level=1", "/wake_up"]),
                       ("drop_weights", ["/sleep?level=2", "/wake_up?tags=weights"])):
        posts.clear()
        with run(sleep=how) as (fleet, engine, publish):
            publish(1)
            engine.sleep()
            assert (engine.weight_version() is None) == (how == "drop_weights")
            for sample in (engine.generate, engine.submit) if how != "off" else ():
                with pytest.raises(BridgeError, match="asleep"):
                    sample([request()])
            engine.wake(), engine.wake()
            assert posts == asked
            publish(2)
            assert engine.generate([request()])[0][0].version_spans[0].version == 2


def test_memory_that_cannot_be_taken_back_names_what_helps(monkeypatch):
    def post(self, path):
        if path == "/wake_up":
            raise PublishFailed("/wake_up (500): CUDA out of memory")

    monkeypatch.setattr(Way, "post", post, raising=False)
    with run(sleep="keep_weights") as (fleet, engine, publish):
        publish(1)
        engine.sleep()
        with pytest.raises(EngineUnhealthy, match="could not take back their memory: .*out of memory") as e:
            engine.wake()
        for knob in ("rollout.kv_cache_gib", "train.rows_per_microbatch", "train.remat"):
            assert knob in e.value.next_step


@pytest.mark.parametrize("options, message", [
    ({"vocab_size": 64}, "a vocabulary of 64, but the model's is 128"),
    ({"vocab_size": 128, "max_model_len": 8}, "max_model_len 8, but a prompt and its"),
    ({"vocab_size": 128}, "a cache in float32, but rollout.kv_cache is")],
                         ids=["vocabulary", "length", "cache"])
def test_a_server_that_runs_already_must_be_what_the_config_asks_for(tmp_path, options, message):
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.errors import ConfigError
    from jaxfp8rl.policy.shapes import model_config
    from jaxfp8rl.rollout.engines import build_engine

    token = tmp_path / "token"
    with StandIn(FakeEngine(**options)) as server:
        settings = {"engine": "served", "engine_urls": server.url, "engine_token_file": str(token)}
        cfg = load_config("demo", [w for k, v in settings.items() for w in (f"--rollout.{k}", v)])
        model = model_config(cfg)
        with pytest.raises(ConfigError, match="rollout.engine_token_file: .*token cannot be read"):
            build_engine(cfg, model, ())
        token.touch(0o600)
        token.write_text(TOKEN + "\n")
        with pytest.raises(ConfigError, match=message):
            build_engine(cfg, model, ())


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


def test_the_engines_end_though_the_clients_own_thread_hangs(monkeypatch):
    monkeypatch.setattr(vllm_client, "CLOSE_SECONDS", 0.1)
    with run() as (fleet, engine, publish):
        publish(1)
        engine.client._loop.call_soon_threadsafe(time.sleep, 1.0)
        with pytest.raises(TimeoutError):
            engine.close()
        assert not any(map(fleet.alive, range(2))) and not fleet.open
