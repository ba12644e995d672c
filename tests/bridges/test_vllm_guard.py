"""The guard before all routes of `vllm serve`, around an app that stands for vLLM's: ASGI without a
socket."""

from __future__ import annotations

import asyncio
import json
import os
import random
import types

import pytest
from pausing import Pausing

from bridges.api import BridgeError
from bridges.vllm_plugin import access, guard
from bridges.vllm_plugin.guard import (
    FINISH,
    HOME,
    INFO,
    INIT,
    LEASE,
    LEASED,
    PUBLISH,
    START,
    UNPROVED,
    UPDATE,
    VERIFY,
    Guard,
)

TOKEN = "a token of the tests, 32 letters"
RIGHT = (b"authorization", f"Bearer {TOKEN}".encode())


class Client(Pausing):
    """vLLM's EngineClient, as far as the guard speaks to it."""

    def __init__(self, load_format="dummy_stacked", replicas=1):
        self.vllm_config = types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(data_parallel_size=replicas),
            load_config=types.SimpleNamespace(load_format=load_format))
        self.paused, self.problems, self.calls, self.woken = False, {}, [], []
        self.next_step = ""  # of every problem

    async def collective_rpc(self, method, args):
        self.calls.append(args[0])
        found = [self.problems.get((args[0], r), "") for r in range(2)]
        if args[0] == "state":
            found = [self.problems.pop(r, "") for r in range(2)]
        return [json.dumps({"rank": r, "problem": problem, "next_step": self.next_step})
                for r, problem in enumerate(found)]

    async def reset_prefix_cache(self, running, connector):
        self.calls.append("reset_prefix_cache")
        return True

    async def update_weight_version(self, version):
        self.calls.append(version)

    async def wake_up(self, tags):
        self.woken.append(tags)


class Server:
    """A guarded app that answers 200 to everything, and keeps which paths it saw."""

    def __init__(self, client=None):
        self.client, self.seen, self.now, self.gone = client or Client(), [], 0.0, False
        self.args = types.SimpleNamespace(api_server_count=None)
        self.guard = Guard(self._app)
        self.guard._lease.clock = lambda: self.now

    async def _app(self, scope, receive, send):
        self.seen.append(scope["path"])
        await receive()
        self.client.paused = {"/pause": True, "/resume": False}.get(scope["path"], self.client.paused)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def __call__(self, path, body=None, *, method="POST", headers=(RIGHT,), key="", query=b"", kind="http"):
        """(status, content)."""
        said = []
        headers = [*headers, *([(b"x-jaxfp8rl-lease", key.encode())] if key else [])]
        scope = {"type": kind, "path": path, "method": method, "headers": headers, "query_string": query,
                 "app": types.SimpleNamespace(state=types.SimpleNamespace(engine_client=self.client,
                                                                          args=self.args))}

        async def receive():
            if self.gone:
                return {"type": "http.disconnect"}
            raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
            return {"type": "http.request", "body": raw}

        async def send(message):
            said.append(message)

        asyncio.run(self.guard(scope, receive, send))
        if kind == "websocket":
            return said
        return said[0]["status"], json.loads(said[1]["body"] or b"{}")

    def lease(self, holder="first", seconds=6.0):
        return self(LEASE, {"holder": holder, "seconds": seconds})[1]["lease"]

    def publish(self, key, version="1"):
        steps = [("/pause", {}), (INIT, {}), (START, {}), (UPDATE, {}), (FINISH, {"weight_version": version})]
        return [self(path, body, key=key)[0] for path, body in steps]


