"""The tokens that a filtered draw is among: how many there may be, what is refused, and what the contract
says of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridges.api import Capabilities, Completion, EngineFormats, SamplingParams, VersionSpan, supports
from jaxfp8rl.config.sampling import Rollout
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import padded_support
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.memory.plan import memory_plan
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.rollout import support


def rollout(**settings) -> Rollout:
    return Rollout(prompts_per_step=1, samples_per_prompt=1, max_new_tokens=8, **settings)


@pytest.mark.parametrize(
    ("settings", "vocabulary", "bound", "width"),
    [({}, 10**5, 0, 0), ({"top_k": 20}, 10**5, 20, 28), ({"top_k": 400, "top_p": 0.9}, 10**5, 400, 500),
     ({"top_k": 20}, 12, 12, 12), ({"top_p": 0.9}, 151_936, 128, 160), ({"top_p": 0.9}, 700, 700, 700)],
)
def test_a_support_has_a_bound_and_room_for_ties(settings, vocabulary, bound, width):
    r = rollout(**settings)
    assert (support.bound(r, vocabulary), support.width(r, vocabulary)) == (bound, width)
    said = support.note(r, vocabulary)
    assert (said is None) == (bound == 0) and ("at most the 128 likeliest" in (said or "")) == (bound == 128)


def test_an_engine_that_does_not_say_what_it_left_is_refused_by_name():
    formats = EngineFormats(*["float32"] * 4)
    mute, cfg = Capabilities("mine", "7", formats, 64, 64,
                             True), load_config("demo", ["--rollout.top_p", "0.9"])
    with pytest.raises(ConfigError,
                       match="rollout.top_p, rollout.top_k: mine 7 does not report.*\\n.*rollout.top_p = 1"):
        support.check_engine(cfg, mute)
    support.check_engine(cfg, dataclasses.replace(mute, support=True))
    support.check_engine(load_config("demo"), mute)


def completion(tokens: list[int], ids: list[int], sizes: list[int]) -> Completion:
    arrays = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
    told = np.array(ids, np.int32), np.array(sizes, np.int32)
    return Completion("r", 0, *arrays, "length", (VersionSpan(0, len(tokens), 1),), None, *told)


def test_a_token_is_in_its_own_support_once():
    good = completion([5, 6, 7], [4, 5, 7], [2, 0, 1])
    assert good.problem() is None and support.problem(good, 2) is None
    for bad, said in {
        "token 0 occurs 0 times": completion([5, 6], [4, 6], [1, 1]),
        "token 1 occurs 2 times": completion([5, 6], [5, 6, 6], [1, 2]),
        "2 tokens with 1 supports": completion([5, 6], [5], [1]),
        "of 3 tokens in all, 2 ids": completion([5, 6], [5, 6], [2, 1]),
        "support_ids without support_sizes, or the reverse": dataclasses.replace(good, support_ids=None),
    }.items():
        assert bad in said.problem()
    assert support.problem(good, 1) == "a support of 2 tokens, but at most 1 were requested"
    assert support.problem(dataclasses.replace(good, support_ids=None, support_sizes=None),
                           2) == "no support of its tokens"
    half = good.first(2, prompt_tokens=3)
    assert half.problem() is None and half.support_ids.tolist() == [4, 5] and half.support_sizes.tolist() == [
        2, 0]
    said = support.metrics([good, half])
    assert said == {"support/tokens_mean": 5 / 3, "support/unknown": 2 / 5}


@given(st.lists(st.sets(st.integers(0, 20), max_size=6), min_size=1, max_size=9), st.integers(1, 5))
def test_what_an_engine_tells_comes_back_padded_but_for_what_is_too_wide(sets, most):
    left = np.full((len(sets), 7), -1, np.int32)
    for row, s in zip(left, sets):
        row[: len(s)] = list(s)
    ids, sizes = supports(left, most)
    assert sizes.tolist() == [len(s) if len(s) <= most else 0 for s in sets] and sizes.sum() == len(ids)
    for row, s in zip(padded_support(ids, sizes, most), sets):
        assert set(row[row >= 0]) == (s if len(s) <= most else set())


def test_only_filtered_draws_have_one():
    reported = lambda **settings: SamplingParams(8, support=9, **settings).reported
    assert [reported(), reported(top_k=3), reported(top_p=0.5),
            reported(top_k=3, temperature=0.0)] == [0, 9, 9, 0]
    with pytest.raises(ValueError, match="support must be"):
        SamplingParams(8, support=-1)


def test_the_plan_counts_them():
    cfg = load_config("demo", ["--rollout.top_k", "16"])
    plan, free = (dict(memory_plan(c, ModelConfig.from_hf(c.model.config)))
                  for c in (cfg, load_config("demo")))
    (what,) = plan.keys() - free.keys()
    rows = 4 * 22  # 512 samples of 10 tokens, six in a row of 60, by micro-batches of 22 rows
    assert "candidate tokens" in what and plan[what] == rows * 60 * (16 + 8) * 4
