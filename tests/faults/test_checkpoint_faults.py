"""Faults of checkpoints, by their rows in docs/faults.md: killed in the middle of a save, damaged on the
disk, no room."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.checkpoint import store
from jaxfp8rl.checkpoint.store import DIGESTS, Checkpoints, damage
from jaxfp8rl.config.resume_rules import MAY_CHANGE, changes, check_resumable
from jaxfp8rl.config.schema import SECTIONS
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import CheckpointError, ConfigError
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.run.run_directory import RunDirectory, check_run_directory
from jaxfp8rl.types import TrainState


def state(step: int) -> TrainState:
    def values(n: int):
        return jax.random.normal(jax.random.key(step), (n, 16))

    zero = jnp.zeros((), jnp.int32)
    fields = {"params": {"w": values(8)}, "opt_state": (values(4), {"m": values(2)}),
              "step": jnp.asarray(step, jnp.int32)}
    return TrainState(**{name: fields.get(name, zero) for name in TrainState._fields})


LIKE = state(0)


def check(restored, step: int) -> None:
    back, loop = restored
    assert loop["step"] == step and loop["place"] == [step, "ä"]
    jax.tree.map(np.testing.assert_array_equal, back, state(step))


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, state(step), {"place": [step, "ä"]})


@pytest.fixture
def saved(tmp_path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    for step in (2, 4):
        save(checkpoints, step)
    return checkpoints


# 30: killed while saving; damaged on the disk

WATCHED: list = []  # (folder, what is called at each of Python's operations on files below it)


def _audit(event: str, args: tuple) -> None:
    if WATCHED and event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
        folder, act = WATCHED[-1]
        if isinstance(args[0], str | bytes | os.PathLike) and os.fsdecode(args[0]).startswith(str(folder)):
            WATCHED.pop()
            act(event)
            WATCHED.append((folder, act))


sys.addaudithook(_audit)


def copy_if_there(source: str, to: str) -> None:
    """A lock of Orbax's may be let go of by another of its threads just then."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, to)


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_row_30_wherever_a_save_is_killed_the_last_or_the_new_checkpoint_is_whole(
        tmp_path, monkeypatch, keep):
    """What a SIGKILL would leave is what the disk holds at that moment: it is copied before each operation on
    a file."""
    folder, copies, synced = tmp_path / "checkpoints", [], []
    checkpoints = Checkpoints(folder, keep)
    for step in (2, 4):
        save(checkpoints, step)

    def snapshot(event: str) -> None:
        to = tmp_path / f"{len(copies)}"
        copies.append(shutil.copytree(folder, to, ignore_dangling_symlinks=True, copy_function=copy_if_there))

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync",
                        lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    renamed, rename = [], Path.rename
    monkeypatch.setattr(Path, "rename",
                        lambda self, to: (renamed.append((self.name, list(synced))), rename(self, to))[1])
    WATCHED.append((folder, snapshot))
    try:
        save(checkpoints, 6)
    finally:
        WATCHED.clear()
    newest = []
    for i, copied in enumerate(copies):
        left = Checkpoints(copied, keep)
        newest.append(left.latest())
        check(left.restore(LIKE), newest[-1])
        if i % 10 == 0:
            save(left, 8)  # a draft that was left is no obstacle, and goes
            assert not list(Path(copied).glob(".draft-*"))
    assert len(copies) > 30 and set(newest) == {4, 6} and newest == sorted(newest)
    on_disk = dict(renamed)[".draft-6"]  # all of it, before it got its name
    assert {Path(p).name for p in on_disk} >= {p.name for p in (folder / "6").rglob("*")}
    assert checkpoints.steps() == [2, 4, 6][-keep:]


def files(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.is_file()]


