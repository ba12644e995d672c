"""Selection: the chances that it states are those with which it draws, and weights by them change no mean."""

from __future__ import annotations

import collections
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.selection_lab import measure
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses import selection
from jaxfp8rl.losses.selection import Selection

GROUPS = {"ones": [1, 0, 0, 1, 0], "rare": [1, 0, 0, 0, 0], "graded": [0.5, 1, 0, 0.5, 0.25],
          "equal": [1, 1, 1, 1, 1]}
KINDS = ("best_worst", "mean_deviation", "random")


class Every:
    """A generator whose draws are one of all that there can be: an order, and whether the coin falls below
    `p`."""

    def __init__(self, order, below: bool):
        self.order, self.below = order, below

    def permutation(self, n):
        return np.array(self.order[:n])

    def random(self):
        return 0.0 if self.below else 1.0


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("by", KINDS)
@pytest.mark.parametrize("explore", [0.0, 0.25])
def test_inclusion_is_the_share_of_all_draws_that_keep_a_completion(group, by, explore):
    rewards, usable = np.array(GROUPS[group]), np.ones(5, bool)
    for count in (1, 2, 3, 4):
        s = Selection(count, by, explore)
        seen = np.zeros(5)
        for order in itertools.permutations(range(5)):
            for below, chance in ((True, explore), (False, 1 - explore)):
                kept = selection.keep(rewards, usable, s, Every(order, below))
                assert len(set(kept.places)) == count
                assert (np.diff(rewards[kept.places]) <= 0).all(), "the best comes first"
                seen[kept.places] += chance / math.factorial(5)
        np.testing.assert_allclose(kept.inclusion, seen, atol=1e-12)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, math.nan]), min_size=1, max_size=12), st.integers(1, 12),
       st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
def test_as_many_are_kept_as_asked_for_and_never_one_without_a_score(rewards, count, by, seed):
    rewards = np.array(rewards)
    usable = ~np.isnan(rewards)
    kept = selection.keep(np.nan_to_num(rewards), usable, Selection(count, by), np.random.default_rng(seed))
    assert len(kept.places) == min(count, usable.sum()) and usable[kept.places].all()
    assert (kept.inclusion[kept.places] > 0).all() and not kept.inclusion[~usable].any()
    np.testing.assert_allclose(kept.inclusion.sum(), len(kept.places))


def test_rewards_of_0_and_1_leave_each_completion_of_the_best_and_worst_a_chance():
    """It is a sample by strata. Of graded rewards the middle has none."""
    of = lambda name: selection.keep(np.array(GROUPS[name]), np.ones(5, bool), Selection(2),
                                     np.random.default_rng(0))
    assert of("ones").inclusion.tolist() == [1 / 2, 1 / 3, 1 / 3, 1 / 2, 1 / 3]
    assert of("rare").inclusion.tolist() == [1, 1 / 4, 1 / 4, 1 / 4, 1 / 4]
    assert of("graded").inclusion.tolist() == [0, 1, 1, 0, 0]


def test_pairs_are_the_best_with_the_worst():
    kept = selection.keep(np.array([0.1, 0.9, 0.5, 0.3, 0.7]), np.ones(5, bool), Selection(4),
                          np.random.default_rng(0))
    assert selection._members(kept.places, "pairs") == [(1, 0), (4, 3)]
    assert selection._members(np.array([4, 1, 2]), "pairs") == [(4, 2), (1,)]


@given(st.lists(st.just(0.0) | st.floats(1e-9, 9), min_size=1, max_size=9), st.integers(1, 5),
       st.integers(0, 2**32 - 1))
def test_a_unit_is_replayed_as_often_as_expected_rounded_up_or_down(sizes, copies, seed):
    sizes = np.array(sizes)
    counts, expected = selection.replay(sizes, len(sizes), copies, np.random.default_rng(seed))
    assert (np.abs(counts - expected) < 1 + 1e-9).all() and (counts <= copies).all()
    if sizes.any():
        assert not counts[sizes == 0].any()
        assert counts.sum() == min(len(sizes), copies * (sizes > 0).sum())
        free = (expected < copies) & (sizes > 0)
        np.testing.assert_allclose(expected[free] / sizes[free],
                                   (expected[free] / sizes[free]).max(initial=0), rtol=1e-9)
    else:
        assert (counts == 1).all()


