"""The few parts of ASGI that the guard needs: JSON answers, and bodies that are read once and given on."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Refused(Exception):
    """A request that is answered with `status` and {"error": ..., "next_step": ...}."""

    def __init__(self, status: int, error: str, next_step: str = ""):
        super().__init__(error)
        self.status, self.error, self.next_step = status, error, next_step


async def answer(send: Send, status: int, content: Any) -> None:
    """A whole response of JSON."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse_websocket(scope: MutableMapping[str, Any], receive: Receive, send: Send, status: int,
                           error: str, next_step: str = "") -> None:
    """Refuse a handshake: with `status` where the server can say it, else by closing."""
    await receive()  # websocket.connect
    if "websocket.http.response" in scope.get("extensions", {}):
        await send({"type": "websocket.http.response.start", "status": status, "headers": []})
        await send({"type": "websocket.http.response.body", "body": error.encode()})
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": error[:100]})


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body. Raises Refused(413) if it is longer than `limit` bytes, 400 if the client leaves."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, "the client left before its request was complete")
        parts.append(message.get("body", b""))
        if (size := size + len(parts[-1])) > limit:
            raise Refused(413, f"the body has more than {limit} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body` first."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def json_object(body: bytes) -> dict[str, Any]:
    """Raises Refused(400) for anything but a JSON object."""
    try:
        content = json.loads(body or b"{}")
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"the body is not JSON: {e}") from e
    if not isinstance(content, dict):
        raise Refused(400, f"the body is a JSON {type(content).__name__}, not an object")
    return content


def header(scope: MutableMapping[str, Any], name: bytes) -> str:
    return next((v.decode("latin-1") for k, v in scope["headers"] if k.lower() == name), "")
