"""Faults of checkpoints, by their rows in docs/faults.md: killed in the middle of a save, damaged on the
disk; which of them are kept."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from small_checkpoint import LIKE, check, save, state

from jaxfp8rl.checkpoint import store
from jaxfp8rl.checkpoint.store import DIGESTS, Checkpoints, damage
from jaxfp8rl.errors import CheckpointError

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
                       match=r"4 is damaged: state/more is not of this checkpoint; "
                             r"2 is damaged: .* not what"):
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
    monkeypatch.setattr(store, "READ", {store.FORMAT})
    with pytest.raises(CheckpointError, match="checkpoint 4 is of format 3, this jaxfp8rl reads 4"):
        saved.restore(LIKE)


def test_a_checkpoint_whose_loop_orbax_kept_is_read(saved, tmp_path):
    folder, loop = tmp_path / "checkpoints" / "6", {"step": 6, "format": 2, "place": [6, "ä"]}
    store.ocp.save_checkpointables(str(folder), {**store._parts(state(6)), "loop": loop})
    store.seal(folder)
    check(saved.restore(LIKE), 6)


def test_the_loop_takes_one_file_however_much_it_holds(saved, tmp_path):
    """An asynchronous run keeps its queue there, tokens and all: Orbax made an array of each number."""
    few = len(files(tmp_path / "checkpoints" / "4"))
    queue = [{"name": [i, 0], "tokens": list(range(100)), "logprobs": [0.1] * 100} for i in range(100)]
    saved.save(5, state(5), {"queue": queue})
    assert len(files(tmp_path / "checkpoints" / "5")) == few
    assert saved.restore(LIKE)[1]["queue"] == queue


def test_what_a_checkpoint_holds_otherwise_is_named(saved):
    """Not in Orbax's words, of which there are pages."""
    other = LIKE._replace(params={"w": jnp.zeros((8, 32)), "v": jnp.zeros(3)},
                          opt_state=(jnp.zeros((4, 16)), {}))
    with pytest.raises(CheckpointError) as e:
        saved.restore(other)
    said = ("opt_state/1/m is [2, 16], expected none; params/v is missing, expected [3]; "
            "params/w is [8, 16], expected [8, 32]")
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
