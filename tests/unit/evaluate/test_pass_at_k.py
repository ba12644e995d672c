"""The statistics of an evaluation: the estimator of pass@k is unbiased, and the intervals cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.evaluate.pass_at_k import interval, pass_at_k


@given(st.integers(1, 12), st.data())
def test_pass_at_k_counts_the_subsets(n, data):
    """The estimate is the share of the k-subsets of n completions in which one passed."""
    k, passed = data.draw(st.integers(1, n)), data.draw(st.integers(0, n))
    subsets = np.array([bin(s).count("1") == k for s in range(2**n)])
    hits = np.array([s & (2**passed - 1) != 0 for s in range(2**n)])
    assert pass_at_k(np.array([passed]), n, k)[0] == pytest.approx(hits[subsets].mean(), abs=1e-12)


def test_pass_at_k_is_unbiased():
    rng, p = np.random.default_rng(0), 0.2
    estimates = pass_at_k(rng.binomial(8, p, 20_000), 8, 4)
    assert estimates.mean() == pytest.approx(1 - (1 - p) ** 4, abs=4 * estimates.std() / math.sqrt(20_000))


@pytest.mark.parametrize("n, k", [(1, 1), (8, 4), (4, 4)])
def test_intervals_cover_as_often_as_they_say(n, k):
    """Problems are of different difficulty, drawn anew with their completions."""
    rng, covered = np.random.default_rng(1), []
    truth = np.mean(1 - (1 - rng.beta(1, 3, 200_000)) ** k)
    for _ in range(60):
        found = interval(pass_at_k(rng.binomial(n, rng.beta(1, 3, 60)), n, k))
        covered.append(found.low <= truth <= found.high)
        assert 0 <= found.low <= found.estimate <= found.high <= 1
        assert found.method == ("wilson" if k == n else "bootstrap")
    assert np.mean(covered) >= 0.86  # 0.95 less three deviations


def test_wilson_is_wilsons():
    """Newcombe 1998 (Statistics in Medicine 17), table I, method 3: 81 of 263 and 0 of 20."""
    found = interval(np.arange(263) < 81)
    assert (round(found.low, 4), round(found.high, 4)) == (0.2553, 0.3662)
    assert [round(x, 4) for x in interval(np.zeros(20))[:3]] == [0.0, 0.0, 0.1611]


def test_a_single_problem_and_problems_that_agree_have_an_interval():
    for estimates in ([0.5], [0.25, 0.25, 0.25]):
        assert interval(np.array(estimates))[:3] == (estimates[0],) * 3
