"""The conformance suite on the numpy engine, and the suite's own ability to fail: each fault must be caught
by it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from faulty_engine import Faults, FaultyEngine, FaultyTransport

from bridges.api import EngineDirty, GenRequest, PublishFailed, RolloutEngine, SamplingParams, WeightTransport
from bridges.conformance import CHECKS, EngineUnderTest, checks
from bridges.engines.fake_engine import EMBED, FakeEngine, FakeTransport
from bridges.sources.array_source import random_source


def build(made=FakeEngine, transport=FakeTransport, **kwargs) -> EngineUnderTest:
    engine, transport = made(**kwargs), transport()
    transport.open(engine)
    return EngineUnderTest(engine, transport,
                           lambda seed: random_source(engine.expected_manifest(), seed, 1.0))


@pytest.fixture(scope="module")
def under_test():
    e = build()
    yield e
    e.engine.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, under_test):
    check(under_test)


@pytest.mark.parametrize(
    "faults, check",
    [
        (Faults(logprobs="missing"), checks.completions_come_in_order),
        (Faults(logprobs="short"), checks.completions_come_in_order),
        (Faults(logprobs="nan"), checks.completions_come_in_order),
        (Faults(drop_tensor=EMBED), checks.weights_decide),
        (Faults(stale_cache=True), checks.weights_decide),
        (Faults(stale_version=True), checks.receipt_tells_what_crossed),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_suite_catches(faults, check):
    e = build(FaultyEngine, FaultyTransport, faults=faults)
    with pytest.raises((AssertionError, PublishFailed)):
        check(e)


class Hasty(FakeEngine):
    """A hundred tokens a poll, as an engine that samples while nobody looks."""

    def poll(self):
        return [group for _ in range(100) for group in super(Hasty, self).poll()]


class Deaf(FakeEngine):
    def pause(self, keep_cache=True):
        pass


class Forgetful(FakeEngine):
    def submit(self, requests, begun=()):
        super().submit(requests)


def test_requests_become_longer_until_a_publish_interrupts_one(monkeypatch):
    e = build(Hasty)
    checks.interrupted_completions_go_on(e)
    lengths = []
    monkeypatch.setattr(e.engine, "submit", lambda requests, begun=(): lengths.append(
        requests[0].sampling.max_tokens) or Hasty.submit(e.engine, requests, begun))
    checks.interrupted_completions_go_on(e)
    assert lengths == [64, 128] * 2, "two tries for each way of the cache"


@pytest.mark.parametrize("engine, problem", [
    (Deaf, "no publish has interrupted one"), (Forgetful, "begun with have changed")])
def test_suite_sees_what_becomes_of_completions_in_flight(engine, problem):
    with pytest.raises(AssertionError, match=problem):
        checks.interrupted_completions_go_on(build(engine, max_model_len=50))


class Arriving(FakeEngine):
    """Completions of one request are in the batch of the first or come after it, in turn, and round so."""

    calls = 0

    def generate(self, requests):
        self.calls += 1
        among = self.calls % 2 and requests[0].n > 1
        return [[dataclasses.replace(c, logprobs=c.logprobs - 1e-6 * bool(among)) for c in group]
                for group in super().generate(requests)]


class Seedless(FakeEngine):
    """Each call draws anew, whatever the seed."""

    calls = 0

    def generate(self, requests):
        self.calls += 1
        return super().generate([dataclasses.replace(r, seed=self.calls) for r in requests])


def test_completions_of_a_seed_are_compared_one_at_a_time_where_batches_differ():
    e = build(Arriving)
    with pytest.raises(AssertionError, match="one seed, two results"):
        checks.seeds_reproduce(e)
    checks.seeds_reproduce(dataclasses.replace(e, batches_alike=False))
    for batches_alike in (True, False):
        with pytest.raises(AssertionError, match="one seed, two results"):
            checks.seeds_reproduce(dataclasses.replace(build(Seedless), batches_alike=batches_alike))


@pytest.mark.parametrize("tensor", [0, 1])
def test_death_at_a_tensor_leaves_it_dirty_until_a_full_publish(tensor):
    e = build(FaultyEngine, FaultyTransport)
    e.publish(0)
    e.engine.faults.die_at_tensor = tensor
    with pytest.raises(PublishFailed, match=f"tensor {tensor}"):
        e.publish(1)
    with pytest.raises(EngineDirty, match="version 2 has not finished"):
        e.sample()
    e.engine.faults.die_at_tensor = None
    assert e.publish(1).version == e.sample()[0].version_spans[0].version


@pytest.mark.parametrize("fault, problem",
                         [("missing", "none"), ("short", "4 log-prob"), ("nan", "nan at token 2")])
def test_unfit_logprobs_show_in_the_completion_and_in_health_until_a_publish(fault, problem):
    e = build(FaultyEngine, faults=Faults(logprobs=fault))
    e.publish(0)
    assert problem in e.sample(max_tokens=5)[0].problem()
    assert not e.engine.health().ok and problem in e.engine.health().detail
    e.engine.faults.logprobs = ""
    e.publish(0)
    assert e.engine.health().ok and e.sample()[0].problem() is None


def test_replies_come_first_and_have_true_logprobs():
    e = build(replies=[[5, 6], [7, 8, 9]])
    e.publish(0)
    a, b, c = e.sample(n=3, stop_token_ids=(8,))
    assert (a.token_ids.tolist(), b.token_ids.tolist()) == ([5, 6], [7, 8])
    assert b.finish_reason == "stop" and len(c.token_ids) == 8
    arrays = dict(e.source(0))
    logits = arrays["lm_head.weight"].astype(np.float64) @ arrays[EMBED][5]
    want = logits[6] - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(a.logprobs[1], want, rtol=1e-5)


def test_samples_follow_the_distribution():
    e = build(vocab_size=4)
    e.publish(3)
    drawn = e.sample(n=4000, max_tokens=1, seed=0)
    counts = np.bincount([c.token_ids[0] for c in drawn], minlength=4) / 4000
    want = {int(c.token_ids[0]): np.exp(c.logprobs[0]) for c in drawn}
    np.testing.assert_allclose(counts, [want.get(t, 0.0) for t in range(4)], atol=0.03)


def test_keeps_the_contracts():
    assert isinstance(FakeEngine(), RolloutEngine) and isinstance(FakeTransport(), WeightTransport)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_that_an_engine_would_fold_or_fail_at_are_refused_when_asked_for(seed):
    GenRequest("r", (1,), SamplingParams(1), seed=2**32 - 1)
    with pytest.raises(ValueError, match=f"request 'r': a seed lies in .0, 2.32., got {seed}"):
        GenRequest("r", (1,), SamplingParams(1), seed=seed)


def test_the_suite_sees_that_completions_are_missing():
    one = build()
    one.publish(0)
    done = one.sample()
    assert checks._same(done,
                             done) and not checks._same(done, []) and not checks._same([], done)
