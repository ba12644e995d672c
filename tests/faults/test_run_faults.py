"""Faults in the middle of whole runs, by their rows in docs/faults.md. What each leaves is compared, bit for
bit, with a run that nothing happened to."""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import micro_run
import numpy as np
import pytest
from micro_run import arrays, assert_same_run, config, metrics, words
from served_jax import served
from served_run import Kill, drawn, until_done

from jaxfp8rl.checkpoint import store
from jaxfp8rl.checkpoint.saver import Saver
from jaxfp8rl.config.schema import SECTIONS
from jaxfp8rl.config.section import Section
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.errors import CheckpointError, ConfigError, DataError, GateFailed
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.rollout import engines, vllm_options
from jaxfp8rl.run import run_directory
from jaxfp8rl.training import context, gate, loop, publishing

pytestmark = pytest.mark.usefixtures("children")


READ: set[tuple[str, str]] = set()  # (section, key) of every setting that the undisturbed run asked for
NAMES = {model: name for name, model in SECTIONS.items()}
PLANTED = "planted-9f2c61"


def noted(self, name):
    if type(self) in NAMES:
        READ.add((NAMES[type(self)], name))
    return object.__getattribute__(self, name)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The directory of six steps that nothing happened to, in an environment full of secrets. Read it, or
    copy it."""
    directory = tmp_path_factory.mktemp("straight") / "run"
    cfg = config(directory, run__keep_checkpoints=9)
    text = dump_config(cfg)  # which asks for all of them
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Section, "__getattribute__", noted)
        patch.setattr(run_directory, "dump_config", lambda cfg: text)
        for name in ("WANDB_API_KEY", "HF_TOKEN", "BRIDGES_ENGINE_TOKEN", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, PLANTED)
        loop.train(cfg)
    assert sum(row["grad_norm"] > 0 for row in metrics(directory)[1:]) >= 5, "there was something to learn"
    return directory


@pytest.fixture
def copy(straight, tmp_path) -> Path:
    return Path(shutil.copytree(straight, tmp_path / "copy"))


# 8: the gate fails


def test_row_8_what_a_failed_gate_left_is_none_of_the_next_runs(straight, tmp_path):
    """Neither the checkpoint, of another run's step, nor the reference of the KL."""
    disagreeing = config(tmp_path, run__steps=7, loss__kl_coef=0.01, gate__max_mean_gap=1e-12)
    for _ in range(2):
        with pytest.raises(GateFailed):
            loop.train(disagreeing, fork_of=str(straight))
    checkpoints = store.Checkpoints(tmp_path / "checkpoints", 2)
    assert checkpoints.steps() == [6] and (tmp_path / "reference").is_dir()
    loop.train(config(tmp_path, run__steps=2, run__keep_checkpoints=9))
    assert checkpoints.steps() == [0, 2] and not (tmp_path / "reference").exists()
    assert "checkpoint 6 of a start that failed" in (tmp_path / "notes.txt").read_text()
    jax.tree.map(np.testing.assert_array_equal, arrays(tmp_path, 2), arrays(straight, 2))


# 25: the engine dies in generate


def test_row_25_a_run_whose_engine_dies_twice_learns_what_it_would_have_learned(
        tmp_path, monkeypatch):
    """The embedded engine is served over HTTP: at two requests it is gone, weights and all."""
    asked, make, deaths = [], engines._jax, ()

    def dies():
        asked.append(0)
        return len(asked) in deaths

    monkeypatch.setattr(context, "build_engine", lambda *args: served(lambda: make(*args[:3]), dies))
    for name, deaths in (("straight", ()), ("dying", (3, 12))):  # `dies` reads it
        asked.clear()
        loop.train(config(tmp_path / name, run__steps=2))
        assert metrics(tmp_path / name)[-1]["engine/restarts"] == len(deaths)
    assert_same_run(tmp_path / "dying", tmp_path / "straight", 2)


# 27: SIGKILL

