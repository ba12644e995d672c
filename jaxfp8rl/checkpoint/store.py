"""Checkpoints of a whole run: parameters, optimiser and counters (arrays, by Orbax), and the loop's own state
(JSON).

A checkpoint is whole or absent. It is written under another name; then every file is digested and synced to
the disk, and only then is the folder renamed. Whatever stops the process in between leaves a draft, which
nobody reads. Before a checkpoint is restored, its files are compared with their digests, so that one which
has been cut short or changed since is never resumed from. Everything random in a run is drawn from (seed,
step), so the step and the seed are the RNG's state.

A save is asynchronous. Orbax copies the arrays to the host while the loop waits; a thread writes, digests and
renames while the run goes on.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path
from orbax.checkpoint import v1 as ocp

from jaxfp8rl.distributed.process_group import ALONE, ProcessGroup
from jaxfp8rl.errors import CheckpointError
from jaxfp8rl.types import TrainState

DIGESTS, LOOP, DRAFT = "digests.json", "loop.json", ".draft-"
FORMAT = 3  # version of a checkpoint's contents; increase it when they change
READ = {2, 3}  # in 2 Orbax kept the loop's state, a file for each of its numbers
STATE = "state"
NAMED = 4  # the number of arrays that a message lists


class Write(NamedTuple):
    """A save that a thread writes. `seconds`: the thread's time."""

    step: int
    seconds: concurrent.futures.Future[float]


