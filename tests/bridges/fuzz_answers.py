"""Hostile answers to the client of served engines: each must give a completion or a BridgeError, in time."""

from __future__ import annotations

import collections
import json
import random
import time

from stand_in import TOKEN, StandIn, published

from bridges.api import BridgeError, Completion, GenRequest, SamplingParams
from bridges.served.vllm_client import Deadlines, VllmClient

REQUEST = GenRequest("r", (1, 2, 3), SamplingParams(4, top_k=3, support=4), seed=5)
DEADLINE = 0.2
GOOD = {
    "choices": [{
        "index": 0, "finish_reason": "length", "token_ids": [1, 2, 3, 4], "routed_experts": None,
        "weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 4}],
        "logprobs": {"content": [{"token_id": t, "logprob": -1.5, "rank": 1, "top_logprobs": [
            {"token_id": t, "logprob": -1.5, "rank": 1}, {"token_id": 9, "logprob": -9999.0, "rank": 2}]}
            for t in (1, 2, 3, 4)]},
    }],
}
ATOMS = [None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 1e308, float("nan"), float("inf"), "", "x", "..",
         "\x00", "é" * 5, [], {}, [[]], [{}], {"a": 1}, -0.0, "A" * 10000, [1] * 1000, "9" * 5000,
         "k05VTVBZAQB2AA==", "²"]
LENGTHS = ["", "-1", "9" * 30, "9" * 5000, "1e9", "\u0663", "0x10", "0", "5, 5"]
NAMES = ["content-encoding", "transfer-encoding", "location", "set-cookie", "upgrade", "connection",
         "content-type"]
VALUES = ["gzip", "chunked", "br", "x" * 9000, "http://[", "a=b; domain=\x7f", "h2c", "close", "\xff"]
STATUSES = [200] * 30 + [100, 101, 199, 204, 301, 304, 400, 401, 404, 409, 418, 429, 500, 503, 599, 999]
DEEP = [b"[" * 100_000, b'{"choices":' + b"[" * 50_000 + b"]" * 50_000 + b"}", b"9" * 5000, b"\xff\xfe{}"]


def mutated(x, rng: random.Random, atoms=ATOMS, more=()):
    """A value of JSON with others in places. more: keys that a dict may get."""
    if rng.random() < 0.12:
        return rng.choice(atoms)
    if isinstance(x, dict):
        y = {k: mutated(v, rng, atoms, more) if rng.random() < 0.4 else v for k, v in x.items()}
        if y and rng.random() < 0.12:
            y.pop(rng.choice(list(y)))
        return y | ({rng.choice(more): rng.choice(atoms)} if more and rng.random() < 0.1 else {})
    if isinstance(x, list):
        found = [mutated(v, rng, atoms, more) if rng.random() < 0.4 else v for v in x]
        return found * rng.choice([0, 1, 1, 1, 1, 2])
    return rng.choice(atoms) if rng.random() < 0.5 else x


def _body(rng: random.Random) -> bytes:
    choice = {k: mutated(v, rng) if rng.random() < 0.4 else v for k, v in GOOD["choices"][0].items()}
    answer = {"choices": [choice]} if rng.random() < 0.9 else mutated(GOOD, rng)
    body = json.dumps(answer).encode()
    kind = rng.random()
    if kind < 0.1:
        body = bytearray(body)
        for _ in range(rng.randint(1, 8)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        return bytes(body)
    if kind < 0.14:
        return rng.randbytes(rng.randint(0, 200))
    if kind < 0.16:
        return rng.choice(DEEP)
    return body


def hostile(seed: int) -> bytes:
    """All that the server says to one request before it closes."""
    rng = random.Random(seed)
    body = _body(rng)
    headers = {"content-length": str(len(body))}
    if rng.random() < 0.1:
        headers["content-length"] = rng.choice([*LENGTHS, str(len(body) + 1)])
    if rng.random() < 0.1:
        headers[rng.choice(NAMES)] = rng.choice(VALUES)
    if rng.random() < 0.02:
        headers |= {f"x-{i}": "y" for i in range(rng.choice([50, 3000]))}
    status = rng.choice(STATUSES)
    version = rng.choice(["HTTP/1.1"] * 20 + ["HTTP/1.0", "HTTP/9.9", "ICY", ""])
    head = f"{version} {status} X\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
    raw = head.encode("utf-8", "replace") + body
    if rng.random() < 0.03:
        raw = rng.randbytes(rng.randint(1, 300))
    return raw[: rng.randint(0, len(raw))] if rng.random() < 0.04 else raw


def fuzz(inputs: int, seed: int) -> collections.Counter:
    """How often the client said what of `inputs` hostile answers. Raises AssertionError with the seed of one
    that it did not bear."""
    given, said = iter(range(seed * 10**6, seed * 10**6 + 10**6)), collections.Counter()

    async def answer(server, reader, writer):
        server.last = next(given)
        writer.write(hostile(server.last))
        await writer.drain()
        writer.close()

    with StandIn(published(), fault=answer) as server:
        client = VllmClient([server.url], TOKEN, Deadlines(1.0, DEADLINE, 1.0, 1.0), revive=lambda url: None)
        while len(server.asked) < inputs:
            start = time.monotonic()
            try:
                [[done]] = client.generate([REQUEST])
                assert isinstance(done, Completion), server.last
                done.problem()
                said["a completion"] += 1
            except BridgeError as e:
                said[type(e).__name__] += 1
            except Exception as e:
                raise AssertionError(f"hostile({server.last}): {type(e).__name__}: {e}") from e
            assert (passed := time.monotonic() - start) < 5, f"hostile({server.last}) takes {passed:.1f} s"
        server.fault = None
        assert len(client.generate([REQUEST])[0]) == 1, "the client is as it was"
        client.close()
    return said