POINTS = [
    ("jaxfp8rl.training.loop:run_updates", 1), ("jaxfp8rl.checkpoint.store:seal", 2),
    ("jaxfp8rl.training.publishing:publish", 3),
    ("jaxfp8rl.training.start:init_train_state", 1), ("jaxfp8rl.training.context:fresh_state", 1),
    ("jaxfp8rl.training.gate:check_gate", 1),
    ("jaxfp8rl.training.start:evaluate", 1), ("jaxfp8rl.rollout.scored_groups:generate", 2),
    ("jaxfp8rl.rollout.scored_groups:score", 1),
    ("jaxfp8rl.training.loop:score", 2), ("jaxfp8rl.run.run_directory:RunDirectory.log", 2),
    ("jaxfp8rl.monitors.jsonl:JsonlMonitor.log", 3), ("jaxfp8rl.run.run_directory:RunDirectory.rewind", 1),
    ("jaxfp8rl.monitors.jsonl:JsonlMonitor.truncate_after", 2),
    ("jaxfp8rl.checkpoint.store:Checkpoints.set_aside", 1),
    ("jaxfp8rl.checkpoint.store:Checkpoints.save_async", 2), ("jaxfp8rl.checkpoint.store:_sync", 9),
    ("pathlib:Path.rename", 1),
    ("pathlib:Path.rename", 2), ("bridges.engines.embedded_engine:EmbeddedEngine.generate", 3),
]


def killed(directory: Path, place: str, times: int) -> tuple[int, str]:
    """Go on with the run in `directory`, or begin it, until it is killed -> (exit status, what it said)."""
    begun = (directory / "metrics.jsonl").exists() and (directory / "metrics.jsonl").stat().st_size
    used = begun or store.Checkpoints(directory / "checkpoints", 9).steps()
    command = [sys.executable, micro_run.__file__, place, str(times), "train", "demo",
               *words(directory, run__keep_checkpoints=9)]
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run(command + ["--resume"] * bool(used), timeout=120, **output)
    return done.returncode, done.stdout


def assert_gone(pid: int) -> None:
    assert not micro_run.outlives(pid), f"process {pid} has outlived its parent"


@pytest.mark.slow  # the next test has one such point
@pytest.mark.parametrize("points", [POINTS], ids=["20 points"])
def test_row_27_killed_wherever_it_is_a_run_goes_on_from_its_last_commit(straight, tmp_path, points):
    """Killed at one point after the other; what is killed is resumed, and ends as if nothing had been. A run
    that comes to its end because a point lies behind it is compared, and the next one begun."""
    directory = tmp_path / "0"
    for number, (place, times) in enumerate(points, 1):
        before = store.Checkpoints(directory / "checkpoints", 9).steps()
        code, said = killed(directory, place, times)
        if code == 0:
            assert_same_run(directory, straight)
            directory, before = tmp_path / str(number), []
            code, said = killed(directory, place, times)
        assert code == -signal.SIGKILL, f"{place}: {said}"
        assert_gone(int(said.split("child ")[1].split()[0]))
        after = store.Checkpoints(directory / "checkpoints", 9).steps()
        assert set(after) >= set(before), f"a checkpoint was lost at {place}"
    used = (directory / "metrics.jsonl").stat().st_size > 0
    loop.train(config(directory, run__keep_checkpoints=9), resume=used)
    assert_same_run(directory, straight)


@pytest.mark.parametrize("steps, kills", [
    (2, [Kill("replica", "generation", 1, 0.05), Kill("learner", "publish", 2, 0.05)]),
    pytest.param(8, drawn(20, 8, seed=1), marks=[pytest.mark.slow, pytest.mark.timeout(1500)])],
    ids=["2 points", "20 random points"])
def test_row_27_killed_in_a_call_a_served_engine_and_its_learner_lose_nothing(tmp_path, steps, kills):
    """In the middle of a publish and of a generation. Every line, every sample and every bit are those of the
    run that nothing happened to, and no engine outlives its learner."""
    until_done(tmp_path / "straight", steps, [])
    lines = until_done(tmp_path / "killed", steps, kills)
    print("\n".join(map(str, lines)))
    assert sorted(k for line in lines for k in line["kills"]) == sorted(map(str, kills))
    assert sum(line["exit"] == -signal.SIGKILL for line in lines) == sum(k.whom == "learner" for k in kills)
    assert not any(line["engines left"] for line in lines)
    assert_same_run(tmp_path / "killed" / "run", tmp_path / "straight" / "run", steps)


# 30, 31: a damaged checkpoint, a full disk


def test_row_30_a_run_goes_on_before_a_damaged_checkpoint_and_says_so(copy, straight, capsys):
    victim = max((copy / "checkpoints" / "6" / "state" / "d").iterdir(), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-3])
    loop.train(config(copy, run__keep_checkpoints=9), resume=True)
    assert "checkpoint 6 is damaged, continuing from 4: state/d/" in capsys.readouterr().out
    assert_same_run(copy, straight)