def test_counts_of_a_replay_have_their_expectation():
    """Over the one uniform number, exactly: the counts are constant between the places where a sum passes a
    whole."""
    sizes = np.array([0.3, 2.0, 0.0, 1.1, 0.6])
    for order in itertools.permutations(range(5)):
        _, expected = selection.replay(sizes, 5, 8, Every(order, True))
        ends = np.cumsum(expected[list(order)])
        cuts = np.unique([0, 1, *(1 - ends % 1)])
        mean = np.zeros(5)
        for a, b in itertools.pairwise(cuts):
            middle = Every(order, True)
            middle.random = lambda at=(a + b) / 2: at
            mean += (b - a) * selection.replay(sizes, 5, 8, middle)[0]
        np.testing.assert_allclose(mean, expected, atol=1e-12)


@pytest.mark.parametrize("chance", [0.2, 0.7])
@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_the_share_of_teaching_groups_is_unbiased_though_sampling_stops_when_there_are_enough(chance, wanted):
    mean = 0.0
    for found in itertools.product([False, True], repeat=6):
        mean += math.prod(chance if f else 1 - chance for f in found) * selection.refill_share(found, wanted)
    np.testing.assert_allclose(mean, chance, rtol=1e-12)


SOME = {
    "random": Selection(2, "random", weights="inverse"),
    "best and worst": Selection(2, weights="inverse"),
    "explored": Selection(3, "mean_deviation", 0.3, weights="inverse"),
    "replayed": Selection(replay="completions", copies=3, weights="inverse"),
    "pairs": Selection(2, replay="pairs", copies=4, weights="inverse"),
}


@pytest.mark.parametrize("kind", SOME)
def test_weighted_means_of_what_is_selected_are_those_of_all(kind):
    """Of any function that is 0 where the advantage is 0, as a gradient is. The mean of 600 steps, in 5
    standard errors."""
    s = SOME[kind].check()
    rng = np.random.default_rng(0)
    rewards = [np.array(GROUPS[name], float) for name in ("ones", "rare", "equal")]
    sizes = [np.abs(r - r.mean()) for r in rewards]
    f = [rng.normal(size=(5, 2)) * (r - r.mean())[:, None] for r in rewards]
    usable, found = [np.ones(5, bool)] * 3, []
    for _ in range(600):
        kept = [selection.keep(r, u, s, rng) for r, u in zip(rewards, usable)]
        units = selection.select(usable, kept, sizes, s, rng)
        learned = [w * f[u.group][i] for u in units for i, w in zip(u.members, u.weights)]
        found.append(np.mean(learned, 0))
    error = np.std(found, 0) / math.sqrt(len(found))
    assert (np.abs(np.mean(found, 0) - np.concatenate(f).mean(0)) < 5 * error + 1e-12).all()
    plain = s._replace(weights="none")
    drawn = collections.Counter(len(u.members) for u in selection.select(usable, kept, sizes, plain, rng))
    assert drawn == collections.Counter(len(u.members) for u in units), "weights change what is learned from"


@pytest.mark.parametrize("s, says", [
    (Selection(0), "keep at least one"), (Selection(2, "bset_worst"), 'did you mean "best_worst"'),
    (Selection(3, replay="pairs"), "pairs the best with the worst"),
    (Selection(2, "random", replay="pairs"), "pairs the best with the worst"),
    (Selection(2, baseline="kept", weights="inverse"), "no weight gives a completion the advantage"),
    (Selection(explore=1.5), "explore a probability")])
def test_a_selection_that_cannot_be_is_refused(s, says):
    with pytest.raises(ConfigError, match=says):
        s.check()


def test_the_laboratory_finds_no_bias_where_there_are_weights_and_a_bias_where_there_are_none():
    """Over all groups and draws. The middle of graded rewards has no chance, unless it is explored."""
    bias = lambda world, way: measure(world, way)["bias"]
    assert bias("rare", "best and worst, weighed") < 1e-6 < 0.5 < bias("rare", "best and worst")
    assert bias("rare", "refill, weighed") < 1e-6 < 0.5 < bias("rare", "refill")
    assert bias("graded", "best and worst, explored, weighed") < 1e-6 < 0.01 < bias("graded",
                                                                                    "best and worst, weighed")
