"""An engine in another process: who may ask, and from where."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import threading
import time

import pytest
from remote_servers import QWEN3, SERVER, TINY, TOKEN

from bridges.api import (
    BridgeError,
    EngineUnhealthy,
)
from bridges.engines.fake_engine import FakeEngine
from bridges.served import http_server, wire
from bridges.served.engine_server import HttpServer
from bridges.served.remote_engine import RemoteEngine, spawn
from bridges.served.remote_file import RemoteFile


def test_a_wrong_token_is_refused_and_no_token_is_ever_said(served, capfd):
    _, e = served
    for token in ("", TOKEN[:-1], TOKEN + "x", "é" * 32):
        with pytest.raises((BridgeError, UnicodeEncodeError)) as error:
            RemoteEngine(e.engine.url, token)
        assert "the token" in str(error.value) or token.startswith("é")
        assert TOKEN not in str(error.value)
    e.publish(0)
    assert TOKEN not in repr(vars(e.transport)) and TOKEN not in "".join(capfd.readouterr())


@pytest.mark.parametrize("headers", [{}, {"Authorization": TOKEN}, {"Authorization": "Basic " + TOKEN}])
def test_without_the_token_nothing_is_done(served, headers):
    engine, e = served
    e.publish(0)
    connection = http.client.HTTPConnection(e.engine.url.removeprefix("http://"), timeout=2)
    connection.request("POST", "/v1/close", b"{}", headers)
    response = connection.getresponse()
    assert response.status == 401 and "refused the token" in json.loads(response.read())["error"]["message"]
    e.sample()


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"unheard": 1}', b"\xff"])
def test_a_malformed_call_is_answered_and_the_engine_goes_on(served, body):
    _, e = served
    e.publish(0)
    connection = http.client.HTTPConnection(e.engine.url.removeprefix("http://"), timeout=2)
    connection.request("POST", "/v1/generate", body, {"Authorization": f"Bearer {TOKEN}"})
    response = connection.getresponse()
    assert response.status in (400, 500) and json.loads(response.read())["error"]["message"]
    e.sample()


def test_a_long_reply_may_take_longer_than_a_connection_may_be_idle(monkeypatch):
    """As through a tunnel: whoever reads on is written to."""
    monkeypatch.setattr(http_server._Handler, "timeout", 0.5)
    monkeypatch.setattr(http_server, "PIECE_BYTES", 2**16)
    server = HttpServer(TOKEN)
    server.answer = lambda method, arguments, seconds: "x" * 2**23
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.closing(socket.create_connection(server.server_address)) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        s.sendall(
            f"POST /v1/x HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        begun, got = time.monotonic(), 0
        while data := s.recv(2**18):
            got += len(data)
            time.sleep(0.03 if time.monotonic() - begun < 1.5 else 0)
    server.shutdown()
    server.server_close()
    assert got > 2**23 and time.monotonic() - begun > 1


def test_only_this_machine_unless_asked_for_in_words():
    for host in ("0.0.0.0", "192.0.2.1", "some.host"):
        with pytest.raises(BridgeError, match="--allow-network"):
            HttpServer(TOKEN, host)
    for token in ("", "short", "é" * 32, "line\n" * 8):
        with pytest.raises(BridgeError, match="a token has at least 16"):
            HttpServer(token)
    HttpServer(TOKEN, "0.0.0.0", allow_network=True).server_close()


def run_server(*arguments, token: str = "") -> tuple[int, dict, str]:
    environment = {**os.environ, wire.TOKEN_VARIABLE: token}
    done = subprocess.run([*SERVER, *arguments], capture_output=True, text=True, env=environment, timeout=60)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_the_command_refuses_a_taken_port_the_network_and_unknown_options(remote):
    port = remote.engine.url.rpartition(":")[2]
    code, said, _ = run_server("--engine", "fake", "--port", port)
    assert code == 1 and f"cannot listen on 127.0.0.1:{port}: it is taken" in said["error"]["message"], said
    code, said, _ = run_server("--engine", "fake", "--host", "0.0.0.0", "--allow-network")
    assert code == 1 and "wants a token that you chose" in said["error"]["message"], said
    code, said, _ = run_server("--engine", "fake", "--host", "0.0.0.0", token=TOKEN)
    assert code == 1 and "can be reached from other machines" in said["error"]["message"], said
    code, said, err = run_server("--engine", "fake", "--vocab", "9")
    assert code == 2 and said == {} and "--vocab" in err


def test_the_command_makes_a_token_for_this_user_alone(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != wire.TOKEN_VARIABLE}
    child = subprocess.Popen([*SERVER, "--engine", "fake", "--vocab-size", "9"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE,
                             text=True, env=environment)
    ready = json.loads(child.stdout.readline())
    token = open(ready["token_file"]).read()
    assert os.stat(ready["token_file"]).st_mode & 0o777 == 0o600 and len(token) > 40 and ready[
        "pid"] == child.pid
    engine = RemoteEngine(ready["url"], token)
    assert engine.capabilities().vocab_size == 9
    engine.close()
    out, err = child.communicate(timeout=10)
    assert child.returncode == 0 and token not in out + err
    assert not os.path.exists(ready["token_file"]) and not os.path.exists(ready["folder"])


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path):
    for error, message, arguments in (
        (EngineUnhealthy, "TypeError: .*'unheard'", dict(engine="fake", faults={"unheard": 1})),
        (BridgeError, "no transport 'teleport' into vLLM",
         dict(engine="vllm", hf_config=QWEN3, transport="teleport", **TINY)),
        (BridgeError, "wants to know the model", dict(engine="vllm", **TINY)),
        (EngineUnhealthy, "exit code 2", dict(engine="vllm", hf_config=QWEN3)),
        (EngineUnhealthy, "exit code 2", dict(engine="fake", unheard=1)),
        (EngineUnhealthy, "not started within 0 s", dict(engine="fake", start_seconds=0.0)),
    ):
        with pytest.raises(error, match=message), spawn(**arguments, environment={"TMPDIR": str(tmp_path)}):
            pass
    assert os.listdir(tmp_path) == []


def test_another_protocol_and_other_addresses_are_refused(served, monkeypatch):
    _, e = served
    for odd in ("127.0.0.1:80", "https://127.0.0.1:80", "http://127.0.0.1"):
        with pytest.raises(BridgeError, match="is not the address"):
            RemoteEngine(odd, TOKEN)
    original = RemoteEngine.call
    monkeypatch.setattr(RemoteEngine, "call",
                        lambda self, *a, **k: {**original(self, *a, **k), "protocol": 0})
    with pytest.raises(BridgeError, match="speaks protocol 0"):
        RemoteEngine(e.engine.url, TOKEN)


def test_the_transport_refuses_another_engine_and_a_folder_it_cannot_see(remote):
    with pytest.raises(BridgeError, match="not a FakeEngine"):
        RemoteFile().open(FakeEngine())
    with pytest.raises(BridgeError, match="is no folder here"):
        RemoteFile("/nowhere/at/all").open(remote.engine)
    with pytest.raises(BridgeError, match="call open"):
        RemoteFile().publish(remote.source(0), 1)
