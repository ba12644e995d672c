"""What the processes of a run say to each other, in threads with a store of their own (real ones:
tests/e2e)."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from bridges.api import Completion, EngineFormats, GenRequest, SamplingParams, VersionSpan
from bridges.engines.fake_engine import FakeEngine
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.distributed import process_group
from jaxfp8rl.distributed.mesh import make_mesh_layout
from jaxfp8rl.distributed.process_group import ALONE, ProcessGroup, check_shared, joined
from jaxfp8rl.errors import ConfigError, DataError, ProcessFailed
from jaxfp8rl.rewards.runner import Score
from jaxfp8rl.rollout.process_proxies import with_proxies
from jaxfp8rl.training.context import check_same

LARGEST = 64  # bytes


class Store:
    """As jax.distributed's: a key is set once, waited for, and goes with those below it. What is large does
    not cross in time."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: it is not there")
            if len(self.values[key]) > LARGEST:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: of the transfer")
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            for name in [name for name in self.values if name == key or name.startswith(key + "/")]:
                del self.values[name]


@pytest.fixture
def each(monkeypatch):
    """each(f, count): f(group) of each of `count` processes -> results, or the exceptions that they
    raised."""
    monkeypatch.setattr(process_group, "SLICE_MS", 20)
    monkeypatch.setattr(process_group, "PART", LARGEST)
    monkeypatch.setattr(process_group, "SHARED_S", 0.3)

    def run(f, count=3):
        store = Store()
        groups = [ProcessGroup(count, number, store) for number in range(count)]
        for group in groups:
            group._name = "run"

        def one(group):
            try:
                return f(group)
            except BaseException as e:
                if group.first:
                    group.leave(e)
                return e

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, groups)), store

    return run


def test_what_the_first_finds_all_are_told_in_order_and_then_it_is_forgotten(each):
    def f(group):
        found = [group.broadcast(lambda i=i: [group.number, 0.1, None, i]) for i in range(3)]
        return found, group.all_reduce_max(group.number), group.all_reduce_max(0), group.broadcast(
            lambda: float("nan"))

    results, store = each(f)
    assert [str(r) for r in results] == [str(([[0, 0.1, None, i] for i in range(3)], 2, 0, float("nan")))] * 3
    # since all came together
    assert sorted(store.values) == ["run/told/4", "run/told/4/0", "run/told/5", "run/told/5/0"]


def test_what_is_large_is_told_in_parts_and_they_are_forgotten_too(each):
    value = ["ä" * 10 * LARGEST, 7]
    results, store = each(lambda group: (group.broadcast(lambda: value), group.all_reduce_max(0),
                                         group.broadcast(lambda: "x")))
    assert results == [(value, 0, "x")] * 3
    assert sorted(store.values) == ["run/told/1", "run/told/1/0", "run/told/2", "run/told/2/0"]


def test_whoever_is_interrupted_while_telling_still_says_so(each, monkeypatch):
    def interrupted(store, key, value, allow_overwrite=False, set=Store.key_value_set_bytes):
        if key.endswith("told/0/1") and value.startswith(b"x"):
            raise KeyboardInterrupt
        set(store, key, value, allow_overwrite)

    monkeypatch.setattr(Store, "key_value_set_bytes", interrupted)
    results, _ = each(lambda group: group.broadcast(lambda: "x" * 10 * LARGEST))
    assert isinstance(results[0], KeyboardInterrupt) and [r.code for r in results[1:]] == [130, 130]


def test_with_one_process_nothing_is_sent():
    assert ALONE.broadcast(lambda: 3) == 3 and ALONE.all_reduce_max(4) == 4 and ALONE.suffix == ""
    with pytest.raises(ValueError, match="of its own"):
        ALONE.run_and_sync(lambda: (_ for _ in ()).throw(ValueError("of its own")))
    with joined(load_config("demo", ["--run.dir", "unused"])) as group:
        assert group is ALONE and with_proxies(group, lambda: (1, 2, 3)) == (1, 2, 3)


def test_what_one_raises_ends_all(each):
    def fail(group, number):
        if group.number == number:
            raise DataError("a row", "mend it")

    for number in range(3):
        results, _ = each(lambda group, number=number: group.run_and_sync(lambda: fail(group, number)))
        assert [type(r) for r in results] == [DataError if i == number else ProcessFailed for i in range(3)]
    results, _ = each(lambda group: group.run_and_sync(lambda: fail(group, 1), alone=True))
    assert results == [None] * 3  # who is not the first does nothing
    for error, code, says in [
        (DataError("a row", "mend it"), 2, "the first process has ended: a row\n  next step: mend it"),
        (KeyError("x"), 1, "the first process has ended: KeyError: 'x'"),
    ]:
        results, _ = each(lambda group, error=error: group.broadcast(lambda: (_ for _ in ()).throw(error)))
        assert results[0] is error and all(isinstance(r, ProcessFailed) for r in results[1:])
        assert {(r.exit_code, str(r)) for r in results[1:]} == {(code, says)}

    def go_on(group):
        fail(group, 0)
        with contextlib.suppress(ProcessFailed):  # as who tries a disk again would
            group.run_and_sync(lambda: None)
        group.broadcast(lambda: 1)

    assert [type(r) for r in each(go_on)[0]] == [DataError, ProcessFailed, ProcessFailed]
    results, _ = each(lambda group: group.broadcast(lambda: (_ for _ in ()).throw(SystemExit(143))))
    assert [r.code for r in results] == [143] * 3