class Checkpoints:
    """The folder `checkpoints/` of a run directory. Only saves and `set_aside` write to it. Of several
    processes all save and restore, each its part of the arrays; the first does the rest."""

    def __init__(self, folder: str | Path, keep: int, group: ProcessGroup = ALONE):
        self._folder, self._keep, self._group = Path(folder).absolute(), keep, group
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.in_flight: Write | None = None
        self.damaged: dict[int, str] = {}  # steps that `restore` skipped -> the damage

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, oldest first."""
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted(int(p.name) for p in found if p.name.isdecimal() and (p / DIGESTS).is_file())

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: TrainState, loop: dict[str, Any]) -> None:
        """Write both parts of `step`. Returns when they are durable."""
        self.save_async(step, state, loop)
        self.wait()

    def save_async(self, step: int, state: TrainState, loop: dict[str, Any]) -> None:
        """Begin to write both parts of `step`. Returns when they have been copied: the buffers of `state` may
        be donated then, and `loop` may change. The oldest checkpoints go when this one is durable; the newest
        `keep` stay.

        One save is written at a time. Raises the error of the one before, if nobody has asked for it."""
        self.wait()
        draft = self._folder / f"{DRAFT}{step}"
        parts = {name: jax.tree.map(_settled, tree) for name, tree in _parts(state).items()}
        text = json.dumps(loop | {"step": step, "format": FORMAT}, default=lambda x: np.asarray(x).tolist())
        self._group.run_and_sync(self._clear, alone=True)
        try:
            self._group.run_and_sync(lambda: self._begin(draft, step, parts, text))
        except BaseException:
            self.in_flight = None  # in all processes alike
            raise

    def finished(self) -> bool:
        """Whether no process writes any more. All processes call this."""
        write = self.in_flight
        return write is None or not self._group.all_reduce_max(int(not write.seconds.done()))

    def wait(self) -> float:
        """The seconds for which the save in flight was written, when it is durable; 0 where there is none.
        Raises its error in all processes, once."""
        write, self.in_flight = self.in_flight, None
        if write is None:
            return 0.0
        self._group.run_and_sync(write.seconds.result)
        return write.seconds.result()

    def _begin(self, draft: Path, step: int, parts: dict[str, Any], loop: str) -> None:
        try:
            written = ocp.save_checkpointables_async(str(draft), parts)
        except BaseException:
            self._forget(draft)
            raise
        self.in_flight = Write(step, self._writer.submit(self._commit, draft, step, written.result,
                                                         loop))

    def _commit(self, draft: Path, step: int, written: Callable[[], object], loop: str) -> float:
        """Make a checkpoint of the draft when `written` returns: in the thread."""
        start = time.perf_counter()
        try:
            written()
            if self._group.first:
                (draft / LOOP).write_text(loop, encoding="utf-8")
                seal(draft)
                self._put(draft, self._folder / str(step))
        except BaseException:
            self._forget(draft)
            raise
        return time.perf_counter() - start

    def _forget(self, draft: Path) -> None:
        """A full disk would keep the rest of the draft."""
        if self._group.first:
            shutil.rmtree(draft, ignore_errors=True)

    def _clear(self) -> None:
        """Delete what an earlier save left."""
        for left_over in self._folder.glob(DRAFT + "*"):
            shutil.rmtree(left_over)
        self._folder.mkdir(parents=True, exist_ok=True)

    def _put(self, draft: Path, final: Path) -> None:
        """The draft becomes a checkpoint, and the oldest ones go."""
        if final.exists():  # a folder without digests is not a checkpoint
            final.rename(self._folder / f"{DRAFT}old")
        draft.rename(final)
        _sync(self._folder)
        for old in self.steps()[: -self._keep]:
            gone = (self._folder / str(old)).rename(self._folder / f"{DRAFT}old-{old}")
            shutil.rmtree(gone)

    def kept(self, step: int | None, flag: str) -> int:
        """The newest step, or `step` if it was kept. Raises CheckpointError, which names the others, each
        after `flag`."""
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self._folder}: no complete checkpoint", "run.save_every = 0 keeps none")
        if step not in (None, *steps):
            raise CheckpointError(f"{self._folder} has no checkpoint of step {step}",
                                  " or ".join(f"{flag}{s}" for s in steps))
        return steps[-1] if step is None else step

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """The newest sound checkpoint, or that of `step`, its arrays placed and typed as in `like`;
        loop["step"] says which. `like` may be of jax.ShapeDtypeStruct with a sharding: there may be no room
        for arrays beside those of the state. The state has no draft head if the checkpoint has none.

        Raises CheckpointError if there is none, or if it does not fit the model or the optimiser at hand.
        """
        step = self._group.broadcast(lambda: self._sound(self.steps() if step is None else [step]))
        abstract = _parts(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
                                       like))
        folder = self._folder / str(step)
        loop = loop_of(folder)
        abstract = {name: tree for name, tree in abstract.items() if name == STATE
                    or (folder / name).is_dir()}
        try:
            saved = ocp.load_checkpointables(str(folder), abstract)
        # from the device, out of memory above all: not a fault of the checkpoint
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as e:
            raise CheckpointError(
                f"{self._folder}: checkpoint {step} cannot be restored into this configuration: "
                + unlike(folder, abstract[STATE], e),
                "resume with the configuration that wrote it (config.toml of the run directory)",
            ) from e
        return _joined({name: jax.tree.map(_typed, saved[name]) for name in abstract}, like), loop

    def loop_state(self) -> dict[str, Any]:
        """The loop's own state in the newest checkpoint. Raises CheckpointError."""
        return loop_of(self._folder / str(self.kept(None, "")))

    def _sound(self, steps: list[int]) -> int:
        """The newest of `steps` whose files are as they were written."""
        for step in reversed(steps):
            if not (problem := damage(self._folder / str(step))):
                return step
            self.damaged[step] = problem
        if len(steps) == 1 < len(kept := self.steps()):  # this step was requested, and there are others
            others = " or ".join(str(s) for s in kept if s != steps[0])
            what = f"{self._folder}: checkpoint {steps[0]} is damaged: {self.damaged[steps[0]]}"
            raise CheckpointError(what, f"take that of step {others}")
        raise self.none_to_go_on_from()

    def none_to_go_on_from(self) -> CheckpointError:
        """The error for a folder without a sound checkpoint. It names the damage found in each."""
        damages = "; ".join(f"{step} is damaged: {why}" for step, why in self.damaged.items())
        return CheckpointError(f"{self._folder}: no complete checkpoint to go on from"
                               + (f" ({damages})" if damages else ""),
                               "start another run, in another --run.dir")

    def set_aside(self, after: int, why: str = "damaged") -> list[int]:
        """Rename checkpoints newer than `after`, from which the run goes on, to `WHY-STEP`: the run will soon
        write these steps itself. Returns their steps."""
        steps = [s for s in self.steps() if s > after]
        for step in steps:
            shutil.rmtree(aside := self._folder / f"{why}-{step}", ignore_errors=True)
            (self._folder / str(step)).rename(aside)
        return steps


