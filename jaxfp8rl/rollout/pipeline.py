"""The rollout batch of each step: sampled when its turn comes, or (rollout.lag = 1) while the step before it
learns.

    lag 0    sample 1 | learn 1 | publish 1 | sample 2 | learn 2 | publish 2 | ...
    lag 1    sample 1 | learn 1, sample 2 | publish 1 | learn 2, sample 3 | publish 2 | ...

With a lag the batch of step s was sampled at the weights of step s - 2, one version older than the weights
that learn from it, and never older. A publish waits until sampling has finished, so each completion has one
version (Completion.version_spans). pi_old is scored at the learner's weights when it learns, so the
correction's pi_old / mu covers both rounding and age.

A checkpoint holds the completions that were sampled ahead, because the weights that sampled them are gone; a
resumed run takes them from there. The last step samples nothing ahead. If a finished run is given more steps,
the first of them samples at the newest weights, as step 1 did.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from bridges.api import Completion, GenRequest, Health, RolloutEngine
from jaxfp8rl.data.dataset import PromptStream
from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.completion_json import completion_from_json, completion_to_json
from jaxfp8rl.rollout.context import RolloutContext

Answers = list[list[list[Completion]]]  # of each call of `generate`


class RolloutPipeline:
    """The rollout batches of one run, in order. With a lag, sampling runs in its own thread."""

    def __init__(self, ctx: RolloutContext):
        self._parts = ctx
        self._waiting: Future | None = None
        self._kept: dict[str, Any] = {}

    def next_batch(self, step: int, clock: Clock) -> scored_groups.Rollouts:
        """The batch of `step`. Its times are added to `clock`, even if it was sampled beside the step
        before."""
        if not self._parts.cfg.rollout.lag:
            return generate_batch(self._parts, self._parts.engine, step, step - 1, clock)
        waiting = self._waiting or self._begin(step, step - 1)
        with clock("wait"):
            batch, sampling_clock = waiting.result()
        clock.include(sampling_clock)
        self._waiting, self._kept = None, {}
        if step < self._parts.cfg.run.steps:
            self._begin(step + 1, step - 1)
        return batch

    def wait(self, clock: Clock) -> None:
        """Wait until sampling has finished. Raises the exception that it raised."""
        if self._waiting is not None:
            with clock("wait"):
                self._waiting.result()

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON types: the position in the prompt stream and, after `wait`, the
        completions sampled for the next step."""
        if self._waiting is None:
            return {"stream": self._parts.stream.state()}
        answers = [[[completion_to_json(c) for c in group] for group in call]
                   for call in self._kept["answers"]]
        return {"stream": self._kept["stream"],
                "ahead": {"version": self._kept["version"], "answers": answers}}

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Continue where the run was after `step`. Raises CheckpointError if the state is damaged or belongs
        to other data."""
        self._parts.stream = PromptStream.from_state(self._parts.train, state["stream"])
        # without a lag the same prompts are sampled anew
        if (ahead := state.get("ahead")) and self._parts.cfg.rollout.lag:
            answers = [[[completion_from_json(c) for c in group] for group in call]
                       for call in ahead["answers"]]
            self._begin(step + 1, ahead["version"], answers)

    def _begin(self, step: int, version: int,
               known: Sequence[list[list[Completion]]] = ()) -> Future:
        """Sample the batch of `step` in a thread. `known`: the engine's answers that a checkpoint holds,
        which are not requested again."""
        engine, clock, done = _ReplayedEngine(self._parts.engine, known), Clock(), Future()
        self._waiting = done
        self._kept = {"stream": self._parts.stream.state(), "version": version, "answers": engine.answers}

        def sample() -> None:
            try:
                done.set_result((generate_batch(self._parts, engine, step, version, clock), clock))
            except BaseException as e:  # raised where the batch is taken
                done.set_exception(e)

        threading.Thread(target=sample, name="rollout", daemon=True).start()
        return done


class _ReplayedEngine:
    """An engine that records its answers, and gives the answers in `known` before it samples."""

    def __init__(self, engine: RolloutEngine, known: Sequence[list[list[Completion]]]):
        self._engine, self._known, self.answers = engine, list(known), []

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        self.answers.append(self._known.pop(0) if self._known else self._engine.generate(requests))
        return self.answers[-1]

    def health(self) -> Health:
        return self._engine.health()


def generate_batch(ctx: RolloutContext, engine: scored_groups.Generates, step: int, version: int,
                   clock: Clock) -> scored_groups.Rollouts:
    """Sample and score a batch of prompts. Dynamic sampling repeats this with further prompts until enough
    groups have rewards that differ."""
    cfg, rounds = ctx.cfg, []
    for again in range(cfg.loss.dynamic_sampling_rounds):
        with clock("rollout"):
            prompts = ctx.stream.next(cfg.rollout.prompts_per_step)
            n, seed = cfg.rollout.samples_per_prompt, cfg.run.seed
            requests = scored_groups.make_requests(prompts, ctx.sampling, n, seed, step, again)
            kept, rejected = scored_groups.generate(engine, prompts, requests, version, ctx.unfit,
                                                    ctx.stops.cut)
        with clock("reward"):
            groups = tuple(scored_groups.score(kept, ctx.tokenizer, ctx.rewards,
                                               ctx.cfg.task.think_tags))
        rounds.append(scored_groups.Rollouts(groups, rejected, groups))
        if len(scored_groups.choose(rounds,
                                    cfg.rollout.prompts_per_step).chosen) == cfg.rollout.prompts_per_step:
            break
    return rounds[0] if cfg.loss.dynamic_sampling_rounds == 1 else scored_groups.choose(
        rounds, cfg.rollout.prompts_per_step)
