"""A stand-in for `vllm serve`: the routes that the client asks, over a FakeEngine, on a socket that can
misbehave."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import threading
from collections.abc import Awaitable, Callable

import numpy as np
from faulty_engine import FaultyEngine

from bridges.api import Completion, EngineDirty, GenRequest, SamplingParams
from bridges.engines.fake_engine import FakeEngine, FakeTransport
from bridges.served.token_api import HOME
from bridges.sources.array_source import random_source

TOKEN = "a token of the tests, 32 letters".replace(" ", "-")
GENERATE = "/inference/v1/generate"
Fault = Callable[["StandIn", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def published(*sizes: int, version: int = 1, weights: int = 0, scale: float = 1.0, kind: type = FaultyEngine,
              **options) -> FakeEngine:
    """A numpy engine to which weights were published, drawn with the seed `weights`."""
    engine, transport = kind(*sizes, **options), FakeTransport()
    transport.open(engine)
    transport.publish(random_source(engine.expected_manifest(), weights, scale), version)
    return engine


class StandIn:
    """One server in a thread. fault: answers `POST /inference/v1/generate` in its place.

    asked: the bodies of generate. token_seconds: of a stream. open and peak: connections now, and the most at
    once. left: how many clients went before they had an answer.
    """

    def __init__(self, engine: FakeEngine | None = None, *, fault: Fault | None = None,
                 seconds: float = 0.0, port: int = 0, token: str = TOKEN, token_seconds: float = 0.0,
                 **capabilities):
        self.engine, self.fault, self.seconds = engine or FakeEngine(), fault, seconds
        self.token_seconds, self.streams = token_seconds, []
        self.port, self.alive, self._closing, self._token = port, True, threading.Lock(), token
        self.hangs = False  # the engine behind the server
        self.metrics = ""  # what it tells Prometheus
        self.said = dataclasses.replace(self.engine.capabilities(), **capabilities)
        self.asked, self.open, self.peak, self.left = [], 0, 0, 0
        self._held: set[tuple] = set()  # prefixes whose keys and values it has, by salt
        self._loop, self._up = asyncio.new_event_loop(), threading.Event()
        self._tasks: set[asyncio.Task] = set()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._up.wait(5)

    def _serve(self) -> None:
        starting = asyncio.start_server(self._connected, "127.0.0.1", self.port, backlog=4096)
        self._server = self._loop.run_until_complete(starting)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._up.set()
        self._loop.run_forever()
        while late := asyncio.all_tasks(self._loop):  # connections that came while it closed
            for task in late:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(late))
        self._loop.run_until_complete(asyncio.sleep(0))  # their sockets are closed, too

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        with self._closing:
            if self.alive:
                self.alive = False
                asyncio.run_coroutine_threadsafe(stop(), self._loop).result(5)
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(5)

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = lines[0].split()[1]
        if headers.get("authorization") != f"bearer {self._token.lower()}":
            self.answer(writer, 401, {"error": "Unauthorized"})
            return True
        if path == GENERATE:
            self.asked.append(json.loads(body))
            if self.fault:
                await self.fault(self, reader, writer)
                return not writer.is_closing()
            await self.hold(reader, self.seconds)
            if self.asked[-1].get("stream") and (self.engine._paused
                                                 or self.engine.state.version is not None):
                await self.stream(reader, writer, json.loads(body))
                return True
        elif path == "/is_paused" and self.hangs:
            await self.hold(reader, 60.0)
        elif path == "/metrics" and self.metrics:
            raw = self.metrics.encode()
            writer.write(f"HTTP/1.1 200 X\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)
            return True
        self.answer(writer, *self.route(path, json.loads(body) if body else {}))
        return True

    async def hold(self, reader: asyncio.StreamReader, seconds: float) -> None:
        """Let the client wait. Raises OSError if it leaves before the end."""
        if not seconds:
            return
        gone = asyncio.ensure_future(reader.read(1))
        done, _ = await asyncio.wait([gone], timeout=seconds)
        if done:
            self.left += 1
            raise ConnectionResetError
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)

    async def stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict) -> None:
        """Token by token, each by the weights of its moment. A paused engine waits."""
        draft = self.engine._draft(asked(body), 0)
        self.streams.append(draft)
        writer.write(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\ncontent-type: "
                     b"text/event-stream\r\n\r\n")
        while not draft.done:
            await self.hold(reader, self.token_seconds)
            if self.engine._paused or self.engine.state.version is None:
                await self.hold(reader, 0.01)
                continue
            self.engine._advance(draft)
            done = self.engine._completion(draft)
            self._event(writer, json.dumps(last_token(done)))
        self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, data: str) -> None:
        raw = f"data: {data}\n\n".encode()
        writer.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")

    def answer(self, writer: asyncio.StreamWriter, status: int, content) -> None:
        raw = json.dumps(content).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)

    def route(self, path: str, body: dict) -> tuple[int, object]:
        if path == GENERATE:
            return self._generate(body)
        if path.startswith(("/pause", "/resume")):
            (self.engine.pause if path.startswith("/pause") else self.engine.resume)()
            return 200, {}
        if path == HOME:
            return 200, {"dirty": "", "ranks": [dataclasses.asdict(self.said)]}
        if path == "/weight_info":
            version = self.engine.weight_version()
            return 200, {"weight_version": None if version is None else str(version)}
        return (200, {}) if path in ("/health", "/is_paused") else (404, {"error": {"message": "Not Found"}})

    def _generate(self, body: dict) -> tuple[int, object]:
        try:
            request = asked(body)
            [[done]] = self.engine.generate([request])
        except EngineDirty as e:
            return 503, {"error": str(e), "next_step": "publish"}
        except ValueError as e:
            return 400, {"error": {"message": str(e)}}
        answer = vllm_answer(done, self.said.routed_experts and len(body["token_ids"]),
                             request.sampling.support)
        return 200, answer | {"usage": {"prompt_tokens_details": {"cached_tokens": self._cached(body, done)}}}

    def _cached(self, body: dict, done: Completion) -> int:
        """How many tokens of the prompt it had met before, at least one less than all; a block of the cache
        is one."""
        salt, tokens = body.get("cache_salt"), [*body["token_ids"], *done.token_ids.tolist()]
        # the last token has not been an input
        prefixes = [(salt, *tokens[:n]) for n in range(1, len(tokens))]
        held = max((n for n, p in enumerate(prefixes[: len(body["token_ids"]) - 1], 1) if p in self._held),
                   default=0)
        self._held.update(prefixes)
        return held


def asked(body: dict, name: str = "r") -> GenRequest:
    p = body["sampling_params"]
    sampling = SamplingParams(p["max_tokens"], p["temperature"], p["top_k"], p["top_p"],
                              tuple(p["stop_token_ids"]), min(p["logprobs"], 64))
    return GenRequest(name, tuple(body["token_ids"]), sampling, 1, p["seed"])


def last_token(done: Completion) -> dict:
    """The event of a stream that brings the last token of `done`, with the versions of all."""
    [choice] = vllm_answer(done, 0, 0 if done.support_ids is None else 64)["choices"]
    choice["finish_reason"] = None if done.finish_reason == "abort" else done.finish_reason
    choice["token_ids"] = choice["token_ids"][-1:]
    choice["logprobs"]["content"] = choice["logprobs"]["content"][-1:]
    return {"choices": [choice]}


def vllm_answer(done: Completion, routed: int = 0, kept: int = 0) -> dict:
    """What vLLM answers for a completion."""
    rows, at = [], 0
    for i, (token, logprob) in enumerate(zip(done.token_ids.tolist(), done.logprobs.tolist())):
        logprob = logprob if np.isfinite(logprob) else -9999.0
        row = {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
        if done.support_sizes is not None:
            size = int(done.support_sizes[i])
            among = done.support_ids[at : at + size].tolist() if size else list(range(kept))
            others = [t for t in range(64) if t not in among][: kept - len(among)]
            row["top_logprobs"] = [{"token_id": t, "logprob": -1.0 if t in among else -9999.0, "rank": 1}
                                   for t in among + others]
            at += size
        rows.append(row)
    spans = [{"version": str(s.version), "start": s.start, "end": s.stop} for s in done.version_spans]
    experts = None
    if routed:
        buffer = io.BytesIO()
        np.save(buffer, np.full((routed + len(rows) - 1, 2, 4), 3, np.uint8), allow_pickle=False)
        experts = base64.b64encode(buffer.getvalue()).decode()
    choice = {"index": 0, "finish_reason": done.finish_reason, "token_ids": done.token_ids.tolist(),
              "weight_versions": spans, "routed_experts": experts, "logprobs": {"content": rows}}
    return {"request_id": "x", "choices": [choice]}