def completion(at: int) -> Completion:
    values = np.array([-0.1, -2.5e-8], np.float32)
    return Completion(f"{at}", at, np.array([3, at], np.int32), values, "stop", (VersionSpan(0, 2, 7),))


class Engine(FakeEngine):
    def generate(self, requests):
        return [[completion(i) for i in range(r.n)] for r in requests]


SCORES = [Score(1 / 3, "ok"), Score(None, "timeout")]


class Rewards:
    def score(self, items):
        return SCORES

    def close(self):
        pass


def test_engine_and_rewards_of_the_first_answer_in_all(each):
    made = []

    def make():
        made.append(1)
        return Rewards(), Engine(), None

    def f(group):
        rewards, engine, _ = with_proxies(group, make)
        answers = engine.generate([GenRequest("a", (1, 2), SamplingParams(4), 2),
                                   GenRequest("b", (1,), SamplingParams(4), 1)])
        engine.sleep(), engine.wake()
        assert engine.health().ok and engine.restarts == 0
        return engine.capabilities(), answers, rewards.score([("p", "x"), ("p", "y")])

    results, _ = each(f)
    assert made == [1]
    for capabilities, answers, scores in results:
        assert capabilities == results[0][0] and isinstance(capabilities.formats, EngineFormats)
        assert [len(group) for group in answers] == [2, 1] and scores == SCORES
        for i, c in enumerate(answers[0]):
            want = completion(i)
            assert (c.index, c.finish_reason, c.version_spans,
                    c.routed_experts) == (i, "stop", want.version_spans, None)
            for have, array in ((c.token_ids, want.token_ids), (c.logprobs, want.logprobs)):
                assert have.dtype == array.dtype
                np.testing.assert_array_equal(have, array)


def test_who_was_started_otherwise_or_sees_other_files_is_refused(each, tmp_path):
    dated = ["--run.dir", "unused", "--task.options", "{since = 2020-01-01}"]  # which JSON cannot write
    cfg, other = (load_config("demo", [*dated, "--optim.lr", lr]) for lr in ("1e-4", "1e-5"))

    def compare(configs, ways):
        return each(lambda g: process_group._compare(g, configs[g.number], ways[g.number]))[0]

    assert compare([cfg] * 3, [(True, "")] * 3) == [None] * 3
    results = compare([cfg, cfg, other], [(True, "")] * 3)
    assert "process 2 was started with other arguments than the first: optim.lr: 0.0001 -> 1e-05\n" in str(
        results[2])
    assert isinstance(results[2], ConfigError) and all(isinstance(r, ProcessFailed) for r in results[:2])
    results = compare([cfg] * 3, [(True, ""), (False, ""), (True, "")])
    assert "process 1 was started with other arguments than the first: --resume or --fork" in str(results[1])

    digests = [{"problems": "a"}, {"problems": "b"}, {"problems": "a"}]
    results, _ = each(lambda group: check_same(group, digests[group.number]))
    assert "process 1 has other problems than the first" in str(results[1]) and isinstance(
        results[1], DataError)

    files = [tmp_path / "seen", tmp_path / "seen", tmp_path / "elsewhere"]
    files[0].write_text("12\n")
    results, _ = each(lambda group: check_shared(group, files[group.number]))
    assert "process 2 does not see the first one's" in str(results[2]) and isinstance(
        results[0], ProcessFailed)
    files[2].write_text("12\n")
    assert each(lambda group: check_shared(group, files[group.number]))[0] == [None] * 3


TWO = ["--run.dir", "unused", "--train.data", "2", "--train.processes", "2"]


@pytest.mark.parametrize(
    "environment, says",
    [
        ({}, "train.processes = 2: the number of this process is unknown"),
        ({"JAX_COORDINATOR_ADDRESS": "nowhere", "JAX_PROCESS_ID": "0"}, "the number of this process is unknown"),
        ({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_PROCESS_ID": "2"},
         "JAX_PROCESS_ID = 2: train.processes = 2 are 0 to 1"),
        ({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_PROCESS_ID": "first"}, "JAX_PROCESS_ID = first"),
        ({"JAX_NUM_PROCESSES": "3"}, "train.processes = 2, JAX_NUM_PROCESSES = 3"),
    ],
)
def test_a_process_that_does_not_know_which_it_is_is_refused(environment, says, monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    with pytest.raises(ConfigError, match=says), joined(load_config("demo", TWO)):
        pass


@pytest.mark.parametrize("address, bound",
                         [("127.0.0.1:1", "127.0.0.1:1"), ("localhost:1", "localhost:1"), ("host-a:1", None)])
def test_on_one_machine_no_other_can_reach_the_coordinator(address, bound, monkeypatch):
    given = {}
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **named: given.update(named) or int(""))
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    for name, value in {"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError), joined(load_config("demo", TWO)):
        pass
    assert given["process_id"] == 0 and given.get("coordinator_bind_address") == bound


@pytest.mark.parametrize(
    "options, says",
    [
        (["--train.processes", "3"],
         "train.processes = 3 does not divide train.data . train.fsdp . train.tensor = 2"),
        (["--rollout.max_staleness", "1"], "train.processes = 2: rollout.max_staleness is for a learner in one process"),
        (["--moe.replay", "R3"], 'train.processes = 2: moe.replay = "R3" is for a learner in one process'),
    ],
)
def test_what_is_only_there_in_one_process_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        check(load_config("demo", [*TWO, *options]))


def test_all_devices_of_all_processes_are_taken():
    with pytest.raises(ConfigError, match=r"train.data = 2000: the 2 processes have \d+ device"):
        make_mesh_layout(data=2000, processes=2)
