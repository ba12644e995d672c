"""The client of served engines: the conformance suite over HTTP, how it shares requests out, and what it does
with servers that are slow, cut off, mad or gone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import threading
import time

import numpy as np
import pytest
from faulty_engine import Faults
from stand_in import GENERATE, TOKEN, StandIn, published

from benchmarks.processes import free_port, until
from bridges.api import BridgeError, EngineDirty, EngineUnhealthy, GenRequest, RolloutEngine, SamplingParams
from bridges.conformance import CHECKS, EngineUnderTest
from bridges.engines.fake_engine import FakeEngine, FakeTransport
from bridges.inside_vllm.sampling import seed_of
from bridges.served.http_calls import RequestRefused, checked_url
from bridges.served.parts import Part
from bridges.served.vllm_client import Deadlines, VllmClient
from bridges.sources.array_source import random_source

QUICK = Deadlines(connect=1.0, generate=0.4, call=2.0, down=2.0)


def request(i=0, n=1, seed=None, **sampling) -> GenRequest:
    return GenRequest(f"r{i}", (1, 2, 3 + i % 50), SamplingParams(**{"max_tokens": 4} | sampling), n, seed)


def tokens(groups) -> list:
    return [[c.token_ids.tolist() for c in group] for group in groups]


@contextlib.contextmanager
def served(*servers: StandIn, deadlines=QUICK, **kwargs):
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
        client = VllmClient([s.url for s in servers], TOKEN, deadlines, **kwargs)
        stack.callback(client.close)
        yield client


@pytest.fixture(scope="module")
def under_test():
    engine, transport = FakeEngine(), FakeTransport(proof=True)
    transport.open(engine)
    with served(StandIn(engine), deadlines=Deadlines()) as client:
        publish = transport.publish

        def published(source, version):
            receipt = publish(source, version)
            client.published()
            return receipt

        transport.publish = published
        metas = engine.expected_manifest()
        yield EngineUnderTest(client, transport, lambda seed: random_source(metas, seed, 1.0))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, under_test):
    check(under_test)


def test_it_is_the_engine_that_answers(under_test):
    under_test.publish(3)
    assert isinstance(under_test.engine, RolloutEngine)
    can = FakeEngine().capabilities()
    assert under_test.engine.capabilities() == dataclasses.replace(can, engine="vllm")


def test_a_completion_crosses_unchanged():
    """Ids, log-probabilities to the last bit, the tokens among which each was drawn, and why it ended."""
    engine = published()
    asked = GenRequest("r", (1, 2, 3), SamplingParams(9, 0.7, 20, 0.95, (5,), 30), 3, seed=11)
    with served(StandIn(engine)) as client:
        [there] = client.generate([asked])
    for i in range(3):
        [[here]] = engine.generate([dataclasses.replace(asked, n=1, seed=seed_of(asked, i))])
        for name in ("token_ids", "logprobs", "support_ids", "support_sizes"):
            assert getattr(here, name).tobytes() == getattr(there[i], name).tobytes(), name
        assert (here.finish_reason, here.version_spans) == (there[i].finish_reason, there[i].version_spans)
        assert (there[i].request_id, there[i].index) == ("r", i)


def test_routed_experts_cross():
    with served(StandIn(published(), routed_experts=True)) as client:
        [[done]] = client.generate([request()])
    assert done.routed_experts.shape == (3 + 4 - 1, 2, 4) and done.routed_experts.dtype == np.uint8


# Sharing out


def test_completions_of_a_prompt_go_to_one_replica_and_prompts_to_the_one_with_the_fewest():
    a, b = StandIn(published(), seconds=0.1), StandIn(published(), seconds=0.1)
    with served(a, b) as client:
        client.generate([request(i, 3, seed=i) for i in range(6)])
    prompts = [{tuple(x["token_ids"]) for x in s.asked} for s in (a, b)]
    assert [len(p) for p in prompts] == [3, 3] and not prompts[0] & prompts[1]
    assert len({x["sampling_params"]["seed"] for s in (a, b) for x in s.asked}) == 18


def test_a_seed_samples_the_same_wherever_it_is_asked():
    alone, requests = StandIn(published()), [request(i, 2, seed=i) for i in range(5)]
    with served(alone) as client:
        want = client.generate(requests)
    with served(StandIn(published()), StandIn(published()), StandIn(published())) as client:
        have = client.generate(requests)
    assert tokens(have) == tokens(want)


@pytest.fixture
def few_descriptors():
    """As many more files as this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = 120
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + left, hard))
    yield left
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_requests_than_file_descriptors(few_descriptors):
    server = StandIn(published(), seconds=0.01)
    with served(server, connections=few_descriptors // 3, deadlines=Deadlines()) as client:
        # both ends of a connection are in this process
        groups = client.generate([request(i, 8, max_tokens=1) for i in range(40)])
        assert client.health().detail == ""
    assert sum(map(len, groups)) == 320 and 8 < server.peak <= few_descriptors // 3
    with served(StandIn(published())) as client:
        assert client._gate._free <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def test_calls_of_many_threads_are_answered_side_by_side():
    with served(StandIn(published(), seconds=0.2)) as client:
        threads = [threading.Thread(target=client.generate, args=([request(i)],)) for i in range(8)]
        start = time.monotonic()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert time.monotonic() - start < 1.0


# Faults. Each is what a server does with a request to generate.


async def cut(server, reader, writer):
    """Half an answer, then the end."""
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"choices": [{')
    writer.close()


async def silent(server, reader, writer):
    """Nothing, for ever."""
    await asyncio.sleep(60)


async def drip(server, reader, writer):
    """A byte now and then, for ever: a timeout for each byte would never end it."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1\r\n \r\n")
        await asyncio.sleep(0.05)


async def failing(server, reader, writer):
    server.answer(writer, 500, {"error": {"message": "EngineCore encountered an issue"}})


async def garbage(server, reader, writer):
    raw = b"<html>it works</html>"
    writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)


async def elsewhere(server, reader, writer):
    writer.write(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n")


async def no_http(server, reader, writer):
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    writer.close()


async def others(server, reader, writer):
    """An answer to another request."""
    server.answer(writer, 200, {"choices": [{"token_ids": [1] * 9, "logprobs": {"content": []}}]})


FAULTS = [cut, silent, drip, failing, garbage, elsewhere, no_http, others]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_what_one_replica_fails_another_answers(fault):
    good, bad = StandIn(published()), StandIn(published(), fault=fault)
    with served(bad, good) as client:
        groups = client.generate([request(i, 2, seed=i) for i in range(4)])
        assert [len(g) for g in groups] == [2] * 4 and len(good.asked) == 8
        bad.fault = None
        until(lambda: client.health().detail == "")  # it answers /health, and is asked again
        client.generate([request(i) for i in range(2)])
    with served(StandIn(published())) as client:
        want = client.generate([request(i, 2, seed=i) for i in range(4)])
    assert tokens(groups) == tokens(want)


@pytest.mark.parametrize("fault", [silent, garbage], ids=lambda f: f.__name__)
def test_what_ends_every_replica_is_an_unhealthy_engine_in_good_time(fault):
    with served(StandIn(published(), fault=fault), StandIn(published(), fault=fault)) as client:
        start = time.monotonic()
        with pytest.raises(EngineUnhealthy, match="request 'r0' was asked 3 times in vain: "):
            client.generate([request()])
        assert time.monotonic() - start < 5


def test_a_replica_that_is_gone_is_lost_and_the_other_goes_on():
    good, gone = StandIn(published(), seconds=0.05), StandIn(published(), seconds=0.3)
    with served(gone, good, deadlines=dataclasses.replace(QUICK, down=0.3)) as client:
        threading.Timer(0.05, gone.close).start()
        assert len(client.generate([request(i) for i in range(6)])) == 6
        until(lambda: client.replicas[0].lost is EngineUnhealthy)
        assert client.health().ok and f"{gone.url}: " in client.health().detail
        good.close()
        with pytest.raises(EngineUnhealthy, match=r"no engine is left: .*not back after 0.3 s"):
            client.generate([request()])
        assert not client.health().ok


def test_a_port_where_nobody_listens_is_said_at_once():
    port = free_port()
    with pytest.raises(EngineUnhealthy, match=f"127.0.0.1:{port}/jaxfp8rl: no answer"):
        VllmClient([f"http://127.0.0.1:{port}"], TOKEN, QUICK)


def test_a_refused_request_is_the_callers_and_what_else_the_call_asked_is_cancelled():
    async def refuses(server, reader, writer):
        if server.asked[-1]["token_ids"][-1] == 5:
            while len(server.asked) < 3:
                await asyncio.sleep(0.01)
            server.answer(writer, 400, {"error": {"message": "this prompt is not to my taste"}})
        else:
            await server.hold(reader, 30)

    server = StandIn(published(), fault=refuses)
    with served(server, deadlines=Deadlines()) as client:
        with pytest.raises(RequestRefused, match="400.*not to my taste") as e:
            client.generate([request(2), request(0), request(1)])
        until(lambda: server.left == 2)
        assert isinstance(e.value, ValueError) and client.health().detail == "" and len(server.asked) == 3


def test_who_waits_no_more_has_its_requests_cancelled():
    server = StandIn(published(), seconds=30)
    with served(server, deadlines=Deadlines()) as client:
        failed = []

        def ask():
            try:
                client.generate([request(i) for i in range(3)])
            except BridgeError as e:
                failed.append(str(e))

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: len(server.asked) == 3)
        start = time.monotonic()
        client.close()
        thread.join(5)
        until(lambda: server.left == 3)
        assert time.monotonic() - start < 2 and "closed" in failed[0]


def test_the_callers_own_errors_leave_the_engine_alone():
    server = StandIn(published())
    with served(server) as client:
        with pytest.raises((TypeError, ValueError)):
            client.generate([GenRequest("r", ("x", "y"), SamplingParams(2))])
        with pytest.raises(ValueError, match="request 'r0': vLLM samples at temperature 0 or 0.01 to 2.0"):
            client.generate([request(temperature=9.0)])
        assert client.health().ok and client.health().detail == "" and not server.asked


def test_nan_is_seen_and_healed_by_a_publish():
    server = StandIn(published(faults=Faults(logprobs="nan")))
    with served(server) as client:
        [[done]] = client.generate([request()])
        assert "log-probability nan" in done.problem()
        assert not client.health().ok and "request 'r0', completion 0: log-prob" in client.health().detail
        client.published()
        assert client.health().ok


class OneEach(StandIn):
    """The connection breaks after each token."""

    def _event(self, writer, data: str) -> None:
        super()._event(writer, data)
        writer.close()


def test_a_completion_whose_last_token_came_before_the_connection_broke_is_whole_and_looked_at():
    server = OneEach(published(faults=Faults(logprobs="nan")), token_seconds=0.01)
    with served(server) as client:
        r = request(max_tokens=3)
        [done] = client.start(r, [Part(r, 0, client.capabilities())]).result(20)
        assert len(done.token_ids) == 3 and done.finish_reason == "length" and len(server.asked) == 3
        assert not client.health().ok, "its log-probabilities are NaN"


def test_a_client_that_is_closed_says_so():
    with served(StandIn(published())) as client:
        pass
    with pytest.raises(BridgeError, match="the engine is closed"):
        client.pause()


def test_weights_of_nobody_are_dirty_and_so_is_a_publish_that_broke_off():
    with served(StandIn()) as client, pytest.raises(EngineDirty, match="nothing has been published to it"):
        client.generate([request()])

    async def default(server, reader, writer):
        answer = server.route(GENERATE, server.asked[-1])[1]
        answer["choices"][0]["weight_versions"][0]["version"] = "default"
        server.answer(writer, 200, answer)

    with served(StandIn(published(), fault=default)) as client:
        with pytest.raises(EngineDirty, match="weights 'default', which no learner has published"):
            client.generate([request()])
        client.dirty = "the publish of version 2 has not finished"
        with pytest.raises(EngineDirty, match="version 2 has not finished"):
            client.generate([])
        assert client.weight_version() is None


def test_spans_of_three_versions_are_told():
    async def three(server, reader, writer):
        answer = server.route(GENERATE, server.asked[-1])[1]
        ends = [(0, 1), (1, 3), (3, 4)]
        answer["choices"][0]["weight_versions"] = [{"version": str(7 + i), "start": a, "end": b}
                                                   for i, (a, b) in enumerate(ends)]
        server.answer(writer, 200, answer)

    with served(StandIn(published(), fault=three)) as client:
        [[done]] = client.generate([request()])
    assert [dataclasses.astuple(s) for s in done.version_spans] == [(0, 1, 7), (1, 3, 8), (3, 4, 9)]


# Who may ask, and of whom


def test_the_wrong_token_names_its_file():
    refused = "refuses the token of /run/token .401"
    with StandIn(published()) as server, pytest.raises(BridgeError, match=refused):
        VllmClient([server.url], "another", QUICK, token_file="/run/token")


def test_replicas_are_alike():
    with StandIn() as a, StandIn(max_model_len=128) as b:
        with pytest.raises(BridgeError, match="they differ in max_model_len"):
            VllmClient([a.url, b.url], TOKEN, QUICK)


def test_the_environments_proxy_never_sees_the_token(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with served(StandIn(published())) as client:
        client.generate([request()])


@pytest.mark.parametrize("url", ["localhost:80", "ftp://h:1", "http://", "http://h:99999999", "http://h:1/v1",
                                 "http://u@h:1", "http://h:x"])
def test_addresses_that_are_none(url):
    with pytest.raises(BridgeError, match="is not the address of an engine"):
        checked_url(url)


def test_one_address_twice_or_none_is_refused():
    for urls in ([], ["http://h:1", "http://h:1/"]):
        with pytest.raises(BridgeError, match="at least one, and each once"):
            VllmClient(urls, TOKEN)


# Hostile answers


def test_hostile_answers_are_bridge_errors():
    from fuzz_answers import fuzz

    fuzz(300, seed=int(time.time()) if os.environ.get("FUZZ_NEW") else 1)


@pytest.mark.slow  # the same, of which 300 run always
@pytest.mark.timeout(900)
def test_many_hostile_answers_are_bridge_errors():
    from fuzz_answers import fuzz

    fuzz(25_000, seed=2)


def test_the_answers_of_the_fuzzer_differ():
    from fuzz_answers import hostile

    assert len({hostile(seed) for seed in range(200)}) > 150
