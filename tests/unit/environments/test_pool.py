"""Environments in their processes: what hangs, dies, raises or answers nonsense costs a trajectory, not the
run."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tasks import make_task
from jaxfp8rl.environments.pool import Ask, Pool
from jaxfp8rl.environments.protocol import Answer
from jaxfp8rl.environments.registry import make_environment
from jaxfp8rl.environments.world import World
from jaxfp8rl.errors import ConfigError

HERE = str(Path(__file__).parent)
ODD = World("odd_environment.py:Odd", {}, 0, HERE, 2.0, 1000)


def play(pool: Pool, kinds, action: str = "7") -> list[Answer | str]:
    """What each episode is answered at its first step, or at its reset."""
    episodes = pool.begin(len(kinds))
    resets = pool.ask([Ask(e, {"do": "reset", "problem": dataclasses.asdict(Problem(k, "?", k))})
                       for e, k in zip(episodes, kinds)])
    steps = iter(pool.ask([Ask(e, {"do": "step", "action": action}) for e, r in zip(episodes, resets)
                           if not isinstance(r, str)]))
    found = [r if isinstance(r, str) else next(steps) for r in resets]
    pool.forget(list(episodes))
    return found


def test_answers_and_what_is_none():
    wrong = {"bytes": "there is bytes", "nan": "the reward is nan", "megabyte": "1,048,576 characters",
             "word": "must be a number, but is '1.0'", "surrogate": "UnicodeEncodeError",
             "nothing": "step returned None",
             "maybe": "done must be true or false", "raise": "KeyError: 'no such move' (odd_environment.py:",
             "raise in reset": "no such board", "memory": "MemoryError"}
    fine = {"fine": Answer("ok", 1.0, True), "gym": Answer("ok", 0.5, True), "print": Answer("7", 1.0, True),
            "messages": Answer([{"role": "user", "content": "ok"}], 0.25), "never": Answer("+"),
            "counted": Answer("ok", 1.0, True, {"malformed_calls": 2})}
    pool = Pool(ODD, workers=1)
    try:
        found = dict(zip([*wrong, *fine], play(pool, [*wrong, *fine])))
        assert {k: found[k] for k in fine} == fine
        for kind, words in wrong.items():
            assert found[kind].startswith("error: ") and words in found[kind], kind
    finally:
        pool.close()


def test_what_hangs_or_dies_is_replaced_and_the_others_go_on():
    pool = Pool(ODD, workers=2)
    try:
        began = time.monotonic()
        assert play(pool, ["hang", "fine"]) == ["timeout", Answer("ok", 1.0, True)]
        assert time.monotonic() - began < 20
        found = play(pool, ["die", "fine", "die", "fine"])
        assert [x.startswith("crash") if isinstance(x, str) else x.reward
                for x in found] == [True, 1, True, 1]
        assert play(pool, ["fine"] * 3) == [Answer("ok", 1.0, True)] * 3
        e = pool.begin(1)[0]
        assert pool.ask([Ask(e, {"do": "step", "action": "1"})]) == ["lost"], "nobody has begun it"
    finally:
        pool.close()
        pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.ask([])


def test_answers_out_of_order_reach_their_questions():
    pool = Pool(dataclasses.replace(ODD, name="odd_environment.py:Slow"), workers=1, concurrency=8)
    try:
        episodes = pool.begin(4)
        pool.ask([Ask(e, {"do": "reset", "problem": dataclasses.asdict(Problem("p", "?", "fine"))})
                  for e in episodes])
        began = time.monotonic()
        actions = ["0.3", "forever", "0.2", "0.1"]
        found = pool.ask([Ask(e, {"do": "step", "action": a}) for e, a in zip(episodes, actions)])
        assert found == [a if a == "timeout" else Answer(f"after {a}", 1.0, True)
                         for a in ("0.3", "timeout", "0.2", "0.1")]
        assert time.monotonic() - began < 15, "the process lives: it gave the late answer up itself"
    finally:
        pool.close()


@pytest.mark.parametrize(("name", "options", "words"), [
    ("gess", {}, 'there is no environment "gess" (did you mean "guess"?)'),
    ("guess", {"larges": 3}, "task.options.larges: the environment \"guess\" has no such option"),
    ("guess", {"largest": 1}, "task.options.largest = 1: from 2 to 999"),
    ("odd_environment.py:Od", {}, 'did you mean "Odd"'),
    ("odd_environment.py:Odd", {"refuse": True}, "RuntimeError: no licence"),
    ("odd_environment.py:Bare", {}, "no method `step`"),
    ("no_such_package:Env", {}, "No module named 'no_such_package'"),
])
def test_an_environment_that_cannot_be_made_is_refused_by_name(name, options, words):
    with pytest.raises(ConfigError) as e:
        make_environment(name, options, 0, HERE)
    assert words in str(e.value) and "task." in str(e.value)


def test_a_pool_says_why_its_environment_cannot_be_made():
    pool = Pool(dataclasses.replace(ODD, options={"refuse": True}), workers=1)
    try:
        with pytest.raises(ConfigError, match="no licence"):
            pool.wait_until_ready()
    finally:
        pool.close()


def test_a_task_lists_an_environments_problems():
    task = make_task("environment", name="odd_environment.py:Odd", scorer_folder=HERE)
    assert {p.id for p in task.problems()} >= {"fine", "bytes"} and task.held_out() == []
    guess = make_task("environment", name="guess", largest=3)
    assert [p.answer for p in guess.problems()] == ["1", "2", "3"]
    assert json.loads(json.dumps(dataclasses.asdict(guess)))["options"] == {"largest": 3}
    with pytest.raises(ConfigError, match="did you mean"):
        make_task("environment", name="calculater").problems()
