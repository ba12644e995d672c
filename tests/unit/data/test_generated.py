"""Problems of a slow generator come from other processes, and are the same."""

from __future__ import annotations

import json
import sys

import pytest

from jaxfp8rl.data import generated, reasoning_gym_child
from jaxfp8rl.data.generated import written
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tasks import make_task
from jaxfp8rl.errors import DataError

FAKE = """
import json, sys
task, start, stop = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
assert start != task["fails"]
for i in range(start, stop):
    print(json.dumps({"id": f"there:{i}", "prompt": "?", "answer": str(i), "meta": {}, "alternatives": ["a"],
                      "reference": "", "question": ""}))
"""


@pytest.fixture
def slow(monkeypatch):
    """Every generator is, and there are four cores; the children are fakes."""
    monkeypatch.setattr(generated, "PATIENCE_S", 0.0)
    monkeypatch.setattr(generated, "TRIED", 2)
    monkeypatch.setattr(generated.os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(generated, "CHILD", (sys.executable, "-c", FAKE))


def here(i: int) -> Problem:
    return Problem(f"here:{i}", "?", str(i))


@pytest.mark.parametrize("count", [1, 2, 3, 11])
def test_a_slow_generator_is_shared_out(slow, count):
    found = generated.generated(here, count, {"fails": -1})
    assert [p.answer for p in found] == [str(i) for i in range(count)]
    assert [p.id.partition(":")[0] for p in found] == ["here"] * min(count, 2) + ["there"] * (count - 2)


def test_a_part_that_fails_is_made_here_and_raises_here(slow):
    found = generated.generated(here, 10, {"fails": 4})
    assert [p.id for p in found[3:6]] == ["there:3", "here:4", "here:5"]

    def broken(i: int) -> Problem:
        if i >= 2:
            raise DataError(f"item {i}")
        return here(i)

    with pytest.raises(DataError, match="item 4"):
        generated.generated(broken, 10, {"fails": 4})


def test_a_quick_generator_starts_no_process(monkeypatch):
    monkeypatch.setattr(generated.subprocess, "run", lambda *_, **__: pytest.fail("started"))
    assert [p.id for p in generated.generated(here, 40, {})] == [f"here:{i}" for i in range(40)]


@pytest.mark.parametrize("chat", [False, True])
def test_the_child_makes_the_same_problems(chat, capsys, monkeypatch):
    options = {"chat": chat, "system_prompt": "Be brief." if chat else ""}
    task = make_task("reasoning_gym", name="chain_sum", size=6, held_out_size=2, seed=3, **options)
    handed = []
    in_one = lambda problem, count, fields: handed.append(fields) or [problem(i) for i in range(count)]
    monkeypatch.setattr("jaxfp8rl.data.reasoning_gym_task.generated", in_one)
    expected = [*task.problems(), *task.held_out()]
    reasoning_gym_child.main(json.dumps(handed[0]), 0, 8)
    lines = capsys.readouterr().out.splitlines()
    assert [generated.read(line) for line in lines] == expected
    assert [written(problem) for problem in expected] == lines


@pytest.mark.slow  # true processes, which import reasoning-gym
def test_true_processes_make_the_same_problems(monkeypatch):
    monkeypatch.setattr(generated, "PATIENCE_S", 0.0)
    monkeypatch.setattr(generated.os, "sched_getaffinity", lambda _: range(2))
    task = make_task("reasoning_gym", name="countdown", size=60, held_out_size=4, chat=True)
    calls = []
    monkeypatch.setattr(generated, "_elsewhere",
                        lambda *args, run=generated._elsewhere: calls.append(run(*args)) or calls[-1])
    made = [*task.problems(), *task.held_out()]
    assert len(calls) == 2 and None not in calls and made == [task.problem(i) for i in range(64)]
