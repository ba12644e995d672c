"""Jobs as child processes of this one, wherever this one runs. A child leads a process group, which ends with
this process, however that goes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from jaxfp8rl.launch.jobs import Job

END_SECONDS = 20.0  # after SIGTERM, until SIGKILL
# The group ends when nobody holds the other end of standard input any more.
WITH_PARENT = 'exec 3<&0; (read _ <&3; kill -KILL 0) & exec 3<&-; exec "$@" </dev/null'


def program(words: tuple[str, ...]) -> list[str]:
    """The command of a job in the environment of this process."""
    if words[0] != "vllm":
        return [sys.executable, "-m", "jaxfp8rl", *words[1:]]
    from jaxfp8rl.rollout.served import serve_script  # it loads jax

    return [serve_script(), *words[1:]]


class Child:
    """The process of a job. log: takes its output; None: this process's own output does."""

    def __init__(self, job: Job, log: Path | None = None):
        self.job, self.log = job, log
        read, write = os.pipe()
        with contextlib.ExitStack() as stack:
            stdin = stack.enter_context(os.fdopen(read, "rb"))
            out = stack.enter_context(log.open("ab")) if log else None
            self._pipe: IO[bytes] = os.fdopen(write, "wb")
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", WITH_PARENT, job.words[0], *program(job.words)], stdin=stdin, stdout=out,
                stderr=subprocess.STDOUT if out else None, start_new_session=True,
                env={**os.environ, **job.environment})

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, as a shell has it; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def wait(self) -> int:
        self._process.wait()
        return self.poll() or 0

    def signal(self, number: int) -> None:
        if self.poll() is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Ask it to end, then end it with its group. Idempotent."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # the shell of the group is there still
        self._process.wait()
        self._pipe.close()


class Restarted:
    """A Child that is started again, `restarts` times, when it ends."""

    def __init__(self, job: Job, log: Path, restarts: int):
        self._job, self._log, self._budget, self.restarts = job, log, restarts, 0
        self._child = Child(job, log)

    @property
    def pid(self) -> int:
        return self._child.pid

    def poll(self) -> int | None:
        """The exit code once it has ended for good."""
        code = self._child.poll()
        if code is None or self.restarts >= self._budget:
            return code
        self._child.end()
        self.restarts += 1
        print(f"{self._job.name} ended with exit status {code}; it is started again, "
              f"{self.restarts} of {self._budget} times", file=sys.stderr, flush=True)
        self._child = Child(self._job, self._log)
        return None

    def signal(self, number: int) -> None:
        self._child.signal(number)

    def end(self) -> None:
        self._budget = 0
        self._child.end()


def last_lines(log: Path, count: int = 12) -> str:
    """The end of a log, for an error."""
    with contextlib.suppress(OSError):
        return "".join(f"\n    {line}" for line in log.read_text(errors="replace").splitlines()[-count:])
    return ""
