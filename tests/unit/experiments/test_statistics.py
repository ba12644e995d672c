"""Intervals cover, tests agree with the intervals that they are dual to, and the power is what simulation
shows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy import stats

from jaxfp8rl.experiments import statistics as tests

NUMBERS = st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=2, max_size=12)
PS = st.lists(st.floats(0, 1), min_size=1, max_size=10)
ALPHAS = st.sampled_from((0.01, 0.05, 0.1))


@given(NUMBERS, st.floats(0.001, 1), ALPHAS)
def test_equivalence_is_accepted_exactly_if_the_interval_lies_in_the_margin(values, margin, alpha):
    found = tests.interval(values, 1 - 2 * alpha)
    assume(min(abs(margin + found.low), abs(margin - found.high)) > 1e-9)
    assert (tests.p_equivalent(values, margin) < alpha) == found.within(margin)


@given(NUMBERS, ALPHAS)
def test_a_difference_is_found_exactly_if_the_interval_leaves_zero_out(values, alpha):
    found = tests.interval(values, 1 - alpha)
    assume(min(abs(found.low), abs(found.high)) > 1e-9)
    assert (tests.p_different(values) < alpha) == (found.low > 0 or found.high < 0)


@given(NUMBERS, st.floats(0.001, 1))
def test_a_margin_for_each_pair_that_is_the_same_for_all_is_one_margin(values, margin):
    assert tests.p_equivalent(values, [margin] * len(values)) == tests.p_equivalent(values, margin)


def test_the_noise_of_a_margin_counts():
    """With the same mean margin, one that varies against the differences is harder to keep."""
    differences = [0.01, 0.02, -0.01, 0.0, -0.02]
    varying = [0.1 + 2 * d for d in differences]
    assert tests.p_equivalent(differences, varying) > 2 * tests.p_equivalent(differences, 0.1)
    assert tests.p_equivalent(differences, -0.1) > 0.99  # a control that lost reward has no margin


@given(PS)
def test_holm_is_monotone_and_between_the_raw_p_and_bonferroni(ps):
    adjusted = tests.holm(ps)
    assert all(p <= a <= min(1.0, len(ps) * p) or a == max(adjusted) for p, a in zip(ps, adjusted))
    order = np.argsort(ps, kind="stable")
    assert np.all(np.diff(np.array(adjusted)[order]) >= 0)
    assert min(adjusted) == min(1.0, len(ps) * min(ps))


def test_holm_of_an_example_by_hand():
    np.testing.assert_allclose(tests.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])


def test_intervals_cover_as_often_as_they_say():
    rng = np.random.default_rng(0)
    for size, level in ((3, 0.9), (5, 0.95)):
        found = [tests.interval(x, level) for x in rng.normal(0.3, 2.0, (800, size))]
        assert np.mean([e.low < 0.3 < e.high for e in found]) == pytest.approx(level, abs=0.03)


def test_a_bootstrap_of_many_values_is_near_students():
    x = np.random.default_rng(1).normal(size=60)
    ours, students = tests.interval(x, 0.95, "bootstrap"), tests.interval(x)
    np.testing.assert_allclose(ours, students, atol=0.03)
    assert ours != students


@pytest.mark.parametrize("spread, margin, pairs", [(0.05, 0.1, 5), (0.05, 0.05, 8), (0.1, 0.08, 12)])
def test_power_is_what_a_simulation_shows(spread, margin, pairs):
    draws = np.random.default_rng(2).normal(0.0, spread, (20_000, pairs))
    half = stats.t.ppf(0.95, pairs - 1) * stats.sem(draws, axis=1)
    shown = np.mean(np.abs(draws.mean(1)) + half < margin)
    assert tests.equivalence_power(tests.Spread(spread), margin, pairs) == pytest.approx(shown, abs=0.012)


@given(st.floats(0.01, 1), st.sampled_from([1, 3, math.inf]), st.floats(0.01, 1), st.integers(2, 20))
@example(1.0, math.inf, 0.5, 2)
def test_power_grows_with_pairs_and_margin(spread, free, margin, pairs):
    """A test without power may lose some with a pair: two pairs that happen to lie together prove more, by
    chance, than three."""
    of = lambda margin, pairs: tests.equivalence_power(tests.Spread(spread, free), margin, pairs)
    assert of(margin, pairs) >= 0
    assert of(margin, pairs) < 0.1 or of(margin, pairs) <= of(margin, pairs + 1) + 1e-3
    assert of(margin, pairs) <= of(1.5 * margin, pairs) + 1e-12


@pytest.mark.parametrize("free", [1, 4])
def test_power_counts_how_little_a_pilot_tells(free):
    """Over pilots and grids of one true spread, drawn as often as a pilot like this one comes of it."""
    rng, seen, margin, pairs = np.random.default_rng(3), 0.05, 0.1, 5
    true = seen * np.sqrt(free / rng.chisquare(free, 20_000))
    draws = rng.normal(0.0, true[:, None], (20_000, pairs))
    half = stats.t.ppf(0.95, pairs - 1) * stats.sem(draws, axis=1)
    shown = np.mean(np.abs(draws.mean(1)) + half < margin)
    found = tests.equivalence_power(tests.Spread(seen, free), margin, pairs)
    assert found == pytest.approx(shown, abs=0.012)
    assert found < tests.equivalence_power(tests.Spread(seen), margin, pairs)


def test_effect_size_is_hedges():
    """Cohen's d of paired differences times the exact correction, gamma(n/2) / (sqrt(n/2) gamma((n-1)/2))
    with n degrees of freedom, which the usual formula approximates."""
    x = [0.1, 0.3, 0.2, 0.5, 0.4, 0.3]
    free = len(x) - 1
    exact = math.gamma(free / 2) / (math.sqrt(free / 2) * math.gamma((free - 1) / 2))
    assert tests.effect_size(x) == pytest.approx(np.mean(x) / np.std(x, ddof=1) * exact, rel=2e-3)


def test_values_without_spread_are_certain_and_one_value_is_not():
    assert tests.interval([0.25, 0.25]) == (0.25, 0.25, 0.25)
    assert (tests.p_different([0.25, 0.25]), tests.p_different([0.0, 0.0])) == (0.0, 1.0)
    assert (tests.p_equivalent([0.25, 0.25], 0.3), tests.p_equivalent([0.25, 0.25], 0.25)) == (0.0, 1.0)
    assert tests.effect_size([0.25, 0.25]) is None
    assert tests.equivalence_power(tests.Spread(0.0), 0.1, 3) == 1.0
    assert math.isnan(tests.interval([0.25]).low) and tests.p_different([0.25]) == 1.0
    assert not tests.interval([0.25]).within(1.0)
    with pytest.raises(ValueError, match="no values"):
        tests.interval([])


def test_the_spread_of_groups_is_that_within_them():
    groups = [[0.1, 0.3], [10.0, 10.4, 10.2], [5.0]]
    assert tests.pooled_spread(groups) == pytest.approx((math.sqrt((0.02 + 0.08) / 3), 3))
    assert tests.pooled_spread([[1.0], []]) is None
