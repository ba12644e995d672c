"""The rollout batch of each step, taken from the queue of groups (jaxfp8rl.rollout.queue).

    max_staleness 0    sample 1 | learn 1 | publish 1 | sample 2 | learn 2 | publish 2 | ...
    max_staleness 1    sample 1 | learn 1, sample 2 | publish 1 | learn 2, sample 3 | publish 2 | ...
    ... and in_flight  the engine is interrupted for each publish and goes on with what it had begun

No token is older than k = rollout.max_staleness versions when it is learned from. pi_old is scored at the
learner's weights when it learns, so the correction's pi_old / mu covers both rounding and age.

With k > 0 the queue is in each checkpoint, and each step's batch is recorded (jaxfp8rl.rollout.journal). A
resumed run replays the recorded steps after its checkpoint and then samples. If a finished run is given more
steps, the first of them samples at the newest weights, as step 1 did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from bridges.api import InFlight, RolloutEngine
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.dataset import PromptStream
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.completion_json import completion_from_json, completion_to_json
from jaxfp8rl.rollout.context import RolloutContext
from jaxfp8rl.rollout.journal import Journal
from jaxfp8rl.rollout.queue import GroupQueue, Name, Ticket
from jaxfp8rl.rollout.samplers import Interrupted, Sampler, WholeGroups


class RolloutPipeline:
    """The rollout batches of one run, in order."""

    def __init__(self, ctx: RolloutContext):
        r = ctx.cfg.rollout
        self._ctx, self._version = ctx, 0
        self._queue = GroupQueue(r.prompts_per_step, r.max_staleness, r.oversample)
        self._sampler = sampler_of(ctx, self._judge)
        self._journal = Journal.of(ctx.cfg)
        self._recorded: dict[int, dict[str, Any]] = {}

    def next_batch(self, step: int, clock: Clock) -> scored_groups.Rollouts:
        """The batch of `step`. Its times are added to `clock`, even if it was sampled beside the step
        before."""
        self._version = step - 1
        if record := self._recorded.pop(step, None):
            return self._replayed(step, record, clock)
        self._sampler.refresh()
        dropped = self._queue.drop_stale(self._version)
        self._sampler.cancel(dropped)
        admitted, taken, rounds = [], [], []
        for again in range(self._ctx.cfg.loss.dynamic_sampling_rounds):
            admitted += self._admit(step, again)
            self._sampler.wait(self._queue.ready, clock)
            with clock("rollout"):
                taken.append(self._queue.take())
            rounds.append(self._rollouts(taken[-1], clock))
            self._learn(taken[-1])
            if len(scored_groups.choose(rounds, self._queue.per_step).chosen) == self._queue.per_step:
                break
        if self._journal:
            self._sampler.refresh()
            names = lambda tickets: [t.request.request_id for t in tickets]
            self._journal.write(
                step, {"admitted": names(admitted), "dropped": names(dropped),
                       "taken": {t.request.request_id: versions(t) for t in sum(taken, [])}},
                {"taken": [[to_json(t) for t in round] for round in taken], "dropped": len(dropped),
                 **self.state()})
        return self._joined(rounds, taken, len(dropped))

    @contextlib.contextmanager
    def held(self, clock: Clock) -> Iterator[None]:
        """Entered while weights are written: what cannot be interrupted has been sampled before. Raises the
        exception that sampling raised."""
        self._sampler.hold(clock)
        yield
        self._sampler.release()

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON types: the position in the prompt stream, and the queue where
        there is one."""
        self._sampler.refresh()
        state = {"stream": self._ctx.stream.state()}
        if not (self._queue.live or self._queue.redraw):
            return state
        return state | {"queue": [to_json(t) for t in self._queue.live], "redraw": self._queue.redraw,
                        "named": self._queue.named()}

    def restore(self, state: dict[str, Any], step: int) -> Iterator[str]:
        """Continue where the run was after `step`; yields notes. Raises CheckpointError if the state is
        damaged or belongs to other data."""
        self._version = step
        self._take_up(state)
        if self._journal:
            self._recorded, notes = self._journal.read(after=step)
            yield from notes

    def draw_again(self, state: dict[str, Any]) -> None:
        """Begin with the problems in the queue of another run's checkpoint, whose completions are not
        used."""
        self._queue.redraw = [t["problem"] for t in state.get("queue", ())] + list(state.get("redraw", ()))

    def _take_up(self, state: dict[str, Any]) -> None:
        self._ctx.stream = PromptStream.from_state(self._ctx.train, state["stream"],
                                                   self._ctx.stream.curriculum)
        self._queue.restore([self._from_json(t) for t in state.get("queue", ())], state.get("redraw", ()),
                            state.get("named", ()))

    def _replayed(self, step: int, record: dict[str, Any], clock: Clock) -> scored_groups.Rollouts:
        """The recorded batch of `step`. What was in flight behind it goes on, unless the next step is
        recorded, too."""
        self._take_up(record)
        taken = [[self._from_json(t) for t in round] for round in record["taken"]]
        if step + 1 not in self._recorded:
            self._submit()
        return self._joined([self._rollouts(t, clock) for t in taken], taken, record["dropped"])

    def _admit(self, step: int, again: int) -> list[Ticket]:
        """Fill the queue with new groups, those of dropped problems first, and hand them to the sampler."""
        n, redraw = self._queue.room(self._ctx.cfg.run.steps - step), self._queue.redraw
        problems, self._queue.redraw = redraw[:n], redraw[n:]
        problems += self._ctx.stream.draw(n - len(problems))
        tickets = [self._ticket(name, p) for name, p in zip(self._queue.names(n, step, again), problems)]
        self._queue.admit(tickets)
        self._submit()
        return tickets

    def _submit(self) -> None:
        tickets = [t for t in self._queue.live if not (t.submitted or t.done)]
        for ticket in tickets:
            ticket.submitted = True
        self._sampler.submit(tickets, self._version)

    def _ticket(self, name: Name, problem: int) -> Ticket:
        prompt, cfg = self._ctx.train[problem], self._ctx.cfg
        request = scored_groups.make_request(prompt, self._ctx.sampling, cfg.rollout.samples_per_prompt,
                                             cfg.run.seed, *name)
        return Ticket(name, problem, prompt, request, self._version)

    def _from_json(self, d: dict[str, Any]) -> Ticket:
        ticket = self._ticket(Name(*d["name"]), d["problem"])
        completions = tuple(completion_from_json(c) for c in d["completions"])
        if len(completions) == ticket.request.n:  # else rollout.samples_per_prompt has changed: sample anew
            ticket.version, ticket.completions, ticket.done = d["version"], completions, bool(d["done"])
        return ticket

    def _judge(self, tickets: Sequence[Ticket], clock: Clock) -> None:
        """Score the sampled groups, and reject those that cannot be learned from."""
        ctx = self._ctx
        with clock("rollout"):
            found = scored_groups.sift(
                [(t.prompt, t.request, t.completions, range(t.version, self._version + 1)) for t in tickets],
                ctx.engine, ctx.unfit, ctx.stops.cut)
        with clock("reward"):
            groups = iter(scored_groups.score([f for f in found if not isinstance(f, str)], ctx.tokenizer,
                                              ctx.rewards, ctx.cfg.task.think_tags))
        for ticket, f in zip(tickets, found):
            ticket.outcome = f if isinstance(f, str) else next(groups)

    def _rollouts(self, taken: Sequence[Ticket], clock: Clock) -> scored_groups.Rollouts:
        if late := [t for t in taken if t.outcome is None]:
            self._judge(late, clock)
        for beside in {id(t.clock): t.clock for t in taken if t.clock}.values():
            clock.include(beside)
        groups = tuple(t.outcome for t in taken if isinstance(t.outcome, scored_groups.Group))
        return scored_groups.Rollouts(groups, tuple(t.outcome for t in taken if isinstance(t.outcome, str)),
                                      groups)

    def _learn(self, taken: Sequence[Ticket]) -> None:
        """Tell the curriculum what of the groups was solved."""
        if curriculum := self._ctx.stream.curriculum:
            curriculum.learn([(t.problem, t.outcome.rewards) for t in taken
                              if isinstance(t.outcome, scored_groups.Group)])

    def _joined(self, rounds: Sequence[scored_groups.Rollouts], taken: Sequence[Sequence[Ticket]],
                dropped: int) -> scored_groups.Rollouts:
        """The rounds of a step as one batch, with the metrics of the queue and of the curriculum where there
        is one."""
        once = self._ctx.cfg.loss.dynamic_sampling_rounds == 1
        batch = rounds[0] if once else scored_groups.choose(rounds, self._queue.per_step)
        curriculum = self._ctx.stream.curriculum
        drawn = curriculum.metrics() if curriculum else {}
        if not self._journal:
            return batch.with_drawn(drawn)
        left = [len(c.token_ids) for t in self._queue.live for c in t.completions]
        return batch.with_drawn(drawn | {
            "queue/length": len(self._queue.live), "queue/dropped": dropped,
            "queue/left_tokens": sum(left) / max(len(left), 1),
            "queue/partial": sum(t.partials for round in taken for t in round)})


