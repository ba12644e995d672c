"""Answers that clients fetch later, by the names of their requests."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxfp8rl.serving.refusal import Refused
from jaxfp8rl.serving.wire import failed

KEPT = 1024  # answers that were fetched: a client whose connection broke asks again
POLL_S = 20.0  # the client gives up a request after 45 s
PROTO, JSON = "application/x-protobuf", "application/json"


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    content_type: str
    body: bytes


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(status, JSON, json.dumps(value).encode())


class Futures:
    """The pending and the finished requests of a server. `say(error)` is told of errors that are not the
    client's."""

    def __init__(self, say: Callable[[BaseException], None]):
        self._say, self._of, self._fetched = say, dict[str, Future](), deque[str]()

    def add(self, name: str, future: Future) -> Future:
        """Keep a request's future."""
        self._of[name] = future
        return future

    def known(self, name: str) -> bool:
        return name in self._of

    def end(self, session_id: str) -> None:
        """Forget the requests of a session; those that have not begun never will."""
        for name in [n for n in self._of if n.startswith(f"{session_id}:")]:
            self._of.pop(name).cancel()

    async def answer(self, name: str) -> Answer:
        """The answer, or 408 while there is none, which makes the client ask again. Raises Refused(404) for
        an unknown name."""
        if name not in self._of:
            raise Refused(f"no request {name!r}: the server was started anew, or its answer was "
                          f"fetched long ago",
                          "send the request again", 404)
        future = asyncio.wrap_future(self._of[name])
        try:
            found = await asyncio.wait_for(asyncio.shield(future), POLL_S)
        except TimeoutError:
            if not future.done():
                return json_answer({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)
            raise
        except (Exception, asyncio.CancelledError) as e:
            if not future.done():  # the connection was closed
                raise
            if not isinstance(e, Refused):
                self._say(e)
            return self._last(name, json_answer(failed(e if isinstance(e, Exception) else Refused(
                "the request was cancelled", "send it again"))))
        return self._last(name, Answer(200, PROTO, found) if isinstance(found, bytes) else json_answer(found))

    def _last(self, name: str, answer: Answer) -> Answer:
        self._fetched.append(name)
        while len(self._fetched) > KEPT:
            if (old := self._fetched.popleft()) not in self._fetched:
                self._of.pop(old, None)
        return answer
