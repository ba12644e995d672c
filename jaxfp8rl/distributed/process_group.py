"""A learner of several processes, one for each host or GPU (docs/sharding.md): all run the same loop, and the
first alone talks to the engine, the rewards and the disk.

The first process sends their results to the others, in order, through connections of its own
(jaxfp8rl.distributed.links). The others hold no device while they wait, and wait as long as it takes: a
collective would give up, on a CPU after half a minute. Meanwhile they take part when the first asks all
devices to gather a weight for a publish. A single process sends nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bridges.api import BridgeError
from jaxfp8rl.config.resume_rules import described
from jaxfp8rl.config.schema import Config
from jaxfp8rl.distributed.links import LINGER_S, Link, Listener, connect, hosts_of
from jaxfp8rl.distributed.mesh import whole
from jaxfp8rl.errors import ConfigError, ProcessFailed, UserError

SHUTDOWN_S = 60  # how long the others wait for a process that has failed
SHARED_S = 60.0  # how long a file may take to appear on a shared disk
CONNECT_S = 60.0  # how long the processes take to connect: all have met already
ADDRESS = 4096  # bytes of the message that says where the first process listens
LOOPBACK = "127.", "localhost:", "[::1]:"


class ProcessGroup:
    """The processes of a run, one of which is this. `links`: in the first process those to all others, in
    their order; in another the one to the first."""

    def __init__(self, count: int = 1, number: int = 0, links: Sequence[Link] = ()):
        self.count, self.number, self.first, self.links = count, number, number == 0, links
        self._lent: list[jax.Array] = []
        self._served: Any = None
        self._calling = threading.Lock()
        self._ended: BaseException | None = None  # raised once the first process has ended

    @property
    def suffix(self) -> str:
        """Distinguishes the files that every process writes: "" in the first."""
        return "" if self.first else f"-{self.number}"

    def broadcast(self, f: Callable[[], Any]) -> Any:
        """The result of f() in the first process, for all of them: JSON types, and numpy arrays among them.
        An exception ends the run in all processes."""
        return self.scatter(lambda: [f()] * self.count)

    def scatter(self, f: Callable[[], Sequence[Any]]) -> Any:
        """This process's own of the results, one a process, that f() returns in the first. As `broadcast`."""
        if not self.first:
            return self._recv()
        own, *others = f()
        self._send([{"value": value} for value in others])
        return own

    def all_reduce_max(self, code: int) -> int:
        """The largest code of all processes. Returns when all have called this."""
        if not self.first:
            self._send([code])
            return self._recv()
        codes = [code, *map(self._next_of, self.links)]
        return self.broadcast(lambda: max(codes))

    def run_and_sync(self, f: Callable[[], object], alone: bool = False) -> None:
        """Call f() in all processes, or in the first if `alone`. Returns when all are done; raises in all if
        it raises in one. f must not broadcast: a process that has failed does not listen."""
        error = None
        try:
            if self.first or not alone:
                f()
        except Exception as e:
            error = e
        if self.all_reduce_max(int(error is not None)):
            raise error or ProcessFailed("another process has failed; its output has the reason")

    def broadcast_tree(self, f: Callable[[], Any], like: Any) -> Any:
        """The tree of arrays that f() returns in the first process, for all of them. `like` has its
        shapes."""
        if self.count == 1:
            return f()
        made = f() if self.first else like
        self.all_reduce_max(0)  # a collective does not wait for long
        return multihost_utils.broadcast_one_to_all(made)

    def lend(self, policy: Any) -> Callable[[jax.Array], jax.Array]:
        """Returns a function that gathers a leaf of `policy` on one device. The first process calls it; the
        others take part while they wait for its next message."""
        if self.count == 1:
            return whole
        self._lent = jax.tree.leaves(policy)
        numbers = {id(leaf): i for i, leaf in enumerate(self._lent)}

        def ask(leaf: jax.Array) -> jax.Array:
            self._send([{"whole": numbers[id(leaf)]}] * len(self.links))
            return whole(leaf)

        return ask

    def serve(self, part: Any) -> Callable[..., list[Any]]:
        """Returns call(method, *arguments), for the first process: what this method of the `part` of each
        process returns, in their order; JSON types and arrays cross. The others answer while they wait for
        its next message. Raises what it raises here, and ProcessFailed for what it raises in another."""
        self._served = part
        return self._call

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        if not self._calling.acquire(blocking=False):
            raise ProcessFailed("the processes have not answered an earlier call", "see their output")
        self._send([{"call": method, "arguments": arguments}] * len(self.links))
        answers = [_answer(self._served, method, arguments), *map(self._next_of, self.links)]
        self._calling.release()  # not after an answer that did not come: the links are of no use then
        for number, answer in enumerate(answers):
            if error := answer["error"]:
                raise error if isinstance(error, Exception) else ProcessFailed(f"process {number}: {error}")
        return [answer["answer"] for answer in answers]

    def leave(self, error: BaseException) -> None:
        """Tell the others why the first process ends."""
        requested = isinstance(error, SystemExit | KeyboardInterrupt)
        code = getattr(error, "code", 130) if requested else 5 if isinstance(error, BridgeError) else getattr(
            error, "exit_code", 1)
        known = isinstance(error, UserError | BridgeError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        for link in self.links:  # whether or not another is gone
            link.send({"ended": reason, "code": code, "asked": requested})

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connections, once the others have read everything or `linger_s` seconds have passed."""
        for link in self.links:
            link.close(linger_s)

    def _send(self, messages: Sequence[Any]) -> None:
        """Send one message over each link."""
        self._check()
        for link, message in zip(self.links, messages, strict=True):
            link.send(message)

    def _recv(self) -> Any:
        """The next value that the first process sends."""
        while self._ended is None:
            message = self._next_of(self.links[0])
            if "value" in message:
                return message["value"]
            if "whole" in message:
                whole(self._lent[message["whole"]])
            elif "call" in message:
                found = _answer(self._served, message["call"], message["arguments"])
                self._send([found | {"error": found["error"] and _first(found["error"])}])
            elif message["asked"]:
                self._ended = SystemExit(message["code"])
            else:
                self._ended = ProcessFailed(f"the first process has ended: {message['ended']}",
                                            exit_code=message["code"])
        raise self._ended

    def _next_of(self, link: Link) -> Any:
        """The next message of `link`. Raises ProcessFailed if a process is gone, this one's or another."""
        with _as_gone(link):
            return link.recv(self._check)

    def _check(self) -> None:
        for link in self.links:
            with _as_gone(link):
                link.check()


def _answer(part: Any, method: str, arguments: Sequence[Any]) -> dict[str, Any]:
    try:
        return {"answer": getattr(part, method)(*arguments), "error": None}
    except Exception as e:
        return {"answer": None, "error": e}


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@contextlib.contextmanager
def _as_gone(link: Link) -> Iterator[None]:
    """Raise what a link raises as ProcessFailed."""
    try:
        yield
    except (EOFError, OSError) as e:
        raise ProcessFailed(f"another process is gone: process {link.number}: {e}",
                            "see the end of its output") from e


ALONE = ProcessGroup()


@contextlib.contextmanager
def joined(cfg: Config, *how: object) -> Iterator[ProcessGroup]:
    """The group of train.processes processes, one of which is this one. When the first ends, all end.

    Call it before anything asks JAX for its devices. Raises ConfigError if the number of this process is
    unknown, if there are more or fewer processes, or if this one was started with other settings than the
    first, or in another way (`how`).
    """
    if cfg.train.processes == 1:
        yield ALONE
        return
    group = _connected(cfg.train.processes)
    linger_s = LINGER_S if group.first else 0.0
    try:
        _compare(group, cfg, how)
        yield group
        # the first process may take long to close its engine: wait here, not in JAX's own shutdown
        group.all_reduce_max(0)
    except BaseException as e:
        if group.first:
            group.leave(e)
        raise
    finally:
        group.close(linger_s)


def check_environment(count: int) -> str | None:
    """The number of this process among `count`, from the environment, or None. Raises ConfigError for an
    impossible number."""
    number, given = os.environ.get("JAX_PROCESS_ID"), os.environ.get("JAX_NUM_PROCESSES", str(count))
    if given != str(count):
        raise ConfigError(f"train.processes = {count}, JAX_NUM_PROCESSES = {given}", "set both to the same")
    if number is not None and number not in map(str, range(count)):
        raise ConfigError(f"JAX_PROCESS_ID = {number}: train.processes = {count} are 0 to {count - 1}",
                          "give each process one of these numbers")
    return number


def _connected(count: int) -> ProcessGroup:
    """Connect with JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID, or with the cluster settings that
    jax.distributed detects."""
    number = check_environment(count)
    if not jax.distributed.is_initialized():
        jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM itself
        named: dict[str, Any] = {} if number is None else {"num_processes": count, "process_id": int(number)}
        address = os.environ.get("JAX_COORDINATOR_ADDRESS", "")
        if address.startswith(LOOPBACK) and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
            # by default JAX listens on every network of the machine
            named["coordinator_bind_address"] = address
        try:
            jax.distributed.initialize(**named, shutdown_timeout_seconds=SHUTDOWN_S)
        except (ValueError, IndexError) as e:  # IndexError for an address without a port
            raise ConfigError(
                f"train.processes = {count}: the number of this process is unknown: {e}",
                "start each with JAX_COORDINATOR_ADDRESS=HOST:PORT of the first and its own JAX_PROCESS_ID, "
                "from 0 on, or by Slurm, Open MPI or Kubernetes (docs/sharding.md)",
            ) from e
        except jax.errors.JaxRuntimeError as e:
            raise ConfigError(
                f"train.processes = {count}: some processes have not connected: {str(e).splitlines()[0]}",
                "start so many, all with the address of the first") from e
    if jax.process_count() != count:
        raise ConfigError(f"train.processes = {count}, and {jax.process_count()} were started",
                          "give the number of both")
    devices = [sum(d.process_index == i for d in jax.devices()) for i in range(count)]
    if len(set(devices)) > 1:
        raise ConfigError(f"train.processes = {count}: the processes have {devices} devices",
                          "give each process as many as the others")
    return ProcessGroup(count, number := jax.process_index(), _links(count, number))


def _links(count: int, number: int) -> list[Link]:
    """Connect this process: where the first one listens is the only message that goes through devices."""
    listener = None if number else Listener(*hosts_of(os.environ.get("JAX_COORDINATOR_ADDRESS", "")))
    said = json.dumps(listener.address if listener else "").encode()
    sent = np.frombuffer(said.ljust(ADDRESS), np.uint8)
    address = json.loads(multihost_utils.broadcast_one_to_all(sent).tobytes())
    try:
        return listener.accept(range(1, count),
                               CONNECT_S) if listener else [connect(address, number, CONNECT_S)]
    except (OSError, EOFError) as e:
        what = (f"process {number} does not reach the first one" if number
                else "the first one is not called by")
        raise ConfigError(f"train.processes = {count}: {what}: {e}",
                          "let the hosts open TCP connections to the first one, on any port") from e


def _compare(group: ProcessGroup, cfg: Config, how: tuple[object, ...]) -> None:
    """Check that all processes have the same settings: otherwise they would wait for each other forever, or
    diverge."""
    own, way = json.loads(json.dumps([cfg.model_dump(mode="json"), how]))
    theirs, their_way = group.broadcast(lambda: (own, way))
    differ = {(s, k): (theirs[s][k], value) for s in own for k, value in own[s].items()
              if theirs[s][k] != value}
    differences = "; ".join(described(differ)) or "--resume or --fork"

    def refuse() -> None:
        if differ or their_way != way:
            raise ConfigError(
                f"process {group.number} was started with other arguments than the first: {differences}",
                "start all with the same arguments")

    group.run_and_sync(refuse)


def check_shared(group: ProcessGroup, file: Path) -> None:
    """Raise ConfigError unless all processes see `file`, which the first has written."""
    content, last = group.broadcast(file.read_text), time.monotonic() + SHARED_S

    def look() -> None:
        while not (file.is_file() and file.read_text() == content):
            if time.monotonic() > last:
                raise ConfigError(f"run.dir: process {group.number} does not see the first one's {file}",
                                  "put run.dir on a disk that all processes share")
            time.sleep(0.2)

    group.run_and_sync(look)