@pytest.fixture
def token(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    monkeypatch.setenv(access.TOKEN_FILE, str(path))
    return path


@pytest.fixture
def server(token):
    return Server()


ROUTES = sorted(LEASED | UNPROVED | {HOME, LEASE, INFO, "/health", "/metrics", "/v1/completions", "/"})
WRONG = {
    "none": [], "empty": [(b"authorization", b"")], "other": [(b"authorization", b"Bearer " + b"x" * 32)],
    "bare": [(b"authorization", TOKEN.encode())], "longer": [(b"authorization", RIGHT[1] + b"x")],
    "twice": [RIGHT, (b"authorization", b"Bearer x")], "bytes": [(b"authorization", b"\xff\xfe")],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_every_route_asks_for_the_token(server, wrong):
    for path in ROUTES:
        for method in ("GET", "POST") if wrong != "none" else ("GET", "POST", "HEAD",
                                                               "OPTIONS", "DELETE", "PUT"):
            assert server(path, method=method, headers=WRONG[wrong])[0] == 401, (method, path)
    assert server.seen == [] and server.client.calls == []


@pytest.mark.parametrize("extension", [True, False])
def test_a_websocket_without_the_token_is_refused(server, extension):
    found = server("/v1/realtime", kind="websocket", headers=[])
    assert found[0]["type"] == "websocket.close"
    assert server.seen == []


def test_the_right_token_is_let_through(server):
    assert server("/health", method="GET")[0] == 200
    assert server.seen == ["/health"]


@pytest.mark.parametrize("mode, admitted", [(0o600, True), (0o640, True), (0o604, False), (0o602, False)])
def test_a_token_that_every_user_can_read_is_refused(token, mode, admitted):
    token.chmod(mode)
    if admitted:
        assert access.token_of_environment() == TOKEN
    else:
        with pytest.raises(BridgeError, match="every user of this machine") as e:
            Server()
        assert e.value.next_step == f"chmod 600 {token}"


@pytest.mark.parametrize("text", ["", "short", "sixteen letters\n and another line", "ä" * 20])
def test_a_bad_token_is_refused(token, text):
    token.write_text(text)
    with pytest.raises(BridgeError, match="16 printable ASCII"):
        Server()


def test_a_server_without_a_token_does_not_start(monkeypatch, tmp_path):
    monkeypatch.delenv(access.TOKEN_FILE, raising=False)
    with pytest.raises(BridgeError, match="JAXFP8RL_TOKEN_FILE is not set"):
        Server()
    monkeypatch.setenv(access.TOKEN_FILE, str(tmp_path / "missing"))
    with pytest.raises(BridgeError, match="cannot be read"):
        Server()


def test_a_publish_makes_an_engine_generate(server):
    status, said = server("/v1/completions")
    assert status == 503 and "nothing has been published" in said["error"]
    assert server(INFO, method="GET")[1] == {"weight_version": None, "holder": "",
                                             "dirty": "nothing has been published to it yet"}
    key = server.lease()
    assert server.publish(key) == [200] * 5
    assert server("/resume", key=key)[0] == 200
    assert server("/v1/completions")[0] == 200
    assert server.client.calls == ["state", "renew", "state", "state", "prove", "reset_prefix_cache"]


def test_running_requests_may_keep_their_cache(server):
    key = server.lease()
    server("/pause", key=key), server(START, key=key), server(UPDATE, key=key)
    assert server(FINISH, {"weight_version": "1"}, key=key, query=b"cache=keep")[0] == 200
    assert "reset_prefix_cache" not in server.client.calls


BUCKETS, DIGESTS = {"buckets": [0, 4]}, {"digests": {"0": ""}}
WHOLE = {"update_info": BUCKETS | DIGESTS, "weight_version": "1"}
PARTS = {"update_info": BUCKETS}, {"update_info": DIGESTS, "weight_version": "1"}


@pytest.mark.parametrize("calls", [[WHOLE], PARTS])
def test_a_publish_in_one_call_or_two_freezes_and_resumes(server, calls):
    key = server.lease()
    assert server(INIT, key=key)[0] == 200
    assert server(START, key=key)[0] == 409, "it generates"
    for body in calls:
        assert not server.client.paused or body is calls[1]
        status, took = server(PUBLISH, body, key=key, query=b"cache=keep")
        assert status == 200 and set(took) == {"start", "send", "finish"}
    assert not server.client.paused and server.seen == [INIT]
    assert server.client.calls[1:] == ["renew", *["publish"] * len(calls), "1"]
    assert server("/v1/completions")[0] == 200


def test_a_publish_that_is_not_proved_resumes_nothing(server):
    key = server.lease()
    server.client.problems["publish", 1] = "up_proj differs"
    assert server(PUBLISH, WHOLE, key=key)[0] == 500
    assert server.client.paused and server("/v1/completions")[0] == 503
    assert server.client.calls == ["renew", "publish"], "no version was set"


def test_what_cannot_be_written_is_said_before_the_engine_stops(server):
    key = server.lease()
    server.publish(key), server("/resume", key=key)
    server.client.problems["renew", 1] = "norm.weight has moved"
    assert server(PUBLISH, WHOLE, key=key)[0] == 500
    assert not server.client.paused and server("/v1/completions")[0] == 200


@pytest.mark.parametrize("body", [
    {}, {"update_info": 3}, {"update_info": BUCKETS, "weight_version": "1"}, {"update_info": DIGESTS},
    {"update_info": BUCKETS | DIGESTS, "weight_version": 1}])
def test_a_publish_without_its_parts_is_refused(server, body):
    key = server.lease()
    assert server(PUBLISH, body, key=key)[0] == 400 and not server.client.calls
    assert server(PUBLISH, PARTS[1], key=key)[0] == 409, "its buckets have not come"


def test_a_learner_that_hangs_up_in_a_publish_leaves_the_engine_dirty(server, monkeypatch):
    key, answered = server.lease("first"), server.client.collective_rpc

    async def late(method, args):
        server.gone = args[0] == "publish"
        await asyncio.sleep(0)
        return await answered(method, args)

    monkeypatch.setattr(server.client, "collective_rpc", late)
    assert server(PUBLISH, WHOLE, key=key)[0] == 409 and server.client.paused
    server.gone = False
    assert "first left in the middle of a publish" in server("/v1/completions")[1]["error"]
    assert server.client.calls == ["renew", "publish"], "no version was set"


@pytest.mark.parametrize("next_step, shown", [("use kind nccl", "use kind nccl"),
                                              ("", "publish a full set of weights")])
def test_what_a_rank_advises_reaches_the_learner(server, next_step, shown):
    server.client.problems["prove", 1], server.client.next_step = "up_proj differs", next_step
    key = server.lease()
    server("/pause", key=key), server(START, key=key), server(UPDATE, key=key)
    status, said = server(FINISH, {"weight_version": "1"}, key=key)
    assert (status, said["next_step"]) == (500, shown)


def test_an_engine_that_loaded_a_checkpoint_generates_at_once(token):
    server = Server(Client(load_format="auto"))
    assert server("/v1/completions")[0] == 200


def test_replicas_inside_a_server_are_refused_by_name(token):
    status, said = Server(Client(replicas=2))("/v1/completions")
    assert status == 501 and "--data-parallel-size 2" in said["error"]


def test_several_guards_of_one_engine_are_refused_by_name(server):
    server.args.api_server_count = 2
    status, said = server("/v1/completions")
    assert status == 501 and "--api-server-count 2" in said["error"]


def test_who_waits_for_the_turn_needs_the_lease_when_it_comes(server):
    """The first learner's call waits behind a step; its lease ends meanwhile, and a second takes over."""
    key = server.lease("first", seconds=2.0)
    server("/pause", key=key)

    async def later():
        weights = server.guard._state({"app": types.SimpleNamespace(
            state=types.SimpleNamespace(engine_client=server.client, args=server.args))})
        scope = {"headers": [(b"x-jaxfp8rl-lease", key.encode())], "query_string": b""}
        await weights.lock.acquire()
        call = asyncio.ensure_future(server.guard._in_turn(START, scope, None, None, weights))
        await asyncio.sleep(0)
        server.now = 3.0
        server.guard._lease.take("second", 5.0)
        weights.lock.release()
        with pytest.raises(guard.Refused, match="second is this engine's learner"):
            await call

    asyncio.run(later())


def test_a_second_learner_is_told_who_the_first_is(server):
    key = server.lease("pid 1 on host a")
    status, said = server(LEASE, {"holder": "pid 2 on host b"})
    assert status == 409 and "pid 1 on host a is this engine's learner" in said["error"]
    for path in LEASED:
        status, said = server(path, {"weight_version": "1"}, key="guess")
        assert status == 409 and "pid 1 on host a" in said["error"], path
    assert server(LEASE, {"lease": key})[1] == {"lease": key}
    server(LEASE, method="DELETE", key="guess")
    assert server(LEASE, {"holder": "pid 2 on host b"})[0] == 409
    server(LEASE, method="DELETE", key=key)
    assert server(LEASE, {"holder": "pid 2 on host b"})[0] == 200


def test_the_successor_of_a_killed_learner_may_open(server):
    """In the middle of a publish: the engine is dirty until the successor's is whole."""
    key = server.lease("first", seconds=2.0)
    assert server.publish(key) == [200] * 5
    server("/pause", key=key), server(START, key=key)
    assert server("/v1/completions")[0] == 200, "it waits in vLLM's queue"
    server.now = 2.5
    assert server(LEASE, {"lease": key})[0] == 410, "too late to renew"
    successor = server.lease("second")
    status, said = server("/v1/completions")
    assert status == 503 and "first left in the middle of a publish" in said["error"]
    assert server(UPDATE, key=successor)[0] == 409
    assert server("/resume", key=successor)[0] == 409
    assert server.publish(successor, "2") == [200] * 5
    assert server("/v1/completions")[0] == 200


@pytest.mark.parametrize("seconds", [0, -1, 61, float("inf"), float("nan"), "6", None, True and [6]])
def test_a_lease_without_an_end_is_refused(server, seconds):
    assert server(LEASE, {"holder": "x", "seconds": seconds})[0] == 410


@pytest.mark.parametrize("body", [{}, {"holder": 3}, {"holder": "a\nb"}, {"lease": 5}])
def test_a_lease_for_nobody_is_refused(server, body):
    assert server(LEASE, body)[0] == 400


def test_bytes_that_differ_leave_the_engine_dirty(server):
    key = server.lease()
    server.client.problems["prove", 1] = "model.norm.weight differs"
    assert server.publish(key) == [200, 200, 200, 200, 500]
    status, said = server("/v1/completions")
    assert (status, said["error"]) == (
        503, "the engine has no usable weights: rank 1: model.norm.weight differs")
    assert server(FINISH, {"weight_version": "1"}, key=key)[0] == 409, "a new publish begins with its start"
    assert server.seen.count(FINISH) == 0, "vLLM's version was not set"
    del server.client.problems["prove", 1]
    assert server.publish(key, "2") == [200] * 5
    assert server("/v1/completions")[0] == 200


def test_weights_that_have_changed_since_are_seen(server):
    key = server.lease()
    assert server(VERIFY, key=key)[0] == 409
    server.publish(key)
    assert server(VERIFY, key=key)[0] == 200
    server.client.problems["verify", 0] = "model.norm.weight has changed"
    assert server(VERIFY, key=key)[0] == 500
    assert server("/v1/completions")[0] == 503


def test_steps_out_of_order_are_refused(server):
    key = server.lease()
    assert server(START, key=key)[0] == 409, "it is generating"
    server("/pause", key=key)
    assert server(UPDATE, key=key)[0] == server(FINISH, {"weight_version": "1"}, key=key)[0] == 409
    server(START, key=key)
    assert server("/resume", key=key)[0] == 409
    assert server(FINISH, key=key)[0] == 400, "without a version"
    assert not {UPDATE, FINISH, "/resume"} & set(server.seen)


def test_sleep_that_drops_weights_leaves_the_engine_dirty(server):
    key = server.lease()
    server.publish(key)
    server("/sleep", key=key, query=b"level=1")
    assert server("/v1/completions")[0] == 200
    server("/sleep", key=key, query=b"level=2")
    assert "sleep dropped" in server("/v1/completions")[1]["error"]
    assert server(START, key=key)[1]["error"] == "the engine is asleep"
    server("/wake_up", key=key, query=b"tags=kv_cache")
    assert server(START, key=key)[0] == 409
    server("/wake_up", key=key, query=b"tags=weights&tags=kv_cache")
    assert server.publish(key) == [200] * 5


def test_memory_of_the_cache_comes_back_with_a_publish(server):
    """The weights' first, then they are published, and vLLM goes on with all of its memory."""
    key = server.lease()
    server("/sleep", key=key, query=b"level=2")
    server("/wake_up", key=key, query=b"tags=weights")
    assert server("/resume", key=key)[0] == 409
    assert "sleep dropped" in server("/v1/completions")[1]["error"] and not server.client.woken
    assert server.publish(key) == [200] * 5 and server.client.woken == [["kv_cache"]]
    assert server("/resume", key=key)[0] == server("/v1/completions")[0] == 200
    server("/sleep", key=key, query=b"level=1")
    server("/wake_up", key=key, query=b"tags=weights")
    server("/sleep", key=key, query=b"level=1")
    assert len(server.client.woken) == 2, "vLLM does not go to sleep from half awake"
    assert server("/resume", key=key)[1]["error"] == "the memory of its kv_cache and weights is asleep"
    server("/wake_up", key=key)
    assert server("/resume", key=key)[0] == 200


@pytest.mark.parametrize("path", sorted(UNPROVED))
def test_routes_that_change_weights_without_proof_are_closed(server, path):
    assert server(path, key=server.lease())[0] == 403


def test_a_route_with_a_line_break_is_not_another_route(server):
    assert server("/pause\n")[0] == 400


def test_bodies_have_a_largest_size(server, monkeypatch):
    monkeypatch.setattr(guard, "LARGEST_BODY", 100)
    chunked = (RIGHT, (b"transfer-encoding", b"chunked"))
    assert server("/v1/completions", {"x": "y" * 200}, headers=chunked)[0] == 413
    assert server("/v1/completions", headers=(RIGHT, (b"content-length", b"101")))[0] == 413
    assert server(LEASE, {"holder": "y" * 200})[0] == 413


ATOMS = [None, True, 0, -1, 2**64, 1e308, float("nan"), float("inf"), "", "x", "..", "\x00", "\ud800",
         "é" * 5, [], {}, [[]],
         "9" * 5000, "first", "shared_memory", [1] * 1000]


def mutated(draw: random.Random, key: str) -> tuple[dict, bool]:
    """(a request, whether its token is right)."""
    path = draw.choice([*ROUTES, *sorted(LEASED), LEASE, LEASE, "/pause/", "//pause", "/pause\x00",
                        "/v1/../pause"])
    body = {k: draw.choice(ATOMS) for k in draw.sample(
        ["holder", "seconds", "lease", "weight_version", "init_info", "update_info"], draw.randint(0, 4))}
    raw = json.dumps(body).encode()
    if draw.random() < 0.3:
        raw = draw.choice([draw.randbytes(40), b"[" * 200_000, raw[: len(raw) // 2], b"null", b"[]", b'"x"'])
    right = draw.random() < 0.7
    headers = [RIGHT] if right else WRONG[draw.choice(list(WRONG))]
    more = [(b"content-length", draw.choice([b"", b"-1", b"9" * 5000, b"x", b"5, 5",
                                             str(len(raw)).encode()]))]
    headers = [*headers, *(more if draw.random() < 0.3 else [])]
    held = [(b"x-jaxfp8rl-lease", draw.choice([key.encode(), b"", b"\xff", b"guess"]))]
    return {"path": path, "body": raw, "method": draw.choice(["GET", "POST", "POST", "DELETE", "PURGE", ""]),
            "headers": [*headers, *(held if draw.random() < 0.5 else [])],
            "query": draw.choice([b"", b"mode=keep", b"level=9", b"cache=keep&cache", b"\xff%",
                                  b"tags=" * 50])}, right


@pytest.mark.parametrize("inputs", [300, pytest.param(25_000, marks=pytest.mark.slow)])
def test_no_request_has_an_effect_that_it_may_not_have(server, inputs):
    """Whatever comes, the guard answers; without the token nothing happens; and the engine generates after a
    whole publish only."""
    draw, key = random.Random(int(os.environ.get("FUZZ_SEED", "0"))), server.lease(seconds=60.0)
    for _ in range(inputs):
        request, right = mutated(draw, key)
        before = len(server.seen), len(server.client.calls), server.guard._lease.key
        status, said = server(request.pop("path"), request.pop("body"), **request)
        if not right:
            assert status == 401 and before == (len(server.seen), len(server.client.calls),
                                                server.guard._lease.key)
        assert status in (200, 400, 401, 403, 409, 410, 413, 503), (status, said)
        whole = "reset_prefix_cache" in server.client.calls or "cache=keep" in str(request["query"])
        assert whole or server("/v1/completions")[0] == 503
    server.now += 100.0
    key = server.lease("the learner")
    server("/wake_up", key=key)
    assert server.publish(key) == [200] * 5
    assert server("/v1/completions")[0] == 200
