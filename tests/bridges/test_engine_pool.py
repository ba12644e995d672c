"""Several engines as one: the conformance suite, and what happens when they are not of one mind."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from bridges.api import (
    BridgeError,
    EngineDirty,
    EngineUnhealthy,
    GenRequest,
    ManifestMismatch,
    PublishFailed,
    RolloutEngine,
    WeightTransport,
)
from bridges.api import SamplingParams as Sampling
from bridges.conformance import CHECKS, EngineUnderTest, checks
from bridges.engines.fake_engine import FakeEngine, FakeTransport, Faults
from bridges.served.engine_pool import EnginePool, Member
from bridges.sources.array_source import random_source


def member(**kwargs) -> Member:
    engine, transport = FakeEngine(**kwargs), FakeTransport()
    transport.open(engine)
    return Member(engine, transport)


def of(*members: Member) -> EngineUnderTest:
    pool, metas = EnginePool(members), members[0].engine.expected_manifest()
    return EngineUnderTest(pool, pool, lambda seed: random_source(metas, seed, 1.0))


@pytest.fixture(scope="module")
def under_test():
    e = of(*(member(seed=i) for i in range(3)))
    yield e
    e.engine.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, under_test):
    check(under_test)


def test_keeps_the_contracts(under_test):
    assert isinstance(under_test.engine, RolloutEngine) and isinstance(under_test.transport, WeightTransport)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (Faults(logprobs="nan"), checks.completions_come_in_order),
        (Faults(stale_cache=True), checks.weights_decide),
        (Faults(stale_version=True), checks.receipt_tells_what_crossed),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
@pytest.mark.parametrize("at", [0, 1])
def test_the_suite_catches_one_bad_member(fault, check, at):
    members = [member(), member()]
    members[at].engine.faults = fault
    with pytest.raises((AssertionError, PublishFailed)):
        for _ in range(2):
            check(of(*members))
            members.reverse()  # the checks that ask one thing ask it of the first


@pytest.mark.parametrize("requests", [1, 2, 7])
def test_requests_are_shared_out_and_answered_in_order(under_test, requests):
    under_test.publish(0)
    asked, members = [], under_test.engine.members
    for i, m in enumerate(members):
        generate = type(m.engine).generate
        m.engine.generate = lambda rs, m=m, i=i, generate=generate: asked.append((i, len(rs))) or generate(
            m.engine, rs)
    try:
        requests = [GenRequest(f"r{i}", (i + 1,), Sampling(4), 2, i) for i in range(requests)]
        answers = under_test.engine.generate(requests)
    finally:
        for m in members:
            del m.engine.generate
    assert [[c.request_id for c in group] for group in answers] == [[r.request_id] * 2 for r in requests]
    assert sorted(asked) == [(i, n) for i in range(3) if (n := len(requests[i::3]))]
    alone = of(member())
    alone.publish(0)
    for a, b in zip(answers, alone.engine.generate(requests), strict=True):  # seeded: by whichever engine
        assert [c.token_ids.tolist() for c in a] == [c.token_ids.tolist() for c in b]


def test_a_member_that_breaks_off_leaves_all_dirty_until_a_publish_in_full():
    e = of(member(), member())
    e.publish(0)
    e.engine.members[1].engine.faults.die_at_tensor = 1
    with pytest.raises(PublishFailed, match="tensor 1"):
        e.publish(1)
    assert e.engine.weight_version() is None and e.engine.members[0].engine.weight_version() == 2
    with pytest.raises(EngineDirty, match="the publish of version 2 has not finished"):
        e.sample()
    e.engine.members[1].engine.faults.die_at_tensor = None
    assert e.publish(1).version == e.sample()[0].version_spans[0].version == 3


def test_what_is_refused_before_a_byte_moves_changes_nothing():
    e = of(member(), member())
    receipt = e.publish(0)
    with pytest.raises(ManifestMismatch):
        e.transport.publish(random_source(e.source(0).manifest()[:1], 0, 1.0), 9)
    assert e.engine.weight_version() == receipt.version and len(e.sample()) == 1


def test_a_member_that_was_changed_is_found_and_not_asked_any_more():
    e = of(member(), member())
    receipt = e.publish(0)
    e.engine.members[1].transport.publish(e.source(1), receipt.version + 1)
    assert e.engine.weight_version() is None
    with pytest.raises(PublishFailed):
        e.transport.verify(receipt)


def test_health_names_the_member():
    e = of(member(), member(faults=Faults(logprobs="nan")))
    e.publish(0)
    assert e.engine.health().ok
    e.engine.generate([GenRequest(str(i), (1,), Sampling(4)) for i in range(2)])
    assert not e.engine.health().ok and e.engine.health().detail.startswith("engine 1: ")


def test_members_are_alike_and_a_start_that_fails_closes_the_others():
    with pytest.raises(BridgeError, match="alike"):
        of(member(), member(vocab_size=65))
    good = member()

    def bad():
        raise BridgeError("no such GPU")

    with pytest.raises(BridgeError, match="no such GPU"):
        EnginePool.start([lambda: good, bad])
    with pytest.raises(EngineDirty, match="closed"):
        good.engine.generate([GenRequest("r", (1,), Sampling(1))])
    np.testing.assert_equal(len(EnginePool.start([member, member]).members), 2)


def test_closing_does_not_wait_for_a_generation():
    """The second Ctrl-C of a run: what is generated then is lost, and no engine waits for another to end."""

    class Slow(FakeEngine):
        def __init__(self):
            super().__init__()
            self.began, self.closed = threading.Event(), threading.Event()

        def generate(self, requests):
            self.began.set()
            assert self.closed.wait(10)
            raise EngineUnhealthy("its process has ended")

        def close(self):
            self.closed.set()
            time.sleep(0.3)

    engines, failed = [Slow() for _ in range(3)], []
    e = of(*(Member(engine, FakeTransport()) for engine in engines))
    for m in e.engine.members:
        m.transport.open(m.engine)
    e.publish(0)

    def generate():
        try:
            e.engine.generate([GenRequest(str(i), (1,), Sampling(4)) for i in range(3)])
        except EngineUnhealthy as error:
            failed.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    assert all(engine.began.wait(5) for engine in engines)
    begun = time.monotonic()
    e.engine.close()
    assert time.monotonic() - begun < 0.8
    thread.join(5)
    assert len(failed) == 1
    with pytest.raises(BridgeError, match="the engines are closed"):
        e.engine.pause()


def test_who_waits_for_his_turn_is_told_that_they_were_closed():
    class Slow(FakeEngine):
        began, closed = threading.Event(), threading.Event()

        def pause(self):
            self.began.set()
            assert self.closed.wait(10)

        def resume(self):
            raise EngineUnhealthy("it is closed")

        def close(self):
            self.closed.set()

    pool, said = of(Member(Slow(), FakeTransport())).engine, []

    def queued():
        try:
            pool.resume()
        except BridgeError as error:
            said.append(str(error))

    threads = [threading.Thread(target=pool.pause), threading.Thread(target=queued)]
    threads[0].start()
    assert Slow.began.wait(5)
    threads[1].start()
    while pool._threads._work_queue.qsize() < 1:
        time.sleep(0.01)
    pool.close()
    for thread in threads:
        thread.join(5)
    assert said == ["it is closed"]


def test_engines_of_a_run_have_seeds_of_their_own(monkeypatch):
    """Those of one seed would answer unseeded requests alike."""
    from bridges.served import remote_engine
    from jaxfp8rl.config.rules import check
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.policy.shapes import engine_runs, model_config
    from jaxfp8rl.rollout import engines as registry

    seeds = []

    def start(engine, hf_config, *, environment, transport, seed, **options):
        seeds.append(seed)
        return FakeEngine(seed=seed)

    monkeypatch.setattr(remote_engine, "start", start)
    monkeypatch.setattr(registry, "_opened", lambda cfg, engine: FakeTransport())
    options = ["--rollout.engine", "remote", "--rollout.link", "file", "--rollout.engines", "3", "--run.seed",
               "5"]
    cfg = check(load_config("demo", options))
    model = model_config(cfg)
    registry.build_engine(cfg, model, engine_runs(cfg, model))
    assert sorted(seeds) == [5, 6, 7]
