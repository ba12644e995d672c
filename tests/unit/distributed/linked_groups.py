"""The processes of a run as threads, whose groups are joined by pairs of sockets."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from jaxfp8rl.distributed.links import Link
from jaxfp8rl.distributed.process_group import ProcessGroup


def linked(count: int) -> list[ProcessGroup]:
    """The groups of `count` processes."""
    pairs = [socket.socketpair() for _ in range(count - 1)]
    first = ProcessGroup(count, 0, [Link(own, i) for i, (own, _) in enumerate(pairs, 1)])
    return [first, *(ProcessGroup(count, i, [Link(own, 0)]) for i, (_, own) in enumerate(pairs, 1))]


def of_each(f, count=3):
    """f(group) of each of `count` processes -> results, or the exceptions that they raised."""

    def one(group):
        try:
            return f(group)
        except BaseException as e:
            if group.first:
                group.leave(e)
            return e
        finally:
            group.close(5.0 if group.first else 0.0)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, linked(count)))
