"""Trackers get every record, keep no secret, and never stop a run; a missing package is said before it starts."""

from __future__ import annotations

import errno
import io
import sys
import threading
import time

import pytest
from rich.console import Console

from jaxfp8rl import loop, run_directory
from jaxfp8rl.errors import UserError
from jaxfp8rl.monitors import trackers
from jaxfp8rl.monitors.console import ConsoleMonitor
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.run_directory import RunDirectory
from jaxfp8rl.toml_config import load_config

KEY = "0123456789abcdef0123456789abcdef01234567"  # of the form that Weights & Biases gives out
NAMES = ("tensorboard", "wandb")


def config(folder, *names: str):
    return load_config("demo", ["--run.dir", str(folder), "--run.trackers", str(list(names))])


def test_wandb_offline_holds_the_numbers_and_not_the_key(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "WANDB_PROJECT": "a-project"}.items():
        monkeypatch.setenv(name, value)
    for step in (1, 2):  # the second time as a resumed run
        with RunDirectory(config(tmp_path, "wandb"), resume=step == 2) as run:
            run.log({"step": step, "reward/mean": 0.25 * step, "loss": float("nan")})
    assert not (tmp_path / "notes.txt").exists()
    paths, until = sorted(tmp_path.rglob("*.wandb")), time.monotonic() + 20
    while any(p.stat().st_size < 1000 for p in paths) and time.monotonic() < until:  # its service writes on for a moment
        time.sleep(0.05)
    logs = [p.read_bytes() for p in paths]
    assert len(logs) == 2
    always = (b"reward/mean", b"a-project", b"fp8_unified", (tmp_path / "wandb-id").read_bytes())
    for log, value in zip(logs, (b"0.25", b"0.5")):
        assert all(word in log for word in (*always, value))
    assert [p for p in tmp_path.rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()] == []


class Failing:
    """Takes `calls` calls."""

    def __init__(self, calls: int):
        self.calls, self.records = calls, []

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise ConnectionError("the service is gone")

    def log(self, record) -> None:
        self._count()
        self.records.append(record)

    def close(self) -> None:
        self._count()


@pytest.mark.parametrize("calls, logged", [(0, 0), (1, 1), (2, 2)], ids=["at the first record", "at the second", "at the end"])
def test_a_failing_tracker_is_off_and_the_run_goes_on(calls, logged, tmp_path, monkeypatch):
    failing = Failing(calls)
    monkeypatch.setattr(trackers, "_make", lambda *args: failing)
    with RunDirectory(config(tmp_path, "wandb"), resume=False) as run:
        for step in (1, 2):
            run.log({"step": step})
    assert len(failing.records) == logged
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    (note,) = (tmp_path / "notes.txt").read_text().splitlines()
    assert "run.trackers: wandb is off for the rest of the run: ConnectionError: the service is gone" in note


def test_a_tracker_that_cannot_begin_is_off(tmp_path, monkeypatch):
    """As wandb without a key, where nobody can be asked for one."""
    monkeypatch.setattr(trackers, "_make", lambda *args: Failing(0).close())
    with RunDirectory(config(tmp_path, "wandb"), resume=False) as run:
        run.log({"step": 1})
    assert "wandb is off" in (tmp_path / "notes.txt").read_text()


def test_a_full_disk_does_not_hold_up_who_logs_to_tensorboard(tmp_path, monkeypatch):
    tensorboardX = pytest.importorskip("tensorboardX")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    def log() -> None:
        with RunDirectory(config(tmp_path, "tensorboard"), resume=False) as run:
            monkeypatch.setattr(tensorboardX.record_writer.RecordWriter, "write", full)
            for step in (1, 2):
                run.log({"step": step} | dict.fromkeys("abcdefghijkl", 0.5))

    logging = threading.Thread(target=log, daemon=True)
    logging.start()
    logging.join(30)
    assert not logging.is_alive()
    assert "tensorboard is off for the rest of the run: OSError" in (tmp_path / "notes.txt").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_said_before_an_engine_starts(name, tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.PACKAGES, name, "not_installed")
    monkeypatch.setattr(loop, "build", lambda *_: pytest.fail("it takes minutes"))
    with pytest.raises(UserError, match=rf'"{name}" needs the package not_i.*\n  next step: pip install "jaxfp8rl\[trackers\]"'):
        loop.train(config(tmp_path / "run", name))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_package_that_is_broken_is_a_tracker_that_is_off(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, trackers.PACKAGES[name], None)
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with RunDirectory(config(tmp_path, name), resume=False) as run:
        run.log({"step": 1})
    assert f"{name} is off for the rest of the run: ModuleNotFoundError" in (tmp_path / "notes.txt").read_text()


def test_what_ends_a_run_while_trackers_begin_leaves_no_live_line(tmp_path, monkeypatch):
    console = ConsoleMonitor(2, Console(file=io.StringIO(), force_terminal=True))
    monkeypatch.setattr(run_directory, "ConsoleMonitor", lambda steps: console)

    def interrupted(*_):
        assert console._progress.live.is_started
        raise KeyboardInterrupt

    monkeypatch.setattr(trackers, "_make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RunDirectory(config(tmp_path, "wandb"), resume=False)
    assert not console._progress.live.is_started
