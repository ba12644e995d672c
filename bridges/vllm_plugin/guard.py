"""A guard before all routes of `vllm serve`: ASGI middleware.

    JAXFP8RL_TOKEN_FILE=token VLLM_SERVER_DEV_MODE=1 vllm serve MODEL \\
        --weight-transfer-config '{"backend": "jaxfp8rl"}' --middleware bridges.vllm_plugin.guard.Guard

vLLM's own `--api-key` leaves the routes open that stop the engine and change its weights. Here every route
asks for the token, `/health` and websockets, too. The routes that change its weights also ask for the lease,
which one learner holds at a time:

    POST   /jaxfp8rl/lease  {"holder": "who", "seconds": 6}     -> {"lease": KEY}; the same with "lease": KEY
    renews DELETE /jaxfp8rl/lease  header x-jaxfp8rl-lease: KEY
    GET    /jaxfp8rl        what the engine holds and computes in, by rank; its state
    POST   /jaxfp8rl/verify read the engine's bytes again

    POST   /jaxfp8rl/publish  {"update_info": ..., "weight_version": "7"}     -> seconds of each step

freezes the requests in flight, has the ranks take all buckets and the digests, and lets the requests go on:
vLLM's routes take four calls for that. A learner whose digests are made on the way sends the buckets without
a version, and then the digests with it. With ?cache=keep the requests go on with the keys and values that
they have.

A dirty engine answers requests for tokens with 503 and the reason.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import parse_qs

from bridges.api import BridgeError
from bridges.vllm_plugin.access import LEASE_SECONDS, Lease, LeaseTaken, Token, token_of_environment
from bridges.vllm_plugin.asgi import (
    App,
    Receive,
    Refused,
    Send,
    answer,
    header,
    json_object,
    read_body,
    refuse_websocket,
    replayed,
)
from bridges.vllm_plugin.publishes import NEXT, PUBLISH, Publishes

LEASE_HEADER = b"x-jaxfp8rl-lease"
HOME, LEASE, VERIFY = "/jaxfp8rl", "/jaxfp8rl/lease", "/jaxfp8rl/verify"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
INIT, SLEEP, INFO = "/init_weight_transfer_engine", "/sleep", "/weight_info"
PAUSE, RESUME, WAKE = "/pause", "/resume", "/wake_up"
LEASED = {
    PUBLISH, START, UPDATE, FINISH, INIT, SLEEP, VERIFY, "/shutdown_weight_transfer_engine", WAKE,
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/release_kv_cache_memory",
}
# These change weights or their version without proof.
UNPROVED = {"/collective_rpc", "/weight_checker", "/update_weight_version", "/start_draft_weight_update"}
LARGEST_BODY = 64 * 2**20
Scope = Any


class Guard:
    """The middleware. Raises BridgeError when the server starts if there is no usable token."""

    def __init__(self, app: App):
        self._app, self._token, self._lease = app, Token(token_of_environment()), Lease()
        self._publishes: Publishes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):  # the server's start and end
            return await self._app(scope, receive, send)
        refuse = _refuse_http if scope["type"] == "http" else refuse_websocket
        if not self._token.admits(scope["headers"]):
            return await refuse(scope, receive, send, 401, "the token is missing or wrong")
        try:
            await self._admitted(scope, receive, send)
        except Refused as e:
            await refuse(scope, receive, send, e.status, e.error, e.next_step)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if not path.isprintable():
            raise Refused(400, "the path holds a control character")
        if path in UNPROVED:
            raise Refused(403, f"{path} changes weights without proof, or their version", NEXT)
        weights = self._state(scope)
        if scope["type"] == "http":
            receive = await _bounded(scope, receive)
        if path in (HOME, LEASE) or path == INFO and weights.problem:
            await answer(send, 200, await self._own(path, scope, receive, weights))
        elif path in LEASED or path in (PAUSE, RESUME, "/abort_requests"):
            await self._in_turn(path, scope, receive, send, weights)
        elif scope["type"] == "http" and scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif why := weights.unfit(self._lease.current()):
            raise Refused(503, f"the engine has no usable weights: {why}", NEXT)
        else:
            await self._app(scope, receive, send)

    def _state(self, scope: Scope) -> Publishes:
        if self._publishes is None:
            state = scope["app"].state
            if (count := getattr(state.args, "api_server_count", None) or 1) > 1:
                raise Refused(501, f"--api-server-count {count}: the guards of several processes do not know "
                                   "what the others let through", "use --api-server-count 1")
            self._publishes = Publishes(state.engine_client)
        return self._publishes

    async def _own(self, path: str, scope: Scope, receive: Receive, weights: Publishes) -> dict[str, Any]:
        if path == LEASE:
            return await self._take_or_release(scope, receive)
        weights.unfit(self._lease.current())
        state = {"dirty": weights.problem, "holder": self._lease.holder if self._lease.held() else ""}
        if path == INFO:
            return {"weight_version": None} | state
        return state | {"ranks": await weights.describe()}

    async def _take_or_release(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        if scope["method"] == "DELETE":
            self._lease.release(header(scope, LEASE_HEADER))
            return {}
        asked = json_object(await read_body(receive, LARGEST_BODY))
        holder, key = asked.get("holder", ""), asked.get("lease", "")
        seconds = asked.get("seconds", LEASE_SECONDS)
        if not (isinstance(holder, str) and holder.isprintable() and isinstance(key, str)
                and (holder or key)):
            raise Refused(400, 'the lease is asked for by {"holder": "who you are", "seconds": 6}')
        try:
            return {"lease": self._lease.take(holder[:200], seconds, key)}
        except BridgeError as e:
            raise Refused(409 if isinstance(e, LeaseTaken) else 410, str(e).partition("\n")[0],
                          e.next_step) from e

    def _require_lease(self, scope: Scope) -> None:
        if not self._lease.owned_by(header(scope, LEASE_HEADER)):
            who = f"{self._lease.holder} is this engine's learner" if self._lease.held() else (
                "who changes the engine's weights needs its lease")
            raise Refused(409, who, f"POST {LEASE} first, then send header {LEASE_HEADER.decode()}")

    async def _in_turn(self, path: str, scope: Scope, receive: Receive, send: Send,
                       weights: Publishes) -> None:
        """One step after the other."""
        async with weights.lock:
            if path in LEASED:
                self._require_lease(scope)
            try:
                await self._step(path, scope, receive, send, weights)
            except Refused:
                raise
            except Exception as e:  # vLLM's own, of whatever class
                if path in (PUBLISH, START, UPDATE, FINISH):
                    weights.fail(f"{path} failed in vLLM: {e}")
                raise

    async def _step(self, path: str, scope: Scope, receive: Receive, send: Send, weights: Publishes) -> None:
        if path == RESUME and (weights.problem or weights.learner):
            raise Refused(409, f"the engine has no usable weights: {weights.problem}", NEXT)
        if path == VERIFY:
            await weights.verify()
            return await answer(send, 200, {})
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        if path == PUBLISH:
            return await answer(send, 200, await self._publish(query, receive, weights))
        if path in (UPDATE, FINISH):
            weights.require_begun(self._lease.current())
        if path == START:
            await weights.begin(self._lease.holder, self._lease.current(), pause=False)
        if path == RESUME and weights.asleep:
            raise Refused(409, f"the memory of its {' and '.join(sorted(weights.asleep))} is asleep",
                          "POST /wake_up first")
        if path == SLEEP:
            await weights.wake_cache()  # vLLM does not go to sleep from half awake
        if path == FINISH:
            receive = await _with_version(receive)
            await weights.prove()
        kept = _Kept()
        await self._app(scope, receive, kept)
        if kept.status == 200:
            await self._after(path, query, weights)
        elif path in (START, UPDATE, FINISH):
            weights.fail(f"{path} failed in vLLM: {kept.body[:300].decode(errors='replace')}")
        await kept.give(send)

    async def _publish(self, query: dict[str, list[str]], receive: Receive,
                       weights: Publishes) -> dict[str, float]:
        """A whole publish, or one of its two parts -> the seconds of each step. A learner that hangs up
        before it is proved leaves the engine dirty."""
        asked, begun = json_object(await read_body(receive, LARGEST_BODY)), time.perf_counter()
        said, version = asked.get("update_info"), asked.get("weight_version", "")
        if not (isinstance(said, dict) and isinstance(version, str) and bool(version) == ("digests" in said)):
            raise Refused(400, "a publish is told by its update_info, which ends with digests and a version",
                          'POST {"update_info": {"buckets": ..., "digests": ...}, "weight_version": "7"}')
        if said.get("buckets"):
            await weights.begin(self._lease.holder, self._lease.current(), pause=True)
        weights.require_begun(self._lease.current())
        started, left = time.perf_counter(), asyncio.ensure_future(receive())
        try:
            sent = await weights.receive(said)
            gone = left.done() and left.result()["type"] == "http.disconnect"
        finally:
            left.cancel()
        weights.require_begun("" if gone else self._lease.current())
        if version:
            await weights.commit(query.get("cache") == ["keep"], version)
        end = time.perf_counter()
        return {"start": started - begun, "send": sent, "finish": end - started - sent}

    async def _after(self, path: str, query: dict[str, list[str]], weights: Publishes) -> None:
        if path in (INIT, START, UPDATE):
            await weights.check(fatal=path != INIT)
        if path == FINISH:
            await weights.commit(query.get("cache") == ["keep"])
        if path == SLEEP and (level := query.get("level", ["1"])[-1]) != "0":
            weights.asleep = {"weights", "kv_cache"}
            if level != "1":
                weights.fail("sleep dropped its weights")
        if path == WAKE:
            weights.asleep -= set(query.get("tags", weights.asleep))


class _Kept:
    """A response that waits until the guard has seen what came of it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def __call__(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return next((m["status"] for m in self.messages if m["type"] == "http.response.start"), 500)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)

    async def give(self, send: Send) -> None:
        for message in self.messages:
            await send(message)


async def _with_version(receive: Receive) -> Receive:
    """`receive`, once its body was seen to name a version. Raises Refused(400)."""
    body = await read_body(receive, LARGEST_BODY)
    if not isinstance(version := json_object(body).get("weight_version"), str) or not version:
        raise Refused(400, f"a publish ends with its version, not {version!r}",
                      'POST {"weight_version": "7"}')
    return replayed(body, receive)


async def _bounded(scope: Scope, receive: Receive) -> Receive:
    """`receive`. A body whose length is not told is read and counted first. Raises Refused(413) for one that
    is too large."""
    length = header(scope, b"content-length")
    if length.isdecimal() and int(length[:20]) > LARGEST_BODY:
        raise Refused(413, f"the body has more than {LARGEST_BODY} bytes")
    if length or not header(scope, b"transfer-encoding"):
        return receive
    return replayed(await read_body(receive, LARGEST_BODY), receive)


async def _refuse_http(scope: Scope, receive: Receive, send: Send, status: int, error: str,
                       next_step: str = "") -> None:
    await answer(send, status, {"error": error, "next_step": next_step})