@pytest.mark.slow
def test_row_31_a_save_that_fails_is_made_after_the_next_step(straight, tmp_path, monkeypatch, capsys):
    seal, tried = store.seal, []

    def full(folder):
        tried.append(folder.name)
        if tried[-1] in (".draft-2", ".draft-3"):
            raise OSError(errno.ENOSPC, "No space left on device")
        seal(folder)

    monkeypatch.setattr(store, "seal", full)
    monkeypatch.setattr(Saver, "check", Saver._take_up)  # as if a save took no longer than a step
    loop.train(config(tmp_path, run__keep_checkpoints=9))
    assert tried == [".draft-0", ".draft-2", ".draft-3", ".draft-4", ".draft-6"]
    assert "the checkpoint of step 3 could not be written: OSError" in capsys.readouterr().out
    assert_same_run(tmp_path, straight)


# 34, 35: resuming, and branching off


def test_row_34_restore_publish_gate_generate(copy, monkeypatch):
    """And what is restored is on the device once: the state that it has its shapes from is gone by then."""
    calls, fresh, restored, alive = [], context.fresh_state, store.Checkpoints.restore, []

    def watched(*args):
        state = fresh(*args)
        alive.extend(map(weakref.ref, jax.tree.leaves(state)))
        return state

    def restoring(*args):
        assert alive and all(array() is None for array in alive)
        return restored(*args)

    monkeypatch.setattr(context, "fresh_state", watched)
    monkeypatch.setattr(store.Checkpoints, "restore", restoring)
    for owner, name in ((store.Checkpoints, "restore"), (publishing, "publish"), (gate, "check_gate"),
                        (loop, "one_step")):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, f=function, n=name, **k: (calls.append((n, a)), f(*a, **k))[1])
    loop.train(config(copy, run__steps=7), resume=True)
    assert [name for name, _ in calls] == ["restore", "publish", "check_gate", "one_step", "publish"]
    assert calls[1][1][2] == 6, "the version that was restored"


def test_row_35_a_fork_is_the_run_it_left(straight, tmp_path, capsys):
    loop.train(config(tmp_path), fork_of=f"{straight}@4")
    assert [r["step"] for r in metrics(tmp_path)] == [4, 5, 6]
    assert "forked from" in (
        said := capsys.readouterr().out) and "settings that differ: run.keep_checkpoints" in said
    for step in (4, 6):
        jax.tree.map(np.testing.assert_array_equal, arrays(tmp_path, step), arrays(straight, step))


HALF = {"precision__compute_dtype": "float16", "precision__weight_dtype": "float16"}


@pytest.mark.slow
def test_row_35_a_fork_may_differ_in_what_its_state_does_not_hold(straight, tmp_path, capsys):
    other = tmp_path / "other"
    loop.train(config(other, run__seed=1, loss__advantage="dr_grpo", loss__kl_coef=0.1, run__steps=7),
               fork_of=str(straight))
    assert metrics(other)[-1]["step"] == 7 and metrics(other)[-1]["kl"] >= 0 and (other / "reference").is_dir(
        )
    assert "run.seed: 0 -> 1" in capsys.readouterr().out
    few = tmp_path / "few"
    loop.train(config(few, run__steps=2, optim__master="float16"))
    loop.train(config(tmp_path / "its fork", run__steps=3, optim__master="float16", loss__kl_coef=0.1),
               fork_of=str(few))
    assert metrics(tmp_path / "its fork")[-1]["step"] == 3
    loop.train(config(other, run__seed=1, loss__advantage="dr_grpo", loss__kl_coef=0.1, run__steps=8),
               resume=True)
    loop.train(config(tmp_path / "half", run__steps=7, precision__recipe="fp16", **HALF),
               fork_of=str(straight))
    assert metrics(tmp_path / "half")[-1]["update/loss_scale"] > 1, "a format that wants a loss scale has one"


def test_row_35_what_cannot_be_forked_is_refused(straight, tmp_path):
    for source, changes, error, message in (
        (f"{straight}@6", {}, ConfigError, "run.steps = 6: the checkpoint was taken after step 6"),
        (straight, {"run__dir": straight}, ConfigError, "that is run.dir itself"),
        (f"{straight}@5", {"run__steps": 9}, CheckpointError,
         f"has no checkpoint of step 5\n.*--fork {straight}@4 or --fork"),
        (tmp_path / "none", {}, ConfigError, "none is not a run directory: it holds no config.toml"),
        (straight, {"model__config__intermediate_size": 64, "run__steps": 9}, CheckpointError,
         "restored into this.*expected"),
    ):
        assert not (tmp_path / "new").exists(), "refused before anything is made"
        with pytest.raises(error, match=message):
            loop.train(config(tmp_path / "new", **changes), fork_of=str(source))
    with pytest.raises(ConfigError, match="pass only one of them"):
        loop.train(config(tmp_path / "new"), resume=True, fork_of="x")


