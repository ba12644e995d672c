"""A guarded server under strangers: half-open connections, bodies without an end, and calls that no learner
would make. uvicorn serves, as it does for vLLM; plain torch modules stand for the model."""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import os
import random
import resource
import socket
import threading
import time
import urllib.parse

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("uvicorn")

import plugin_server  # noqa: E402
from fuzz_answers import mutated  # noqa: E402
from plugin_server import TOKEN, Engine, Model, serving, with_token, without_vllm  # noqa: E402
from stand_in import StandIn, published  # noqa: E402
from test_vllm_client import request, served  # noqa: E402

from benchmarks.processes import printed  # noqa: E402
from bridges.api import BridgeError, EngineUnhealthy  # noqa: E402
from bridges.served import served_control  # noqa: E402
from bridges.served.served_control import Server  # noqa: E402
from bridges.served.served_transport import ServedTransport  # noqa: E402
from bridges.served.vllm_client import Deadlines  # noqa: E402
from bridges.sources.array_source import random_source  # noqa: E402
from bridges.vllm_plugin import pieces, slots  # noqa: E402
from bridges.vllm_plugin.rank import Rank  # noqa: E402
from bridges.vllm_plugin.receiver import Receiver  # noqa: E402
from bridges.vllm_plugin.turns import Turns  # noqa: E402


@pytest.fixture(autouse=True)
def guarded(tmp_path, monkeypatch):
    with_token(tmp_path, monkeypatch)
    without_vllm(monkeypatch)


@pytest.fixture
def many_files():
    """This process has 1,100 files open, so that each further one has a number above 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"this process may open {hard} files at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def publish(url: str) -> float:
    """Seconds of a lease and a whole publish."""
    start, transport = time.monotonic(), ServedTransport(TOKEN, urls=[url])
    transport.open()
    transport.verify(transport.publish(random_source(transport.expected_manifest(), 0), 1))
    transport.close()
    return time.monotonic() - start


def test_a_publish_among_a_thousand_half_open_connections_and_files_above_1024(many_files):
    """Of each connection the server has a part of a request without a token, and waits for the rest."""
    with serving(Engine()) as url, contextlib.ExitStack() as stack:
        alone, where = publish(url), urllib.parse.urlsplit(url)
        for i in range(1000):
            s = stack.enter_context(socket.create_connection((where.hostname, where.port), 5))
            s.sendall([b"", b"POST /update_weights HTTP/1.1\r\nhost: x\r\n",
                       b"POST /jaxfp8rl/lease HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"][i % 3])
        assert publish(url) < alone + 5


class Page(http.server.BaseHTTPRequestHandler):
    """Another program at the address: it answers everything with a page."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>Welcome</html>")

    def log_message(self, *_):
        pass


def test_another_program_at_the_address_is_named():
    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        transport = ServedTransport(TOKEN, urls=[f"http://127.0.0.1:{server.server_port}"])
        with pytest.raises(BridgeError, match="/jaxfp8rl/lease: the answer is not JSON: '<html>Welcome"):
            transport.open()
        server.shutdown()


class Hanging(http.server.BaseHTTPRequestHandler):
    """It gives its lease, and does not answer /pause until `released`."""

    released = threading.Event()

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/pause":
            self.released.wait(60)
        body = json.dumps({"lease": "a key", "ranks": []}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_DELETE = do_POST

    def log_message(self, *_):
        pass


INTERRUPTED = """
import signal, sys, threading
from bridges.served.served_transport import ServedTransport

transport = ServedTransport(sys.argv[2], urls=[sys.argv[1]])
transport.open()
threading.Timer(0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
try:
    transport.post("/pause")
except KeyboardInterrupt:
    transport.close()
    print("closed")
"""


def test_a_call_that_hangs_does_not_keep_a_learner_from_its_end():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hanging) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start = time.monotonic()
        assert printed(INTERRUPTED, f"http://127.0.0.1:{server.server_port}", TOKEN) == "closed\n"
        assert time.monotonic() - start < 20
        Hanging.released.set()
        server.shutdown()


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nx-slow: ", b"HTTP/1.1 200 OK\r\n\r\n",
                                  b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\n"])
def test_a_call_ends_at_its_deadline_though_its_answer_drips(head):
    """The answer has a byte every 50 ms, for two seconds: a header, or a body with or without its length."""
    def answer():
        with contextlib.suppress(OSError), listener.accept()[0] as s:
            s.sendall(head)
            for _ in range(40):
                time.sleep(0.05)
                s.sendall(b"1")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        start = time.monotonic()
        with pytest.raises(EngineUnhealthy, match=r"/pause: no answer within 0.3 s \(TimeoutError: timed out"):
            Server(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN).call("/pause", seconds=0.3)
        assert time.monotonic() - start < 1
        thread.join()


