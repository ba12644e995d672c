"""Laws of the queue of groups, against a model that only counts: whatever the engine finishes first, and
whenever."""

import collections
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from bridges.api import Completion, SamplingParams
from bridges.tokens import spans
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.environments.player import ProblemRequest
from jaxfp8rl.rollout.queue import GroupQueue, Ticket
from jaxfp8rl.rollout.scored_groups import Prompt, make_request

PROMPT = Prompt(Problem("p", "1+1=", ("2",)), (1,))


class Run:
    """A run that learns from a queue. `chance(n)`: the next choice among n, by which an engine in flight
    advances or finishes one of its groups."""

    def __init__(self, per_step: int, staleness: int, oversample: float, steps: int, chance):
        self.queue, self.steps, self.chance = GroupQueue(per_step, staleness, oversample), steps, chance
        self.problems, self.tokens = 0, collections.defaultdict(list)
        self.admitted, self.dropped, self.log = [], [], []

    def ticket(self, name) -> Ticket:
        redraw = self.queue.redraw
        problem = redraw.pop(0) if redraw else self.problems
        self.problems = max(self.problems, problem + 1)
        return Ticket(name, problem, PROMPT, make_request(PROMPT, SamplingParams(9), 1, 0, *name), 0)

    def sample(self, ticket: Ticket, version: int) -> None:
        """A token, or the last one."""
        versions = self.tokens[id(ticket)]
        versions.append(version)
        some = [0.0] * len(versions)
        ticket.completions = (Completion("", 0, some, some, "length", spans(versions)),)
        ticket.done = self.chance(3) == 0

    def step(self, step: int) -> list[Ticket]:
        queue, version = self.queue, step - 1
        gone = queue.drop_stale(version)
        self.dropped += gone
        tickets = [self.ticket(n) for n in queue.names(queue.room(self.steps - step), step, 0)]
        queue.admit(tickets)
        self.admitted += tickets
        most = queue.staleness * queue.per_step + queue.window
        assert len(queue.live) <= most and not queue.redraw
        if step + queue.staleness <= self.steps:
            assert len(queue.live) == most  # the engine never waits for the learner
        while not queue.ready():
            going = [t for t in queue.live if not t.done]
            self.sample(going[self.chance(len(going))], version)
        taken = queue.take()
        assert len(taken) == queue.per_step
        for t in taken:
            assert version - queue.staleness <= t.oldest <= version
        self.log.append(([t.name for t in tickets], [t.name for t in gone], [t.name for t in taken]))
        return taken


settings = dict(per_step=st.integers(1, 4), staleness=st.integers(0, 4), steps=st.integers(1, 8))


@given(**settings, oversample=st.sampled_from([1.0, 1.3, 2.0]), seed=st.integers(0, 2**32 - 1))
def test_no_token_is_too_old_no_group_is_lost_or_taken_twice_and_the_choices_decide_all(
        per_step, staleness, steps, oversample, seed):
    runs = []
    for _ in range(2):
        run = Run(per_step, staleness, oversample, steps, random.Random(seed).randrange)
        taken = sum([run.step(s) for s in range(1, steps + 1)], [])
        ends = [id(t) for t in (*taken, *run.dropped, *run.queue.live)]
        assert sorted(ends) == sorted(map(id, run.admitted)), "each group has one end"
        assert len({t.request.request_id for t in run.admitted}) == len(run.admitted)
        problems = collections.Counter(t.problem for t in taken)
        assert max(problems.values()) == 1 and set(range(run.problems)) == {
            *problems, *(t.problem for t in run.queue.live)}, "a dropped problem came again"
        if oversample == 1:
            assert not run.dropped and taken == run.admitted, "first in, first out"
            assert len(run.queue.live) == 0
        runs.append(run.log)
    assert runs[0] == runs[1]


@given(**settings, seed=st.integers(0, 2**32 - 1))
def test_admission_is_areals(per_step, staleness, steps, seed):
    """capacity = (k + v + 1) B - (accepted + running), while enough steps follow."""
    run = Run(per_step, staleness, 1.0, steps + staleness, random.Random(seed).randrange)
    for step in range(1, steps + 1):
        accepted_and_running = len(run.admitted)
        assert run.queue.room(run.steps - step) == (staleness + step) * per_step - accepted_and_running
        run.step(step)


@given(per_step=st.integers(1, 4), steps=st.integers(1, 5))
def test_without_staleness_each_step_asks_for_its_own_groups(per_step, steps):
    """The names, and so the seeds, are those of a run without a queue; rounds of dynamic sampling
    included."""
    queue = GroupQueue(per_step, 0)
    for step in range(1, steps + 1):
        for again in range(3):
            names = queue.names(queue.room(steps - step), step, again)
            assert names == [(step, again, i) for i in range(per_step)]
            assert make_request(PROMPT, SamplingParams(9), 1, 0, *names[-1]) == ProblemRequest(
                f"{step}.{again}/{per_step - 1}" if again else f"{step}/{per_step - 1}", (1,),
                SamplingParams(9), 1,
                make_request(PROMPT, SamplingParams(9), 1, 0, step, again, per_step - 1).seed,
                problem=PROMPT.problem)


def test_ahead_a_group_is_named_for_the_step_that_takes_it():
    queue = GroupQueue(2, 2)
    names = queue.names(queue.room(9), 1, 0)
    assert names == [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 1), (3, 0, 0), (3, 0, 1)]
    queue.admit([Ticket(n, 0, PROMPT, make_request(PROMPT, SamplingParams(9), 1, 0, *n), 0) for n in names])
    del queue.live[:2]
    assert queue.names(queue.room(9), 2, 0) == [(4, 0, 0), (4, 0, 1)]
    assert GroupQueue(2, 2).room(0) == 2, "beside the last step nothing is sampled ahead"


def test_the_slowest_stay_in_the_window_and_their_problems_come_first_once_they_are_too_old():
    queue = GroupQueue(2, 0, 1.5)
    assert queue.window == math.ceil(1.5 * 2) == queue.room(5)
    tickets = [Ticket(n, i, PROMPT, make_request(PROMPT, SamplingParams(9), 1, 0, *n), 0)
               for i, n in enumerate(queue.names(3, 1, 0))]
    queue.admit(tickets)
    for ticket, done in zip(tickets, (False, True, True)):
        ticket.completions, ticket.done = (Completion("", 0, [0.0], [0.0], "abort", spans([0])),), done
    assert queue.take() == tickets[1:] and queue.live == tickets[:1]
    assert queue.drop_stale(1) == tickets[:1] and queue.redraw == [0] and not queue.live
