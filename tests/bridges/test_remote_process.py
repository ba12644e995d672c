"""An engine in another process that dies, hangs, or has lost its parent."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from remote_servers import SHORT, TOKEN, under

from bridges.api import EngineDirty, EngineUnhealthy, PublishFailed
from bridges.conformance import EngineUnderTest
from bridges.engines.fake_engine import FakeEngine, FakeTransport
from bridges.served import remote_engine
from bridges.served.remote_engine import RemoteEngine, spawn
from bridges.sources.array_source import ArraySource


class Doing(ArraySource):
    """Does something to the server when the last tensor is asked for."""

    def __iter__(self):
        *first, last = super().__iter__()
        yield from first
        self.arrays["do"]()
        yield last


def doing(e: EngineUnderTest, do) -> Doing:
    good = e.source(1)
    return Doing(good.metas, {**good.arrays, "do": do})


def test_killed_while_the_engine_loads(own):
    def stop_then_kill():
        os.kill(own.engine.pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, [own.engine.pid, signal.SIGKILL]).start()

    with pytest.raises(PublishFailed, match=r"no answer from the engine.*after 0\.\d of 1\.0 s"):
        own.transport.publish(doing(own, stop_then_kill), 1)
    assert own.engine.weight_version() is None
    assert not own.engine.health().ok


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_gone_during_generate_is_known_by_the_deadline(sign):
    with spawn("fake", faults={"seconds": 30.0}, deadlines=dataclasses.replace(SHORT, publish=5.0)) as engine:
        e = under(engine)
        e.publish(0)
        threading.Timer(0.2, os.kill, [engine.pid, sign]).start()
        start = time.monotonic()
        with pytest.raises(EngineUnhealthy, match="generate: no answer|generate has not finished"):
            e.sample()
        passed = time.monotonic() - start
        assert passed < 0.9 if sign == signal.SIGKILL else 0.9 < passed < 2
        if sign == signal.SIGSTOP:
            os.kill(engine.pid, signal.SIGKILL)


def test_an_engine_that_hangs_in_a_publish_is_dirty_even_when_it_comes_round(own):
    own.publish(0)
    own.transport.verify(receipt := own.publish(0))
    start = time.monotonic()
    with pytest.raises(PublishFailed, match="load: no answer"):
        own.transport.publish(doing(own, lambda: os.kill(own.engine.pid, signal.SIGSTOP)), 3)
    assert 0.9 < time.monotonic() - start < 2
    os.kill(own.engine.pid, signal.SIGCONT)
    for refused, error in ((own.sample, EngineDirty), (lambda: own.transport.verify(receipt), PublishFailed)):
        with pytest.raises(error, match="version 3 has not finished"):
            refused()
    own.publish(0)
    own.sample()


def test_a_call_given_up_in_the_queue_is_not_made(serving, tmp_path):
    engine, calls = FakeEngine(), []
    engine.pause, engine.resume = lambda: time.sleep(0.6), lambda: calls.append("resume")
    with serving(engine, FakeTransport(), tmp_path) as url:
        remote = RemoteEngine(url, TOKEN)
        thread = threading.Thread(target=remote.pause)
        thread.start()
        time.sleep(0.1)
        with pytest.raises(EngineUnhealthy, match="resume"):
            remote.call("resume", 0.2)
        thread.join()
        remote.wake()
    assert calls == []


def test_an_address_that_drips_does_not_outlast_the_deadline():
    """A socket's own timeout starts anew at each byte; the deadline must not."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        def drip():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                for _ in range(50):
                    connection.sendall(b"H")
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        start = time.monotonic()
        with pytest.raises(EngineUnhealthy):
            RemoteEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN, SHORT)
        assert time.monotonic() - start < 2


def test_the_engine_ends_with_its_parent():
    script = """from bridges.served.remote_engine import spawn
with spawn("fake") as e:
    print(e.pid, e.url, e.folder, flush=True)
    input()"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True)
    pid, url, folder = parent.stdout.readline().split()
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 5
    while os.path.exists(folder) and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(folder), f"process {pid} is still there"
    time.sleep(0.1)
    with pytest.raises(EngineUnhealthy):
        RemoteEngine(url, TOKEN, SHORT)


def test_it_ends_with_its_context_and_removes_its_files():
    with spawn("fake") as engine:
        e = under(engine)
        assert os.stat(engine.folder).st_mode & 0o077 == 0, "weights are for this user alone"
    assert not os.path.exists(engine.folder) and not engine.health().ok
    with pytest.raises(EngineUnhealthy):
        e.publish(0)


def test_close_ends_the_server(own):
    own.engine.close()
    until = time.monotonic() + 5
    while os.path.exists(own.engine.folder) and time.monotonic() < until:
        time.sleep(0.02)
    with pytest.raises(EngineDirty, match="closed"):
        own.sample()
    own.engine.close()
    assert not own.engine.health().ok


def test_a_process_is_ended_once(monkeypatch):
    """Its number may be another process group's by the second close."""
    killed = []
    monkeypatch.setattr(os, "killpg", lambda *args: killed.append(args))
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, start_new_session=True)
    for _ in range(2):
        remote_engine._end(child)
    assert killed == [(child.pid, signal.SIGKILL)] and child.returncode == -signal.SIGTERM
