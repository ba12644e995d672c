"""A rollout engine that lives in another process, and `spawn`, which starts one: the other side of
`engine_server`.

    with spawn("vllm", hf_config, weights="bfloat16", max_model_len=4096) as engine:
        transport = RemoteFile()  # bridges.served.remote_file
        transport.open(engine)

Needs neither torch nor vLLM. Every call has a deadline, and an engine that is dead or hangs is an
EngineUnhealthy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bridges.api import (
    BridgeError,
    Capabilities,
    Completion,
    EngineDirty,
    EngineUnhealthy,
    GenRequest,
    Health,
    ParamMeta,
)
from bridges.inside_vllm import device_pool
from bridges.served import wire

CLOSE_SECONDS = 20.0  # for an engine to free its memory before it is killed
REAP_SECONDS = 0.2  # in which an end is known, once its socket is closed
START_OVER = "start a new engine and publish to it"


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Seconds: to reach the server, for a `generate`, for each of the two calls of a publish, and for any
    other call."""

    connect: float = 5.0
    generate: float = 1800.0
    publish: float = 600.0
    call: float = 60.0


class RemoteEngine:
    """RolloutEngine over an engine server. Calls may come from several threads: the server takes them in
    turn.

    Raises, besides what the engine itself raises: EngineUnhealthy when the server is gone or does not answer
    by the deadline; BridgeError when it refuses the token or speaks another protocol. `dirty` says why this
    side takes the engine for dirty whatever the server says: a publish whose end was not seen. leave_running:
    `close` does not end the server.
    """

    def __init__(self, url: str, token: str, deadlines: Deadlines = Deadlines(), *,
                 leave_running: bool = False):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise BridgeError(f"{url!r} is not the address of an engine's server",
                              "http://HOST:PORT, as it said when it started")
        self.url, self._address, self._token, self.deadlines = url, (
            parts.hostname, parts.port), token, deadlines
        self.dirty: str | None = None
        self._leave_running = leave_running
        hello = self.call("hello")
        if hello["protocol"] != wire.PROTOCOL:
            raise BridgeError(f"the server speaks protocol {hello['protocol']}, this is {wire.PROTOCOL}",
                              "install one version of this package on both sides")
        self._capabilities = wire.unpack_capabilities(hello["capabilities"])
        self.folder, self.pid = hello["folder"], hello["pid"]

    def call(self, method: str, seconds: float | None = None, **arguments: Any) -> Any:
        """The result of `method`, within `seconds` (default `deadlines.call`) in all."""
        seconds = self.deadlines.call if seconds is None else seconds
        host, port = self._address
        start, connection = time.monotonic(), http.client.HTTPConnection(
            host, port, min(self.deadlines.connect, seconds))
        try:
            connection.connect()
            with _cut_off(connection.sock, start + seconds - time.monotonic()):
                answer = json.loads(self._exchange(connection, method, seconds, arguments))
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as e:
            passed = time.monotonic() - start
            raise EngineUnhealthy(
                f"{method}: no answer from the engine at {host}:{port} after {passed:.1f} of {seconds:.1f} s "
                f"({type(e).__name__}: {e})", START_OVER) from e
        finally:
            connection.close()
        if "error" in answer:
            raise wire.unpack_error(answer["error"])
        return answer["result"]

    def _exchange(self, connection: http.client.HTTPConnection, method: str, seconds: float,
                  arguments: dict) -> bytes:
        connection.sock.settimeout(seconds)
        headers = {"Authorization": f"Bearer {self._token}", "Deadline-Seconds": str(seconds),
                   "Content-Type": "application/json"}
        connection.request("POST", f"/v1/{method}", json.dumps(arguments).encode(), headers)
        return connection.getresponse().read()

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        """See RolloutEngine. Given up at the deadline, the engine may be busy with it still: the next call
        waits its turn."""
        if self.dirty:
            raise EngineDirty(f"the engine has no usable weights: {self.dirty}",
                              "publish a full set of weights first")
        groups = self.call("generate", self.deadlines.generate,
                           requests=[wire.pack_request(r) for r in requests])
        return [[wire.unpack_completion(c) for c in group] for group in groups]

    def pause(self) -> None:
        self.call("pause")

    def resume(self) -> None:
        self.call("resume")

    def sleep(self) -> None:
        self.call("sleep")

    def wake(self) -> None:
        device_pool.give_back()  # the server may be on this GPU
        self.call("wake")

    def health(self) -> Health:
        """Not ok, and why, also when the server cannot be reached."""
        try:
            return Health(**self.call("health"))
        except EngineUnhealthy as e:
            return Health(False, str(e))

    def weight_version(self) -> int | None:
        return None if self.dirty else self.call("weight_version")

    def expected_manifest(self) -> tuple[ParamMeta, ...]:
        """Every tensor a publish must bring, in checkpoint layout."""
        return wire.unpack_manifest(self.call("expected_manifest"))

    def close(self) -> None:
        """Have the server close its engine and end, unless it is to be left running. It may be gone
        already."""
        self.dirty = "the engine is closed"
        if self._leave_running:
            return
        with contextlib.suppress(EngineUnhealthy):
            self.call("close", self.deadlines.connect)


