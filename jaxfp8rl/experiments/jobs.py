"""The child processes of an experiment: what each runs, where it stands, and whether it is done.

A job is a cell, or the warm start that the cells of a seed share. All of a job's files lie in the
experiment's work folder, under a name that ends with the hash of its settings, so that a changed protocol
never goes on with the run of another.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config
from jaxfp8rl.data.seen import FILE as SEEN
from jaxfp8rl.experiments.cells import Cell, digest_of, name_of
from jaxfp8rl.experiments.slots import Slot
from jaxfp8rl.gpus import FRACTION, OLD_FRACTION

PROGRAM = sys.executable, "-m", "jaxfp8rl"
BAD_STEPS = 4  # the exit code of a run whose updates are not finite: an outcome, not a failure
CHECKPOINT_FILE = "digests.json"  # jaxfp8rl.checkpoint.store: a checkpoint with it is whole
CHECKPOINTS, OF_WARM_START = "checkpoints", "sft_checkpoints"  # of a run; of jaxfp8rl.training.sft


class Spent(NamedTuple):
    """seconds: of a job's processes. at_once: the largest number of jobs that shared the device with it, it
    included."""

    seconds: float
    at_once: int


@dataclasses.dataclass(frozen=True)
class Job:
    """One child. run: its run directory. after: a path that must exist before it may start, or None."""

    name: str
    run: Path
    work: Path
    cfg: Config
    after: Path | None
    cell: Cell | None

    @property
    def log(self) -> Path:
        return self.work / "logs" / f"{self.run.name}.log"

    @property
    def done(self) -> bool:
        """Whether the child has nothing left to do."""
        if not self.cell:
            return self.made.is_file()
        return self.lines.is_file() or self.step == self.cfg.run.steps

    @property
    def lines(self) -> Path:
        """The work folder's copy of a cell's lines. It stays, so that no cell runs again because its lines
        were taken away."""
        return self.work / "lines" / f"{self.run.name}.jsonl"

    @property
    def made(self) -> Path:
        """The file that a warm start writes last."""
        return self.run / "sft" / SEEN

    @property
    def arm(self) -> str:
        """The name of the cell's arm, whose cells run the same programs; "" of a warm start."""
        return name_of(self.cell.arm) if self.cell else ""

    @property
    def compiled(self) -> bool:
        """Whether a cell has made its first step, before which it may have evaluated."""
        lines = self.run / "metrics.jsonl"
        return lines.is_file() and lines.read_bytes().count(b"\n") > 1

    @property
    def step(self) -> int | None:
        """The step of a cell, or the update of a warm start, of the newest whole checkpoint."""
        found = (self.run / (CHECKPOINTS if self.cell else OF_WARM_START)).glob(f"*/{CHECKPOINT_FILE}")
        return max((int(p.parent.name) for p in found if p.parent.name.isdecimal()), default=None)

    @property
    def saved(self) -> str:
        """The newest whole checkpoint in words: "step 20", "update 400"; "" without one."""
        return "" if self.step is None else f"{'step' if self.cell else 'update'} {self.step}"

    @property
    def in_use(self) -> bool:
        """Whether a process runs it now, of this command or of another."""
        lock = self.run / ".lock"
        if not lock.is_file():
            return False
        with lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def command(self) -> list[str]:
        """The words of the child; the config is written for it. A half-made warm start without a checkpoint
        is removed."""
        again = ["--resume"] * (self.step is not None)
        if self.cell and again:
            return [*PROGRAM, "train", str(self.run), *again]
        if not self.cell and not again:
            shutil.rmtree(self.run / "sft", ignore_errors=True)
        path = self.work / "configs" / f"{self.run.name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_config(self.cfg), encoding="utf-8")
        return [*PROGRAM, "train" if self.cell else "sft", str(path), *again]

    def environment(self, slot: Slot) -> dict[str, str]:
        """The child's environment: it compiles into a folder that all jobs share. JAX's own allocator, which
        there is without vLLM, takes the slot's share of the GPU. What this process's environment says
        counts."""
        shared = {"JAX_COMPILATION_CACHE_DIR": str(self.work.absolute() / "compiled"),
                  "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        own = not self.cell or self.cfg.rollout.engine == "jax"
        if own and slot.share and OLD_FRACTION not in os.environ:  # JAX refuses both names
            shared |= {FRACTION: str(slot.share), "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
        return shared | dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": slot.gpu} if slot.gpu else {})

    @property
    def spent(self) -> Spent:
        """What all processes of the job have taken so far."""
        return Spent(**json.loads(self._ledger.read_text())) if self._ledger.is_file() else Spent(0.0, 1)

    def spend(self, spent: Spent) -> None:
        """Note it for later commands."""
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        draft = self._ledger.with_suffix(".tmp")
        draft.write_text(json.dumps(spent._asdict()))
        os.replace(draft, self._ledger)

    @property
    def _ledger(self) -> Path:
        return self.work / "spent" / f"{self.run.name}.json"

    def last_error(self) -> str:
        """The message with which the last child ended, or the last line that it wrote."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        said = [n for n, line in enumerate(lines) if line.startswith("jaxfp8rl: ")]
        if said:
            return "\n  ".join(line.strip() for line in lines[said[-1]:][:6]).removeprefix("jaxfp8rl: ")
        return next((line for line in reversed(lines) if line.strip()), "it wrote nothing")


def jobs_of(found: Sequence[Cell], work: Path) -> tuple[dict[str, Job], dict[str, Job]]:
    """(warm starts, cells), each by name."""
    warm = {job.name: job for cell in found if cell.warm for job in [_warm_start(cell, cell.warm, work)]}
    return warm, {cell.name: _job_of(cell, work) for cell in found}


def _job_of(cell: Cell, work: Path) -> Job:
    cfg, after = cell.cfg, None
    if cell.warm:
        after = _warm_start(cell, cell.warm, work).made
        model = cfg.model.model_copy(update={"path": str(after.parent), "config": {}})
        cfg = cfg.model_copy(update={"model": model, "sft": cfg.sft.model_copy(update={"steps": 0})})
    run = work / "cells" / f"{cell.name}-{cell.digest[:8]}"
    return Job(cell.name, run, work, _in(cfg, run), after, cell)


def _warm_start(cell: Cell, cfg: Config, work: Path) -> Job:
    run = work / "warm" / f"warm-s{cell.seed}-{digest_of(cfg)[:8]}"
    return Job(f"warm start of seed {cell.seed}", run, work, _in(cfg, run), None, None)


def _in(cfg: Config, run: Path) -> Config:
    return cfg.model_copy(update={"run": cfg.run.model_copy(update={"dir": str(run)})})
