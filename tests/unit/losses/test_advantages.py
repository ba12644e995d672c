"""Advantages: formulas, degenerate groups, and bias by enumeration."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.errors import ConfigError, DataError
from jaxfp8rl.losses.advantages import (
    ADVANTAGES,
    advantages,
    check_advantage,
    informative_groups,
    overlong_penalty,
)

nan = np.nan
seeds = st.integers(0, 2**32 - 1)
REAL = [kind for kind in ADVANTAGES if kind != "pass_at_k"]


def groups_of(seed: int) -> list[np.ndarray]:
    """Groups of 1 to 8 completions, some undefined."""
    rng = np.random.default_rng(seed)
    return [np.where(rng.random(n) < 0.2, nan, rng.normal(size=n))
            for n in rng.integers(1, 9, 6)] + [rng.normal(size=2)]


def one_by_one(groups, kind):
    """Each completion from the definition: r its reward, d those of its group, o those of the others, b the
    batch's."""
    defined = [g[~np.isnan(g)] for g in groups]
    b = np.concatenate(defined)
    c = np.concatenate([d - d.mean() for d in defined if len(d)])
    formula = {
        "grpo": lambda r, d, o: (r - d.mean()) / d.std(),
        "grpo_sample_std": lambda r, d, o: (r - d.mean()) / (d.std(ddof=1) + 1e-6),
        "dr_grpo": lambda r, d, o: r - d.mean(),
        "rloo": lambda r, d, o: r - o.mean(),
        "leave_one_out": lambda r, d, o: (r - o.mean()) / (o.std(ddof=1) + 1e-6 if len(o) > 1 else 1),
        "reinforce_pp": lambda r, d, o: (r - b.mean()) / np.sqrt(b.var(ddof=1) + 1e-8),
        "reinforce_pp_baseline": lambda r, d, o: (r - d.mean()) / np.sqrt(c.var(ddof=1) + 1e-8),
        "none": lambda r, d, o: 0.0,
    }[kind]
    for g, d in zip(groups, defined):
        alone = len(d) < 2 and kind != "reinforce_pp"
        others = [np.delete(g, i) for i in range(len(g))]
        yield [0.0 if np.isnan(r) or alone else formula(r, d, o[~np.isnan(o)]) for r, o in zip(g, others)]


@pytest.mark.parametrize("kind", REAL)
@given(seed=seeds)
def test_each_kind_is_its_formula(kind, seed):
    groups = groups_of(seed)
    got = advantages(groups, kind)
    for g, a, want in zip(groups, got, one_by_one(groups, kind), strict=True):
        assert a.dtype == np.float32 and a.shape == g.shape
        np.testing.assert_allclose(a, want, rtol=2e-5, atol=1e-6)


@given(seeds, st.integers(2, 8))
def test_grpo_is_centred_scaled_and_blind_to_an_affine_change_of_the_reward(seed, n):
    rewards = np.random.default_rng(seed).normal(size=(4, n))
    a = np.stack(advantages(list(rewards)))
    np.testing.assert_allclose(a.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(a.std(-1), 1, atol=1e-5)
    np.testing.assert_allclose(a, advantages(list(3 * rewards + 5)), atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in ADVANTAGES if kind != "none"])
def test_degenerate_groups(kind):
    """Equal rewards, one defined reward, none: 0 for all kinds (reinforce_pp compares across groups
    instead)."""
    groups = [np.full(4, 0.1) if kind != "pass_at_k" else np.ones(4), np.array([1.0, nan, nan]),
              np.full(3, nan),
              np.array([1.0]), np.array([0.0, 1.0, nan, 0.0])]
    a = advantages(groups, kind, 2 if kind == "pass_at_k" else None)
    assert all(np.isfinite(x).all() for x in a) and a[4][2] == 0 and a[4][1] > 0 > a[4][0]
    if kind != "reinforce_pp":
        assert not any(x.any() for x in a[:4])
    else:
        np.testing.assert_allclose(np.concatenate(a).sum(), 0, atol=1e-6)
    assert advantages([], kind, 2 if kind == "pass_at_k" else None) == []
    assert not np.any(advantages([np.array([nan, nan])], kind, 2 if kind == "pass_at_k" else None))


def test_worked_examples():
    np.testing.assert_array_equal(advantages([np.array([1.0, nan, 0.0])])[0], [1, 0, -1])
    np.testing.assert_array_equal(advantages([np.array([1.0, 0.0])], "dr_grpo")[0], [0.5, -0.5])
    np.testing.assert_allclose(advantages([np.array([1.0, 0, 0, 0])], "rloo")[0], [1, -1 / 3, -1 / 3, -1 / 3])
    # The one right answer's others are all equal, so it is not divided; the others' have the std sqrt(1/3).
    np.testing.assert_allclose(advantages([np.array([1.0, 0, 0, 0])], "leave_one_out")[0],
                               [1] + [-(3**-0.5)] * 3, rtol=1e-5)
    np.testing.assert_allclose(advantages([np.array([1.0, 0])], "grpo_sample_std")[0], [2**-0.5, -(2**-0.5)],
                               rtol=1e-5)


