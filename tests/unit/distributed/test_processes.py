"""What the processes of a run say to each other, in threads with sockets of their own (real ones:
tests/e2e)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from linked_groups import of_each

from bridges.api import EngineFormats
from bridges.engines.fake_engine import FakeEngine
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.distributed import links, process_group
from jaxfp8rl.distributed.mesh import make_mesh_layout
from jaxfp8rl.distributed.process_group import ALONE, check_shared, joined
from jaxfp8rl.errors import ConfigError, DataError, ProcessFailed
from jaxfp8rl.rollout.process_proxies import with_proxies
from jaxfp8rl.training.context import check_same


@pytest.fixture
def each(monkeypatch):
    """`of_each` with shorter waits."""
    monkeypatch.setattr(links, "SLICE_S", 0.02)
    monkeypatch.setattr(process_group, "SHARED_S", 0.3)
    return of_each


def test_what_the_first_finds_all_are_told_in_order(each):
    def f(group):
        found = [group.broadcast(lambda i=i: [group.number, 0.1, None, i]) for i in range(3)]
        return found, group.all_reduce_max(group.number), group.all_reduce_max(0), group.broadcast(
            lambda: float("nan"))

    assert [str(r) for r in each(f)] == [str(([[0, 0.1, None, i] for i in range(3)], 2, 0, float("nan")))] * 3


ARRAYS = [np.arange(5, dtype=np.uint8), np.array(7, np.int64), np.zeros((0, 3), np.float32),
          np.array([np.nan, -0.0], np.float32), np.arange(12, dtype=np.int16).reshape(3, 4).T,
          np.array([True])]


def test_arrays_cross_with_every_bit(each):
    found = each(lambda group: group.broadcast(lambda: {"a": ARRAYS, "b": [{"c": ARRAYS[0]}, "ä"]}))[1]
    assert found["b"][1] == "ä" and found["b"][0]["c"].tolist() == [0, 1, 2, 3, 4]
    for have, want in zip(found["a"], ARRAYS, strict=True):
        assert (have.dtype, have.shape, have.tobytes()) == (want.dtype, want.shape, want.tobytes())


@pytest.mark.parametrize("value", [np.array([{}]), np.zeros(2, "V2"), object(), np.float32(1)])
def test_what_has_no_bytes_of_its_own_is_refused(value):
    with pytest.raises(TypeError, match="a message cannot hold"):
        links.packed([value])


def test_a_large_message_arrives_in_bounded_time_and_as_it_was(each):
    content = np.random.default_rng(0).integers(0, 2**63, 25 * 2**20)  # 200 MiB
    begun = time.monotonic()
    results = each(lambda group: int(group.broadcast(lambda: content).sum()), 2)
    assert results[0] == results[1] and time.monotonic() - begun < 10


def test_of_what_is_scattered_each_is_sent_its_own_share_alone(each):
    sizes = [10**6, 1000, 200_000]

    def f(group):
        own = group.scatter(lambda: [np.full(n, n) for n in sizes])
        return own.tolist() == [sizes[group.number]] * sizes[group.number], [link.sent
                                                                             for link in group.links]

    results = each(f)
    assert [r[0] for r in results] == [True] * 3 and [r[1] for r in results[1:]] == [[0], [0]]
    assert all(0 <= sent - 8 * n < 200 for sent, n in zip(results[0][1], sizes[1:]))


def test_whoever_is_interrupted_while_telling_still_says_so(each, monkeypatch):
    """The message that a thread is sending arrives whole, and then the reason."""

    def f(group):
        def interrupted():
            group.links[0].send({"value": "x" * 10**7})  # to the first of the others alone
            raise KeyboardInterrupt

        if group.first:
            monkeypatch.setattr(group, "_check", interrupted)
        return group.broadcast(lambda: "y")

    first, second, third = each(f)
    assert isinstance(first, KeyboardInterrupt) and second == "x" * 10**7 and third.code == 130


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_process_that_is_gone_is_noticed_by_all_while_they_wait(number, each):
    """Though the first one waits for another one."""
    gone = threading.Event()

    def f(group):
        if group.number == number:
            group.close()
            gone.set()
            group.links = []  # nothing more is sent
            return None
        assert gone.wait(5)
        return group.all_reduce_max(0) if group.number != 1 else group.broadcast(lambda: 1)

    results = each(f)
    assert results.pop(number) is None and all(isinstance(r, ProcessFailed) for r in results)
    if number:
        assert str(results[0]).startswith(f"another process is gone: process {number}: ")
        assert "the first process has ended: another process is gone" in str(results[1])
    else:
        assert all(str(r).startswith("another process is gone: process 0: ") for r in results)


def test_strangers_are_turned_away_and_the_others_are_let_in():
    listener = links.Listener("127.0.0.1", ["127.0.0.1"])
    hosts, port, key = listener.address
    strangers = [socket.create_connection((hosts[0], port)) for _ in range(50)]  # they say nothing
    with ThreadPoolExecutor(3) as pool:
        accepted = pool.submit(listener.accept, [1, 2], 10.0)
        with pytest.raises((OSError, EOFError)):
            links.connect((hosts, port, "00" * 32), 1, 5.0)
        called = [pool.submit(links.connect, (["127.0.0.2", *hosts], port, key), n, 5.0) for n in (2, 1)]
        ours, theirs = accepted.result(), [c.result() for c in called]
    for link in theirs:
        link.send({"a": 1})
    assert [link.number for link in ours] == [1, 2] and [link.recv() for link in ours] == [{"a": 1}] * 2
    with pytest.raises(OSError):  # nobody listens any more
        socket.create_connection((hosts[0], port), timeout=5.0)
    for link in (*ours, *theirs, *strangers):
        link.close()
    with pytest.raises(TimeoutError, match="^1, 2$"):
        links.Listener("127.0.0.1", []).accept([1, 2], 0.1)


def test_an_address_that_never_answers_leaves_time_for_the_next():
    """The first process waits as long as another one calls."""
    listener = links.Listener("127.0.0.1", ["127.0.0.2", "127.0.0.1"])
    hosts, port, key = listener.address
    with socket.create_server((hosts[0], port)), ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, [1], 4.0)
        theirs = links.connect((hosts, port, key), 1, 4.0)
        [ours] = accepted.result()
    for link in (ours, theirs):
        link.close()


@pytest.mark.parametrize("address, bound, bind, hosts", [
    ("127.0.0.1:1", "", "127.0.0.1", ["127.0.0.1"]), ("[::1]:1", "", "::1", ["::1"]),
    ("localhost:1", "", "localhost", ["localhost"]), ("host-a:1", "", "", ["host-a"]),
    ("host-a:1", "10.0.0.1:1", "10.0.0.1", ["host-a"]),
])
def test_the_first_process_listens_where_the_coordinator_does(address, bound, bind, hosts, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", bound)
    assert links.hosts_of(address) == (bind, hosts)
    assert "127.0.0.1" not in links.hosts_of("")[1] and links.hosts_of("")[1]


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
        results = each(lambda group, number=number: group.run_and_sync(lambda: fail(group, number)))
        assert [type(r) for r in results] == [DataError if i == number else ProcessFailed for i in range(3)]
    results = each(lambda group: group.run_and_sync(lambda: fail(group, 1), alone=True))
    assert results == [None] * 3  # who is not the first does nothing
    for error, code, says in [
        (DataError("a row", "mend it"), 2, "the first process has ended: a row\n  next step: mend it"),
        (KeyError("x"), 1, "the first process has ended: KeyError: 'x'"),
    ]:
        results = each(lambda group, error=error: group.broadcast(lambda: (_ for _ in ()).throw(error)))
        assert results[0] is error and all(isinstance(r, ProcessFailed) for r in results[1:])
        assert {(r.exit_code, str(r)) for r in results[1:]} == {(code, says)}

    def go_on(group):
        fail(group, 0)
        with contextlib.suppress(ProcessFailed):  # as who tries a disk again would
            group.run_and_sync(lambda: None)
        group.broadcast(lambda: 1)

    assert [type(r) for r in each(go_on)] == [DataError, ProcessFailed, ProcessFailed]
    results = each(lambda group: group.broadcast(lambda: (_ for _ in ()).throw(SystemExit(143))))
    assert [r.code for r in results] == [143] * 3


class Rewards:
    def close(self):
        pass


def test_the_engine_of_the_first_speaks_for_all(each):
    made = []

    def make():
        made.append(1)
        return Rewards(), FakeEngine(), None

    def f(group):
        rewards, engine, _ = with_proxies(group, make)
        engine.sleep(), engine.wake()
        rewards.close()
        assert engine.health().ok and engine.restarts == 0
        return engine.capabilities(), engine.weight_version()

    results = each(f)
    assert made == [1] and results == [results[0]] * 3
    assert isinstance(results[0][0].formats, EngineFormats)


def test_who_was_started_otherwise_or_sees_other_files_is_refused(each, tmp_path):
    dated = ["--run.dir", "unused", "--task.options", "{since = 2020-01-01}"]  # which JSON cannot write
    cfg, other = (load_config("demo", [*dated, "--optim.lr", lr]) for lr in ("1e-4", "1e-5"))

    def compare(configs, ways):
        return each(lambda g: process_group._compare(g, configs[g.number], ways[g.number]))

    assert compare([cfg] * 3, [(True, "")] * 3) == [None] * 3
    results = compare([cfg, cfg, other], [(True, "")] * 3)
    assert "process 2 was started with other arguments than the first: optim.lr: 0.0001 -> 1e-05\n" in str(
        results[2])
    assert isinstance(results[2], ConfigError) and all(isinstance(r, ProcessFailed) for r in results[:2])
    results = compare([cfg] * 3, [(True, ""), (False, ""), (True, "")])
    assert "process 1 was started with other arguments than the first: --resume or --fork" in str(results[1])

    digests = [{"problems": "a"}, {"problems": "b"}, {"problems": "a"}]
    results = each(lambda group: check_same(group, digests[group.number]))
    assert "process 1 has other problems than the first" in str(results[1]) and isinstance(
        results[1], DataError)

    files = [tmp_path / "seen", tmp_path / "seen", tmp_path / "elsewhere"]
    files[0].write_text("12\n")
    results = each(lambda group: check_shared(group, files[group.number]))
    assert "process 2 does not see the first one's" in str(results[2]) and isinstance(
        results[0], ProcessFailed)
    files[2].write_text("12\n")
    assert each(lambda group: check_shared(group, files[group.number])) == [None] * 3


TWO = ["--run.dir", "unused", "--train.data", "2", "--train.processes", "2"]


@pytest.mark.parametrize(
    "environment, says",
    [
        ({}, "train.processes = 2: the number of this process is unknown"),
        ({"JAX_COORDINATOR_ADDRESS": "nowhere", "JAX_PROCESS_ID": "0"},
         "the number of this process is unknown"),
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
        (["--rollout.max_staleness", "1"],
         "train.processes = 2: rollout.max_staleness is for a learner in one process"),
        (["--moe.replay", "R3"], 'train.processes = 2: moe.replay = "R3" is for a learner in one process'),
    ],
)
def test_what_is_only_there_in_one_process_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        check(load_config("demo", [*TWO, *options]))


def test_all_devices_of_all_processes_are_taken():
    with pytest.raises(ConfigError, match=r"train.data = 2000: the 2 processes have \d+ device"):
        make_mesh_layout(data=2000, processes=2)
