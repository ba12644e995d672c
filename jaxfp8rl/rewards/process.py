"""A process that can be killed: for code that may be slow, hang or crash, and that is not trusted.

It is a fresh Python process, never a fork of a process that has loaded JAX. Both directions carry one JSON
object a line. Its first line is `{"ready": true}`, or `{"fatal": why, "next_step": ...}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfp8rl.data.environment_task import HASHES
from jaxfp8rl.errors import ConfigError

START_TIMEOUT_S = 120.0  # importing a library on a busy machine takes many seconds
NO_DEADLINE = float("inf")
STDERR_BYTES = 2**20  # of a process's stderr that are kept, to quote its last line in an error
LINE_BYTES = 2**26  # a longer line is taken for a crash


class LineProcess:
    """`python -m MODULE SOCKET_FD WORDS...`. `ready`: it has said so. `deadline`: the time limit of its start
    or of its current work, in seconds of time.monotonic(). `timeout_s`: how long it may take to read a
    line."""

    def __init__(self, module: str, words: Sequence[str], timeout_s: float):
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(timeout_s)
        self.ready, self.deadline = False, time.monotonic() + START_TIMEOUT_S
        self._buffer = b""
        self._stderr = tempfile.TemporaryFile()  # closed by kill()
        argv = [sys.executable, "-P", "-m", module, str(theirs.fileno()), *words]
        with theirs:
            # In its own session, so that one signal reaches every process that it forks.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._stderr,
                pass_fds=[theirs.fileno()], start_new_session=True, env=child_environment())

    def write(self, message: dict[str, Any]) -> None:
        """Send a message. Raises OSError if the process is dead or does not read."""
        # it may print at each call, so the file is emptied from time to time
        if os.fstat(self._stderr.fileno()).st_size > STDERR_BYTES:
            self._stderr.seek(0)  # also moves the child's position, which it inherited with the file
            self._stderr.truncate()
        self.sock.sendall((json.dumps(message) + "\n").encode())

    def read(self) -> list[dict[str, Any]]:
        """The messages that have arrived whole, without the one that says that the process is ready.

        Raises EOFError if the process has died or writes a line without an end, ConfigError if it could not
        start.
        """
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data or len(self._buffer) > LINE_BYTES:
            raise EOFError
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if messages and not self.ready:
            self._started(messages.pop(0))
        return messages

    def _started(self, hello: dict[str, Any]) -> None:
        if "fatal" in hello:
            raise ConfigError(hello["fatal"], hello.get("next_step", "run it by hand in a fresh Python"))
        self.ready, self.deadline = True, NO_DEADLINE

    def last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote no error message"

    def kill(self) -> None:
        """End the process and all that it started, in sessions of their own too."""
        below = _below(self._process.pid)
        # before wait(): until it is reaped, no other gets its id
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self.sock.close()
        self._stderr.close()


def _below(pid: int) -> list[int]:
    """The processes that this one started, and those that they did."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(pid, ()))
    for child in found:  # which grows meanwhile
        found += children.get(child, ())
    return found


# It removes a variable too many rather than too few, but neither PWD, which is a folder, nor names that only
# begin like these words, such as PATH and TOKENIZERS.
_SECRET = re.compile(
    r"PASSW|PASSPHRASE|SECRET|CREDENTIAL|(TOKEN|KEY|PASS|CRED)S?(?![A-Z])|(_PWD|(?<![A-Z])PAT)(?![A-Z])",
    re.IGNORECASE)



def child_environment() -> dict[str, str]:
    """The environment of such a process: this process's modules, without its secrets, without a GPU and with
    one thread a library, so that it does not slow the learner down. All such processes hash alike, so that
    what takes the first word of a set, say, takes the same word in each."""
    kept = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **HASHES}
