"""`jaxfp8rl.train`: what it takes, and where its rewards run. tests/unit/docs/test_docs_metrics.py runs one
to its end."""

from __future__ import annotations

import functools
import os
import sys
import time

import pytest

import jaxfp8rl
from benchmarks.processes import printed
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tasks import make_task
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.rewards.runner import RewardRunner, Score
from jaxfp8rl.training import entry
from jaxfp8rl.verifiers.own_scorers import handed_over
from jaxfp8rl.verifiers.scorers import exact_match

ROWS = ["--task.kind", "file", "--task.path", "x.jsonl", "--task.options", "{}"]
P = Problem("p", "?", "1")


class Judge:
    def __call__(self, problem, text):
        return 0.5

    def method(self, problem, text):
        return 0.25


def rewarded(reward, weights=None, words=ROWS):
    functions = {}
    cfg = check(entry._rewarded(load_config("demo", words), reward, weights or {}, functions))
    return cfg, functions


def scored(cfg, functions, *texts, timeout_s=5.0):
    with handed_over(functions), RewardRunner(make_task(cfg.task), timeout_s) as r:
        return r.score([(P, text) for text in texts])


def test_the_package_has_its_names_and_loads_nothing_for_them():
    code = "import sys, jaxfp8rl; jaxfp8rl.train; jaxfp8rl.load_config; print(*({'jax', 'torch', 'vllm'} & set(sys.modules)))"
    assert printed(code).split() == []
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        jaxfp8rl.tarin  # noqa: B018


def test_a_function_of_a_module_goes_by_its_name_and_any_other_stays_here():
    # of (answer, candidate), which are not a problem and a text: only its name matters
    cfg, functions = rewarded(exact_match)
    assert cfg.task.scorer == "jaxfp8rl.verifiers.scorers:exact_match" and functions == {}
    seen = []
    for reward, value in ((lambda problem, text: seen.append(text) or 0.75, 0.75), (Judge(), 0.5),
                          (Judge().method, 0.25),
                          (functools.partial(lambda x, problem, text: x, 0.125), 0.125)):
        cfg, functions = rewarded(reward)
        assert cfg.task.scorer.startswith("callable:reward_") and not make_task(cfg.task).in_child
        assert scored(cfg, functions, "a") == [Score(value, "ok")]
    assert seen == ["a"], "it keeps its state"


def test_several_rewards_by_name(tmp_path):
    reward = {"right": "exact", "short": lambda problem, text: 1 / len(text), "own": "generator"}
    cfg, functions = rewarded(reward, {"short": 0.5, "own": 2.0}, words=[])
    assert [(r.name, r.weight) for r in cfg.task.rewards] == [("right", 1.0), ("short", 0.5), ("own", 2.0)]
    assert [s.value for s in scored(cfg, functions, "1", "1.0", "")] == [3.5, pytest.approx(1 + 0.5 / 3), 0.0]
    (tmp_path / "config.toml").write_text(dump_config(cfg))
    assert load_config(str(tmp_path / "config.toml")) == cfg
    cfg, functions = rewarded(lambda problem, text: 0.5, words=[])  # sums have a scorer of their own
    assert [r.name for r in cfg.task.rewards] == ["reward"] and scored(cfg, functions, "7") == [
        Score(0.5, "ok", {"reward": 0.5})]


def test_a_function_here_is_left_behind_where_it_overruns_and_judged_where_it_breaks():
    def odd(problem, text):
        if text == "slow":
            time.sleep(3)
        if text == "exit":
            sys.exit(1)
        return 1 / len(text)

    before = time.monotonic()
    scores = scored(*rewarded(odd), "slow", "exit", "", "a", timeout_s=0.3)
    assert time.monotonic() - before < 2.5
    assert [s.value for s in scores] == [None, None, 0.0, 1.0]
    assert [s.why.split(":")[0] for s in scores] == ["timeout", "crash", "malformed", "ok"]


def test_what_cannot_be_is_refused():
    for reward, weights, words in (
        (lambda text: 1.0, None, "cannot be called with"), (3, None, "is not a function but int"),
        (exact_match, {"a": 1.0}, "rewards with names"),
        ({"a": "exact"}, {"b": 1.0}, 'no reward is named "b"'),
        ("exakt", None, 'did you mean "exact"'),
    ):
        with pytest.raises(ConfigError, match=words):
            rewarded(reward, weights)
    with pytest.raises(ConfigError, match="run.steps: expected an integer"):
        jaxfp8rl.train({"run": {"dir": "x", "steps": "2"}})
    cfg, _ = rewarded(lambda problem, text: 1.0)
    with pytest.raises(ConfigError, match="must pass in.*\n.*reward=FUNCTION"):
        RewardRunner(make_task(cfg.task))


def test_a_config_may_be_a_file_a_preset_a_table_or_a_config(tmp_path):
    demo = load_config("demo")
    (tmp_path / "config.toml").write_text(dump_config(demo))
    for config in ("demo", tmp_path / "config.toml", demo.model_dump(), demo):
        assert entry._config(config, [], False) == demo
    assert entry._config(os.fspath(tmp_path), ["--run.steps", "9"], True).run.steps == 9
    with pytest.raises(ConfigError, match="overrides apply only"):
        entry._config(demo, ["--run.steps", "9"], False)
