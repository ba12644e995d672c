"""A plan on a Ray cluster: Ray chooses hosts and GPUs (one placement group), starts an actor a process,
and starts an engine's actor again when it dies. No batch and no weight goes through Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfp8rl.errors import UserError
from jaxfp8rl.launch.children import Child
from jaxfp8rl.launch.jobs import ENGINE, LEARNER, Job, Need, Place, Plan
from jaxfp8rl.launch.places import check_gpus
from jaxfp8rl.launch.plan import LOOPBACK
from jaxfp8rl.launch.supervise import supervised

PLACED_SECONDS = 300.0
ENDED_SECONDS = 40.0
# variables of this process that the jobs get, too
CARRIED = ("JAX_", "XLA_", "VLLM_", "NCCL_", "HF_", "PYTHONPATH", "OMP_NUM_THREADS")


def import_ray() -> Any:
    """Raises UserError, with pip's command, where Ray is not installed."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as e:
        raise UserError(f"--on ray: Ray is not installed here ({e})", 'pip install "jaxfp8rl[ray]"') from e
    return ray


class RayRun:
    """A connection to a cluster, and the places that it gives. address: of the cluster, or "" for that of
    RAY_ADDRESS, or else for one on this host that ends with this object. processes: how many it places."""

    def __init__(self, processes: int, address: str = ""):
        self._ray, self._group = import_ray(), None
        known = self._known = address or os.environ.get("RAY_ADDRESS", "")
        try:
            self._ray.init(log_to_driver=False, logging_level="ERROR",
                           **({"address": known} if known else _of_this_host(processes)))
        except (ConnectionError, ValueError, RuntimeError) as e:
            raise UserError(f"Ray does not answer: {str(e).partition(chr(10))[0]}",
                            "`ray status` says whether a cluster runs; --address names another") from e

    def on_gpus(self) -> bool:
        return bool(self._ray.cluster_resources().get("GPU"))

    def place(self, wanted: Sequence[Need]) -> list[tuple[Need, Place]]:
        """Reserve what the processes want -> where each goes. Raises UserError if the cluster is too small,
        or busy."""
        there = self._ray.cluster_resources()
        check_gpus(wanted, int(there.get("GPU", 0)), "the Ray cluster has")
        if (cpus := int(there.get("CPU", 0))) < len(wanted):
            raise UserError(f"the Ray cluster has {cpus} CPUs, and each of {len(wanted)} processes takes one",
                            "add a host to it")
        bundles = [{"CPU": 1.0, **({"GPU": float(n.gpus)} if n.gpus else {})} for n in wanted]
        self._group = self._ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(PLACED_SECONDS):
            raise UserError(f"the Ray cluster has not given these places within "
                            f"{PLACED_SECONDS:g} s: {bundles}",
                            "see `ray status`: who has them, and whether one host has so many GPUs")
        seat = self._ray.remote(_seat)
        seats = [self._in(i, seat).remote() for i in range(len(wanted))]
        # a cluster of this host alone: what its processes open is for none but this host
        hosts = {node["NodeID"]: node["NodeManagerAddress"] if self._known else LOOPBACK
                 for node in self._ray.nodes()}
        return [(need, Place(hosts[node], port, None))
                for need, (node, port) in zip(wanted, self._ray.get(seats))]

    def _in(self, bundle: int, what: Any, **more: Any) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle)
        return what.options(scheduling_strategy=strategy, num_cpus=1, **more)

    def run(self, plan: Plan) -> int:
        """See `supervised`."""
        bundles, log = {job.name: i for i, job in enumerate(plan.jobs)}, plan.folder
        log.mkdir(parents=True, exist_ok=True)
        file = lambda job: log / f"{job.name.replace(' ', '-')}.log"
        carried = {k: v for k, v in os.environ.items() if k.startswith(CARRIED)}

        def start(job: Job) -> _Remote:
            is_engine = job.need.role == ENGINE
            actor = self._in(bundles[job.name], self._ray.remote(JobActor), num_gpus=job.need.gpus,
                             max_restarts=plan.restarts if is_engine else 0)
            file(job).unlink(missing_ok=True)
            made = actor.remote(job, file(job), carried, os.getcwd(), is_engine)
            return _Remote(self._ray, made, job)

        return supervised(plan, start, start, file)

    def close(self) -> None:
        if self._group is not None:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def __enter__(self) -> RayRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _of_this_host(processes: int) -> dict[str, Any]:
    """The options of a cluster of this host alone: as many logical CPUs as there are processes, which share
    the real ones; on the loopback interface."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return dict(address="local", num_cpus=max(os.cpu_count() or 1, processes), include_dashboard=False,
                _node_ip_address="127.0.0.1", object_store_memory=100 * 2**20)


def _seat() -> tuple[str, int]:
    """The node of the cluster where this runs, and a port on it on which nobody listens."""
    import ray

    with socket.socket() as s:
        s.bind(("", 0))
        return ray.get_runtime_context().get_node_id(), s.getsockname()[1]


def _cause(error: BaseException) -> str:
    """Of the end of an actor: what its start raised, or what Ray knows."""
    lines = str(error).strip().splitlines()
    return lines[-1] if "creation task" in lines[0] else lines[0]


class JobActor:
    """An actor that has one job as its child. An engine's actor dies with its child, so that Ray starts both
    again, on the same host and port."""

    def __init__(self, job: Job, log: Path, carried: dict[str, str], folder: str, dies_with_child: bool):
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's own
        os.environ.update(carried)
        os.chdir(folder)
        self._read, self._log, self._ending = 0, log, False
        self._child = Child(job, log)
        if dies_with_child:
            threading.Thread(target=self._die_with_child, daemon=True).start()

    def _die_with_child(self) -> None:
        self._child.wait()
        if not self._ending:
            os._exit(1)

    def pid(self) -> int:
        """Of the child, and of its group."""
        return self._child.pid

    def poll(self) -> tuple[int | None, bytes]:
        """(the child's exit code, what it has written since the last call)."""
        code = self._child.poll()  # before its output is read, which is then all of it
        with self._log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        return code, new

    def signal(self, number: int) -> None:
        self._child.signal(number)

    def end(self) -> None:
        self._ending = True
        self._child.end()


class _Remote:
    """A JobActor, as `supervised` wants it. The first learner's output is this command's."""

    def __init__(self, ray: Any, actor: Any, job: Job):
        self._ray, self._actor, self._job, self._asked, self._code = ray, actor, job, None, None

    def poll(self) -> int | None:
        """The exit code; 1 if the actor is gone for good."""
        if self._code is not None:
            return self._code
        self._asked = self._asked or self._actor.poll.remote()
        if not self._ray.wait([self._asked], timeout=0.01)[0]:
            return None
        asked, self._asked, errors = self._asked, None, self._ray.exceptions
        try:
            self._code, written = self._ray.get(asked)
        except errors.ActorUnavailableError:  # it is being started again
            return None
        except errors.RayActorError as e:
            self._code, written = 1, b""
            print(f"{self._job.name}: {_cause(e)}", file=sys.stderr, flush=True)
        if self._job.name == f"{LEARNER} 0":
            os.write(1, written)
        return self._code

    def signal(self, number: int) -> None:
        self._actor.signal.remote(number)

    def end(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.end.remote(), timeout=ENDED_SECONDS)
        self._ray.kill(self._actor, no_restart=True)
