"""Standard error of other libraries: in a file while a run goes well, on the terminal when it fails, however
it ends. Each case is a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxfp8rl.monitors import quiet

ROOT = Path(__file__).parents[3]
NOISE = "W0000 bfc_allocator.cc] Allocator (GPU_0_bfc) ran out of memory trying to allocate"
BEGIN = f"""
import ctypes, os, signal, subprocess, sys, threading
from pathlib import Path
from jaxfp8rl.errors import ConfigError, GateFailed
from jaxfp8rl.monitors import quiet
def noise(n):
    for i in range(n): os.write(2, f"{NOISE} {{i}}\\n".encode())
"""


def run(tmp_path, body: str, **environment: str) -> tuple[subprocess.CompletedProcess, str]:
    """(the ended process, the content of its file). `body` runs inside of `quiet`."""
    path = tmp_path / "logs" / "stderr.txt"
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    code = f"{BEGIN}with quiet.quiet(Path({str(path)!r})):\n{indented}"
    env = {k: v for k, v in os.environ.items() if k not in (quiet.VERBOSE, "PYTHONFAULTHANDLER")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60,
                          env=env | {"PYTHONPATH": str(ROOT)} | environment)
    return done, path.read_text() if path.exists() else ""


def test_a_run_that_ends_well_shows_its_own_lines_alone(tmp_path):
    done, log = run(tmp_path, """noise(3); print("step 1"); print("warned", file=sys.stderr)
subprocess.run(["sh", "-c", "echo child >&2"])
quiet.say("ours")
print("step 2")""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "step 1\nstep 2\n", "ours\n")
    assert log.splitlines() == [*(f"{NOISE} {i}" for i in range(3)), "warned", "child"]


def test_an_error_shows_the_last_lines_before_its_trace(tmp_path):
    done, log = run(tmp_path, 'noise(50); raise RuntimeError("ours")')
    said = done.stderr.splitlines()
    assert done.returncode == 1 and len(log.splitlines()) == 50
    assert said[0] == f"jaxfp8rl: {quiet.HEAD} {tmp_path / 'logs' / 'stderr.txt'}"
    assert said[1:21] == [f"{NOISE} {i}" for i in range(30, 50)]
    assert said[21].startswith("Traceback") and said[-1] == "RuntimeError: ours"


@pytest.mark.parametrize("body, code", [
    ('raise ConfigError("wrong input")', 1), ("sys.exit(7)", 7), ("sys.exit(0)", 0),
])
def test_wrong_input_and_an_exit_show_none(body, code, tmp_path):
    done, log = run(tmp_path, f"noise(3); {body}")
    assert done.returncode == code and NOISE not in done.stderr and NOISE in log


def test_an_error_of_the_run_that_is_no_bug_shows_them(tmp_path):
    done, _ = run(tmp_path, 'noise(3); raise GateFailed("apart")')
    assert done.stderr.count(NOISE) == 3 and "apart" in done.stderr


@pytest.mark.parametrize("body, number", [
    ('os.write(2, b"F0000 Check failed: in C\\n"); ctypes.CDLL(None).abort()', signal.SIGABRT),
    ('os.write(2, b"F0000 Check failed: in C\\n"); ctypes.string_at(0)', signal.SIGSEGV),
])
def test_a_fatal_signal_shows_its_message_and_where_it_was(body, number, tmp_path):
    done, _ = run(tmp_path, f"noise(30); {body}")
    assert done.returncode == -number
    assert "F0000 Check failed: in C" in done.stderr and "Fatal Python error" in done.stderr
    assert done.stderr.count(NOISE) == 19  # and the message of C


def test_a_killed_process_and_one_that_leaves_at_once_show_them(tmp_path):
    killed, _ = run(tmp_path, "noise(2); os.kill(os.getpid(), signal.SIGKILL)")
    left, _ = run(tmp_path, "noise(2); os._exit(7)")
    assert (killed.returncode, left.returncode) == (-signal.SIGKILL, 7)
    assert killed.stderr.count(NOISE) == 2 and left.stderr.count(NOISE) == 2  # each its own part of the file


def test_the_exception_of_a_thread_is_shown_at_once(tmp_path):
    done, _ = run(tmp_path, "t = threading.Thread(target=lambda: 1 / 0, name='writer'); t.start(); t.join()")
    assert done.returncode == 0 and "Exception in thread writer" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_everything_is_shown_on_request(tmp_path):
    done, log = run(tmp_path, "noise(3)", **{quiet.VERBOSE: "1"})
    assert done.stderr.count(NOISE) == 3 and log == ""


def test_a_silent_death_prints_nothing_of_ours(tmp_path):
    done, _ = run(tmp_path, "os._exit(3)")
    assert (done.returncode, done.stderr) == (3, "")


def test_all_is_as_it_was_afterwards(tmp_path, capfd):
    for _ in range(2):
        with quiet.quiet(tmp_path / "logs" / "stderr.txt"):
            assert quiet.active()
            os.write(2, b"inside\n")
        os.write(2, b"outside\n")
    assert not quiet.active() and capfd.readouterr().err == "outside\noutside\n"
    assert (tmp_path / "logs" / "stderr.txt").read_text() == "inside\ninside\n"
    with quiet.quiet(None):
        assert not quiet.active()
