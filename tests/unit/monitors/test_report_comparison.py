"""The report's comparison of runs: its tests are exact, and it says all of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfp8rl.monitors.jsonl import JsonlMonitor
from jaxfp8rl.monitors.report import compare
from jaxfp8rl.monitors.report.runs import load_runs


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9))
@settings(deadline=None)
def test_sign_flip_is_the_count_of_all_patterns(d):
    seen = abs(sum(d)) * (1 - 1e-12)
    patterns = [abs(sum(s * x for s, x in zip(signs, d)))
                for signs in itertools.product((1, -1), repeat=len(d))]
    assert compare.sign_flip_p(d) == pytest.approx(np.mean([p >= seen - 1e-12 for p in patterns]), abs=2e-2)
    assert compare.sign_flip_p([-x for x in d]) == compare.sign_flip_p(d)


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_sign_flip_is_exact(alpha):
    """Of all sign patterns of given magnitudes, those with p <= alpha are at most the share alpha, and hardly
    less."""
    sizes = np.array([0.3, 1.1, 0.7, 2.0, 0.2, 0.9, 1.6])
    ps = [compare.sign_flip_p(sizes * signs) for signs in itertools.product((1, -1), repeat=len(sizes))]
    assert alpha - 2 / len(ps) <= np.mean(np.array(ps) <= alpha) <= alpha


def test_sign_flip_of_many_pairs_is_near_the_normal_approximation():
    d = np.random.default_rng(1).normal(0.3, 1, 40)
    z = abs(d.sum()) / math.sqrt((d**2).sum())
    assert compare.sign_flip_p(d) == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.01)
    # the pattern seen is one of those drawn: never 0
    assert compare.sign_flip_p([1.0] * 40) == 2**-compare.EXACT_PAIRS


def test_runs_that_differ_in_seed_alone_are_one_variant(folder):
    runs = load_runs(sorted(folder.glob("??")))
    groups = compare.variants(runs)
    assert [(g.name, [r.name for r in g.runs]) for g in groups] == [
        ("lr 0.001", ["a0", "a1", "a2"]), ("lr 0.002", ["b0", "b1", "b2"]),
    ]
    assert set(compare.config_differences(runs)) == {"run.dir", "run.seed", "optim.lr"}
    (test,) = compare.paired_tests(groups, [("eval/reward_mean", "held-out")])
    assert test.seeds == (0, 1, 2) and test.p == 0.25 == test.smallest_p
    assert test.difference == pytest.approx(0.1) and test.means == pytest.approx((0.5, 0.6))


def test_the_comparison_says_all_of_it(comparison):
    text = "".join(comparison.text)
    assert "0.25 (at least 0.25)" in text and "optim.lr" in text and "lr 0.002" in text
    assert text.count("pass@4") == 11 and "0.5 to 0.875" in text
    assert text.count("100 problems, 4 completions each, greedy, passed from 0.5, rollout.top_k = 7") == 5
    assert "Band: the range of the seeds." in text


def test_runs_are_compared_as_far_as_all_have_come_and_a_seed_given_twice_counts_once(tmp_path):
    """Both learn alike, step/100, but one seed of the second variant is its second run's and 0.2 better."""
    for name, lr, seed, steps, more in (("a0", 1, 0, 100, 0), ("a1", 1, 1, 100, 0), ("b0", 2, 0, 40, 0),
                                        ("b1", 2, 1, 60, 0),
                                        ("b1 again", 2, 1, 60, 0.2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"[run]\nseed = {seed}\n[optim]\nlr = {lr}\n")
        monitor = JsonlMonitor(tmp_path / name / "metrics.jsonl")
        for step in range(0, steps + 1, 20):
            monitor.log({"step": step, "eval/reward_mean": step / 100 + more})
    runs = load_runs([tmp_path / n for n in ("a0", "a1", "b0", "b1", "b1 again")])
    (test,) = compare.paired_tests(compare.variants(runs), [("eval/reward_mean", "held-out")])
    assert test.measure == "held-out, up to step 40" and test.seeds == (0, 1)
    assert test.means == pytest.approx((0.4, 0.45)) and (test.least, test.largest) == pytest.approx((0, 0.1))


def test_one_pair_is_no_test(folder):
    groups = compare.variants(load_runs([folder / "a0", folder / "b0"]))
    assert [t.p for t in compare.paired_tests(groups, [("reward/mean", "reward")])] == [None]
    assert compare.paired_tests(compare.variants(load_runs([folder / "a0", folder / "b1"])),
                                [("reward/mean", "reward")]) == []
