"""Whole runs of a tiny config: bit-for-bit resumption, what is refused, what stops a run and what it leaves
behind."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import assert_same_run, config, metrics, saved, words

from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.cli.dry_run import dry_run
from jaxfp8rl.cli.main import main
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.errors import CheckpointError, ConfigError, DataError, ModelError
from jaxfp8rl.models.loading import load_params, save_params
from jaxfp8rl.monitors.console import ConsoleMonitor
from jaxfp8rl.policy.initial import starting_params
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.training import loop
from jaxfp8rl.training import start as starting
from jaxfp8rl.training.sft import run_sft

pytestmark = pytest.mark.usefixtures("quick_children")

# The keys of a step that a user is promised, besides those that an evaluation adds.
KEYS = set(
    """step reward/mean reward/std loss entropy grad_norm lr correction/ess correction/weight_mean
    correction/truncated_fraction correction/rejected_fraction mismatch/k1 mismatch/k3
    mismatch/token_mult_prob_error mismatch/max_logp_diff response/length_mean time/rollout_s time/score_s
    time/update_s time/publish_s time/step_s
    tokens/rollout_per_s tokens/update_per_s memory/peak_gib weights/version""".split()
)


COMPILED: list[float] = []  # seconds that each program took to compile, or to be read from the cache


def listen(event: str, seconds: float, **_) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(seconds)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, list[int]]:
    """The directory of one run of ten steps, never interrupted, and the programs compiled before each step
    and at the end."""
    directory, compiled, one_step = tmp_path_factory.mktemp("straight") / "run", [], loop.one_step

    def counted(*args):
        compiled.append(len(COMPILED))
        return one_step(*args)

    jax.monitoring.register_event_duration_secs_listener(listen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "one_step", counted)
        loop.train(config(directory))
    jax.monitoring.unregister_event_duration_listener(listen)
    return directory, [*compiled, len(COMPILED)]


@pytest.fixture(scope="module")
def straight(recorded) -> Path:
    """The directory of one run of ten steps. Read it, or copy it."""
    return recorded[0]


@pytest.fixture
def copy(straight, tmp_path) -> Path:
    return Path(shutil.copytree(straight, tmp_path / "copy"))


def start(directory: Path) -> subprocess.Popen:
    """The command line in a process of its own group, as a terminal would start it; far more steps than will
    be taken."""
    command = [sys.executable, "-m", "jaxfp8rl", "train", "demo", *words(directory, run__steps=500)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            start_new_session=True)


def wait_for_step(process: subprocess.Popen, directory: Path, step: int):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (directory / "metrics.jsonl").exists() and any(r["step"] >= step for r in metrics(directory)):
            return
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"the run did not reach step {step}:\n{process.communicate()[0]}")


# --- a run and its files


def test_a_run_leaves_what_was_promised(straight):
    rows = metrics(straight)
    assert [r["step"] for r in rows] == list(range(11))
    for row in rows[1:]:
        assert KEYS <= row.keys() and all(np.isfinite(row[k]) for k in KEYS)
        assert row["rollout/groups_rejected"] == 0
        # both had something to learn
        assert (row["tokens/update"] == row["tokens/rollout"]) == (row["update/applied"] == 1)
    # there was something to learn, so the weights did move
    assert sum(row["grad_norm"] > 0 for row in rows[1:]) >= 5
    assert [r["step"] for r in rows if "eval/reward_mean" in r] == [0, 5, 10]
    assert rows[0]["eval/problems"] == 16 and rows[0]["eval/undefined"] == 0 and rows[0]["gate/max_gap"] < 0.5
    assert saved(straight)[2] == 10 and sorted(p.name
                                               for p in (straight / "checkpoints").iterdir()) == ["10", "8"]
    samples = [json.loads(line) for line in (straight / "samples.jsonl").read_text().splitlines()]
    assert [s["step"] for s in samples] == [s for s in range(1, 11) for _ in range(4)]
    for s in samples:  # what engine and learner said of each token, beside its text
        facts = [s[name] for name in ("token_lengths", "rollout_logp", "old_logp", "weights")]
        assert {len(f) for f in facts} == {s["tokens"]} and sum(s["token_lengths"]) == len(s["completion"])
        np.testing.assert_allclose(s["weights"], np.exp(np.subtract(s["old_logp"], s["rollout_logp"])),
                                   rtol=1e-3)
    assert load_config(str(straight / "config.toml")) == config(straight)


def test_a_run_makes_a_page(straight, tmp_path):
    assert main(["report", str(straight), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Held-out reward" in page and "of 40 sampled completions" in page


def test_nothing_is_compiled_after_the_first_step(recorded):
    """Lengths vary from step to step, shapes do not: not in steps, nor in evaluations and checkpoints between
    them."""
    directory, compiled = recorded
    assert len({r["response/length_mean"] for r in metrics(directory)[1:]}) > 1
    assert len(compiled) == 11 and compiled[1] > compiled[0] > 0
    assert compiled[1] == compiled[-1]


def test_every_version_of_the_weights_is_sampled_once(straight):
    assert [r["weights/version"] for r in metrics(straight)[1:]] == list(range(10))
    # two samples of a step, its best and its worst, may be of one problem; those of two steps not
    of_step: dict[int, set] = {}
    for sample in map(json.loads, (straight / "samples.jsonl").read_text().splitlines()):
        of_step.setdefault(sample["step"], set()).add(sample["id"])
    assert len(of_step) == 10 and len(set().union(*of_step.values())) == sum(map(len, of_step.values()))


# --- resuming


@pytest.mark.slow  # the run that Ctrl-C stops is resumed and compared, too
def test_ten_steps_equal_five_and_five(straight, tmp_path):
    loop.train(config(tmp_path, run__steps=5))
    loop.train(config(tmp_path), resume=True)
    assert_same_run(tmp_path, straight)
    assert load_config(str(tmp_path / "config.toml")).run.steps == 10


@pytest.mark.slow  # a smaller run, killed elsewhere too, is row 27 of tests/faults
def test_a_killed_run_goes_on_from_its_checkpoint_and_forgets_what_came_after(straight, tmp_path):
    process = start(tmp_path)
    wait_for_step(process, tmp_path, 5)
    process.kill()
    process.communicate()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "loss"')  # a line cut short
    assert saved(tmp_path)[2] < max(r["step"] for r in metrics(tmp_path))  # there is something to forget
    loop.train(config(tmp_path), resume=True)
    assert_same_run(tmp_path, straight)


@pytest.mark.slow  # tests/e2e/test_served.py has a run that samples ahead, and its resumption
def test_a_run_samples_ahead_and_resumes_bit_for_bit(tmp_path, monkeypatch):
    """What was sampled ahead is in the checkpoint, whose weights are newer."""
    options, one_step = {"run__steps": 4, "rollout__max_staleness": 1, "run__eval_every": 2}, loop.one_step
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    loop.train(config(whole, **options))
    rows = metrics(whole)[1:]
    assert [r["weights/version"] for r in rows] == [0, 0, 1, 2]
    assert [r["staleness/versions_max"] for r in rows] == [r["staleness/versions_mean"]
                                                           for r in rows] == [0, 1, 1, 1]
    assert all(r["rollout/groups_rejected"] == 0 and r["time/wait_s"] > 0 for r in rows[:-1])

    def interrupted(*args):
        if args[-1] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return one_step(*args)

    monkeypatch.setattr(loop, "one_step", interrupted)
    with pytest.raises(SystemExit):
        loop.train(config(parted, **options))
    assert {t["version"] for t in saved(parted)[1]["queue"]} == {1} and saved(parted)[2] == 2
    loop.train(config(parted, **options), resume=True)
    assert_same_run(parted, whole)
    loop.train(config(parted, **options | {"run__steps": 5}), resume=True)
    assert metrics(parted)[-1]["weights/version"] == 4, "beside a run's last step nothing is sampled"


def test_ctrl_c_saves_leaves_with_130_and_resumes(straight, tmp_path):
    process = start(tmp_path)
    wait_for_step(process, tmp_path, 1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "stopping after this step" in output and "Traceback" not in output
    _, _, step = saved(tmp_path)
    assert step == metrics(tmp_path)[-1]["step"] < 10
    assert f"step {step} is saved; continue with: jaxfp8rl train {tmp_path} --resume" in output
    loop.train(config(tmp_path), resume=True)
    resumed, whole = metrics(tmp_path), metrics(straight)
    assert [r["loss"] for r in resumed[1:]] == [r["loss"] for r in whole[1:]]
    jax.tree.map(np.testing.assert_array_equal, saved(tmp_path)[0], saved(straight)[0])


@pytest.mark.slow
def test_ctrl_c_after_the_warm_start_keeps_it(tmp_path, monkeypatch):
    """The first step is not begun, the warm start is saved as step 0, and the run resumes from it."""
    gate = starting.gate
    monkeypatch.setattr(starting, "gate", lambda *a: (os.kill(os.getpid(), signal.SIGINT), gate(*a))[1])
    with pytest.raises(SystemExit) as e:
        loop.train(config(tmp_path, run__steps=1))
    assert e.value.code == 130 and saved(tmp_path)[2] == 0 and len(metrics(tmp_path)) == 1
    monkeypatch.setattr(starting, "gate", gate)
    monkeypatch.setattr(starting, "warm_start", lambda *a: pytest.fail("warm-started twice"))
    loop.train(config(tmp_path, run__steps=1), resume=True)
    assert [r["step"] for r in metrics(tmp_path)] == [0, 1]


def test_a_finished_run_resumes_to_nothing(copy, straight):
    loop.train(config(copy), resume=True)
    assert_same_run(copy, straight)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"task.options.max_operand": 8}, "task.options.max_operand: 9 -> 8"),
        ({"run.seed": 1}, "run.seed: 0 -> 1"),
        ({"model.config.intermediate_size": 384, "optim.lr": 0.1},
         "model.config.intermediate_size: 128 -> 384"),
        ({"model.tokenizer": "chars:9876543210+-*="}, "model.tokenizer: .* with another vocabulary"),
    ],
    ids=["data", "seed", "model", "tokenizer"],
)
def test_resuming_as_another_run_is_refused_and_touches_nothing(copy, change, message):
    contents = lambda: {p.name: p.read_bytes() for p in copy.iterdir() if p.is_file()
                        and p.name != "notes.txt"}
    before, cfg = contents(), config(copy, run__steps=12,
                                     **{k.replace(".", "__"): v for k, v in change.items()})
    for attempt in (dry_run, loop.train):
        with pytest.raises(CheckpointError, match=message):
            attempt(cfg, resume=True)
    assert contents() == before


def test_a_used_run_directory_and_one_without_a_run_are_refused(straight, tmp_path):
    with pytest.raises(ConfigError, match="already holds a run\n.*--resume"):
        loop.train(config(straight))
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        loop.train(config(tmp_path), resume=True)


def test_a_run_that_failed_before_it_began_does_not_occupy_its_directory(tmp_path):
    """The second attempt is also one of a task that holds nothing out: it is trained without evaluations."""
    with pytest.raises(DataError, match="the limit is 2"):
        loop.train(config(tmp_path, task__max_prompt_tokens=2))
    loop.train(config(tmp_path, run__steps=1, sft__steps=0, task__options__held_out_fraction="0.0"))
    rows = metrics(tmp_path)
    assert [r["step"] for r in rows] == [0, 1] and not any("eval/reward_mean" in r for r in rows)


# --- the warm start as a command


@pytest.mark.slow
def test_sft_goes_on_after_a_signal_and_train_from_its_folder_as_from_its_own_warm_start(
        straight, tmp_path, monkeypatch, capsys):
    """In FP8 as the run, with the same weights bit for bit."""
    interrupt_after(15, monkeypatch)
    with pytest.raises(SystemExit) as e:
        run_sft(config(tmp_path, sft__save_every=10))
    assert e.value.code == 143 and not (tmp_path / "sft").exists()
    assert Checkpoints(tmp_path / "sft_checkpoints", 1).steps() == [15]
    assert "update 15 of 40 is saved: the same command with --resume goes on" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="a warm start that was interrupted after update 15\n.*--resume"):
        run_sft(config(tmp_path))
    with pytest.raises(CheckpointError, match=r"others:\n  sft.lr: 0.003 -> 0.1\n"):
        run_sft(config(tmp_path, sft__lr=0.1), resume=True)
    run_sft(config(tmp_path), resume=True)
    said = capsys.readouterr().out
    assert 'warm start: computes as "fp8_unified", forward in FP8, backward in FP8' in said
    assert "goes on after update 15 of 40" in said and not (tmp_path / "sft_checkpoints").exists()
    with pytest.raises(ModelError, match="sft exists and is not empty"):  # before it trains for nothing
        run_sft(config(tmp_path))
    run_sft(config(tmp_path), resume=True)
    assert capsys.readouterr().out == f"nothing to do: {tmp_path / 'sft'} is written\n"
    check_folder(tmp_path, straight)
    check_course((straight / "notes.txt").read_text(), said)


def interrupt_after(update: int, monkeypatch) -> None:
    """A signal while the update is made."""
    monkeypatch.setattr(ConsoleMonitor, "bar", lambda console, name, done, total:
                        os.kill(os.getpid(), signal.SIGTERM) if done == update - 1 else None)


def check_course(notes: str, of_sft: str) -> None:
    """The loss falls, and it is the same in `sft`."""
    losses = re.findall(r"warm start (\d+)/40  loss (\S+)", notes)
    assert float(losses[-1][1]) < 0.5 * float(losses[0][1])
    assert re.findall(r"warm start (\d+)/40  loss (\S+)", of_sft) == losses[3:]


def check_folder(place: Path, straight: Path) -> None:
    """The folder has the model, the tokenizer, and the weights with which `straight` began."""
    folder = place / "sft"
    cfg, params = load_params(folder)
    assert cfg == dataclasses.replace(model_config(config(place)), dtype=cfg.dtype)
    assert load_tokenizer(str(folder)).encode("1+2=") == load_tokenizer("chars:0123456789+-*=").encode("1+2=")
    from_folder = {"model__path": folder, "model__config": "{}", "model__tokenizer": '""', "sft__steps": 0,
                   "run__steps": 1}
    loop.train(config(place / "run", **from_folder))
    (begun, first), (want, want_first) = metrics(place / "run"), metrics(straight)[:2]
    untimed = lambda record: {key: x for key, x in record.items() if not key.startswith("time/")}
    # the policy is the rounded one in both: same evaluation, same gate
    assert untimed(begun) == untimed(want)
    # before the masters' low bits play a part
    for key in ("reward/mean", "response/length_mean", "mismatch/max_logp_diff"):
        assert first[key] == want_first[key], key
    assert (folder / "trained_on.npy").read_bytes() == (straight / "trained_on.npy").read_bytes()


@pytest.mark.slow
def test_a_run_whose_model_folder_is_gone_goes_on_is_evaluated_and_exported(tmp_path, capsys):
    """By what it has kept of it; or where the folder is now, if it is that of the same model."""
    cfg, run, folder, moved = config(tmp_path), tmp_path / "run", tmp_path / "model", tmp_path / "elsewhere"
    save_params(folder, model_config(cfg), starting_params(cfg, model_config(cfg)))
    load_tokenizer("chars:0123456789+-*=").save(str(folder))
    from_folder = {"model__path": folder, "model__config": "{}", "model__tokenizer": '""', "sft__steps": 0,
                   "run__eval_every": 0}
    loop.train(config(run, run__steps=1, **from_folder))
    folder.rename(moved)
    resumed = ["train", str(run), "--resume", "--run.steps"]
    assert main([*resumed, "2"]) == 0
    said = capsys.readouterr().out
    assert f"model.path: {folder} is gone; using the copies in {run}/base_model/path" in said
    assert main([*resumed, "3", "--model.path", str(moved)]) == 0 and metrics(run)[-1]["step"] == 3
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert load_tokenizer(str(tmp_path / "out")).fingerprint() == load_tokenizer(str(moved)).fingerprint()
    assert (tmp_path / "out" / "trained_on.npy").is_file()
    moved.rename(tmp_path / "gone again")
    assert main(["eval", str(run), "--samples", "1"]) == 0
