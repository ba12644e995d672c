"""Faults of processes, by their rows in docs/faults.md: an engine that dies, a run that is told to go, that
hangs, that is not alone in its directory."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest
import stand_in_program
from stand_in_program import ByFolder

from bridges.api import EngineUnhealthy, GenRequest, SamplingParams
from bridges.engines.fake_engine import FakeEngine
from bridges.served import serve_process
from bridges.served.serve_process import ServeProcesses
from bridges.served.served_engines import ServedEngines
from bridges.served.vllm_client import Deadlines
from bridges.sources.array_source import random_source

DEADLINES = Deadlines(connect=2.0, generate=5.0, call=5.0, down=20.0)
METAS = FakeEngine().expected_manifest()
REQUESTS = [GenRequest(f"r{i}", (1, 2, i), SamplingParams(6), 2, seed=i) for i in range(4)]


class Children:
    """Served engines whose children are programs that stand for vLLM. script: the words of each start, in
    turn. pids: those started. before: is called in a publish, when the weights are on their way."""

    def __init__(self, folder, *script: str, count: int = 1, budget: int = 2):
        self.pids, self.before, words = [], lambda: None, iter(script)
        self.processes = ServeProcesses("", [], count, of_child=lambda i: (next(words, "").split(), {}),
                                        logs=folder)
        start = self.processes.start
        self.processes.start = lambda i: (start(i), self.pids.append(self.processes.pid(i)))
        self.pids += [self.processes.pid(i) for i in range(count)]
        self.processes.wait_until_ready(20)
        self.engine = ServedEngines(
            self.processes.token, lambda urls: ByFolder(self.processes.token, urls, METAS,
                                                        lambda _: self.before()),
            processes=self.processes, deadlines=DEADLINES, restarts=budget)

    def publish(self, seed: int, version: int):
        return self.engine.publish(random_source(METAS, seed, 1.0), version)

    def kill(self, i: int = 0) -> None:
        os.killpg(self.processes.pid(i), signal.SIGKILL)


@pytest.fixture
def children(monkeypatch, tmp_path):
    monkeypatch.setattr(serve_process, "console_script", lambda: stand_in_program.script(tmp_path))
    with contextlib.ExitStack() as stack:
        def start(*script, **options):
            made = Children(tmp_path / "logs", *script, **options)
            stack.callback(made.engine.close)
            return made

        yield start


def sampled(groups) -> list:
    return [(c.token_ids.tobytes(), c.logprobs.tobytes(), c.version_spans) for group in groups for c in group]


@pytest.fixture(scope="module")
def undisturbed() -> list:
    from stand_in import TOKEN, StandIn, published
    from test_vllm_client import served

    with served(StandIn(published(weights=7, version=3), token=TOKEN)) as client:
        return sampled(client.generate(REQUESTS))


@pytest.mark.parametrize("how", ["exit status 0", "SIGKILL"])
def test_row_25_a_dead_engine_is_known_at_once_and_another_answers_as_it_would_have(how, undisturbed,
                                                                                    children):
    """An exit status of 0 is a death, too. The version is the one it had; what was asked is answered to the
    bit."""
    c = children("--exit-status 0" if how == "exit status 0" else "--seconds 30")
    c.publish(7, 3)
    if how == "SIGKILL":
        threading.Timer(0.3, c.kill).start()
    begun = time.monotonic()
    assert sampled(c.engine.generate(REQUESTS)) == undisturbed
    assert time.monotonic() - begun < 8 and c.engine.restarts == 1 and c.engine.weight_version() == 3
    assert len(set(c.pids)) == 2 and c.engine.health().ok


def test_row_25_an_engine_that_dies_between_calls_or_in_a_publish_is_replaced(undisturbed, children):
    c = children()
    c.publish(1, 2)
    c.kill()
    assert c.engine.generate(REQUESTS)[0][0].version_spans[0].version == 2  # the first restart
    kills = iter([c.kill])
    c.before = lambda: next(kills, lambda: None)()
    receipt = c.publish(7, 3)
    assert receipt.version == 3 and c.engine.restarts == 2
    c.engine.verify(receipt)
    assert sampled(c.engine.generate(REQUESTS)) == undisturbed


def test_row_25_an_engine_that_does_not_come_up_at_once_is_started_again(undisturbed, children):
    """The memory of the one before was not free yet. Then the budget is spent."""
    c = children("", "--fail", budget=2)
    c.publish(7, 3)
    c.kill()
    assert sampled(c.engine.generate(REQUESTS)) == undisturbed
    assert c.engine.restarts == 2 and len(c.pids) == 3 and c.engine.weight_version() == 3
    c.kill()
    with pytest.raises(EngineUnhealthy, match="started anew 2 times, which is all they may be"):
        c.engine.generate(REQUESTS)


def test_row_25_what_kills_engine_after_engine_is_raised(children):
    c = children(*["--exit-status 1"] * 4, budget=9)
    c.publish(7, 3)
    with pytest.raises(EngineUnhealthy, match="'r0' was asked 3 times in vain"):
        c.engine.generate(REQUESTS[:1])
    assert c.engine.restarts <= 3
