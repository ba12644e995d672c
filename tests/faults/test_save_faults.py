"""Row 31 of docs/faults.md: a save fails, the disk is full."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from small_checkpoint import LIKE, check, save, state

from jaxfp8rl.checkpoint import store
from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import CheckpointError
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.run.run_directory import RunDirectory


@pytest.mark.parametrize("at", ["fsync", "rename", "write"])
def test_row_31_a_full_disk_is_said_the_older_stays_and_the_run_stops_after_its_patience(
        run, at, monkeypatch, capsys):
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_, **__):
        raise full

    target = {"fsync": (os, "fsync"), "rename": (Path, "rename"),
              "write": (store.ocp, "save_checkpointables_async")}[at]
    with monkeypatch.context() as patch:
        patch.setattr(*target, fail)
        run.save(4, state(4), {})
        assert run.saver.unsaved_since and "No space left on device" in capsys.readouterr().out
        assert run._checkpoints.steps() == [2]
        time.sleep(0.35)
        with pytest.raises(CheckpointError,
                           match="step 5 could not be written: OSError.*newest is that of "
                                 "step 2\n.*--resume"):
            run.save(5, state(5), {})
        # the last there will be: at once
        with pytest.raises(CheckpointError, match="step 6 could not be written"):
            run.saver.unsaved_since = None
            run.save(6, state(6), {}, last=True)
    run.save(7, state(7), {})
    assert run.saver.unsaved_since is None and run._checkpoints.steps() == [2, 7]


@pytest.fixture
def held(monkeypatch) -> threading.Event:
    """A save does not end before this is set."""
    event, seal = threading.Event(), store.seal
    monkeypatch.setattr(store, "seal", lambda folder: (event.wait(60), seal(folder))[1])
    return event


def test_row_31_the_run_goes_on_during_a_save_with_the_buffers_that_are_saved(saved, held):
    loop, now = {"place": [6, "ä"]}, jax.tree.map(jnp.copy, state(6))  # each counter a buffer of its own
    held.set()
    saved.save_async(6, now, loop)
    donated = jax.jit(lambda s: jax.tree.map(lambda x: 0 * x - 7, s), donate_argnums=0)(now)
    loop["place"].append("more")
    jax.block_until_ready(donated)
    saved.wait()
    check(saved.restore(LIKE), 6)


def test_row_31_one_save_is_in_flight_and_the_next_waits_for_it(saved, held):
    saved.save_async(6, state(6), {"place": [6, "ä"]})
    assert not saved.finished() and saved.steps() == [2, 4]
    threading.Timer(0.2, held.set).start()
    saved.save_async(8, state(8), {"place": [8, "ä"]})
    assert saved.steps()[-1] in (6, 8) and saved.wait() > 0 and saved.finished()
    check(saved.restore(LIKE), 8)
    assert saved.steps() == [6, 8] and saved.wait() == 0.0


def test_row_31_the_error_of_a_save_in_flight_comes_with_the_next_step(run, held, monkeypatch, capsys):
    run.log({"step": 3})  # from here on saves are not waited for
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(full))
        run.save(4, state(4), {})
        run.saver.check()
        assert run.saver.unsaved_since is None and not run.saver.again
        held.set()
        store.concurrent.futures.wait([run._checkpoints.in_flight.seconds])
        run.saver.check()
    assert "step 4 could not be written: OSError: [Errno 28] No space left" in capsys.readouterr().out
    assert run.saver.again and run._checkpoints.steps() == [2]
    run.save(5, state(5), {}, last=True)
    assert not run.saver.again and run._checkpoints.steps() == [2, 5]
    run.log({"step": 5})
    before, after = read_metrics(run.path / "metrics.jsonl")
    assert before["time/save_s"] > 0 and after["time/save_s"] > 0 and after["time/save_write_s"] > 0


def test_row_31_a_run_that_crashes_waits_for_its_save(tmp_path, held):
    cfg = load_config("demo", ["--run.dir", str(tmp_path / "run")])
    with pytest.raises(ZeroDivisionError), RunDirectory(cfg, resume=False) as run:
        run.log({"step": 1})
        run.save(2, state(2), {"place": [2, "ä"]})
        threading.Timer(0.2, held.set).start()
        raise ZeroDivisionError
    check(Checkpoints(tmp_path / "run" / "checkpoints", 1).restore(LIKE), 2)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_row_31_a_run_does_not_go_on_without_its_record(tmp_path, name):
    (tmp_path / "run").mkdir()
    for full in (name, "notes.txt"):
        (tmp_path / "run" / full).symlink_to("/dev/full")
    cfg = load_config("demo", ["--run.dir", str(tmp_path / "run")])
    with pytest.raises(CheckpointError,
                       match="the metrics of step 3 could not be written: No space left on "
                             "device\n.*--resume"):
        with RunDirectory(cfg, resume=False) as run:
            run.note("said on the console alone")
            run.log({"step": 3}, samples=[{"step": 3}])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_row_31_on_a_disk_that_is_really_full(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=400k tmpfs {small} 2>/dev/null"):
        pytest.skip("mounting is not allowed here")
    try:
        checkpoints = Checkpoints(small / "checkpoints", 2)
        save(checkpoints, 2)
        (small / "fill").write_bytes(bytes(os.statvfs(small).f_bavail * os.statvfs(small).f_bsize - 8192))
        with pytest.raises(Exception, match="(?i)no space|RESOURCE_EXHAUSTED"):
            save(checkpoints, 4)
        check(checkpoints.restore(LIKE), 2)
        (small / "fill").unlink()
        save(checkpoints, 6)
        check(checkpoints.restore(LIKE), 6)
        assert checkpoints.steps() == [2, 6]
    finally:
        os.system(f"umount {small}")
