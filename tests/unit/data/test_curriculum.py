"""Problems drawn by what was solved lately: their shares, what is learned, and that a resumed run draws the
same."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.curriculum import Curriculum
from jaxfp8rl.data.dataset import PromptStream
from jaxfp8rl.data.permutation import coins
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.errors import CheckpointError
from jaxfp8rl.rollout.problems import Data
from jaxfp8rl.rollout.scored_groups import Prompt

PROBLEMS = [Problem(f"p{i}", f"{i}=", str(i)) for i in range(6)]


def stream(seed=0, **options) -> PromptStream:
    return PromptStream(PROBLEMS, seed, Curriculum(range(6), **options))


def test_coins_are_pinned_and_uniform():
    assert coins(3, 1, 0).round(6).tolist() == [0.198814, 0.739995, 0.922146]
    drawn = np.sort(coins(4000, 0, 0))
    assert abs(drawn - np.arange(4000) / 4000).max() < 0.03 and 0 <= drawn[0] and drawn[-1] < 1
    assert coins(8, 0, 1).tolist() != coins(8, 0, 0).tolist() != coins(8, 1, 0).tolist()


def test_a_problem_is_drawn_as_often_as_its_weight_says():
    drawn = stream(pace=1.0, floor=0.2)
    rates = (0, 0.25, 0.5, 0.75, 1)  # of the first five; nothing is known of the last
    drawn.curriculum.learn([(i, np.arange(4) < 4 * p) for i, p in enumerate(rates)])
    weights = [0.2, 0.2 + 0.8 * 0.75, 1, 0.2 + 0.8 * 0.75, 0.2, 1]
    np.testing.assert_allclose([drawn.curriculum.weight(i) for i in range(6)], weights)
    shares = np.bincount(drawn.draw(20000), minlength=6) / 20000
    np.testing.assert_allclose(shares, np.array(weights) / sum(weights), atol=0.01)
    assert drawn.curriculum.metrics() == pytest.approx({
        "curriculum/known": 5 / 6, "curriculum/solved_mean": 0.5, "curriculum/weight_mean": np.mean(weights)})


def test_with_nothing_known_or_equal_weights_it_is_the_plain_stream():
    equal = stream(floor=1.0)
    equal.curriculum.learn([(0, np.zeros(4))])
    assert equal.draw(40) == stream().draw(40) == PromptStream(PROBLEMS, 0).draw(40)


def test_a_rate_moves_by_its_pace_and_undefined_rewards_do_not_count():
    c = Curriculum(["guess", "guess", "sums"], solved_at=0.8, pace=0.5)
    c.learn([(0, np.array([1.0, 0.0, np.nan])), (1, np.array([0.8, 0.9])), (2, np.array([np.nan]))])
    # three of four; one mean for all of an environment
    assert c.state() == {"guess": 0.5 + 0.5 * (0.75 - 0.5)}
    assert c.metrics()["curriculum/guess/solved"] == 0.625 and c.metrics()["curriculum/known"] == 0.5
    c.learn([(2, np.array([0.0]))])
    c.learn([(2, np.array([0.0]))])
    assert c.state()["sums"] == 0.125


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=12), st.integers(0, 12),
       st.integers(0, 2**31))
def test_resuming_draws_as_if_it_had_never_stopped(steps, stop, seed):
    def drawn(s, steps):
        found = []
        for n, solved in steps:
            found.append(s.draw(n))
            s.curriculum.learn([(i, np.arange(4) < (solved + i) % 5) for i in found[-1]])
        return found

    whole, first = stream(seed), stream(seed)
    expected, got = drawn(whole, steps), drawn(first, steps[:stop])
    second = PromptStream.from_state(PROBLEMS, json.loads(json.dumps(first.state())), Curriculum(range(6)))
    assert got + drawn(second, steps[stop:]) == expected and second.state() == whole.state()


@pytest.mark.parametrize("solved", [{"9": 0.5}, {"1": "x"}, {"1": 1.5}, {"1": float("nan")}, [0.5]])
def test_damaged_rates_are_refused(solved):
    with pytest.raises(CheckpointError, match="solve rates of the checkpoint are damaged"):
        PromptStream.from_state(PROBLEMS, stream().state() | {"solved": solved}, Curriculum(range(6)))


def test_the_config_says_by_what():
    prompts = [Prompt(Problem(name, "?", "", {"environment": name[0]}), (1,)) for name in ("a1", "a2", "b1")]
    data = Data(SimpleNamespace(tokenizer=None), None, prompts, [])
    several = ["--task.kind", "environment", "--task.name", "several", "--sft.steps", "0"]
    keyed = {by: data.stream(load_config("demo",
                                         ["--run.dir", "x", "--curriculum.by", by, *several])).curriculum
             for by in ("none", "problem", "environment")}
    assert keyed["none"] is None
    for by, state in (("problem", {"0": 0.25}), ("environment", {"a": 0.25})):
        keyed[by].learn([(0, np.zeros(2))])
        assert keyed[by].state() == state