# Pass@k
# ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.integers(0, 7), st.integers(1, 8))
def test_pass_at_k_is_the_mean_over_all_sets_of_k(right, wrong, k):
    """Every set of k completions a sample whose reward is its best: GRPO over all sets, each completion's
    mean over its own."""
    r = np.array([1.0] * right + [0.0] * wrong)
    if k > len(r):
        with pytest.raises(ConfigError, match=f"from 1 to {len(r)}"):
            advantages([r], "pass_at_k", k)
        return
    sets = np.array(list(itertools.combinations(range(len(r)), k)))
    best = r[sets].max(-1)
    of_set = (best - best.mean()) / best.std() if best.std() > 0 else 0 * best
    want = [of_set[(sets == i).any(-1)].mean() for i in range(len(r))]
    got = advantages([r], "pass_at_k", k)[0]
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(got.sum(), 0, atol=2e-6)
    if k == 1:
        np.testing.assert_allclose(got, advantages([r])[0], atol=1e-6)
    if k == len(r):
        assert not got.any()


def test_pass_at_k_leaves_out_what_is_undefined():
    r = np.array([1.0, nan, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(
        advantages([r], "pass_at_k", 2)[0], np.insert(advantages([r[[0, 2, 3, 4]]], "pass_at_k", 2)[0], 1, 0)
    )
    assert not advantages([np.array([1.0, nan, nan, 0.0])], "pass_at_k", 3)[0].any()


# Bias, by enumeration: a bandit with the policy softmax(theta), every group of n draws with its probability
# ----------


def expected_gradient(kind, n, rewards, theta, k=None):
    policy = np.exp(theta) / np.exp(theta).sum()
    total = np.zeros_like(theta)
    for draws in itertools.product(range(len(theta)), repeat=n):
        a = advantages([rewards[list(draws)]], kind, k)[0].astype(np.float64)
        score = np.eye(len(theta))[list(draws)] - policy
        total += np.prod(policy[list(draws)]) * (a @ score) / n
    return total


def test_rloo_is_unbiased_and_dr_grpo_short_by_one_in_n():
    rng = np.random.default_rng(0)
    theta, rewards = rng.normal(size=4), rng.normal(size=4)
    policy = np.exp(theta) / np.exp(theta).sum()
    exact = policy * (rewards - policy @ rewards)
    np.testing.assert_allclose(expected_gradient("rloo", 3, rewards, theta), exact, atol=1e-7)
    np.testing.assert_allclose(expected_gradient("dr_grpo", 3, rewards, theta), exact * 2 / 3, atol=1e-7)
    grpo = expected_gradient("grpo", 3, rewards, theta)
    slope = grpo @ exact / (exact @ exact)
    # another direction: dividing by the group's std is a bias
    assert np.abs(grpo - slope * exact).max() > 1e-3


def test_pass_at_k_climbs_the_chance_that_one_of_k_is_right():
    """Two arms, one right: the direction is that of the gradient of 1 - (1 - p)^k, and every k > 1 pushes
    rare success more."""
    theta, rewards = np.array([-2.0, 0.0]), np.array([1.0, 0.0])
    gradients = [expected_gradient("pass_at_k", 4, rewards, theta, k) for k in (1, 2, 3)]
    assert all(g[0] > 0 for g in gradients)
    np.testing.assert_allclose(gradients[0], expected_gradient("grpo", 4, rewards, theta), atol=1e-6)


# Dynamic sampling, overlong shaping, errors
# --------------------------------------------------------------------------


@given(seeds)
def test_groups_that_carry_no_gradient_are_those_whose_grpo_advantages_are_all_zero(seed):
    rng = np.random.default_rng(seed)
    groups = [np.where(rng.random(n) < 0.2, nan, rng.integers(0, 2, n)) for n in rng.integers(1, 5, 9)]
    informative = informative_groups(groups)
    assert informative.dtype == bool and informative.tolist() == [bool(a.any()) for a in advantages(groups)]


def test_informative_groups():
    assert informative_groups([[1, 1], [1, 0], [nan, 1], [nan, 1, 0],
                               []]).tolist() == [False, True, False, True, False]


def test_overlong_penalty_is_a_ramp_over_the_buffer():
    lengths = np.array([0, 16384, 16385, 18432, 20480, 30000])
    want = [0, 0, -1 / 4096, -0.5, -1, -1]
    np.testing.assert_allclose(overlong_penalty(lengths, 20480, 4096), want, atol=1e-12)
    np.testing.assert_allclose(overlong_penalty(lengths, 20480, 4096, 0.5), 0.5 * np.array(want), atol=1e-12)


@pytest.mark.parametrize(("length", "buffer", "factor"),
                         [(100, 0, 1.0), (100, 101, 1.0), (100, 10, -1.0), (100, 10, nan)])
def test_overlong_penalty_refuses(length, buffer, factor):
    with pytest.raises(ConfigError, match="0 < buffer <= max_length"):
        overlong_penalty(np.array([1]), length, buffer, factor)


@pytest.mark.parametrize(
    ("kind", "k", "n", "says"),
    [
        ("median", None, None, "known: dr_grpo, grpo"),
        ("drgrpo", None, None, 'did you mean "dr_grpo"'),
        ("grpo", 4, None, 'or choose "pass_at_k"'),
        ("pass_at_k", None, 8, "choose k from 1 to 7"),
        ("pass_at_k", 9, 8, "choose k from 1 to 7"),
        ("pass_at_k", 8, 8, "choose k from 1 to 7"),  # all 8 are one set: every advantage is 0
        ("pass_at_k", 0, None, "k = 0 is impossible"),
    ],
)
def test_impossible_settings(kind, k, n, says):
    with pytest.raises(ValueError, match=says):
        check_advantage(kind, k, n)


def test_rewards_that_cannot_be_used():
    with pytest.raises(DataError, match="group 1 has an infinite reward"):
        advantages([np.array([0.0, 1.0]), np.array([np.inf, 0.0])])
    with pytest.raises(DataError, match=r"\[1.0, 0.5\]"):
        advantages([np.array([1.0, 0.5])], "pass_at_k", 2)
