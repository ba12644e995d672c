"""Calls over HTTP, for those who know the token: the server's half of `bridges.served.engine_server`, which
knows no engine."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from bridges.api import BridgeError
from bridges.served import wire

TOKEN_CHARACTERS = 16
BODY_BYTES = 2**30  # the largest body that is read
# of a body without the token, so that the refusal can be read before the connection is closed
UNTRUSTED_BYTES = 2**16
IDLE_SECONDS = 60.0  # for which a connection may say nothing, or take nothing
PIECE_BYTES = 2**20  # of a reply that is written at once: each has IDLE_SECONDS


class HttpServer(ThreadingHTTPServer):
    """Bound to its port when made; `answer(method, arguments, seconds)` is asked for each call that shows the
    token.

    Raises BridgeError where the token is too short, the port is taken, or `host` lies outside this machine
    without `allow_network`: calls travel in the clear.
    """

    daemon_threads = True

    def __init__(self, token: str, host: str = "127.0.0.1", port: int = 0, *, allow_network: bool = False):
        if not (is_loopback(host) or allow_network):
            raise BridgeError(f"{host} can be reached from other machines, and calls travel in the clear",
                              "use 127.0.0.1 and a tunnel (ssh -L), or ask for it with --allow-network")
        if len(token) < TOKEN_CHARACTERS or not (token.isascii() and token.isprintable()):
            raise BridgeError(f"a token has at least {TOKEN_CHARACTERS} printable ASCII characters",
                              "make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'")
        self._expected = f"Bearer {token}".encode()
        try:
            super().__init__((host, port), _Handler)
        except OSError as e:
            hint = "it is taken" if e.errno == errno.EADDRINUSE else str(e)
            raise BridgeError(f"cannot listen on {host}:{port}: {hint}",
                              "--port 0 takes a free port and says which") from e

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of this machine's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def admits(self, authorization: str) -> bool:
        return hmac.compare_digest(authorization.encode("utf-8", "replace"), self._expected)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is not news; anything else is told on standard error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One call a connection."""

    server: HttpServer
    timeout = IDLE_SECONDS
    server_version, sys_version = "engine", ""

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        length = int(length) if length.isdecimal() else 0
        if not self.server.admits(self.headers.get("Authorization", "")):
            self.rfile.read(min(length, UNTRUSTED_BYTES))
            return self._reply(401, _refusal("the engine's server refused the token",
                                             "use the one it was started with"))
        if length > BODY_BYTES:
            return self._reply(413, _refusal(f"a call has a Content-Length of at most {BODY_BYTES}",
                                             "ask for fewer at once"))
        self._reply(*self._call(self.rfile.read(length)))

    def _call(self, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            seconds = float(self.headers.get("Deadline-Seconds", IDLE_SECONDS))
            result = self.server.answer(self.path.removeprefix("/v1/"), json.loads(body), seconds)
        except Exception as e:  # carried to the other side, by its class
            status = 400 if isinstance(e, ValueError) else 409 if isinstance(e, BridgeError) else 500
            return status, {"error": wire.pack_error(e)}
        return 200, {"result": result}

    def _reply(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for at in range(0, len(body), PIECE_BYTES):
            self.wfile.write(body[at : at + PIECE_BYTES])

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a request line a call would drown what the engine has to say."""


def _refusal(message: str, next_step: str) -> dict[str, Any]:
    return {"error": wire.pack_error(BridgeError(message, next_step))}


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
