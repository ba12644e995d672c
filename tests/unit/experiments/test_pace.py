"""How soon an arm has half of what the control gains."""

from __future__ import annotations

import math
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.experiments.analysis import Outcome
from jaxfp8rl.experiments.pace import Pace, Paces, log_ratios, paces, reached
from jaxfp8rl.experiments.results import DONE, Result

METRIC = "eval/reward_mean"


def cell(values: dict[int, float], seconds: float = 2.0, tokens: int = 10, compiles: float = 50.0,
         ended: str = DONE, steps: int = 0, arm: str = "a", seed: int = 0) -> Result:
    """Lines of a run that was evaluated at these steps and whose first step took `compiles` seconds."""
    done = max(values)
    lines = [{"step": 0, METRIC: values[0]}]
    for s in range(1, done + 1):
        lines.append({"step": s, "time/step_s": compiles if s == 1 else seconds, "tokens/rollout": tokens} |
                     ({METRIC: values[s]} if s in values else {}))
    return Result({"steps": steps or done, "ended": ended, "arm": {"x": arm}, "seed": seed}, lines)


def test_a_level_between_two_evaluations():
    run = cell({0: 0.0, 4: 0.2, 8: 1.0})
    assert reached(run, METRIC, 0.6) == pytest.approx(Pace(6.0, 6 * 2.0 / 60, 60.0))
    assert reached(run, METRIC, 0.2) == pytest.approx(Pace(4.0, 4 * 2.0 / 60, 40.0))


def test_the_first_step_counts_as_the_median_one():
    run, other = (cell({0: 0.0, 8: 1.0}, compiles=c) for c in (2.0, 500.0))
    assert reached(run, METRIC, 0.5) == reached(other, METRIC, 0.5)


def test_a_level_that_is_never_reached_and_one_at_the_start():
    run = cell({0: 0.3, 4: 0.5})
    assert reached(run, METRIC, 0.51) is None
    assert reached(run, METRIC, 0.3) == (0.0, 0.0, 0.0)


def test_a_run_that_broke_is_not_carried_forward():
    broken = cell({0: 0.0, 4: 0.4}, ended="not finite", steps=40)
    assert reached(broken, METRIC, 0.5) is None
    assert reached(broken, METRIC, 0.4).steps == 4.0


@given(rewards=st.lists(st.floats(0, 1), min_size=2, max_size=9), level=st.floats(0, 1),
       seconds=st.floats(0.1, 9))
def test_the_metric_has_the_level_there_and_not_before(rewards, level, seconds):
    run = cell({3 * i: r for i, r in enumerate(rewards)}, seconds)
    found = reached(run, METRIC, level)
    first = next((i for i, r in enumerate(rewards) if r >= level), None)
    assert (found is None) == (first is None)
    if found and first is not None:
        assert 3 * max(first - 1, 0) <= found.steps <= 3 * first
        assert found.tokens == pytest.approx(10 * found.steps, abs=1e-9)
        assert found.minutes == pytest.approx(seconds * found.steps / 60, abs=1e-9)


def named(monkeypatch):
    """An experiment whose control is the arm "a"."""
    monkeypatch.setattr("jaxfp8rl.experiments.pace.control_name", lambda e: "a")
    monkeypatch.setattr("jaxfp8rl.experiments.pace.name_of", lambda arm: arm["x"])
    outcome = types.SimpleNamespace(metric=METRIC, alpha=0.05, interval="student")
    return types.SimpleNamespace(protocol=types.SimpleNamespace(outcome=outcome))


def outcomes(results):
    return {arm: {r.header["seed"]: Outcome(r.steps[0][METRIC], r.steps[-1][METRIC], 0.0, 0.0, 0.0, DONE)
                  for r in results if r.header["arm"]["x"] == arm} for arm in "ab"}


def test_arms_are_asked_for_half_of_the_controls_gain_of_their_seed(monkeypatch):
    experiment = named(monkeypatch)
    results = [cell({0: 0.0, 4: 0.9}, arm="a", seed=0), cell({0: 0.2, 4: 1.0}, arm="a", seed=1),
               cell({0: 0.0, 4: 0.8}, arm="a", seed=2), cell({0: 0.1, 4: 0.1}, arm="a", seed=3),
               cell({0: 0.0, 4: 0.9}, arm="a", seed=4), cell({0: 0.0, 8: 0.9}, arm="b", seed=0),
               cell({0: 0.2, 8: 0.5}, arm="b", seed=1), cell({0: 0.1, 4: 1.0}, arm="b", seed=3)]
    by_arm = paces(experiment, results, outcomes(results))
    assert by_arm["a"].cells == 4 and by_arm["b"].cells == 2  # the control gained nothing at seed 3
    assert {s: p.steps for s, p in by_arm["a"].by_seed.items()} == pytest.approx(dict.fromkeys((0, 1, 2, 4),
                                                                                               2.0))
    assert {s: p.steps for s, p in by_arm["b"].by_seed.items()} == pytest.approx({0: 4.0})
    assert log_ratios(by_arm["b"], by_arm["a"], "steps") == [pytest.approx(math.log(2))]


@pytest.mark.parametrize("ends", [(0.4,), (0.4, -0.1), (0.01, -0.02, 0.03)])
def test_a_gain_that_may_be_chance_has_no_pace(ends, monkeypatch):
    results = [cell({0: 0.2, 4: 0.2 + end}, arm="a", seed=seed) for seed, end in enumerate(ends)]
    assert paces(named(monkeypatch), results, outcomes(results)) == {}
    assert paces(named(monkeypatch), results, {"b": {}}) == {}


def test_a_pair_that_began_at_the_level_has_no_ratio():
    there, later = Paces({0: Pace(0, 0, 0)}, 1), Paces({0: Pace(2, 1, 9)}, 1)
    assert log_ratios(later, there, "tokens") == []
