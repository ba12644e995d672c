"""Runs the cells of an experiment as child processes, several at once, and never a finished one again.

A command may end at any time. A child that is asked to end saves its step, and the next command goes on from
there. A cell that is done leaves its lines in the folder of results (`jaxfp8rl.experiments.results`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxfp8rl.errors import UserError
from jaxfp8rl.experiments.cells import Cell
from jaxfp8rl.experiments.jobs import BAD_STEPS, Job, Spent, jobs_of
from jaxfp8rl.experiments.protocol import Experiment
from jaxfp8rl.experiments.results import DONE, finished, write_result
from jaxfp8rl.experiments.slots import Slot

POLL_S, NOTE_S = 0.1, 5.0  # between looks at the children, and between notes of the time that they took
GRACE_S = 60.0  # of a command's last minutes, the most in which children save their step
LATE_S = 300.0  # after which a child that was asked to end is ended: it hangs
# Becomes the command behind it, after it has asked for SIGTERM when its parent is gone (PR_SET_PDEATHSIG of
# linux/prctl.h). `preexec_fn` of subprocess would do the same, but forks a process that has threads of JAX.
TIED = (sys.executable, "-ISc", "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
        "os.execv(sys.argv[2], sys.argv[2:]) if os.getppid() == int(sys.argv[1]) else None")
STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)  # as it was asked to
NOT_FINITE, OVER_BUDGET = "updates that were not finite", "the budget of minutes"
STOP = "the command"


class CellsFailed(UserError):
    """Cells that ended with an error; the others ran."""

    exit_code = 1


@dataclasses.dataclass
class Child:
    """A job that runs. spent: what it took before this process. asked: why it was asked to end, or "", and
    asked_at when, of time.monotonic()."""

    job: Job
    process: subprocess.Popen
    slot: int
    began: float
    spent: Spent
    noted: float
    asked: str = ""
    asked_at: float = 0.0

    def total(self) -> Spent:
        return self.spent._replace(seconds=self.spent.seconds + time.monotonic() - self.began)

    def kill(self) -> None:
        """End it with the processes that it started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class Files:
    """Where an experiment keeps its files: runs, logs and compiled programs in `work`; lines in `results`."""

    work: Path
    results: Path

    def result(self, cell: Cell) -> Path:
        return self.results / f"{cell.name}.jsonl"


