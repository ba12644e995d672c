"""Faults before a run's first checkpoint, by their rows in docs/faults.md: a short run of its own for
each."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from micro_run import arrays, config, metrics

from jaxfp8rl.checkpoint import store
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import ConfigError, GateFailed, NonFiniteStep
from jaxfp8rl.rewards.process import child_environment
from jaxfp8rl.run import watchdog
from jaxfp8rl.training import loop, start

pytestmark = pytest.mark.usefixtures("children")


# 1: an update that is not finite


def test_row_1_parameters_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    learn = loop.run_updates

    def blown(*args):
        state, policy, updates = learn(*args)
        params = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(np.inf),
                              state.params) if args[4] == 3 else state.params
        return state._replace(params=params), policy, updates

    monkeypatch.setattr(loop, "run_updates", blown)
    with pytest.raises(NonFiniteStep,
                       match=r"after step 3 the parameters are not finite and were not saved: .*\n"
                             r".*--resume"):
        loop.train(config(tmp_path, run__save_every=1))
    assert store.Checkpoints(tmp_path / "checkpoints", 2).steps() == [1, 2]
    assert all(np.isfinite(x).all() for x in arrays(tmp_path, 2).values())


def test_what_is_not_a_runs_own_is_left_alone(tmp_path):
    """A folder may have been somebody's before it is named as a run's."""
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "work.txt").write_text("years of it")
    (tmp_path / "config.toml").write_text("[tool]\nother = 1\n")
    loop.train(config(tmp_path, run__steps=1, run__save_every=0))
    assert (tmp_path / "reference" / "work.txt").read_text() == "years of it"


def test_a_run_directory_has_a_name_and_home_is_home():
    with pytest.raises(ConfigError, match="run.dir"):
        load_config("demo", ["--run.dir", ""])
    # others: test_paths.py
    assert load_config("demo", ["--run.dir", "~/runs/a"]).run.dir == str(Path.home() / "runs" / "a")


def test_what_does_not_go_with_the_vocabulary_is_said_before_anything_loads(tmp_path):
    with pytest.raises(ConfigError, match="run.samples_top_k = 999999: the vocabulary has"):
        loop.train(config(tmp_path, run__samples_top_k=999999))


# 26: told to go in the warm start; what that came to outlives the gate


@pytest.mark.slow  # the fast form: Ctrl-C in tests/e2e/test_train.py
def test_row_26_a_signal_ends_a_warm_start_and_a_whole_one_is_kept(tmp_path, monkeypatch, capsys):
    """Each of its steps is a phase of its own."""
    phases = []

    def phase(dog, name):
        phases.append(name)
        if name == "warm start" and phases.count(name) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(watchdog.Watchdog, "phase", phase)
    warm = {"sft__steps": 5, "sft__examples_per_step": 4, "run__steps": 1}
    with pytest.raises(SystemExit) as e:
        loop.train(config(tmp_path, **warm))
    said = capsys.readouterr().out
    assert e.value.code == 143 and phases.count("warm start") == 3
    assert ("stopped; nothing is saved: a warm start cannot be resumed, and 2 of its 5 updates are lost. "
            "The same command") in said
    with pytest.raises(GateFailed):
        loop.train(config(tmp_path, gate__max_mean_gap=1e-12, **warm))
    assert phases.count("warm start") == 8 and metrics(tmp_path) == []
    monkeypatch.setattr(start, "warm_start", lambda *a: pytest.fail("warm-started twice"))
    loop.train(config(tmp_path, **warm), resume=True)
    begun, first = metrics(tmp_path)
    assert (begun["step"], first["step"]) == (0, 1) and begun.keys() >= {"gate/max_gap", "eval/reward_mean"}
    assert "restore" in phases


@pytest.mark.parametrize("name, secret",
                         [("WANDB_API_KEY", True), ("HF_TOKEN", True), ("AWS_SECRET_ACCESS_KEY", True),
                                          ("DB_PASSWORD", True), ("PGPASSWORD", True),
                                          ("OPENAI_APIKEY", True), ("KEY2", True),
                                          ("MYSQL_PWD", True), ("GITHUB_PAT", True), ("SSH_PASSPHRASE", True),
                                          ("API_KEYS", True), ("PATH", False), ("PWD", False),
                                          ("OLDPWD", False),
                                          ("KEYBOARD", False), ("GLIBC_COMPAT", False),
                                          ("TOKENIZERS_PARALLELISM", False)])
def test_row_40_a_scoring_process_has_no_secret_of_the_learners(name, secret, monkeypatch):
    monkeypatch.setenv(name, "planted")
    assert (name not in child_environment()) == secret
