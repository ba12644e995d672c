"""Where the processes of a run go, and what is refused before any of them starts."""

from __future__ import annotations

import contextlib
import socket
import stat
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import UserError
from jaxfp8rl.launch.jobs import ENGINE, LEARNER, Need, Place
from jaxfp8rl.launch.plan import LOOPBACK


def on_this_host(wanted: Sequence[Need], gpus: Sequence[str], server_gpus: Sequence[int] = (),
                 first_port: int = 0) -> list[tuple[Need, Place]]:
    """All on the loopback interface: learners on the first GPUs; engines on `server_gpus`, or on those that
    follow. Ports count from `first_port`, by default free ones. Raises UserError for too few GPUs."""
    check_gpus(wanted, len(gpus), "this host has")
    # an index of the driver's, or the position among those that this process may use
    kept = [str(i) for i in server_gpus]
    free = [gpu for gpu in gpus if gpu not in kept]
    ports = _ports(len(wanted), first_port)
    placed = []
    for need, port in zip(wanted, ports):
        pool = kept if need.role == ENGINE and kept else free
        taken, pool[:] = pool[: need.gpus], pool[need.gpus :]
        if len(taken) < need.gpus:
            raise UserError(f"{need.name} wants {need.gpus} GPUs, and {len(taken)} are left for it",
                            "change rollout.server_gpus, or leave it out")
        placed.append((need, Place(LOOPBACK, port, tuple(taken))))
    return placed


def on_hosts(wanted: Sequence[Need], gpus_per_host: int, hosts: Sequence[str],
             first_port: int) -> list[tuple[Need, Place]]:
    """One after the other: the next host begins where a process does not fit. `hosts`: their names, as many
    as may be needed. Raises UserError for a process that fits on none."""
    host, used, placed = 0, 0, []
    for i, need in enumerate(wanted):
        check_gpus([need], max(gpus_per_host, need.gpus and 1), "a host has")
        if used + need.gpus > gpus_per_host:
            host, used = host + 1, 0
        gpus = tuple(map(str, range(used, used + need.gpus)))
        used += need.gpus
        placed.append((need, Place(hosts[host], first_port + i, gpus)))
    return placed


def check_gpus(wanted: Sequence[Need], there: int, who: str) -> None:
    """Raise UserError if the processes want more GPUs than there are."""
    if (total := sum(need.gpus for need in wanted)) > there:
        what = "; ".join(f"{role}s {n}" for role in (LEARNER, ENGINE)
                         if (n := sum(need.gpus for need in wanted if need.role == role)))
        raise UserError(f"the run wants {total} GPUs ({what}), and {who} {there}",
                        "change train.data, train.fsdp, train.tensor, rollout.engines or "
                        "rollout.tensor_parallel_size, or launch it on more hosts")


def _ports(count: int, first: int) -> list[int]:
    """Ports of the loopback interface on which nobody listens: from `first` on, or any. Raises UserError
    for one that is taken."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for i, s in enumerate(sockets):
            port = first + i if first else 0
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections do not count
            try:
                s.bind((LOOPBACK, port))
            except (OSError, OverflowError) as e:
                raise UserError(f"port {port} of this host is taken: {e}",
                                "give another --port, or leave it out for free ones") from e
        return [s.getsockname()[1] for s in sockets]


def check_running(cfg: Config) -> None:
    """Check the servers that run already. Raises UserError for a host that has no address, and for a token
    file that is missing or that other users may read."""
    for url in cfg.rollout.engine_urls:
        host = urllib.parse.urlsplit(url).hostname or ""
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as e:
            raise UserError(f"rollout.engine_urls: {url}: no such host: {host!r}",
                            "name a host that this one can find") from e
    if cfg.rollout.engine_urls:
        check_token(Path(cfg.rollout.engine_token_file))


def check_token(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as e:
        raise UserError(f"rollout.engine_token_file: {path}: {e.strerror}",
                        "name the file whose token the engines were started with") from e
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"rollout.engine_token_file: {path}: other users may use the token "
                        f"(mode {stat.filemode(mode)})", f"chmod 600 {path}")