def sampler_of(ctx: RolloutContext, judge: Any) -> Sampler:
    """The sampler that the config asks for. An embedded engine, or one in another process, samples beside the
    learner; vLLM in the learner's process takes turns with it."""
    r = ctx.cfg.rollout
    if r.in_flight:
        return Interrupted(in_flight(ctx.cfg, ctx.engine), r.recompute_kv)
    return WholeGroups(ctx.explorer or ctx.player, judge, r.prompts_per_step,
                       r.max_staleness > 0 and r.engine != "vllm")


def in_flight(cfg: Config, engine: RolloutEngine) -> InFlight:
    """The engine, which can be interrupted. Raises ConfigError if it cannot."""
    if isinstance(engine, InFlight):
        return engine
    raise ConfigError(
        f'rollout.in_flight: {engine.capabilities().engine}, the engine of rollout.engine = '
        f'"{cfg.rollout.engine}", cannot be interrupted by a publish: it samples whole groups',
        'leave rollout.in_flight out, or set rollout.engine = "served"')


def versions(ticket: Ticket) -> list[int]:
    """The oldest and the newest version that sampled a token of the group."""
    found = [span.version for c in ticket.completions for span in c.version_spans]
    return [min(found), max(found)] if found else []


def to_json(ticket: Ticket) -> dict[str, Any]:
    """A ticket for a checkpoint or a record. Its prompt and its request follow from name and problem."""
    return {"name": list(ticket.name), "problem": ticket.problem, "version": ticket.version,
            "done": int(ticket.done), "completions": [completion_to_json(c) for c in ticket.completions]}