@contextlib.contextmanager
def _cut_off(sock: socket.socket, seconds: float) -> Iterator[None]:
    """Shut the socket after `seconds`, whatever is being read or written: a socket's own timeout starts anew
    at each byte."""
    timer = threading.Timer(seconds, _shut, [sock])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed meanwhile
        sock.shutdown(socket.SHUT_RDWR)


class SpawnedEngine(RemoteEngine):
    """A RemoteEngine whose server is a child of this process: it ends with `close`, and with this process,
    however that goes.

    When the child ends, whatever its exit status, a call in progress fails at once: its socket may live on in
    a grandchild.
    """

    def __init__(self, child: subprocess.Popen, ready: dict[str, Any], token: str, deadlines: Deadlines,
                 own_folder: bool):
        self._child, self._own_folder = child, own_folder
        self._ended, self._in_use = threading.Event(), set()
        threading.Thread(target=self._mourn, name="engine's end", daemon=True).start()
        super().__init__(ready["url"], token, deadlines)

    def _mourn(self) -> None:
        self._child.wait()
        self._ended.set()
        for sock in list(self._in_use):
            _shut(sock)

    def _exchange(self, connection: http.client.HTTPConnection, *args: Any) -> bytes:
        sock = connection.sock
        self._in_use.add(sock)
        try:
            if self._ended.is_set():  # it went before `_mourn` could see this socket
                raise ConnectionResetError("the engine's process has ended")
            return super()._exchange(connection, *args)
        finally:
            self._in_use.discard(sock)

    def call(self, method: str, seconds: float | None = None, **arguments: Any) -> Any:
        """As of RemoteEngine; the error says how the child ended, if it did."""
        try:
            return super().call(method, seconds, **arguments)
        except EngineUnhealthy as e:
            if not self._ended.wait(REAP_SECONDS):
                raise
            code = self._child.returncode
            how = f"with exit status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
            said = str(e).partition("\n")[0]
            raise EngineUnhealthy(f"{said}; its process has ended {how}", START_OVER) from e

    def close(self) -> None:
        """End the child. Idempotent."""
        self.dirty = "the engine is closed"
        _end(self._child)
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)  # left behind by a server that was killed


def start(
    engine: str, hf_config: dict[str, Any] | None = None, *, folder: str | Path | None = None,
    start_seconds: float = 600.0,
    deadlines: Deadlines = Deadlines(), environment: dict[str, str] | None = None, **options: Any,
) -> SpawnedEngine:
    """An engine ("vllm", or "fake") in a child process. The caller closes it.

    hf_config: the contents of config.json. folder: where weights are left as files (default: a new one, which
    goes with the engine; a folder in memory, /dev/shm say, is faster). environment: variables for the child
    beside this process's own. options: those of the engine's constructor, and for vLLM transport "reload"
    (any model), "in_place" (proves every publish), or "auto" (in place where the model's layout is known).

    Raises what the engine raised while it was built; EngineUnhealthy when it ends or is not there after
    `start_seconds`.
    """
    token = secrets.token_urlsafe(32)
    command = [sys.executable, "-m", "bridges.served.engine_server", "--engine", engine, "--parent",
               str(os.getpid())]
    command += ["--config", "/dev/stdin"] if hf_config is not None else []
    command += ["--folder", str(folder)] if folder else []
    command += [f"--{name.replace('_', '-')}={json.dumps(value)}" for name, value in options.items()]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, **(environment or {}), wire.TOKEN_VARIABLE: token},
    )
    ready = {}
    try:
        with contextlib.suppress(BrokenPipeError), child.stdin:  # a child that ends at once says why below
            child.stdin.write(json.dumps(hf_config).encode())
        ready = _ready(child, start_seconds)
        return SpawnedEngine(child, ready, token, deadlines, own_folder=not folder)
    except BaseException:
        _end(child)
        raise


@contextlib.contextmanager
def spawn(engine: str, hf_config: dict[str, Any] | None = None, **arguments: Any) -> Iterator[SpawnedEngine]:
    """`start`, for a `with` block."""
    with contextlib.closing(start(engine, hf_config, **arguments)) as running:
        yield running


def _ready(child: subprocess.Popen, seconds: float) -> dict[str, Any]:
    """What the server says once it answers."""
    if not select.select([child.stdout], [], [], seconds)[0]:
        raise EngineUnhealthy(f"the engine has not started within {seconds:.0f} s",
                              "see its standard error; raise start_seconds")
    line = child.stdout.readline()
    if not line:
        raise EngineUnhealthy(f"the engine ended before it answered, exit code {child.wait()}",
                              "see its standard error")
    ready = json.loads(line)
    if "error" in ready:
        raise wire.unpack_error(ready["error"])
    return ready


def _end(child: subprocess.Popen) -> None:
    """Ask it to end, then enforce that, for the child's own children, too. Once: its number may be another's
    afterwards."""
    if child.stdout.closed:
        return
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(CLOSE_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
