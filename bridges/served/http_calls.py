"""Calls of an engine's HTTP routes with its token, each with a deadline and a bound on the answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from bridges.api import BridgeError, EngineDirty, EngineUnhealthy
from bridges.served.served_control import MOST_BYTES, checked_url, said
from bridges.vllm_plugin.access import read_token

__all__ = ["BadAnswer", "HttpCalls", "RequestRefused", "checked_url", "read_token"]

IDLE_SECONDS = 2.0  # vLLM closes a connection that was idle for 5
DIRTY = "the engine has no usable weights"  # the guard's word
PASSING = 408, 429  # of the 4xx: the request may be made again


class RequestRefused(BridgeError, ValueError):
    """An engine refused a request as impossible. Another engine would say the same."""


class BadAnswer(BridgeError):
    """What was answered is not an answer of vLLM."""


class HttpCalls:
    """Calls from one event loop. No proxy of the environment is used: the token is for the engines alone.

    token_file: named where the token is refused. connect: seconds. idle: connections kept open without use.
    """

    def __init__(self, token: str, token_file: str, connect: float, idle: int):
        self._token_file = token_file
        self._http = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=idle,
                                keepalive_expiry=IDLE_SECONDS),
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            timeout=httpx.Timeout(None, connect=connect), trust_env=False)

    async def call(self, url: str, body: Any, method: str, seconds: float,
                   take: Callable[[bytes], None] | None = None) -> Any:
        """The JSON that is answered, None for nothing. `take`: is given each piece of a good answer instead.

        Raises EngineUnhealthy for no answer within `seconds`, a 5xx, or too large an answer; BadAnswer for no
        JSON; EngineDirty where the guard says so; RequestRefused for any 4xx but 401, which is a BridgeError
        that names the token's file.
        """
        start, raw, size = time.monotonic(), bytearray(), 0
        try:
            async with asyncio.timeout(seconds), self._http.stream(method, url, json=body) as response:
                streams = take if response.status_code == 200 else None
                async for piece in response.aiter_raw():
                    (streams or raw.extend)(piece)
                    if (size := size + len(piece)) > MOST_BYTES:
                        raise EngineUnhealthy(f"{url}: an answer of more than {MOST_BYTES >> 20} MiB")
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError, UnicodeError) as e:
            passed = f"{time.monotonic() - start:.1f} of {seconds:g} s"
            raise EngineUnhealthy(f"{url}: no answer after {passed} ({type(e).__name__}: {e})",
                                  "see the engine's log; its process may have ended") from e
        finally:
            self._http.cookies.clear()
        return None if streams else self._answer(url, response.status_code, bytes(raw))

    def _answer(self, url: str, status: int, raw: bytes) -> Any:
        if status == 401:
            raise BridgeError(f"{url}: the engine refuses the token of {self._token_file} (401)",
                              "name the file whose token the engine was started with")
        if status in (409, 503) and DIRTY in (error := said(raw)[0]):
            raise EngineDirty(f"{url}: {error}", "publish a full set of weights first")
        if 400 <= status < 500 and status not in PASSING:
            raise RequestRefused(f"{url} refuses the request ({status}): {said(raw)[0][:500]}",
                                 "change the request")
        if status >= 500 or status in PASSING:
            raise EngineUnhealthy(f"{url} failed ({status}): {said(raw)[0][:500]}", "see the engine's log")
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            return json.loads(raw) if raw else None
        except (ValueError, RecursionError) as e:
            raise BadAnswer(f"{url}: no answer of vLLM ({e}): {said(raw)[0][:500]}",
                            "is it a vLLM at that address?") from e

    async def close(self) -> None:
        await self._http.aclose()