DAMAGES = {
    "cut short": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "a bit flipped": lambda p: p.write_bytes(bytes([p.read_bytes()[0] ^ 16]) + p.read_bytes()[1:]),
    "missing": lambda p: p.unlink(),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_row_30_damage_to_any_file_is_found_and_the_one_before_is_used(saved, tmp_path, how):
    intact = tmp_path / "intact"
    shutil.copytree(tmp_path / "checkpoints", intact)
    checked = 0
    for file in files(intact / "4"):
        if not file.stat().st_size:
            continue
        folder = Path(shutil.copytree(intact, tmp_path / "damaged"))
        DAMAGES[how](folder / file.relative_to(intact))
        checkpoints = Checkpoints(folder, 2)
        if file.name == DIGESTS and how == "missing":  # as if it had never been completed
            assert checkpoints.steps() == [2]
        else:
            assert damage(folder / "4")
        checked += 1
        assert checkpoints._sound(checkpoints.steps()) == 2
        shutil.rmtree(folder)
    assert checked >= 8
    check(saved.restore(LIKE), 4)


def test_row_30_when_all_are_damaged_each_is_named_and_what_is_too_much_is_damage(saved, tmp_path):
    (tmp_path / "checkpoints" / "4" / "state" / "more").write_text("x")
    next(p for p in files(tmp_path / "checkpoints" / "2") if p.name != DIGESTS).write_text("garbage")
    with pytest.raises(CheckpointError,
                       match=r"4 is damaged: state/more is not of this checkpoint; 2 is damaged: .* not what"):
        saved.restore(LIKE)


def test_row_30_one_that_was_asked_for_and_is_damaged_names_the_others(saved, tmp_path):
    files(tmp_path / "checkpoints" / "4")[0].write_text("garbage")
    with pytest.raises(CheckpointError, match="checkpoint 4 is damaged: ") as error:
        saved.restore(LIKE, 4)
    assert error.value.next_step == "take that of step 2"


def test_row_30_a_damaged_checkpoint_is_set_aside_when_the_run_goes_on_before_it(saved, tmp_path):
    files(tmp_path / "checkpoints" / "4")[0].write_text("garbage")
    _, loop = saved.restore(LIKE)
    saved.set_aside(loop["step"])
    assert saved.steps() == [2] and (tmp_path / "checkpoints" / "damaged-4").is_dir()
    save(saved, 4)
    check(saved.restore(LIKE), 4)


def test_a_checkpoint_of_another_version_is_refused_by_its_format(saved, monkeypatch):
    monkeypatch.setattr(store, "FORMAT", store.FORMAT + 1)
    with pytest.raises(CheckpointError, match="checkpoint 4 is of format 2, this jaxfp8rl reads 3"):
        saved.restore(LIKE)


def test_what_a_checkpoint_holds_otherwise_is_named(saved):
    """Not in Orbax's words, of which there are pages."""
    other = LIKE._replace(params={"w": jnp.zeros((8, 32)), "v": jnp.zeros(3)},
                          opt_state=(jnp.zeros((4, 16)), {}))
    with pytest.raises(CheckpointError) as e:
        saved.restore(other)
    said = "opt_state/1/m is [2, 16], wanted not at all; params/v is not there, wanted [3]; params/w is [8, 16], wanted [8, 32]"
    assert said in str(e.value), str(e.value)
    assert len(str(e.value)) < 500


def test_memory_that_runs_out_is_no_fault_of_the_checkpoint(saved, monkeypatch):
    """The error names the settings that save most (jaxfp8rl.memory.fit)."""

    def full(*_):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 58 bytes.")

    monkeypatch.setattr(store.ocp, "load_checkpointables", full)
    with pytest.raises(jax.errors.JaxRuntimeError, match="58 bytes"):
        saved.restore(LIKE)


# 31: a save fails


@pytest.fixture
def run(tmp_path):
    cfg = load_config("demo", ["--run.dir", str(tmp_path / "run"), "--run.save_patience_s", "0.3"])
    with RunDirectory(cfg, resume=False) as run:
        run.save(2, state(2), {})
        yield run


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
                           match="step 5 could not be written: OSError.*newest is that of step 2\n.*--resume"):
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
                       match="what step 3 came to could not be written: No space left on device\n.*--resume"):
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