def test_row_35_a_fork_holds_nothing_out_that_was_trained_on(straight, tmp_path):
    """Nor does a fork of the fork, nor what starts from what another left: the digests of both are with the
    weights."""
    with pytest.raises(DataError,
                       match=r"\d+ of \d+ held-out problems are among those that .*straight.* was "
                             r"trained on"):
        loop.train(config(tmp_path, run__steps=7, task__seed=1), fork_of=str(straight))
    assert metrics(tmp_path) == [] and not (tmp_path / "checkpoints").exists()
    loop.train(config(tmp_path, run__steps=7, task__options__operands=3, task__max_prompt_tokens=6),
               fork_of=str(straight))
    seen = [np.load(run / "trained_on.npy") for run in (straight, tmp_path)]
    assert np.isin(seen[0], seen[1]).all() and len(seen[1]) > len(seen[0])


# 37: a setting that nobody reads

NOT_OF_THIS_RUN = {  # (section, key): when it is asked for
    ("loss", "calibrate_clip_newest"): "loss.calibrate_clip_every",
    ("loss", "calibrate_clip_start"): "loss.calibrate_clip_every",
    ("loss", "kl"): "loss.kl_coef",
    ("reference", "recipe"): "reference.path", ("loss", "kl_weight_cap"): "loss.unbiased_kl",
    ("loss", "overlong_penalty"): "loss.overlong_buffer", ("loss", "turn_discount"): "loss.turn_advantages",
    **{("environment", name): "a task of several turns" for name in (
        "concurrency", "lanes", "malformed_call_penalty", "max_observation", "max_turn_tokens", "max_turns",
        "timeout_s", "tool_calls", "workers")},
    **{("curriculum", name): "curriculum.by" for name in ("floor", "pace", "solved_at")},
    **{("lora", name): "lora.rank" for name in ("alpha", "dtype", "path", "publish", "rslora", "targets")},
    **{("noise", name): "noise.start" for name in ("end", "stages", "total_steps", "unit", "where")},
    ("optim", "max_bad_steps"): "an update that is not finite",
    ("rollout", "draft_tokens"): "rollout.speculation",
    ("rollout", "draft_lr"): 'rollout.speculation = "head"',
    ("rollout", "kv_scale_decay"): 'rollout.kv_scales = "calibrated"',
    ("rollout", "recompute_kv"): "rollout.in_flight",
    ("rollout", "request_timeout_s"): 'rollout.engine = "served"',
    ("rollout", "restarts"): 'rollout.engine = "served"',
    ("sft", "examples_per_step"): "sft.steps", ("sft", "lr"): "sft.steps",
    ("sft", "save_every"): "`jaxfp8rl sft`",
}


def test_row_37_every_setting_is_asked_for(straight, monkeypatch):
    """By the undisturbed run, by what makes the other engines, or by the pass that another setting switches
    on."""
    monkeypatch.setattr(Section, "__getattribute__", noted)
    cfg = load_config("demo", ["--run.dir", "runs/x"])  # in FP8
    model = model_config(cfg)
    vllm_options.vllm_options(cfg, model, engine_runs(cfg, model))
    engines.embedded_formats(cfg)
    # `Correction.resolve` goes through all that are given
    READ.update(("correction", name) for name, _ in cfg.correction)
    READ.update(("selection", name) for name, _ in cfg.selection)  # so does `Selection.resolve`
    monkeypatch.undo()
    known = {(s, k) for s, model in SECTIONS.items() for k in model.model_fields}
    assert known - READ == set(
        NOT_OF_THIS_RUN), "a new setting without effect? or one that this run reads now"


# 40: secrets


def test_row_40_no_secret_of_the_environment_is_in_what_a_run_writes(straight):
    files = [p for p in straight.rglob("*") if p.is_file()]
    assert len(files) > 50 and {"config.toml", "metrics.jsonl", "samples.jsonl"} <= {p.name for p in files}
    assert not [p for p in files if PLANTED.encode() in p.read_bytes()]
