"""Completions in flight in served engines: publishes interrupt them, and another replica goes on after the
tokens of one that has died. Stand-ins stream."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from concurrent.futures import Future

import numpy as np
import pytest
from fuzz_answers import ATOMS, DEEP
from stand_in import StandIn, last_token
from test_served_engines import METAS, run
from test_vllm_client import published, request, served, until

from bridges.api import (
    BridgeError,
    Capabilities,
    Completion,
    EngineDirty,
    EngineUnhealthy,
    GenRequest,
    InFlight,
    PublishFailed,
)
from bridges.engines.fake_engine import FakeEngine
from bridges.served.parts import Part, Stream
from bridges.sources.array_source import random_source

CAN: Capabilities = dataclasses.replace(FakeEngine().capabilities(), engine="vllm")


def arrived(engine, name: str, tokens: int) -> list[Completion]:
    """What has come of a request once each of its completions has so many tokens."""
    until(lambda: min(len(c.token_ids) for c in engine.partial()[name]) >= tokens)
    return engine.partial()[name]


def landed(engine, count: int) -> dict[str, list[Completion]]:
    done, end = {}, time.monotonic() + 10
    while len(done) < count:
        assert time.monotonic() < end
        done |= {group[0].request_id: group for group in engine.poll()}
    return done


def score(c: Completion, r: GenRequest, seed: int) -> np.ndarray:
    """The log-probabilities of its tokens under the weights of `seed`."""
    whole = published()
    for name, value in random_source(METAS, seed, 1.0):
        whole.store(name, np.array(np.from_dlpack(value)))
    before = [r.prompt_token_ids[-1], *c.token_ids[:-1].tolist()]
    return np.array([whole._distributions(b, r.sampling)[0][t] for b, t in zip(before, c.token_ids.tolist())])


@pytest.mark.parametrize("sampling", [{}, {"top_k": 5, "support": 8}, {"temperature": 0.0}])
def test_a_publish_interrupts_completions_and_each_token_has_the_probability_of_its_version(sampling):
    with run(token_seconds=0.005) as (fleet, engine, publish):
        assert isinstance(engine, InFlight)
        publish(1, seed=1)
        r = request(n=3, seed=4, max_tokens=60, **sampling)
        engine.submit([r])
        for version in (2, 3):
            arrived(engine, "r0", 15 * (version - 1))
            engine.pause()
            publish(version, seed=version)
            engine.resume()
        for c in landed(engine, 1)["r0"]:
            assert c.problem() is None and len(c.token_ids) == 60 and c.finish_reason == "length"
            assert [s.version for s in c.version_spans] == [1, 2, 3] and c.version_spans[-1].stop == 60
            for s in c.version_spans:
                if sampling.get("temperature") != 0.0:
                    own = score(c, r, s.version)[s.start : s.stop]
                    np.testing.assert_allclose(c.logprobs[s.start : s.stop], own, atol=1e-5)
            assert (c.support_sizes is None) == ("support" not in sampling)
        assert not engine.partial()


def test_another_replica_goes_on_after_the_tokens_of_one_that_dies_and_nothing_is_lost():
    with run(token_seconds=0.002) as (fleet, engine, publish):
        publish(1)
        engine.submit([request(i, 2, seed=i, max_tokens=80) for i in range(4)])
        before = {f"r{i}": arrived(engine, f"r{i}", 10) for i in range(4)}
        fleet.kill(0)
        done = landed(engine, 4)
        for name, parts in before.items():
            for part, whole in zip(parts, done[name]):
                n = len(part.token_ids)
                assert len(whole.token_ids) == 80 and whole.problem() is None
                assert whole.token_ids[:n].tolist() == part.token_ids.tolist()
                assert whole.logprobs[:n].tolist() == part.logprobs.tolist()
                assert [dataclasses.astuple(s) for s in whole.version_spans] == [(0, 80, 1)]
        again = [x for x in fleet.servers[1].asked if len(x["token_ids"]) > 3]
        assert len(again) == 4, "its completions go on after their tokens"
        assert all(len(x["token_ids"]) - 3 + x["sampling_params"]["max_tokens"] == 80 for x in again)
        until(lambda: fleet.started == 1)


def test_a_replica_that_dies_in_a_publish_leaves_its_completions_to_the_others():
    with run(3, token_seconds=0.002) as (fleet, engine, publish):
        fleet.leaves_out = True
        publish(1)
        engine.submit([request(i, seed=i, max_tokens=60) for i in range(6)])
        for i in range(6):
            arrived(engine, f"r{i}", 5)
        engine.pause()
        fleet.dies = 0
        publish(2)
        engine.resume()
        for [c] in landed(engine, 6).values():
            assert [s.version for s in c.version_spans] == [1, 2] and len(c.token_ids) == 60


def test_what_a_checkpoint_held_goes_on_and_what_is_done_is_not_asked_for():
    with run(1, token_seconds=0.002) as (fleet, engine, publish):
        publish(1)
        r = request(n=2, seed=3, max_tokens=40)
        engine.submit([r])
        begun = arrived(engine, "r0", 8)
        engine.cancel(["r0"])
        until(lambda: fleet.servers[0].left == 2)
        assert not engine.partial() and not engine.poll()
        begun[1] = dataclasses.replace(begun[1], finish_reason="stop")
        publish(2)
        engine.submit([r], [begun])
        a, b = landed(engine, 1)["r0"]
        assert len(fleet.servers[0].asked) == 3 and b is begun[1]
        assert [s.version for s in a.version_spans] == [1, 2] and len(a.token_ids) == 40
        assert a.token_ids[: len(begun[0].token_ids)].tolist() == begun[0].token_ids.tolist()


def test_a_paused_engine_samples_nothing_and_begins_nothing():
    with run(1, token_seconds=0.001) as (fleet, engine, publish):
        publish(1)
        engine.submit([request(0, max_tokens=200)])
        arrived(engine, "r0", 3)
        engine.pause()
        time.sleep(0.03)
        held = len(engine.partial()["r0"][0].token_ids)
        engine.submit([request(1)])
        time.sleep(0.05)
        assert len(engine.partial()["r0"][0].token_ids) == held < 200 and len(fleet.servers[0].asked) == 1
        assert not engine.poll()
        engine.resume()
        assert set(landed(engine, 2)) == {"r0", "r1"}


def test_a_failed_publish_ends_what_is_in_flight():
    with run(1, token_seconds=0.002) as (fleet, engine, publish):
        publish(1)
        engine.submit([request(max_tokens=100)])
        arrived(engine, "r0", 2)
        engine.pause()
        fleet.servers[0].engine.faults.die_at_tensor = 1
        with pytest.raises(PublishFailed):
            publish(2)
        for refused in (engine.resume, engine.poll, lambda: engine.submit([request(1)])):
            with pytest.raises(EngineDirty):
                refused()


def test_a_group_that_fails_takes_no_other_with_it():
    with run() as (_, engine, publish):
        publish(1)
        done, failed = Future(), Future()
        done.set_result([])
        failed.set_exception(EngineUnhealthy("three engines failed it"))
        engine._groups |= {"done": ([], done), "failed": ([], failed)}
        with pytest.raises(EngineUnhealthy, match="three engines failed it"):
            engine.poll()
        assert engine.poll() == [[]] and not engine.poll()


def test_the_cache_of_a_request_is_that_of_the_version_that_it_is_asked_at():
    """It may have waited across a publish."""
    with run(1) as (fleet, engine, publish):
        publish(1)
        engine.pause()
        engine.submit([request()])
        publish(2)
        engine.resume()
        landed(engine, 1)
        assert [x["cache_salt"] for x in fleet.servers[0].asked] == ["version 2"]


def test_a_deadline_ends_a_stream_that_stands_still_and_another_replica_goes_on():
    slow, quick = StandIn(published(), token_seconds=0.1), StandIn(published())
    with served(slow, quick) as client:
        parts = [Part(request(max_tokens=20), 0, client.capabilities())]
        [done] = client.start(request(), parts).result(5)
        assert len(done.token_ids) == 20 and len(quick.asked) == 1
        assert 3 < len(quick.asked[0]["token_ids"]) < 3 + 20, "after the tokens that had come"


def events(seed: int) -> tuple[list[bytes], GenRequest]:
    """The events of a good stream of 6 tokens."""
    engine, r = published(), request(seed=seed, max_tokens=6, top_k=4, support=4)
    draft, found = engine._draft(r, 0), []
    while not draft.done:
        engine._advance(draft)
        found.append(json.dumps(last_token(engine._completion(draft))).encode())
    return found, r


def test_a_stream_may_be_cut_anywhere():
    found, r = events(1)
    raw = b"".join(b"data: " + e + b"\n\n" for e in [*found, b"[DONE]"])
    whole = Part(r, 0, CAN)
    whole.take(raw)
    want = whole.completed(None)
    assert len(want.token_ids) == 6 and want.problem() is None
    for end in range(0, len(raw), 101):
        part = Part(r, 0, CAN)
        for at in range(0, end, 61):
            part.take(raw[at : min(at + 61, end)])
        so_far, n = part.so_far(), raw[:end].count(b"\n\n")
        assert len(so_far.token_ids) == n and so_far.token_ids.tolist() == want.token_ids[:n].tolist()
        assert so_far.finish_reason == ("length" if n == 6 else "abort")
        part.keep()
        if n < 6:
            with pytest.raises(EngineUnhealthy, match="its stream ended before it was done"):
                part.completed(None)
            assert part.body()["sampling_params"]["max_tokens"] == 6 - n


def test_tokens_without_versions_are_not_kept_and_the_last_is_sampled_again_if_the_end_was_not_told():
    found, r = events(2)
    said = [json.loads(e) for e in found]
    for e in said:
        e["choices"][0] |= {"weight_versions": None}
    part = Part(r, 0, CAN)
    part.take(b"".join(b"data: %s\n\n" % json.dumps(e).encode() for e in said))
    assert len(part.so_far().token_ids) == 0
    said = [json.loads(e) for e in found]
    said[-1]["choices"][0]["finish_reason"] = None
    part = Part(r, 0, CAN)
    part.take(b"".join(b"data: %s\n\n" % json.dumps(e).encode() for e in said))
    part.keep()
    assert len(part.so_far().token_ids) == 5 and part.body()["sampling_params"]["max_tokens"] == 1


def mutated(draw: random.Random, found: list[bytes]) -> bytes:
    """A stream of which some events are not as they should be."""
    raw = b""
    for event in [*found, b"[DONE]"]:
        kind = draw.random()
        if kind < 0.1 and event != b"[DONE]":
            said = json.loads(event)
            place = said["choices"][0] if draw.random() < 0.8 else said
            place[draw.choice(list(place))] = draw.choice(ATOMS)
            event = json.dumps(said).encode()
        elif kind < 0.14:
            event = draw.choice([*DEEP, draw.randbytes(20), b"", b'{"error": {"message": "x"}}',
                                 event[: len(event) // 2]])
        raw += draw.choice([b"data: "] * 20 + [b"", b": ", b"data:"]) + event + draw.choice([b"\n\n"] * 20
                                                                                            + [b"\n", b""])
    return raw


@pytest.mark.parametrize("inputs", [300, pytest.param(25_000, marks=pytest.mark.slow)])
def test_hostile_streams_are_bridge_errors(inputs):
    draw, (found, r), good = random.Random(3), events(3), 0
    for i in range(inputs):
        part, raw = Part(r, 0, CAN), mutated(draw, found)
        try:
            for at in range(0, len(raw), size := draw.choice([1000, 10**6, 10**6])):
                part.take(raw[at : at + size])
                part.so_far()
            part.completed(None).problem()
            good += 1
        except BridgeError:
            pass
        so_far = part.so_far()
        problem = so_far.problem()
        assert problem in (None, "no tokens") or "log-prob" in problem or "token" in problem, i
        part.keep()
        assert part.done or part.body()
    assert 0 < good < inputs


def test_an_event_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr("bridges.served.parts.LARGEST_EVENT", 1000)
    with pytest.raises(BridgeError, match="an event of more than"):
        for _ in range(30):
            Stream().take(b"x" * 2000)
