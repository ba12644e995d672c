"""Scorers, and the process that runs them: what hangs, forks, crashes or eats memory costs one score and
nothing more."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import tomllib

import pytest
from reward_cases import SCORER, problem

from benchmarks.processes import runs, until
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.tasks import as_json, from_json, make_task
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.rewards import process
from jaxfp8rl.rewards.runner import RewardRunner, Score
from jaxfp8rl.training import context


def test_answers_errors_and_undefined_values(task):
    with RewardRunner(task) as runner:
        scores = runner.score([(problem(a), "right")
                               for a in ("right", "wrong", "raise", "none", "nan", "print", "memory")])
        assert scores[:2] == [Score(1.0, "ok"), Score(0.0, "ok")]
        line = SCORER.splitlines().index('        raise KeyError("no such thing")') + 1
        assert scores[2] == Score(None, f"error: KeyError: 'no such thing' (misbehaving.py:{line})")
        assert [s.why for s in scores[3:5]] == ["none: the scorer returned None",
                                                "error: ValueError: the scorer returned nan"]
        assert scores[5] == Score(0.25,
                                  "ok") and "error: MemoryError" in scores[6].why, "it asked for a terabyte"
        assert runner.counts == {"ok": 3, "none": 1, "error": 3}
        assert runner.score([]) == []


def test_what_a_scorer_prints_at_each_call_does_not_pile_up(task, monkeypatch):
    monkeypatch.setattr(process, "STDERR_BYTES", 4096)
    with RewardRunner(task) as r:
        sizes = []
        for _ in range(6):
            assert all(s.value == 1.0 for s in r.score([(problem("complain"), "x" * 400)] * 5))
            sizes.append(os.fstat(r._children[0]._stderr.fileno()).st_size)
    assert max(sizes) <= 4096 + 500 and min(sizes) > 0


def test_what_a_scorer_raises_most_often_is_said_once_a_batch(task, caplog):
    with RewardRunner(task) as runner:
        for acts in (["none", "raise", "a", "raise", "b"], ["a", "b"]):
            runner.score([(problem(act), "") for act in acts])
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(
        "the scorer failed on 2 of 5 completions, whose scores are undefined; most often: ")
    assert "error: KeyError: 'no such thing' (misbehaving.py:" in said


@pytest.mark.parametrize("act", ["sleep", "hold_the_gil", "ignore_signals"])
def test_a_scorer_that_hangs_is_killed_at_its_deadline_and_the_rest_goes_on(task, act):
    with RewardRunner(task, timeout_s=1.0) as runner:
        runner.score([(problem("a"), "a")])  # the start is not on the item's clock
        before, pid = time.monotonic(), runner._children[0]._process.pid
        scores = runner.score([(problem("a"), "a"), (problem(act), ""), (problem("b"), "b")])
        assert time.monotonic() - before < 10
        assert scores == [Score(1.0, "ok"), Score(None, "timeout"), Score(1.0, "ok")]
        until(lambda: not runs(pid))


def test_what_a_scorer_forks_dies_with_it(task, tmp_path):
    with RewardRunner(task, timeout_s=1.0) as runner:
        assert runner.score([(problem("fork"), str(tmp_path / "pids"))]) == [Score(None, "timeout")]
        until(lambda: not any(map(runs, (tmp_path / "pids").read_text().split())))


def test_a_scorer_that_dies_costs_one_score(task):
    acts = ["segfault", "a", "exit", "a", "sys_exit", "a"]
    with RewardRunner(task, workers=2) as runner:
        scores = runner.score([(problem(act), "a") for act in acts])
        assert scores == [Score(None, "crash"), Score(1.0, "ok")] * 3
        assert runner.counts == {"crash": 3, "ok": 3}


def test_workers_score_side_by_side(task):
    """What takes two alarms in one process takes one in two; and it starts no more of them than there are
    cores."""
    items = [(problem("sleep"), ""), (problem("a"), "a"), (problem("sleep"), "")]
    with RewardRunner(task, timeout_s=2.0, workers=3) as runner:
        runner.wait_until_ready()
        before = time.monotonic()
        assert [s.why for s in runner.score(items)] == ["timeout", "ok", "timeout"]
        assert time.monotonic() - before < 3.9
    with RewardRunner(task, workers=0) as runner:
        assert len(runner._children) == min(8, len(os.sched_getaffinity(0)))


def test_a_child_that_dies_between_batches_is_replaced(task):
    with RewardRunner(task) as runner:
        runner.score([(problem("a"), "a")])
        os.kill(pid := runner._children[0]._process.pid, 9)
        until(lambda: not runs(pid))
        assert runner.score([(problem("a"), "a")] * 3) == [Score(1.0, "ok")] * 3


def test_the_child_imports_neither_jax_nor_torch_and_takes_long_and_odd_texts(task):
    with RewardRunner(task) as runner:
        texts = ["x" * 2_000_000, "\ud800 line\nbreaks\r\x00", ""]
        assert [s.value for s in runner.score([(problem("length"), t) for t in texts])] == [2_000_000, 15, 0]
        assert runner.score([(problem("modules"), "")]) == [Score(0.0, "ok")]


def test_an_interrupted_batch_leaves_no_late_answers(task, monkeypatch):
    with RewardRunner(task) as runner:
        runner.score([(problem("a"), "a")])
        collect = runner._collect

        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(runner, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.score([(problem("wrong"), "a")])
        monkeypatch.setattr(runner, "_collect", collect)
        assert runner.score([(problem("a"), "a")]) == [Score(1.0, "ok")]


def test_close_leaves_no_process_and_is_final(task):
    runner = RewardRunner(task, workers=2)
    pids = [c._process.pid for c in runner._children]
    runner.close()
    runner.close()
    until(lambda: not any(map(runs, pids)))
    with pytest.raises(RuntimeError, match="closed"):
        runner.score([(problem("a"), "a")])


def test_children_end_when_the_learner_is_killed(task, tmp_path):
    script = textwrap.dedent(f"""
        import os, sys, threading
        sys.path.insert(0, {str(tmp_path)!r})
        from jaxfp8rl.data.problem import Problem
        from jaxfp8rl.data.tasks import make_task
        from jaxfp8rl.rewards.runner import RewardRunner
        runner = RewardRunner(make_task("file", path="x", scorer="misbehaving:score"), timeout_s=0.5)
        runner.score([(Problem("p", "?", "a"), "a")])
        child = runner._children[0]
        child.send(0, Problem("p", "?", "hold_the_gil"), "")
        print(child._process.pid, flush=True)
        os.kill(os.getpid(), 9)
    """)
    result = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False, timeout=60)
    until(lambda: not runs(result.stdout.strip()))


@pytest.mark.usefixtures("task")
def test_a_scorer_that_cannot_be_loaded_is_a_config_error():
    for name, words in (("no_such_module:score", 'cannot load "no_such_module:score": No module named'),
                        ("misbehaving:scroe",
                         'module "misbehaving" has no function "scroe" .did you mean "score"')):
        task = make_task("file", path="x", scorer=name)
        for use in (RewardRunner.wait_until_ready, lambda runner: runner.score([(problem("a"), "a")])):
            with RewardRunner(task) as runner, pytest.raises(
                    ConfigError, match=f"^task.scorer: {words}") as e:
                use(runner)
            assert str(e.value).count("next step: ") == 1


def test_a_run_knows_of_it_before_its_engine_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(context, "build_engine", lambda *_: pytest.fail("it takes minutes"))
    (tmp_path
     / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "answer": "1"}}\n' for i in range(100)))
    task = {"kind": "file", "path": str(tmp_path / "rows.jsonl"), "options": "{}",
            "scorer": "no_such_module:score"}
    words = [word for key, value in task.items() for word in (f"--task.{key}", value)]
    with pytest.raises(ConfigError, match='cannot load "no_such_module:score": No module named'):
        context.build_run(load_config("demo", [*words, "--rollout.prompts_per_step", "8"]))


def test_imports_and_scorers_begin_before_the_problems_are_made(monkeypatch):
    """And the scorers end if the engine does not start."""
    seen, runners, task = [], [], type(make_task("arithmetic", max_operand=5))

    class Noted(RewardRunner):
        def __init__(self, *args):
            seen.append("scorers")
            runners.append(self)
            super().__init__(*args)

    def no_engine(*_):
        raise ConfigError("no engine")

    problems = task.problems
    monkeypatch.setattr(task, "problems", lambda self: seen.append("problems") or problems(self))
    monkeypatch.setattr(context, "import_engine", lambda cfg: seen.append("imports"))
    monkeypatch.setattr(context, "RewardRunner", Noted)
    monkeypatch.setattr(context, "build_engine", no_engine)
    with pytest.raises(ConfigError, match="no engine"):
        context.build_run(load_config("demo"))
    assert seen[:3] == ["imports", "scorers", "problems"]
    with pytest.raises(RuntimeError, match="closed"):
        runners[0].score([])


def test_cheap_tasks_need_no_process():
    task = make_task("arithmetic", max_operand=5)
    with RewardRunner(task) as runner:
        p = task.problems()[0]
        assert runner._children == []
        assert runner.score([(p, p.answer), (p, "no")]) == [Score(1.0, "ok"), Score(0.0, "ok")]


@pytest.mark.parametrize(("name", "extract", "right", "options"), [
    ("chain_sum", "last_number", "It is {}.", ""),
    ("time_intervals", "last_line", "{}", "min_date = 2020-01-01\nmax_time = 18:30:00"),
])
def test_reasoning_gym_is_scored_in_the_child(name, extract, right, options):
    """Dates and times, as a config has them, are no less the generator's there."""
    task = make_task("reasoning_gym", name=name, size=5, held_out_size=0, extract=extract,
                     **tomllib.loads(options))
    assert from_json(as_json(task)) == task
    items = [(p, text) for p in task.problems()
             for text in (right.format(p.answer), "I do not know", p.answer + "1")]
    with RewardRunner(task) as runner:
        scores = runner.score(items)
        assert {s.why for s in scores} == {"ok"}
        assert [s.value for s in scores] == [task.score(*item) for item in items]
        assert [s.value for s in scores[::3]] == [1.0] * 5
