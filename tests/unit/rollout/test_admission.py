"""The embedded engine, with a cache that is too small, starts what it is expected to hold."""

import dataclasses

import numpy as np
import pytest
from test_continuous_batching import recorder

from bridges.api import GenRequest, SamplingParams
from bridges.engines import batch, embedded_engine
from bridges.engines.embedded_engine import EmbeddedEngine
from bridges.engines.flights import Flights

MAX_LEN, ROWS, PAGES, STOP = 512, 32, 400, 3
MODEL = recorder(128)  # one token in 128 is the last, on average
pytestmark = pytest.mark.usefixtures("quick_compile")


def engine(admit: str, pages: int | None) -> EmbeddedEngine:
    made = EmbeddedEngine(MODEL, max_model_len=MAX_LEN, max_num_seqs=ROWS, pages=pages, admit=admit)
    made.load({})
    made.commit(1, "")
    return made


def requests(seed: int, count: int) -> list[GenRequest]:
    rng = np.random.default_rng(seed)
    how = SamplingParams(MAX_LEN - 8, 1.0, stop_token_ids=(STOP,))
    prompt = lambda: tuple(rng.integers(0, 16, 4).tolist())
    return [GenRequest(f"r{seed}-{i}", prompt(), how, 8, int(rng.integers(2**31))) for i in range(count)]


def tokens(groups) -> list:
    return [(c.request_id, c.index, c.token_ids.tolist(), c.finish_reason) for group in groups for c in group]


@pytest.fixture
def decoded(monkeypatch):
    """Sequences that are decoded, at each look."""
    found, collect = [], Flights._collect
    monkeypatch.setattr(embedded_engine, "STEPS", 16)

    def seen(self, status):
        found.append(int(sum(status[n] == batch.RUNNING for n in self._numbered)))
        collect(self, status)

    monkeypatch.setattr(Flights, "_collect", seen)
    return found


@pytest.mark.slow  # its fast form is a simulation: tests/bridges/test_admission.py
def test_preemptions_fall_and_the_completions_are_those_of_any_cache(decoded):
    plain, fitting, roomy = engine("all", PAGES), engine("cache", PAGES), engine("all", None)
    preempted, looks = {}, {}
    for seed in range(3):
        want = roomy.generate(asked := requests(seed, 12))
        for name, e in (("all", plain), ("cache", fitting)):
            decoded.clear()
            got = e.generate(asked)
            assert tokens(got) == tokens(want)
            for a, b in zip(got, want):
                for c, d in zip(a, b):
                    np.testing.assert_allclose(c.logprobs, d.logprobs, atol=1e-5)
            told = e.metrics()
            assert 0 < told["engine/concurrency"] <= ROWS and 0.5 < told["engine/cache_use"] <= 1
            assert max(decoded) <= ROWS
            if seed:  # before, no lengths are known
                preempted[name] = preempted.get(name, 0) + told["engine/preemptions"]
                looks[name] = looks.get(name, 0) + len(decoded)
    assert preempted["cache"] < preempted["all"] / 3 and looks["cache"] < 1.05 * looks["all"]
    assert roomy.metrics() == {}, "its cache has no limit"


def test_a_cache_that_one_completion_fills_starts_them_one_by_one(decoded):
    e = engine("cache", MAX_LEN // MODEL.page + 1)
    short = [dataclasses.replace(r, n=2) for r in requests(7, 3)]
    want = tokens(engine("all", None).generate(short))
    for _ in range(2):
        assert tokens(e.generate(short)) == want


def test_completions_in_flight_are_interrupted_and_cancelled_as_without():
    e, groups = engine("cache", PAGES), {}
    e.generate(requests(1, 8))
    e.metrics()
    asked = requests(2, 12)
    e.submit(asked)
    e.cancel([asked[3].request_id])
    for version in range(2, 2000):
        groups |= {g[0].request_id: g for g in e.poll()}
        if version % 100 == 0:
            e.pause(keep_cache=version % 200 == 0)
            e.commit(version, "")
            e.resume()
        if len(groups) == len(asked) - 1:
            break
    want = engine("all", None).generate([r for i, r in enumerate(asked) if i != 3])
    assert tokens(groups[r.request_id] for i, r in enumerate(asked) if i != 3) == tokens(want)
    assert not e._flights