def test_an_answer_to_a_control_call_has_a_bound(monkeypatch):
    monkeypatch.setattr(served_control, "MOST_BYTES", 1000)

    def answer():
        with contextlib.suppress(OSError), listener.accept()[0] as s:
            s.recv(65536)
            s.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"1" * 5000)
            while s.recv(65536):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EngineUnhealthy, match="/jaxfp8rl: an answer of more than 0 MiB"):
            Server(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN).call("/jaxfp8rl", method="GET")
        thread.join()


def test_a_client_whose_files_have_large_numbers(many_files):
    with served(StandIn(published())) as client:
        assert len(client.generate([request(i, 8) for i in range(5)])) == 5


def test_a_deadline_without_an_end_is_one():
    forever = Deadlines(*[float("inf")] * 4)
    with served(StandIn(published()), deadlines=forever) as client:
        assert len(client.generate([request()])) == 1 and client.version_of(client.replicas[0].url) == 1


@pytest.mark.parametrize("token", [True, False])
def test_a_body_without_an_end_is_refused_and_not_kept(token):
    """It has no length, and goes on for 600 MiB, which uvicorn reads and drops once it is refused."""
    with serving(Engine()) as url:
        where = urllib.parse.urlsplit(url)
        with socket.create_connection((where.hostname, where.port), 20) as s:
            keys = f"authorization: Bearer {TOKEN}\r\n" if token else ""
            s.sendall(f"POST /update_weights HTTP/1.1\r\nhost: x\r\n{keys}transfer-encoding: "
                      f"chunked\r\n\r\n".encode())
            before, sent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
            piece = b"100000\r\n" + b" " * 2**20 + b"\r\n"
            with contextlib.suppress(OSError):
                while sent < 600:
                    s.sendall(piece)
                    sent += 1
            with contextlib.suppress(OSError):
                assert (b" 413 " if token else b" 401 ") in s.recv(1000)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024
        assert publish(url) < 5


ATOMS = [None, True, False, 0, -1, 1, 2**20, 2**63, 2**64, 1e308, float("nan"), float("inf"), "", "x", "..",
         "/etc/passwd",
         "\x00", "\ud800", [], {}, [[]], [{}], {"a": 1}, "9" * 500, [1] * 100, "file", "shared_memory",
         "cuda_ipc", "nccl"]
KEYS = ["x", "kind", "slot_bytes", "slot_count"]


@pytest.mark.parametrize("inputs", [300, pytest.param(25_000, marks=pytest.mark.slow)])
def test_no_call_of_a_learner_raises_in_a_rank_and_nothing_unproved_is_let_through(inputs, tmp_path):
    """The bodies of the routes that reach the ranks: what goes wrong is noted, and the weights never count as
    published."""
    draw, model = random.Random(int(os.environ.get("FUZZ_SEED", "0"))), Model(0, 1)
    rank, names = Rank(0, lambda: Receiver(model, 0, 1, False), dict), [m.name for m in plugin_server.metas()]
    slots.made(tmp_path / "slots", 300_000, 2)
    sent = pieces.packed([[(0, pieces.whole(m))] for m in plugin_server.metas()])
    good = {"kind": "shared_memory", "names": names, "slot_bytes": 300_000, "slot_count": 2, "sent": sent,
            "senders": [{"path": str(tmp_path / "slots")}], "turns": str(tmp_path / "turns")}
    Turns.made(tmp_path / "turns").close()
    Receiver(model, 0, 1, False).connect(**good)
    digests, noted = {"0": "A" * 64}, 0
    rank.asked("renew")
    for _ in range(inputs):
        calls = [lambda: rank.connect(mutated(copy.deepcopy(good), draw, ATOMS, KEYS)), rank.start,
                 lambda: rank.receive(mutated({"buckets": [0, draw.choice([0, 1, 2, 4])], "digests": digests},
                                              draw, ATOMS, KEYS))]
        draw.choice(calls)()
        if draw.random() < 0.1:
            rank.asked(draw.choice(["prove", "verify", "describe", "", "__class__"]))
        noted += bool(json.loads(json.dumps(rank.asked("state")))["problem"])
        assert not rank._proved
    assert noted > inputs // 4
    rank.close()

