"""Sampling whose progress is told: the completions stay what `generate` returns."""

from __future__ import annotations

import numpy as np
import pytest
from stand_in import published

from bridges.api import GenRequest, SamplingParams
from bridges.engines.fake_engine import FakeEngine
from jaxfp8rl.rollout.watched import Watched

ASKED = [GenRequest(name, (2, 3), SamplingParams(max_tokens=2 + 3 * i), n=2, seed=i)
         for i, name in enumerate("abc")]


def engine() -> FakeEngine:
    return published(16, 4, max_model_len=64, weights=1, version=3)


def test_the_completions_are_those_of_generate_in_order_and_each_request_is_told():
    told = []
    found = Watched(engine(), lambda *counts: told.append(counts)).generate(ASKED)
    for mine, theirs in zip(found, engine().generate(ASKED), strict=True):
        assert [c.request_id for c in mine] == [c.request_id for c in theirs]
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_an_interruption_leaves_nothing_in_the_engine():
    def stop(done: int, of: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    sampled = engine()
    with pytest.raises(KeyboardInterrupt):
        Watched(sampled, stop).generate(ASKED)
    assert sampled.partial() == {}


def test_an_engine_that_only_generates_is_told_of_at_its_ends():
    class Whole:
        """An engine without `submit`."""

        def generate(self, requests):
            return engine().generate(requests)

        def health(self):
            return engine().health()

    told = []
    found = Watched(Whole(), lambda *counts: told.append(counts)).generate(ASKED)
    assert [c.request_id for group in found for c in group] == [*"aabbcc"] and told == [(0, 3), (3, 3)]
