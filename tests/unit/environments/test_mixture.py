"""Several environments in one run: their shares, and who plays what."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from bridges.api import Completion, VersionSpan
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.environments.registry import make_environment
from jaxfp8rl.environments.trajectory import Branch, Segment, trajectory
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.rewards.runner import Score
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.scored_groups import Prompt, named_means

OF = [{"name": "guess", "weight": 3, "options": {"largest": 5}}, {"name": "calculator", "label": "sums"}]


def test_each_has_its_share_and_plays_its_own_problems():
    several = make_environment("several", {"of": OF, "size": 100}, 0)
    problems = several.problems()
    assert collections.Counter(p.meta["environment"] for p in problems) == {"guess": 75, "sums": 25}
    assert len({p.id for p in problems}) == 100 and {p.meta["environment"]
                                                     for p in several.held_out()} == {"sums"}
    for p in (problems[0], problems[-1]):
        assert several.reset(p) == ""
        assert several.step("9") == (("-", 0.0, False) if p.meta["environment"] == "guess"
                                     else ("", 0.0, True))


@pytest.mark.parametrize(("of", "words"), [
    ([], "give one table or more"), ([OF[0], OF[0]], "each with its own label"),
    ([{"name": "gues"}], 'did you mean "guess"'), ([{"name": "guess", "wieght": 2}], "a table has name"),
    (["guess"], "'guess': a table has name"),
    ([{"name": "guess", "weight": 0}], "weight = 0"), ([{"name": "guess", "label": "a b"}], 'label "a b"'),
])
def test_what_cannot_be_mixed_is_refused(of, words):
    with pytest.raises(ConfigError) as e:
        make_environment("several", {"of": of}, 0)
    assert words in str(e.value)


@pytest.mark.parametrize(("name", "options", "words"), [
    ("several", {}, 'task.options.of is missing: the environment "several" needs it'),
    ("several", {"of": OF, "size": 0}, "task.options.size = 0: expected a number of problems"),
    ("verifiers", {}, "task.options.env is missing"),
    ("guess", {"larges": 3}, 'task.options.larges: the environment "guess" has no such option (did you mean '
                             '"largest"?)'),
])
def test_options_that_an_environment_does_not_take_or_misses_are_named(name, options, words):
    with pytest.raises(ConfigError) as e:
        make_environment(name, options, 0)
    assert words in str(e.value)


def test_the_reward_of_each_environment_has_a_metric():
    def played(reward: float):
        c = Completion("0/0", 0, np.array([3]), np.array([-1.0], np.float32), "stop", (VersionSpan(0, 1, 0),))
        return trajectory("0/0", 0, [Branch.of((2,), [Segment(c.token_ids, c)])], "done", False, [reward], {})

    prompts = [Prompt(Problem(name, "?", "", {"environment": name}), (2,)) for name in ("guess", "sums")]
    rewards = type("Zero", (), {"score": lambda self, items: [Score(0.0, "ok")] * len(items)})()
    tokenizer = type("Text", (), {"decode": lambda self, ids, skip_special_tokens=False: "",
                                  "completion_text": lambda self, ids: ""})()
    groups = scored_groups.score([(prompts[0], (played(1.0), played(0.0))), (prompts[1], (played(0.25),))],
                                 tokenizer,
                                 rewards)
    assert named_means(groups) == {"reward/guess/mean": 0.5, "reward/sums/mean": 0.25}