class Runner:
    """Runs cells until all are done, the minutes are over, or a signal ends the command.

    slots: the places of children, each with its device. failed: the message of each job that ended
    with an error; such a job is tried once a command.
    """

    def __init__(self, experiment: Experiment, files: Files, slots: Sequence[Slot], minutes: float | None,
                 say: Callable[[str], None] = print):
        self.experiment, self.files, self.slots, self._say = experiment, files, slots, say
        self.running, self.failed, self.signal = list[Child](), dict[str, str](), 0
        self._began, self._seconds = time.monotonic(), minutes * 60 if minutes else float("inf")

    def run(self, cells: Sequence[Cell]) -> None:
        """Run `cells`. Raises DataError for results of other settings, and CellsFailed at the end."""
        waiting = self._to_do(cells)
        with self._signals():
            while waiting or self.running:
                self._reap()
                self._end_what_is_over()
                if not self.over:
                    waiting = self._start(waiting)
                if not self.running and (self.over or not self._ready(waiting)):
                    break
                time.sleep(POLL_S)
        if self.signal:
            raise SystemExit(128 + self.signal)
        if self.failed:
            listing = "\n  ".join(f"{name}: {why}" for name, why in self.failed.items())
            raise CellsFailed(f"{len(self.failed)} failed\n  {listing}",
                              f"their logs are in {self.files.work}/logs; the same command tries them again")

    @property
    def over(self) -> bool:
        """Whether no job may start any more: a signal came, or the last tenth of the time has begun."""
        return bool(self.signal) or self._left() < min(GRACE_S, 0.1 * self._seconds)

    def _left(self) -> float:
        return self._seconds - (time.monotonic() - self._began)

    def _to_do(self, cells: Sequence[Cell]) -> list[Job]:
        """The jobs of `cells` that are not done, each warm start before its cells. Lines of cells that were
        done when an earlier command ended are written."""
        warm, jobs = jobs_of(cells, self.files.work)
        found = dict[str, Job]()
        for cell in cells:
            job = jobs[cell.name]
            if finished(self.files.result(cell), cell):
                continue
            if job.done:
                self._write(job, DONE)
                continue
            first = next((w for w in warm.values() if w.made == job.after), None)
            if used := next((j for j in (first, job) if j and j.in_use), None):
                self.failed[job.name] = f"{used.run} is in use by another process"
                continue
            found |= {j.name: j for j in (first, job) if j and not j.done}
        return list(found.values())

    # --- children

    def _start(self, waiting: list[Job]) -> list[Job]:
        """Start what is ready on the free slots; returns the jobs that still wait."""
        free = [n for n in range(len(self.slots)) if n not in {child.slot for child in self.running}]
        starting = list(zip(self._ready(waiting), free))
        for job, slot in starting:
            self._begin(job, slot)
        started = {job.name for job, _ in starting}
        return [job for job in waiting if job.name not in started]

    def _ready(self, waiting: Sequence[Job]) -> list[Job]:
        """Those whose warm start is there. Of an arm one cell at a time compiles: its next cell waits for the
        first step, and finds the programs in the folder that all share."""
        unready = [child.job.made for child in self.running]  # a file may be there before its job has ended
        compiling = [child.job.arm for child in self.running if child.job.cell and not child.job.compiled]
        ready = list[Job]()
        for job in waiting:
            if job.after and (not job.after.is_file() or job.after in unready) or job.arm in compiling:
                continue
            ready.append(job)
            compiling += [job.arm] * bool(job.cell)
        return ready

    def _begin(self, job: Job, slot: int) -> None:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        again = job.saved and f", from {job.saved}"
        with job.log.open("ab") as log:
            process = subprocess.Popen(
                [*TIED, str(os.getpid()), *job.command()], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, env=job.environment(self.slots[slot]), start_new_session=True)
        now = time.monotonic()
        self.running.append(Child(job, process, slot, now, job.spent, now))
        self._note_neighbours()
        where = f" on GPU {gpu}" if (gpu := self.slots[slot].gpu) else ""
        self._tell(job, f"started{where}{again}")

    def _note_neighbours(self) -> None:
        """Every child notes with how many it shares its device."""
        for child in self.running:
            beside = sum(self.slots[other.slot].gpu == self.slots[child.slot].gpu for other in self.running)
            child.spent = child.spent._replace(at_once=max(child.spent.at_once, beside))

    def _reap(self) -> None:
        """Settle the children that have ended, and note what the others have taken."""
        now = time.monotonic()
        for child in list(self.running):
            ended = child.process.poll() is not None
            if ended or now - child.noted > NOTE_S:
                child.noted = now
                child.job.spend(child.total())
            if ended:
                self.running.remove(child)
                self._settle(child)

    def _settle(self, child: Child) -> None:
        """Write the lines of a cell that ran to its end, or say how the child ended."""
        job, code = child.job, child.process.returncode
        if code == 0:
            self._write(job, DONE) if job.cell else self._tell(job, "done")
        elif job.cell and code == BAD_STEPS:
            self._write(job, NOT_FINITE)
        elif child.asked == OVER_BUDGET and code in STOPPED:
            if (job.run / "metrics.jsonl").is_file():
                self._write(job, OVER_BUDGET)
            else:
                self._fail(job, "budget.minutes were over before its first step")
        elif child.asked and code in STOPPED:
            self._tell(job, f"ended by {child.asked}" + (job.saved and f", goes on from {job.saved}"))
        else:
            self._fail(job, f"exit code {code}: {job.last_error()}")

    def _fail(self, job: Job, why: str) -> None:
        self.failed[job.name] = why
        self._tell(job, why)

    def _write(self, job: Job, ended: str) -> None:
        """Write a cell's lines, if they are not written yet, and remove its checkpoints, which are large."""
        assert job.cell
        path, spent = self.files.result(job.cell), job.spent
        if not job.lines.is_file():
            write_result(job.lines, self.experiment, job.cell, job.run, ended, spent.seconds, spent.at_once)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(job.lines, path)
        shutil.rmtree(job.run / "checkpoints", ignore_errors=True)
        how = "done" if ended == DONE else f"ended by {ended}"
        self._tell(job, f"{how} after {spent.seconds / 60:.1f} minutes: {path}")

    def _tell(self, job: Job, what: str) -> None:
        self._say(f"{(time.monotonic() - self._began) / 60:6.1f} min  {job.name}: {what}")

    # --- the end

    def _end_what_is_over(self) -> None:
        """Ask children to end whose budget, or whose command, is over; end those that take too long."""
        budget, now = self.experiment.protocol.budget.minutes * 60, time.monotonic()
        for child in self.running:
            if self.over and not child.asked:
                self._ask(child, STOP)
            elif child.job.cell and child.total().seconds > budget and not child.asked:
                self._ask(child, OVER_BUDGET)
            if self._left() <= 0 or (child.asked and now - child.asked_at > LATE_S):
                child.kill()

    def _ask(self, child: Child, why: str) -> None:
        child.asked, child.asked_at = why, time.monotonic()
        child.process.terminate()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask the children to save and end; a second one ends them at once. Whatever
        ends this context, no child is left."""
        def ask(number: int, _: object) -> None:
            if self.signal:
                for child in self.running:
                    child.kill()
            self.signal = number

        before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)
            for child in self.running:
                child.kill()
                child.process.wait()
