"""Processes that benchmarks and tests start: their ports, what they find or say, and their ends. It needs the
standard library alone, but for `answered`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def free_port() -> int:
    """A port of the loopback interface on which nobody listens now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def child(command: Sequence[str], patience: float = 0.0, **options: Any) -> Iterator[subprocess.Popen]:
    """A process, started with the `options` of Popen. In the end it is told to end, and after `patience`
    seconds it is killed with all its children."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        if patience:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        kill_group(process)


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process that leads a group, and its children, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def found_by(script: str, *words: str, given: Sequence[str] | None = None,
             environment: Mapping[str, str] | None = None) -> Any:
    """What a benchmark finds in a process of its own: the JSON in the file that follows `words` behind
    --child. given: its other arguments, by default those of this process. Exits if that fails."""
    given = sys.argv[1:] if given is None else given
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, script, *given, "--child", *words, str(out)]
        if subprocess.run(command, env=os.environ | (environment or {})).returncode:
            sys.exit(f"{' '.join(words)} failed: see above")
        return json.loads(out.read_text())


def visible(count: int) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names; without it the first `count`."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(count)]


def answered(child: Sequence[str] | None, find: Callable[..., Any]) -> bool:
    """Whether this process is one that `found_by` has started, by the words of --child: then what `find`
    returns for them is in their file."""
    if child:
        from jaxfp8rl.cli.bench import memory_explained

        *words, out = child
        with memory_explained(f"`{sys.argv[0]} --help` lists the options: choose less work by them"):
            Path(out).write_text(json.dumps(find(*words)))
    return bool(child)


def said_by_learners(command: Sequence[str], environments: Sequence[Mapping[str, str]],
                     seconds: float) -> list[str]:
    """What the processes of one learner say, all by the same command. environments: variables of each, beside
    this process's and those by which JAX's processes meet. All must end well, each within so many seconds."""
    shared = os.environ | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    processes = [subprocess.Popen(command, env=shared | own | {"JAX_PROCESS_ID": str(i)}, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                 for i, own in enumerate(environments)]
    said = [process.communicate(timeout=seconds)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(text[-3000:] for text in said)
    return said


def printed(program: str, *words: str, **variables: str) -> str:
    """What a program in Python prints, which runs in the checkout with these environment variables. It must
    end well."""
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=Path(__file__).parents[1],
                          env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def on_devices(count: int, program: str, *words: str) -> str:
    """What a program prints whose JAX has `count` CPUs as devices."""
    return printed(program, *words, JAX_NUM_CPU_DEVICES=str(count), JAX_PLATFORMS="cpu",
                   JAX_DISABLE_MOST_OPTIMIZATIONS="1")


def until(true: Callable[[], Any], seconds: float = 5.0) -> None:
    """Wait until it is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def runs(pid: int | str) -> bool:
    """Whether a process runs. One that has ended may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