def loop_of(folder: Path) -> dict[str, Any]:
    """The loop's own state in a checkpoint. Reads no other file of it. Raises CheckpointError if it cannot be
    read, and for a checkpoint of another format."""
    try:
        if (folder / LOOP).exists():
            loop = json.loads((folder / LOOP).read_text(encoding="utf-8"))
        else:
            loop = ocp.load_checkpointables(str(folder), {"loop": None})["loop"]
    except Exception as e:  # Orbax's are of many kinds
        raise CheckpointError(f"{folder} cannot be read: {str(e)[:300]}",
                              "--resume goes back to a sound one") from e
    if (wrote := loop.get("format")) not in READ:
        raise CheckpointError(
            f"{folder.parent}: checkpoint {folder.name} is of format {wrote}, this jaxfp8rl reads {FORMAT}",
            "continue with the version that wrote it, or start another run from its export")
    return loop


def _parts(state: Any) -> dict[str, Any]:
    """What is saved of a state: the policy's, and the draft head's where there is one. Of another tree, the
    tree."""
    if not isinstance(state, TrainState):
        return {STATE: state}
    of = {STATE: state} | ({} if state.draft is None else {"draft": state.draft})
    return {name: {key: x for key, x in s._asdict().items() if key != "draft"} for name, s in of.items()}


def _joined(parts: dict[str, Any], like: Any) -> Any:
    """Inverse of `_parts`."""
    if not isinstance(like, TrainState):
        return parts[STATE]
    made = {name: TrainState(**part) for name, part in parts.items()}
    return made[STATE]._replace(draft=made.get("draft"))


def unlike(folder: Path, like: Any, error: Exception) -> str:
    """How the state in `folder` differs from `like`, a tree or a part of one: the first few arrays that
    differ, or else the beginning of the error. Orbax's errors have pages."""
    named = lambda tree: {keystr(path, simple=True, separator="/"): list(x.shape)
                          for path, x in tree_flatten_with_path(tree)[0]}
    try:
        saved, wanted = named(ocp.checkpointables_metadata(str(folder)).metadata["state"]), named(like)
    except Exception:  # for example if the folder is not a checkpoint
        saved = wanted = {}
    parts = {name.partition("/")[0] for name in wanted}
    names = [n for n in saved.keys() | wanted.keys() if n.partition("/")[0] in parts
             and saved.get(n) != wanted.get(n)]
    found = [f"{n} is {saved.get(n, 'missing')}, expected {wanted.get(n, 'none')}"
             for n in sorted(names)[:NAMED]]
    more = f"; {len(names) - NAMED} more" if len(names) > NAMED else ""
    return "; ".join(found) + more or str(error)[:300]


def _typed(x: jax.Array) -> jax.Array:
    """Orbax drops the memory space from the type of an array in host memory."""
    host = x.sharding.memory_kind == "pinned_host"
    return jax.device_put(x, jax.memory.Space.Host if host else jax.memory.Space.Device)


def _settled(x: jax.Array) -> jax.Array | np.ndarray:
    """x, or a copy of x if it is in pinned host memory (optim.offload). Orbax reads such an array where it
    lies for as long as the save takes, so the next update could not donate it."""
    return np.array(x) if x.sharding.memory_kind == "pinned_host" else x


def seal(folder: Path) -> None:
    """Write the SHA-256 of every file below `folder` into it, and sync all of it to the disk."""
    digests = _digests(folder)
    (folder / DIGESTS).write_text(json.dumps(digests, indent=1), encoding="utf-8")
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def damage(folder: Path) -> str:
    """The damage to a sealed folder, in words: "" if each file is as it was written and none is missing."""
    try:
        want = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        have = _digests(folder)
        names = sorted(n for n in {*want, *have} if want.get(n) != have.get(n))
    except (OSError, ValueError, TypeError, AttributeError) as e:
        return f"{DIGESTS} cannot be read: {e}"
    if not names:
        return ""
    how = "missing" if names[0] not in have else "not what was written" if names[
        0] in want else "not of this checkpoint"
    return f"{names[0]} is {how}" + (f", and {len(names) - 1} more files" if len(names) > 1 else "")


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / DIGESTS)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # hashing releases the interpreter
        return dict(zip((p.relative_to(folder).as_posix() for p in files), pool.map(_sha256, files)))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
