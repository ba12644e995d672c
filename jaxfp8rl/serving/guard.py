"""Before all routes: the token, and the largest body. Errors are JSON with `error` and `next_step`, which the
client prints whole."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from jaxfp8rl.errors import ConfigError, UserError
from jaxfp8rl.serving.futures import json_answer
from jaxfp8rl.serving.refusal import Refused

LARGEST_BODY = 64 * 2**20  # the client sends 5 MB at once, or one datum
PREFIX = "tml-"  # the client refuses a key without it
KEY = b"x-api-key"
HEAD = 512  # bytes that are kept of a body that is too large: they hold its model and its number
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


def api_key(token: str) -> str:
    """The key that clients give for a token: the client wants a prefix."""
    return token if token.startswith(PREFIX) else PREFIX + token


def check_port(host: str, port: int) -> None:
    """Raise UserError unless this process may listen there: to be asked before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(address)
    except OSError as e:
        raise UserError(f"--port {port}: cannot listen on {host}: {e.strerror}",
                        "end the process that listens there, or give another --port") from e


def check_host(host: str, token: str) -> None:
    """Raise ConfigError for an address that others can reach, unless there is a token."""
    if not token and not is_loopback(host):
        raise ConfigError(f"--host {host}: without a token, everyone who can reach it could use this server",
                          "give --token-file, or leave --host out (127.0.0.1)")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class TooLarge(Refused):
    """`head`: how the body begins."""

    def __init__(self, largest: int, head: bytes):
        super().__init__(f"the body has more than {largest} bytes", "send fewer data at once", 413)
        self.head = head


class Guard:
    """ASGI middleware. Without a token every key is admitted, but some key must be given, and the host that
    is asked for must be this machine: a page in a browser can send neither to another site."""

    def __init__(self, app: Callable[..., Awaitable[None]], token: str, largest_body: int = LARGEST_BODY):
        self._app, self._key, self._largest = app, api_key(token).encode() if token else b"", largest_body

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # a websocket is closed unanswered
        try:
            headers = dict(scope["headers"])
            self._admit(headers, [v for k, v in scope["headers"] if k == KEY])
            await self._app(scope, self._bounded(receive, headers.get(b"content-length", b"0")), send)
        except Refused as e:
            await _answer(send, e)

    def _admit(self, headers: dict[bytes, bytes], keys: list[bytes]) -> None:
        right = len(keys) == 1 and (hmac.compare_digest(keys[0], self._key) if self._key else bool(keys[0]))
        if not right:
            what = "is missing" if not keys else "is wrong"
            raise Refused(f"the API key {what}",
                          f"TINKER_API_KEY={PREFIX}<the token of this server's --token-file>",
                          401)
        asked = headers.get(b"host", b"").decode("latin-1")
        if not self._key and not is_loopback(asked.rpartition(":")[0] if asked[-1:] != "]" and ":" in asked
                                             else asked):
            raise Refused(f"the host {asked!r}: without a token this server answers to its "
                          f"loopback names alone",
                          "use http://127.0.0.1, or start the server with --token-file", 403)
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise Refused(f"a body in {headers[b'content-encoding'].decode('latin-1')!r}: this server reads "
                          "plain bodies", "leave Content-Encoding out", 415)

    def _bounded(self, receive: Receive, length: bytes) -> Receive:
        """`receive`, which raises TooLarge. It does so at once if the header tells that length."""
        told = int(length[:20]) if length.isdigit() else self._largest + 1
        seen, head = 0, b""

        async def counted() -> Any:
            nonlocal seen, head
            message = await receive()
            body = message.get("body", b"")
            seen, head = seen + len(body), (head + body[:HEAD])[:HEAD]
            if seen > self._largest or told > self._largest and len(head) == HEAD:
                raise TooLarge(self._largest, head)
            return message

        return counted


async def _answer(send: Send, error: Refused) -> None:
    answer = json_answer(error.body(), error.status)
    headers = [(b"content-type", answer.content_type.encode()),
               (b"content-length", str(len(answer.body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
