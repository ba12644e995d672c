"""`vllm serve` as children: readiness, their ends however this process ends, and what killed runs leave. A
stub stands for vLLM."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.processes import runs, until
from bridges.api import BridgeError, EngineUnhealthy
from bridges.served import serve_process
from bridges.served.serve_process import PREFIX, ServeProcesses

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def stub(monkeypatch, tmp_path):
    """Its script, and a folder for temporary files of the test's own."""
    script = tmp_path / "vllm"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -S -E {HERE}/stub_vllm.py \"$@\"\n")
    script.chmod(0o755)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(serve_process, "console_script", lambda: str(script))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


def family(stub) -> list[int]:
    """The stub and its child, once they are there."""
    until(lambda: (stub / "pids").exists() and len((stub / "pids").read_text().split()) == 2)
    return [int(x) for x in (stub / "pids").read_text().split()]


def test_two_engines_start_answer_and_end_with_their_folder(stub):
    lines = []
    with ServeProcesses("model", ["--pid-file", str(stub / "pids")], 2, say=lines.append,
                        of_child=lambda i: (["--seed", str(5 + i)], {"CUDA_VISIBLE_DEVICES": str(i)})) as p:
        p.wait_until_ready(20)
        assert lines == sorted(lines) and lines[-1] == "2 of 2 ready" and len(set(p.ports)) == 2
        folder = p.token_file.parent
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (p.token_file, folder)]
        assert modes == [0o600, 0o700]
        assert p.token_file.read_text() == p.token and p.token not in " ".join(
            Path(f"/proc/{p.pid(0)}/cmdline").read_text().split("\0"))
        logs = [p.log(i).read_text() for i in range(2)]
        assert all(f"seed='{5 + i}'" in log and log.strip().endswith(str(i)) for i, log in enumerate(logs))
        assert all("host='127.0.0.1'" in log for log in logs), "of this machine alone"
        pids = [*family(stub), p.pid(0), p.pid(1)]
    until(lambda: not any(map(runs, pids)))
    assert not folder.exists()
    with pytest.raises(EngineUnhealthy, match="the engines are closed"):
        p.start(0)


def test_one_that_ends_at_once_says_why(stub):
    with ServeProcesses("model", ["--fail", "no such model: x"], logs=stub / "logs") as p:
        said = "engine 0 ended with exit status 1 before.*\n.*no such model: x"
        with pytest.raises(EngineUnhealthy, match=said) as e:
            p.wait_until_ready(20)
        assert e.value.next_step == f"see {stub}/logs/engine-0.log"
    assert (stub / "logs" / "engine-0.log").exists(), "a log where the caller wants it stays"


def test_a_taken_port_is_said(stub, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(serve_process, "_free_ports", lambda count: (taken.getsockname()[1],))
        with ServeProcesses("model", []) as p, pytest.raises(EngineUnhealthy, match="Address already in use"):
            p.wait_until_ready(20)


def test_one_that_never_answers_is_given_up(stub):
    with ServeProcesses("model", ["--pid-file", str(stub / "pids")]) as p:
        family(stub)
        os.kill(-p.pid(0), signal.SIGSTOP)
        with pytest.raises(EngineUnhealthy, match="engine 0 is not ready after"):
            p._answers = lambda i: False
            p.wait_until_ready(0.3)
        os.kill(-p.pid(0), signal.SIGCONT)


def test_a_killed_one_starts_anew_at_its_address_and_takes_its_children_along(stub):
    with ServeProcesses("model", ["--pid-file", str(stub / "pids")]) as p:
        p.wait_until_ready(20)
        first, url = family(stub), p.urls[0]
        os.kill(p.pid(0), signal.SIGKILL)
        until(lambda: not p.alive(0))
        p.start(0)
        p.wait_until_ready(20, only=0)
        assert not any(map(runs, first)) and p.urls[0] == url and p.alive(0)


PARENT = """
import sys, time
sys.path[:0] = sys.argv[1:2]
import tempfile
tempfile.tempdir = sys.argv[2]
from bridges.served import serve_process
serve_process.console_script = lambda: sys.argv[3]
p = serve_process.ServeProcesses("model", ["--pid-file", sys.argv[4]])
time.sleep(60)
"""


def parent(stub) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", PARENT, str(HERE.parents[1]), str(stub / "temporary"),
                             str(stub / "vllm"), str(stub / "pids")])


def test_a_killed_parent_takes_all_along_and_its_folder_is_swept(stub):
    process = parent(stub)
    pids = family(stub)
    [folder] = (stub / "temporary").glob(f"{PREFIX}*")
    serve_process.sweep()
    assert folder.exists(), "its owner lives"
    process.kill()
    process.wait()
    until(lambda: not any(map(runs, pids)))
    serve_process.sweep()
    assert not folder.exists()


def test_another_users_folder_does_not_hold_up_a_sweep(stub, monkeypatch):
    left = stub / "temporary" / f"{PREFIX}left"
    left.mkdir()
    os.mkfifo(left / "lock")  # to open it is to wait for somebody who writes
    monkeypatch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
    serve_process.sweep()
    assert left.exists()


def test_a_group_that_outlived_its_run_is_swept(stub):
    with ServeProcesses("model", ["--pid-file", str(stub / "pids")]) as p:
        pids = family(stub)
        left = stub / "temporary" / f"{PREFIX}left"
        left.mkdir()
        (left / "lock").touch()
        (left / "engine-0.pid").write_text(str(pids[0]))
        (left / "engine-1.pid").write_text("no number")
        serve_process.sweep()
        assert not left.exists() and p.alive(0), "its number is another's, which does not know the token"
        p._lock.close()  # as if this process had gone
        serve_process.sweep()
        until(lambda: not any(map(runs, pids)))


def test_a_run_that_sweeps_leaves_one_alone_that_is_just_starting(stub, monkeypatch):
    lock, swept = fcntl.flock, list[Path]()

    def flock(file, how) -> None:
        if how == fcntl.LOCK_EX and not swept:  # the new folder is there, and nobody has locked it
            swept.extend((stub / "temporary").glob(f"{PREFIX}*"))
            serve_process.sweep()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with ServeProcesses("model", ["--pid-file", str(stub / "pids")]) as p:
        p.wait_until_ready(20)
        assert len(swept) == 1 and not swept[0].exists() and p.token_file.exists()


def test_where_one_cannot_be_started_the_others_are_ended(stub):
    started = []

    def of_child(i: int):
        if i == 1:
            started.extend(family(stub))
            raise OSError("no memory for another process")
        return (), {}

    with pytest.raises(OSError, match="no memory"):
        ServeProcesses("model", ["--pid-file", str(stub / "pids")], 2, of_child=of_child)
    until(lambda: not any(map(runs, started)))  # the stub's child is not ours to wait for
    assert not list((stub / "temporary").iterdir())


def test_without_vllm_the_next_step_is_said(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(serve_process.sysconfig, "get_path", lambda name: "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BridgeError, match="console script of vLLM is not installed") as e:
        serve_process.console_script()
    assert "pip install" in e.value.next_step
