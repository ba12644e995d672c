"""Faults of a run's own process, by their rows in docs/faults.md: signals, hangs and a directory that is
taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import CheckpointError, ConfigError, UserError
from jaxfp8rl.run import watchdog
from jaxfp8rl.run.run_directory import claimed
from jaxfp8rl.run.signals import StopSignals

# 26: told to go


def test_row_26_sigterm_asks_for_the_end_of_the_step_and_the_second_is_now():
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert stop.requested and stop.exit_code == 143
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# 28: it hangs

HANGING = """
import ctypes, sys, time
from jaxfp8rl.run import watchdog
watchdog.GRACE_SECONDS = 1.0
def stuck(how):
    if how == "python":
        time.sleep(60)
    ctypes.PyDLL(None).sleep(60)  # which holds the interpreter
with watchdog.Watchdog(0.5, sys.argv[1]) as dog:
    for phase in ("rollout", "reward"):
        time.sleep(0.3)  # each phase has its own time
        dog.phase(phase)
    stuck(sys.argv[2])
"""


@pytest.mark.parametrize("how, code", [("python", watchdog.EXIT_CODE), ("interpreter", 1)])
def test_row_28_a_hang_is_named_by_its_phase_with_all_stacks_and_ends_the_run(tmp_path, how, code):
    begun = time.monotonic()
    command = [sys.executable, "-c", HANGING, tmp_path / "stacks.txt", how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == code and time.monotonic() - begun < 20
    stacks = done.stderr
    if how == "python":
        assert 'the phase "reward" did not end within' in done.stderr and "--resume" in done.stderr
        stacks = (tmp_path / "stacks.txt").read_text()
        assert 'phase "reward"' in stacks
    assert "in stuck" in stacks and stacks.count("hread 0x") >= 2


def test_row_28_a_run_that_goes_on_is_left_alone(tmp_path):
    with watchdog.Watchdog(0.2, tmp_path / "stacks.txt") as dog:
        for _ in range(8):
            time.sleep(0.05)
            dog.phase("update")
    time.sleep(0.3)
    with watchdog.Watchdog(0, tmp_path / "stacks.txt"):
        time.sleep(0.05)
    assert not (tmp_path / "stacks.txt").exists()


# 29: two runs in one directory


def test_row_29_a_directory_is_of_one_process_until_it_ends_however_that_goes(tmp_path):
    cfg = load_config("demo", ["--run.dir", str(tmp_path / "run")])
    script = """import sys, time
from jaxfp8rl.run.run_directory import claimed
from jaxfp8rl.config.toml import load_config
with claimed(load_config("demo", ["--run.dir", sys.argv[1]]), False):
    print("in", flush=True)
    time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", script, cfg.run.dir], stdout=subprocess.PIPE,
                          text=True) as other:
        assert other.stdout.readline() == "in\n"
        # who is there is said before what is there
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0}\n')
        with pytest.raises(ConfigError,
                           match=f"is in use by process {other.pid}\n.*another --run.dir"), claimed(
                               cfg, False):
            pass
        other.kill()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with claimed(cfg, False):
        pass


def test_row_29_a_refused_resumption_makes_no_folder(tmp_path):
    cfg = load_config("demo", ["--run.dir", str(tmp_path / "none")])
    with pytest.raises(CheckpointError, match="holds no run to resume"), claimed(cfg, True):
        pass
    assert not Path(cfg.run.dir).exists()
    Path(cfg.run.dir).write_text("a file")
    with pytest.raises(UserError,
                       match="run.dir: .*none: cannot write to .*: Not a directory"), claimed(
                           cfg, False):
        pass
