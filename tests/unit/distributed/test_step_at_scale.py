"""Laws of the simulated step of many GPUs, and that what is committed is what it says."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import step_at_scale
from benchmarks.common import RESULTS
from benchmarks.step_at_scale import ROWS, drawn, efficiencies, parts, seconds

PARTS, KNOWN = parts(), efficiencies()


@given(st.sampled_from([1, 2, 8, 16]), st.integers(0, 1000))
def test_a_queue_that_stays_full_is_never_slower_and_both_learn_alike(gpus, seed):
    x = drawn(gpus, seed)
    awaited, continued = (seconds(x, how, PARTS, KNOWN) for how in ("awaited", "continued"))
    assert continued["rollout"] <= awaited["rollout"] + 1e-9
    assert continued["learn"] == awaited["learn"]


@given(st.integers(0, 1000), st.integers(0, 7), st.integers(1, 4000))
def test_a_longer_completion_lengthens_a_step_of_every_kind(seed, gpu, more):
    x = drawn(8, seed)
    longer = x.copy()
    longer[gpu, x[gpu].argmax()] += more
    for how in ("awaited", "continued", "apart"):
        assert seconds(longer, how, PARTS, KNOWN)["step"] > seconds(x, how, PARTS, KNOWN)["step"]


@given(st.integers(0, 1000))
def test_apart_lasts_as_long_as_its_longer_half(seed):
    found = seconds(drawn(8, seed), "apart", PARTS, KNOWN)
    assert found["step"] == max(found["rollout"], found["learn"]) + found["publish"]


def test_equal_lengths_have_no_tail():
    x = np.full((4, ROWS), 1500)
    awaited, continued = (seconds(x, how, PARTS, KNOWN) for how in ("awaited", "continued"))
    assert awaited["rollout"] == pytest.approx(continued["rollout"])


def test_the_measured_step_is_the_sum_of_its_parts_and_no_efficiency_is_above_one():
    assert all(0.98 < r["ratio"] < 1.05 for r in step_at_scale.check())
    assert KNOWN[1] == 1 and all(0 < e <= 1 for e in KNOWN.values()) and 512 in KNOWN


def test_the_committed_figures_are_those_of_today():
    committed = json.loads((RESULTS / "step_at_scale.json").read_text(encoding="utf-8"))
    first = next(r for r in committed["records"] if (r["how"], r["gpus"]) == ("awaited", 8))
    steps = [seconds(drawn(8, 1000 * seed + 8), "awaited", PARTS, KNOWN)["step"]
             for seed in range(step_at_scale.DRAWS)]
    assert np.mean(steps) == pytest.approx(first["step"])
