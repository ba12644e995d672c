"""Trackers get every record, keep no secret, and never stop a run; a missing package is said before it
starts."""

from __future__ import annotations

import errno
import io
import sys
import threading
import time

import pytest
from rich.console import Console

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import UserError
from jaxfp8rl.monitors import trackers
from jaxfp8rl.monitors.console import ConsoleMonitor
from jaxfp8rl.monitors.end.evaluations import read_evaluations, write_evaluations
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.monitors.wandb import WandbMonitor
from jaxfp8rl.run import run_directory
from jaxfp8rl.run.run_directory import RunDirectory
from jaxfp8rl.training import loop, start

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
    # its service writes on for a moment
    while any(p.stat().st_size < 1000 for p in paths) and time.monotonic() < until:
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


@pytest.mark.parametrize("calls, logged", [(0, 0), (1, 1), (2, 2)],
                         ids=["at the first record", "at the second", "at the end"])
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
    monkeypatch.setattr(start, "build_run", lambda *_: pytest.fail("it takes minutes"))
    with pytest.raises(UserError,
                       match=rf'"{name}" needs the package not_i.*\n'
                             r'  next step: pip install "jaxfp8rl\[trackers\]"'):
        loop.train(config(tmp_path / "run", name))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_package_that_is_broken_is_a_tracker_that_is_off(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, trackers.PACKAGES[name], None)
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with RunDirectory(config(tmp_path, name), resume=False) as run:
        run.log({"step": 1})
    assert f"{name} is off for the rest of the run: ModuleNotFoundError" in (
        tmp_path / "notes.txt").read_text()


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


def events(folder) -> list:
    """Of all files there, in the order of their names, as TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:  # a TFRecord: length u64, crc u32, payload, crc u32
            n = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + n]))
            data = data[16 + n :]
    return found


def shown(found: list) -> dict[int, float]:
    """What TensorBoard shows of a series: a session that starts at a step purges what was logged of it and
    later ones (tensorboard/backend/event_processing/plugin_event_accumulator.py,
    _CheckForRestartAndMaybePurge)."""
    points = {}
    for event in found:
        if event.HasField("session_log"):
            assert event.session_log.status == event.session_log.START
            points = {step: value for step, value in points.items() if step < event.step}
        points.update((event.step, value.simple_value) for value in event.summary.value if value.tag == "x")
    return points


def test_what_a_rewind_undid_is_in_no_record(tmp_path):
    """Steps 3 and 4 are undone, and the run then ends at 3."""
    pytest.importorskip("tensorboardX")
    cfg = config(tmp_path, "tensorboard")
    with RunDirectory(cfg, resume=False) as run:
        for step in range(5):
            run.log({"step": step, "x": 1.0 + step})
    record = {"problems": 2, "samples": 1, "pass_at_k": {"1": {"estimate": 0.5, "low": 0.1, "high": 0.9}}}
    write_evaluations(tmp_path / "eval.json", [record | {"step": step} for step in (2, 4, 0, 3)])
    (tmp_path / "summary.json").write_text("{}")
    with RunDirectory(cfg, resume=True) as run:
        run.rewind(2)
        run.log({"step": 3, "x": 10.0})
    assert not (tmp_path / "summary.json").exists()
    assert shown(events(tmp_path / "events")) == {0: 1.0, 1: 2.0, 2: 3.0, 3: 10.0}
    assert [(r["step"], r["x"])
            for r in read_metrics(tmp_path / "metrics.jsonl")] == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 10.0)]
    assert [r["step"] for r in read_evaluations(tmp_path / "eval.json")] == [2, 0]
    before = len(events(tmp_path / "events"))
    with RunDirectory(cfg, resume=True) as run:  # nothing is undone: nothing is said
        run.rewind(3)
    assert not any(e.HasField("session_log") for e in events(tmp_path / "events")[before:])


def test_a_file_of_evaluations_that_cannot_be_read_is_left_and_said(tmp_path):
    with RunDirectory(config(tmp_path), resume=False) as run:
        run.log({"step": 1})
    (tmp_path / "eval.json").write_text("mine")
    with RunDirectory(config(tmp_path), resume=True) as run:
        run.rewind(1)
    assert (tmp_path / "eval.json").read_text() == "mine"
    assert "eval.json was not changed" in (tmp_path / "notes.txt").read_text()


def test_a_run_of_wandb_of_which_steps_were_undone_is_another_from_there(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with RunDirectory(config(tmp_path, "wandb"), resume=False) as run:
        for step in range(3):
            run.log({"step": step, "reward/mean": 0.25 * step})
    first = (tmp_path / "wandb-id").read_text()
    with RunDirectory(config(tmp_path, "wandb"), resume=True) as run:
        run.rewind(1)
    second, kept = (tmp_path / "wandb-id").read_text(), []
    assert second != first and not (tmp_path / "notes.txt").exists()
    with monkeypatch.context() as patch:
        patch.setattr(WandbMonitor, "log", lambda self, record: kept.append(record["step"]))
        with RunDirectory(config(tmp_path, "wandb"), resume=True) as run:
            run.rewind(0)
    assert kept == [0] and (tmp_path / "wandb-id").read_text() not in (first, second)
