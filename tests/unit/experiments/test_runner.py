"""The runner with children that only pretend to train: what runs, what does not run again, what goes on, and
what is said of those that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from small_protocol import small

from benchmarks.processes import runs, until
from jaxfp8rl.cli.main import main
from jaxfp8rl.errors import DataError
from jaxfp8rl.experiments import jobs, runner
from jaxfp8rl.experiments.cells import cells
from jaxfp8rl.experiments.jobs import Spent
from jaxfp8rl.experiments.protocol import Experiment
from jaxfp8rl.experiments.results import read_result, read_results
from jaxfp8rl.experiments.runner import CellsFailed, Files, Runner
from jaxfp8rl.experiments.slots import Slot
from jaxfp8rl.experiments.status import state

FAKE_RUN = Path(__file__).with_name("fake_run.py")
WARM = ("[grid.recipe]", "[warm_start]\nsft = { steps = 3, warmup_steps = 0 }\n\n[grid.recipe]")


@dataclasses.dataclass
class Lab:
    """An experiment whose children pretend."""

    folder: Path
    patch: pytest.MonkeyPatch
    said: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.patch.setattr(jobs, "PROGRAM", (sys.executable, "-S", str(FAKE_RUN)))
        self.files = Files(self.folder / "work", self.folder / "results" / "small")
        self.experiment = self.changed()

    def changed(self, *changes: tuple[str, str]) -> Experiment:
        return small(self.folder, ("seeds = [0, 1, 2]", "seeds = [0, 1]"), *changes)

    def waiting(self) -> bool:
        """Whether all four children wait after step 1."""
        return len(list(self.files.work.glob("cells/*/checkpoints/1/digests.json"))) == 4

    def run(self, minutes: float | None = None, places: int = 3, gpu: str = "", **fake) -> None:
        self.patch.setenv("FAKE", json.dumps(fake))
        self.said.clear()
        Runner(self.experiment, self.files, [Slot(gpu)] * places, minutes,
               self.said.append).run(cells(self.experiment))

    def done(self) -> list[str]:
        return [r.header["cell"] for r in read_results(self.files.results)]

    def started(self) -> list[str]:
        return [line.split()[2].rstrip(":") for line in self.said if ": started" in line]


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


def test_every_cell_runs_once_and_sees_its_gpu_alone(lab):
    lab.run(gpu="1")
    assert all(path.read_text().rstrip().endswith(" on 1") for path in lab.files.work.glob("logs/*"))
    assert lab.done() == sorted(cell.name for cell in cells(lab.experiment))
    found = read_result(lab.files.results / "fp8-s1.jsonl")
    assert found.header | {"seconds": 0.0, "at_once": 0} == {
        "experiment": "small", "cell": "fp8-s1", "arm": {"recipe": "fp8"}, "seed": 1, "pilot": False,
        "config": cells(lab.experiment)[3].digest, "protocol": lab.experiment.digest, "ended": "done",
        "steps": 4,
        "seconds": 0.0, "at_once": 0, "device": "a fake", "commit": "abc", "versions": {},
        "begun": "2026-11-26 12:00 UTC"}
    assert [step["eval/reward_mean"] for step in found.steps] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert found.header["seconds"] > 0
    assert 2 <= max(r.header["at_once"] for r in read_results(lab.files.results)) <= 3
    assert not list(lab.files.work.glob("cells/*/checkpoints"))  # they are large
    lab.run()
    assert lab.said == []


def test_lines_that_were_taken_away_are_written_again_without_a_run(lab):
    lab.run()
    before = (lab.files.results / "bf16-s0.jsonl").read_bytes()
    for path in lab.files.results.iterdir():
        path.unlink()
    lab.run()
    assert lab.started() == [] and len(lab.done()) == 4
    assert (lab.files.results / "bf16-s0.jsonl").read_bytes() == before


@pytest.mark.parametrize("left", [1.0, -1.0], ids=["time to save", "none"])
def test_a_command_that_ends_in_the_middle_is_gone_on_with(lab, left):
    lab.patch.setattr(Runner, "_left", lambda self: left if lab.waiting() else 60.0)
    lab.run(minutes=1, waits=True, places=4)
    assert not lab.done()
    assert all("ended by the command, goes on from step 1" in line for line in lab.said[4:])
    lab.patch.setattr(Runner, "_left", lambda self: 60.0)
    lab.run()
    assert sum("from step 1" in line for line in lab.said) == len(lab.done()) == 4
    for result in read_results(lab.files.results):
        assert [step["step"] for step in result.steps] == [0, 1, 2, 3, 4]


KILLED = "import pickle, sys; from jaxfp8rl.experiments import jobs; lab = pickle.load(sys.stdin.buffer); " \
    "jobs.PROGRAM = lab[0]; lab[1](*lab[2]).run(lab[3])"


def test_a_cell_that_is_killed_is_gone_on_with(lab):
    """As when a machine is taken away: the runner dies without a word, and its children end."""
    told = jobs.PROGRAM, Runner, (lab.experiment, lab.files, [Slot()] * 4, None), cells(lab.experiment)
    command = subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE,
                               stdout=subprocess.DEVNULL,
                               env=os.environ | {"FAKE": json.dumps({"waits": True})})
    command.stdin.write(pickle.dumps(told))
    command.stdin.close()
    while not lab.waiting():
        assert command.poll() is None
        time.sleep(0.02)
    pids = [int(path.read_text()) for path in lab.files.work.glob("cells/*/pid")]
    command.kill()
    command.wait()
    until(lambda: not any(map(runs, pids)), 10)  # no child goes on without the command
    lab.run()
    assert sum("from step 1" in line for line in lab.said) == len(lab.done()) == 4


def test_a_signal_saves_the_children_and_ends_the_command(lab):
    def when_all_wait():
        while not lab.waiting():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=when_all_wait).start()
    with pytest.raises(SystemExit) as e:
        lab.run(waits=True, places=4)
    assert e.value.code == 143 and not lab.done()
    assert sum("goes on from step 1" in line for line in lab.said) == 4
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_warm_start_runs_once_a_seed_and_before_its_cells(lab):
    lab.experiment = lab.changed(WARM)
    half_made = next(iter(jobs.jobs_of(cells(lab.experiment), lab.files.work)[0].values())).run / "sft"
    half_made.mkdir(parents=True)
    lab.run(starts_s=0.05)
    assert len(lab.done()) == 4
    order = [line.split("min  ")[1].split(":")[0] for line in lab.said
             if "started" in line or ": done" in line]
    for seed in range(2):
        of_cells = [order.index(f"{arm}-s{seed}") for arm in ("bf16", "fp8")]
        warm = [i for i, name in enumerate(order) if name == f"warm start of seed {seed}"]
        assert len(warm) == 2 and max(warm) < min(of_cells)
    text = next(lab.files.work.glob("cells/fp8-s1-*/config.toml")).read_text()
    assert f'path = "{lab.files.work}/warm/warm-s1-' in text and '\nsteps = 0  #' in text


def test_of_an_arm_one_cell_at_a_time_compiles(lab):
    lab.run(starts_s=0.3, places=4)
    events = [line.split("min  ")[1] for line in lab.said]
    assert [e.split(":")[0] for e in events[:2]] == ["bf16-s0", "fp8-s0"]  # two places stay free
    assert {e.split(":")[0] for e in events[2:6] if "started" in e} == {"bf16-s1", "fp8-s1"}
    compiled = lambda name: next(lab.files.work.glob(f"cells/{name}-*/metrics.jsonl")).stat().st_ctime
    assert all(compiled(f"{arm}-s0") < compiled(f"{arm}-s1") for arm in ("bf16", "fp8"))


def test_a_warm_start_that_is_ended_is_gone_on_with(lab):
    lab.experiment = lab.changed(WARM)
    saved = lambda: list(lab.files.work.glob("warm/*/sft_checkpoints/1/digests.json"))
    lab.patch.setattr(Runner, "_left", lambda self: 1.0 if len(saved()) == 2 else 60.0)
    lab.run(minutes=1, warm_waits=True)
    ends = [line.split("min  ")[1] for line in lab.said[2:]]
    ended = "ended by the command, goes on from update 1"
    assert sorted(ends) == [f"warm start of seed {seed}: {ended}" for seed in (0, 1)]
    lab.patch.setattr(Runner, "_left", lambda self: 60.0)
    lab.run()
    assert sum(": started, from update 1" in line for line in lab.said) == 2 and len(lab.done()) == 4


@contextlib.contextmanager
def locked(run):
    """The run directory `run`, as another process occupies it."""
    run.mkdir(parents=True)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_a_warm_start_that_another_process_makes_is_left_alone(lab):
    lab.experiment = lab.changed(WARM)
    warm = jobs.jobs_of(cells(lab.experiment), lab.files.work)[0]["warm start of seed 0"]
    with locked(warm.run), pytest.raises(
            CellsFailed, match="bf16-s0: .*warm-s0-.* is in use by another process"):
        lab.run()
    assert lab.done() == ["bf16-s1", "fp8-s1"]


def test_a_failure_is_named_and_the_others_run(lab):
    with pytest.raises(CellsFailed, match=r"1 failed\n  fp8-s1: exit code 2: it failed\n  next step: none\n"):
        lab.run(ends={"fp8-s1": 2})
    assert len(lab.done()) == 3
    assert [state(cell, lab.files) for cell in cells(lab.experiment)][2:4] == [
        "done, 0.0 minutes", "saved at step 2 of 4"]
    lab.run()
    assert lab.done()[3] == "fp8-s1"


def test_updates_that_are_not_finite_are_a_result(lab):
    lab.run(ends={"fp8": 4})
    ended = {r.header["cell"]: (r.header["ended"], r.steps[-1]["step"])
             for r in read_results(lab.files.results)}
    assert ended["fp8-s0"] == (runner.NOT_FINITE, 2) and ended["bf16-s0"] == ("done", 4)
    lab.run()
    assert lab.started() == []


def over_its_budget(lab):
    """Each cell, from when all four wait; a cell that has ended takes its checkpoints with it."""
    waited = set[bool]()

    def total(child: runner.Child) -> Spent:
        waited.update([True] * (not waited and lab.waiting()))
        return Spent(1e9 * len(waited), 4)

    lab.patch.setattr(runner.Child, "total", total)


def test_a_cell_over_its_budget_is_ended_and_counts(lab):
    over_its_budget(lab)
    lab.run(waits=True, places=4)
    found = read_results(lab.files.results)
    assert {r.header["ended"] for r in found} == {runner.OVER_BUDGET} and found[0].steps[-1]["step"] == 1
    assert len(found) == 4


def test_a_cell_that_hangs_when_it_is_asked_to_end_is_ended(lab):
    """As in a kernel that does not return; without --minutes the command would wait for ever."""
    over_its_budget(lab)
    lab.patch.setattr(runner, "LATE_S", 0.3)
    lab.run(waits=True, deaf=True, places=4)
    found = read_results(lab.files.results)
    assert [r.header["ended"] for r in found] == [runner.OVER_BUDGET] * 4
    children = [int(path.read_text()) for path in lab.files.work.glob("cells/*/child")]
    assert len(children) == 4
    until(lambda: not any(map(runs, children)), 10)  # what it started has ended, too


def test_a_budget_that_is_too_small_to_start_is_a_failure(lab):
    lab.patch.setattr(runner.Child, "total", lambda child: Spent(1e9, 4))
    with pytest.raises(CellsFailed, match="bf16-s0: budget.minutes were over before its first step"):
        lab.run(starts_s=0.3)


def test_lines_of_other_settings_are_refused(lab):
    lab.run()
    lab.experiment = lab.changed(("margin = 0.1", "margin = 0.2"))
    lab.run()  # the same cells
    assert lab.started() == []
    lab.experiment = lab.changed(("optim.warmup_steps = 0", "optim.warmup_steps = 1"))
    with pytest.raises(DataError, match="bf16-s0.jsonl: the cell ran with other settings"):
        lab.run()


def test_what_another_process_runs_is_left_alone(lab):
    job = jobs.jobs_of(cells(lab.experiment), lab.files.work)[1]["bf16-s0"]
    with locked(job.run), pytest.raises(CellsFailed, match="bf16-s0: .* is in use by another process"):
        lab.run()
    assert len(lab.done()) == 3


def test_the_commands(lab, capsys):
    name, work = str(lab.experiment.path), ["--work", str(lab.files.work)]
    assert main(["experiment", "status", name, *work]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(f"{cell.name:7}  not begun" for cell in cells(lab.experiment)),
        "0 of 4 cells are done"]
    assert main(["experiment", "run", name, *work, "--only", "fp8-s1", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.endswith("1 of 1 cells are done\n") and lab.done() == ["fp8-s1"]
    assert main(["experiment", "run", name, *work, "--only", "fp8-s3"]) == 2
    assert '--only fp8-s3: no such cell (did you mean "fp8-s' in capsys.readouterr().err
    assert main(["experiment", "run", name, *work, "--minutes", "0"]) == 2
    assert "--minutes 0: it must be more than 0" in capsys.readouterr().err


def test_a_check_counts_the_cells_and_foresees_the_cost(lab, capsys):
    assert main(["experiment", "check", str(lab.experiment.path), "--work", str(lab.files.work)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "arithmetic: 885 problems and 115 held out, tokenizer and scorer checked",
        "pilot: 4 cells, 2 seeds; 4 cells to run: 20 cell minutes at most, by the budget; a pilot tells more",
        "grid: 4 cells, 2 seeds; 4 cells to run: 20 cell minutes at most, by the budget; a pilot tells more",
        "power: unknown; it needs a pilot of the control with two seeds"]


def test_a_check_says_a_line_of_all_arms_once_and_counts_one_seed(tmp_path, capsys):
    experiment = small(tmp_path, ("optim.warmup_steps = 0\n", ""), ("[10, 11]", "[10]"))
    assert main(["experiment", "check", str(experiment.path), "--work", str(tmp_path / "work")]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == ["optim.warmup_steps: the preset's 5 are cut to 3, of 4 updates in all"]
    assert "\npilot: 2 cells, 1 seed; 2 cells" in said.out