# 32: retention


@pytest.mark.parametrize("keep", [1, 3])
def test_row_32_the_newest_stay_and_none_goes_before_the_next_is_complete(tmp_path, monkeypatch, keep):
    checkpoints, seen = Checkpoints(tmp_path / "checkpoints", keep), []
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree",
                        lambda path, *a, **k: (seen.append(checkpoints.steps()), rmtree(path, *a, **k))[1])
    for step in range(1, 7):
        save(checkpoints, step)
        assert checkpoints.steps() == list(range(1, step + 1))[-keep:]
        assert not damage(tmp_path / "checkpoints" / str(step))
    assert seen and all(steps for steps in seen)


# 35: other settings on resumption


def test_row_35_what_is_changed_is_kept_with_the_first_step_that_it_is_of(tmp_path):
    """Not at the end of the run, not when the gate fails; and config.toml is replaced, never written to."""
    words = ["--run.dir", str(tmp_path), "--run.steps", "4"]
    begun, other = load_config("demo", words), load_config("demo", [*words, "--optim.lr", "0.5"])
    path = tmp_path / "config.toml"
    with RunDirectory(begun, resume=False) as run:
        run.log({"step": 2})
    before = path.read_text()
    for step in (4, 2):
        with RunDirectory(other, resume=True) as run:
            run.rewind(step)
        assert path.read_text() == before
    with path.open() as reader, RunDirectory(other, resume=True) as run:
        run.rewind(2)
        run.log({"step": 3})
        assert load_config(str(path)) == other and reader.read() == before


def test_row_35_a_run_is_not_resumed_to_before_its_newest_checkpoint(run):
    cfg = load_config(str(run.path / "config.toml"))
    check_run_directory(cfg, resume=True)
    shorter = cfg.model_copy(update={"run": cfg.run.model_copy(update={"steps": 1})})
    with pytest.raises(ConfigError, match="run.steps = 1: the newest checkpoint of .* is of step 2"):
        check_run_directory(shorter, resume=True)


def test_a_run_that_keeps_no_checkpoint_is_refused_before_anything_loads(tmp_path):
    cfg = load_config("demo", ["--run.dir", str(tmp_path), "--run.save_every", "0"])
    with RunDirectory(cfg, resume=False) as run:
        run.log({"step": 1})
    with pytest.raises(CheckpointError) as early:
        check_run_directory(cfg, resume=True)
    with pytest.raises(CheckpointError) as late:
        Checkpoints(tmp_path / "checkpoints", 1).restore(LIKE)
    assert str(early.value) == str(late.value) and "no complete checkpoint to go on from\n" in str(late.value)


OTHER = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: x / 2 + 1e-9, str: lambda x: x + "x",
         tuple: lambda x: (*x, 1), dict: lambda x: x | {"more": 1}, type(None): lambda x: 1}


def test_row_35_every_setting_may_change_or_is_refused_with_the_difference(tmp_path):
    cfg = load_config("demo", ["--run.dir", str(tmp_path)])
    with RunDirectory(cfg, resume=False):
        pass
    check_resumable(cfg)
    known = {(s, k) for s, model in SECTIONS.items() for k in model.model_fields}
    assert {(s, k) for s, keys in MAY_CHANGE.items() for k in keys} <= known
    for section, key in sorted(known):
        old = getattr(getattr(cfg, section), key)
        new = OTHER[type(old)](old)
        part = getattr(cfg, section).model_copy(update={key: new})
        other = cfg.model_copy(update={section: part})
        assert changes(cfg, other) == {(section, key): (old, new)}
        if (section, key) == ("run", "dir"):
            continue
        if key in MAY_CHANGE.get(section, ()):
            check_resumable(other)
        else:
            with pytest.raises(CheckpointError) as e:
                check_resumable(other)
            assert f"\n  {section}.{key}: {old!r} -> {new!r}\n" in str(
                e.value) and "--fork" in e.value.next_step
