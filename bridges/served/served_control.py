"""The control routes of one guarded `vllm serve`: calls with the token and the lease, and the thread that
renews the lease."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

from bridges.api import BridgeError, EngineUnhealthy, PublishFailed, first_line
from bridges.vllm_plugin.access import LEASE_SECONDS

LEASE_ROUTE, LEASE_HEADER = "/jaxfp8rl/lease", "x-jaxfp8rl-lease"
RENEWALS = 4  # a lease
CALL_SECONDS = 30.0
MOST_BYTES = 2**30  # of an answer


class Server:
    """One engine's control routes, for its one learner. Calls may come from several threads.

    url: http://HOST:PORT. holder: who this learner is, for a second one that is refused. lost: why the lease
    is no longer this learner's, or "".
    """

    def __init__(self, url: str, token: str, holder: str = ""):
        self.url, self._token, self._key = checked_url(url), token, ""
        self._parts = urllib.parse.urlsplit(self.url)
        self._holder = holder or f"process {os.getpid()} on {socket.gethostname()}"
        self.lost, self._ended = "", threading.Event()

    def call(self, path: str, body: Any = None, seconds: float = CALL_SECONDS, method: str = "POST") -> Any:
        """The JSON that is answered.

        Raises PublishFailed for what the engine refuses or fails at, BridgeError for a refused token or
        lease and for an answer that is not JSON, EngineUnhealthy for no answer within `seconds` and for too
        large an answer.
        """
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=seconds)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json",
                   LEASE_HEADER: self._key}
        try:
            with _deadline(connection, seconds):
                connection.request(method, path, json.dumps(body if body is not None else {}), headers)
                response = connection.getresponse()
                status, raw = response.status, response.read(MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as e:
            raise EngineUnhealthy(f"{self.url}{path}: no answer within {seconds:g} s "
                                  f"({type(e).__name__}: {e})",
                                  "see the engine's log; its process may have ended") from e
        finally:
            connection.close()
        if len(raw) > MOST_BYTES:
            raise EngineUnhealthy(f"{self.url}{path}: an answer of more than {MOST_BYTES >> 20} MiB",
                                  "is it a vLLM at that address?")
        if status != 200:
            raise self._error(path, status, raw)
        try:
            return json.loads(raw) if raw else None
        except (ValueError, RecursionError) as e:
            raise BridgeError(f"{self.url}{path}: the answer is not JSON: {said(raw)[0]}",
                              "is it a vLLM at that address?") from e

    def _error(self, path: str, status: int, raw: bytes) -> BridgeError:
        why, next_step = said(raw)
        if status == 401:
            return BridgeError(f"{self.url} refuses the token (401)",
                               "use the token that the engine was started with")
        if path == LEASE_ROUTE or status in (404, 501):
            why = why if status != 404 else f"it has no route {path}"
            step = next_step or "start it with the plugin: docs/vllm_server.md"
            return BridgeError(f"{self.url}: {why}", step)
        return PublishFailed(f"{self.url}{path} ({status}): {self.lost or why}",
                             next_step or "publish again in full")

    def take(self) -> None:
        """Take the lease, and renew it until `release`. Raises BridgeError, which names the holder, if
        another learner has it."""
        asked = {"holder": self._holder, "seconds": LEASE_SECONDS}
        try:
            self._key = self.call(LEASE_ROUTE, asked | {"lease": self._key})["lease"]
        except EngineUnhealthy:
            raise
        except BridgeError:
            if not self._key:
                raise
            # the engine has started anew, or the lease has ended
            self._key = self.call(LEASE_ROUTE, asked)["lease"]
        self._ended.set()  # an earlier lease is not renewed any more
        self.lost, self._ended = "", threading.Event()
        threading.Thread(target=self._renew, args=(self._ended,), name="lease", daemon=True).start()

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(LEASE_SECONDS / RENEWALS):
            try:
                self.call(LEASE_ROUTE, {"lease": self._key, "seconds": LEASE_SECONDS},
                          LEASE_SECONDS / RENEWALS)
            except EngineUnhealthy:
                continue  # the next may come through
            except BridgeError as e:
                if not ended.is_set():
                    self.lost = first_line(e)
                return

    def release(self) -> None:
        """Give the lease back. A server that does not answer lets it end."""
        self._ended.set()
        if self._key:
            with contextlib.suppress(BridgeError):
                self.call(LEASE_ROUTE, seconds=LEASE_SECONDS, method="DELETE")
        self._key = ""


@contextlib.contextmanager
def _deadline(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """Connect, and break the connection off once `seconds` have passed: a socket's own timeout is that of one
    read. Raises TimeoutError then."""
    end = time.monotonic() + seconds
    connection.connect()
    alarm = threading.Timer(end - time.monotonic(), _break_off, [connection.sock])
    alarm.daemon = True
    alarm.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if time.monotonic() < end:
            raise
    finally:
        alarm.cancel()
    if time.monotonic() >= end:
        raise TimeoutError("timed out")


def _break_off(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed by now
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of TLS, too


def said(raw: bytes) -> tuple[str, str]:
    """(the error in an answer of the guard or of vLLM, or what it begins with, its next step)."""
    try:
        content = json.loads(raw)
        error = content["error"]
        return str(error["message"] if isinstance(error, dict) else error), str(content.get("next_step", ""))
    except (ValueError, KeyError, TypeError, RecursionError):
        return repr(raw[:200].decode("utf-8", "replace")), ""


def checked_url(url: str) -> str:
    """`url` without a slash at its end. Raises BridgeError for what is no address of an HTTP server."""
    try:
        parts = urllib.parse.urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        whole = whole and not (parts.path.strip("/") or parts.query or parts.username)
    except ValueError:  # a port that is none
        whole = False
    if not whole:
        raise BridgeError(f"{url!r} is not the address of an engine",
                          "http://HOST:PORT, where `vllm serve` listens")
    return url.rstrip("/")
