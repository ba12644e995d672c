"""The order in which completions start, where there are more of them than an engine decodes at once.

A step ends with its longest completion, so that one should start early. Completions of a prompt are of like
lengths: Seer's order (arXiv 2511.14617) lets one of each group begin, and then takes the groups first whose
finished ones were longest.

    fifo      as they were asked for
    longest   1. what was passed over for too long
              2. one of each group of which none has begun
              3. groups of which none has finished, which may be the longest
              4. groups by their longest completion so far, and within a group as they were asked for

An order changes when a completion starts, and neither its seed nor whether it is sampled.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

HOW = Literal["fifo", "longest"]
PATIENCE = 4  # times as many completions as there are places may start before one that waits


class Waiting(NamedTuple):
    """A completion that has not started. age: the number of its request for completions; the younger has the
    larger. since: how many had started when it began to wait."""

    group: Hashable
    age: int
    since: int = 0


class Order:
    """Whose turn it is. patience: so many starts pass over a completion at most, while others wait; then the
    oldest goes first."""

    def __init__(self, how: HOW = "fifo", patience: int = 1024):
        self.how, self._patience = how, patience
        self.starts = 0
        self._begun: set[Hashable] = set()
        self._longest: dict[Hashable, int] = {}

    def started(self, group: Hashable) -> None:
        self.starts += 1
        self._begun.add(group)

    def finished(self, group: Hashable, length: int) -> None:
        """One of the group has ended after `length` tokens."""
        self._longest[group] = max(self._longest.get(group, 0), length)

    def forget(self) -> None:
        """Nothing waits or runs: groups to come are others."""
        self._begun.clear()
        self._longest.clear()

    def sorted(self, waiting: Sequence[Waiting]) -> list[int]:
        """The places in `waiting`, whose turn comes first first."""
        by_age = sorted(range(len(waiting)), key=lambda i: waiting[i].age)
        if self.how == "fifo":
            return by_age
        probed, found = set(self._begun), []
        for i in by_age:
            w = waiting[i]
            if self.starts - w.since >= self._patience:
                rank = 0, 0
            elif w.group not in probed:
                rank = 1, 0
            elif w.group not in self._longest:
                rank = 2, 0
            else:
                rank = 3, -self._longest[w.group]
            probed.add(w.group)
            found.append((rank, w.age, i))
        return [i for _, _, i in sorted(found)]
