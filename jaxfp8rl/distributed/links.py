"""Connections between the first process of a run and each of the others, over TCP.

A message is a value of JSON types in which numpy arrays may stand. The arrays are sent as raw bytes after the
JSON, and nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import wait
from typing import Any

import numpy as np

SLICE_S = 1.0  # a wait is cut into slices: signals are handled between two of them
GREETING_S = 10.0  # how long a caller may take for each part of its greeting
LINGER_S = 10.0  # how long `close` waits until the other end has read everything
LENGTHS, NUMBER = struct.Struct(">QQ"), struct.Struct(">I")
PROOF = 32  # bytes of a key, a challenge and its answer
ARRAY = "\0array"  # the only key of an object that stands for an array
ALIGNMENT = 8


def packed(value: Any) -> tuple[bytes, np.ndarray]:
    """(lengths and JSON, the bytes of all arrays [n] uint8). Raises TypeError for what is neither JSON nor an
    array of numbers or text."""
    arrays: list[tuple[int, np.ndarray]] = []
    size = 0

    def reference(x: Any) -> dict[str, Any]:
        nonlocal size
        if not isinstance(x, np.ndarray) or x.dtype.kind in "OV":
            raise TypeError(f"a message cannot hold {getattr(x, 'dtype', type(x).__name__)}: {x!r:.80}")
        arrays.append((size, x))
        size += math.ceil(x.nbytes / ALIGNMENT) * ALIGNMENT
        return {ARRAY: [arrays[-1][0], x.dtype.str, x.shape]}

    header = json.dumps(value, default=reference).encode()
    content = np.zeros(size, np.uint8)
    for start, x in arrays:
        content[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return LENGTHS.pack(len(header), size) + header, content


def unpacked(header: bytes, content: np.ndarray) -> Any:
    """The value of `packed`. Its arrays are views of `content`."""

    def resolved(found: dict[str, Any]) -> Any:
        if ARRAY not in found:
            return found
        start, name, shape = found[ARRAY]
        dtype = np.dtype(name)
        return content[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    return json.loads(header, object_hook=resolved)


class Link:
    """One end of a connection to the process `number`. `sent`: the bytes of all messages so far.

    A thread sends the messages in order, so that no signal interrupts one. Both ends of a link that is closed
    raise EOFError or OSError.
    """

    def __init__(self, connected: socket.socket, number: int):
        connected.settimeout(SLICE_S)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # many messages are short
        self.number, self.sent, self._socket = number, 0, connected
        self._writer, self._last = ThreadPoolExecutor(1, f"link-{number}"), Future[None]()
        self._last.set_result(None)

    def send(self, value: Any) -> None:
        """Queue a message. An error of its transfer is raised by `check`."""
        parts = packed(value)
        self.sent += sum(map(len, parts))
        self._last = self._writer.submit(self._write, *parts)

    def recv(self, idle: Callable[[], object] = lambda: None) -> Any:
        """The next message, however long it takes. `idle` is called while nothing comes."""
        sizes = LENGTHS.unpack(self._read(LENGTHS.size, idle))
        header, content = (self._read(size, idle) for size in sizes)
        return unpacked(header.tobytes(), content)

    def check(self) -> None:
        """Raise EOFError or OSError if the other end is gone and nothing that it sent is left to read."""
        if self._last.done():
            self._last.result()
        if wait([self._socket], 0) and not self._socket.recv(1, socket.MSG_PEEK):
            raise EOFError("it has closed its connection")

    def close(self, linger_s: float = 0.0) -> None:
        """Close this end, once the other has read everything or `linger_s` seconds have passed."""
        until = time.monotonic() + linger_s
        self._writer.shutdown(wait=False)
        with contextlib.suppress(OSError, TimeoutError), self._socket:
            if linger_s:
                self._last.result(linger_s)
                self._socket.shutdown(socket.SHUT_WR)  # a close with unread bytes would discard what was sent
            while time.monotonic() < until and (not wait([self._socket], SLICE_S)
                                                or self._socket.recv(2**16)):
                pass

    def _write(self, *parts: bytes | np.ndarray) -> None:
        for part in map(memoryview, parts):
            while part:
                with contextlib.suppress(TimeoutError):
                    part = part[self._socket.send(part) :]

    def _read(self, size: int, idle: Callable[[], object]) -> np.ndarray:
        content = np.empty(size, np.uint8)
        left = memoryview(content)
        while left:
            try:
                received = self._socket.recv_into(left)
            except TimeoutError:
                idle()
                continue
            if not received:
                raise EOFError("it has closed its connection")
            left = left[received:]
        return content


class Listener:
    """Waits for the other processes of a run. `address` is for `connect`: hosts to try, port, key."""

    def __init__(self, bind: str, hosts: Sequence[str]):
        dual = not bind and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual or ":" in bind else socket.AF_INET
        self._server = socket.create_server((bind, 0), family=family, backlog=128, dualstack_ipv6=dual)
        self._server.settimeout(0.05)
        self._key, self._found = secrets.token_bytes(PROOF), dict[int, socket.socket]()
        self.address = list(hosts), self._server.getsockname()[1], self._key.hex()

    def accept(self, numbers: Sequence[int], seconds: float) -> list[Link]:
        """The links to the processes `numbers`, in their order. Strangers are turned away. Raises
        TimeoutError with the numbers that are missing after `seconds`."""
        until = time.monotonic() + seconds
        with self._server:
            while missing := [n for n in numbers if n not in self._found]:
                if time.monotonic() > until:
                    raise TimeoutError(", ".join(map(str, missing)))
                with contextlib.suppress(TimeoutError):
                    caller = self._server.accept()[0]
                    threading.Thread(target=self._greet, args=(caller,), daemon=True).start()
        return [Link(self._found[n], n) for n in numbers]

    def _greet(self, caller: socket.socket) -> None:
        caller.settimeout(GREETING_S)
        with contextlib.suppress(OSError, EOFError):
            caller.sendall(challenge := secrets.token_bytes(PROOF))
            number, answer = _exactly(caller, NUMBER.size), _exactly(caller, PROOF)
            if hmac.compare_digest(answer, _proof(self._key, challenge + number)):
                caller.sendall(_proof(self._key, answer))
                self._found[NUMBER.unpack(number)[0]] = caller
                return
        caller.close()


def connect(address: tuple[Sequence[str], int, str], number: int, seconds: float) -> Link:
    """The link of process `number` to the first process, whose Listener has `address`. Its hosts share the
    `seconds`: the first process waits no longer. Raises OSError if none answers."""
    hosts, port, key = address
    refusals = []
    for host in hosts:
        try:
            return Link(_called(host, port, bytes.fromhex(key), number, seconds / len(hosts)), 0)
        except (OSError, EOFError) as e:
            refusals.append(f"{host}:{port}: {e}")
    raise ConnectionError("; ".join(refusals))


def hosts_of(address: str) -> tuple[str, list[str]]:
    """(where the first process listens, the names by which the others may reach it), for its address
    HOST:PORT or "". JAX_COORDINATOR_BIND_ADDRESS says where to listen; otherwise an address of the loopback
    stays there, and any other name listens everywhere, as JAX itself does."""
    bind = _host(os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", ""))
    if host := _host(address):
        return bind or (host if host == "localhost" or host.startswith("127.") or host == "::1"
                        else ""), [host]
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        own = socket.gethostbyname_ex(name)[2]
        return bind, [name, *(ip for ip in own if not ip.startswith("127."))]
    return bind, [name]


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _called(host: str, port: int, key: bytes, number: int, seconds: float) -> socket.socket:
    called = socket.create_connection((host, port), timeout=seconds)
    challenge, own = _exactly(called, PROOF), NUMBER.pack(number)
    called.sendall(own + (answer := _proof(key, challenge + own)))
    if hmac.compare_digest(_exactly(called, PROOF), _proof(key, answer)):
        return called
    called.close()
    raise ConnectionError("another program answers there")


def _proof(key: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, challenge, "sha256")


def _exactly(connected: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (more := connected.recv(size - len(found))):
            raise EOFError("it has closed its connection")
        found += more
    return found
