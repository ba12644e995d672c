"""The queue of groups between the engine and the learner.

    admitted -> in flight (sampled, across publishes where the engine can) -> done -> taken by a step
                    |                                                           |
                    +---- dropped: its oldest token is older than k versions ---+

B = rollout.prompts_per_step, k = rollout.max_staleness. A step at version v takes its B groups from the front
of the queue. At most (k + 1) B groups are in flight or queued, so what is admitted at version u is taken at
version u + k at the latest: AReaL's admission, (k + v + 1) B minus what was accepted or runs (arXiv
2505.24298, section 5.1). With rollout.oversample = f a step looks at the first f B groups and takes the first
B that are done. The slowest stay, go on, and may grow too old.

The queue knows neither engine nor clock: what it does follows from what it is told.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from bridges.api import Completion, GenRequest
from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.rollout.scored_groups import Group, Prompt


class Name(NamedTuple):
    """Who asked for a group: the step that it is meant for, the round of that step (dynamic sampling), and
    its number there. Its seed follows from the name."""

    step: int
    again: int
    number: int


@dataclasses.dataclass
class Ticket:
    """A group from its admission until a step takes it.

    problem: its index in the list of problems. version: that of the weights when it was submitted.
    completions: those sampled so far. outcome: the scored group, or why it cannot be learned from; None until
    it is scored. clock: the times of the call that sampled it, if that call ran beside the learner.
    """

    name: Name
    problem: int
    prompt: Prompt
    request: GenRequest
    version: int
    completions: tuple[Completion, ...] = ()
    submitted: bool = False
    done: bool = False
    outcome: Group | str | None = None
    clock: Clock | None = None

    @property
    def oldest(self) -> int | None:
        """The oldest version that sampled one of its tokens; None if it has no token."""
        return min((span.version for c in self.completions for span in c.version_spans), default=None)

    @property
    def partials(self) -> int:
        """The number of its completions that several versions sampled."""
        return sum(len({span.version for span in c.version_spans}) > 1 for c in self.completions)


class GroupQueue:
    """The groups in flight or queued, `live`, in the order of their admission."""

    def __init__(self, per_step: int, staleness: int, oversample: float = 1.0):
        self.per_step, self.staleness = per_step, staleness
        self.window = math.ceil(oversample * per_step)
        self.live: list[Ticket] = []
        self.redraw: list[int] = []  # problems of dropped groups, which come before new ones
        self._named: collections.Counter[tuple[int, int]] = collections.Counter()

    def room(self, steps_after: int) -> int:
        """How many groups may be admitted, if `steps_after` more steps follow this one."""
        return max(0, min(self.staleness, steps_after) * self.per_step + self.window - len(self.live))

    def names(self, n: int, step: int, again: int) -> list[Name]:
        """The names of the next n groups. One at place p of the queue is meant for the step p // B later."""
        self._named = collections.Counter({key: c for key, c in self._named.items() if key[0] >= step})
        places = range(len(self.live), len(self.live) + n)
        return [self._name(step + (min(p // self.per_step, self.staleness) if not again else self.staleness),
                           again) for p in places]

    def _name(self, step: int, again: int) -> Name:
        self._named[step, again] += 1
        return Name(step, again, self._named[step, again] - 1)

    def named(self) -> list[list[int]]:
        """[step, again, how many have been named so], for a checkpoint."""
        return [[*key, count] for key, count in self._named.items()]

    def restore(self, live: Sequence[Ticket], redraw: Sequence[int], named: Sequence[Sequence[int]]) -> None:
        """Go on from a checkpoint's state."""
        self.live, self.redraw = list(live), list(redraw)
        self._named = collections.Counter({(step, again): count for step, again, count in named})

    def admit(self, tickets: Sequence[Ticket]) -> None:
        self.live += tickets

    def drop_stale(self, version: int) -> list[Ticket]:
        """Remove and return the groups whose oldest token is older than `version` - k. Their problems are
        drawn again."""
        limit = version - self.staleness
        gone = [t for t in self.live if t.oldest is not None and t.oldest < limit]
        self.live = [t for t in self.live if t.oldest is None or t.oldest >= limit]
        self.redraw += [t.problem for t in gone]
        return gone

    def ready(self) -> bool:
        """Whether a step can take its groups."""
        return len(self._done()) >= self.per_step

    def take(self) -> list[Ticket]:
        """Remove and return the B groups of a step, in the order of their admission."""
        taken = self._done()[: self.per_step]
        chosen = {id(t) for t in taken}
        self.live = [t for t in self.live if id(t) not in chosen]
        return taken

    def _done(self) -> list[Ticket]:
        return [t for t in self.live[: self.window] if t.done]
