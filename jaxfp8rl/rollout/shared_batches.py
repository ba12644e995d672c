"""The rollout batches of a learner of several processes: the first samples, and tells the others what their
metrics and their split into updates need, which no token is. The tokens follow in `own_rows`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bridges.api import Completion, VersionSpan
from jaxfp8rl.distributed.process_group import ProcessGroup
from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.rollout.pipeline import RolloutPipeline
from jaxfp8rl.rollout.scored_groups import Group, Prompt, Rollouts


class SharedBatches:
    """The batches of the first process's pipeline, for all. With one process it is that pipeline."""

    def __init__(self, group: ProcessGroup, pipeline: RolloutPipeline, prompts: Sequence[Prompt]):
        self._group, self._pipeline, self._prompts = group, pipeline, prompts

    def next_batch(self, step: int, clock: Clock) -> Rollouts:
        """The batch of `step`. In the others its completions have lengths and versions, and no tokens."""
        if self._group.first:
            batch = self._pipeline.next_batch(step, clock)
            self._group.broadcast(lambda: facts_of(batch, self._prompts))
            return batch
        with clock("rollout"):
            return hollow(self._group.broadcast(dict), self._prompts)

    @contextlib.contextmanager
    def held(self, clock: Clock) -> Iterator[None]:
        with self._pipeline.held(clock):
            yield

    def state(self) -> dict[str, Any]:
        return self._group.broadcast(self._pipeline.state)

    def restore(self, state: dict[str, Any], step: int) -> Iterator[str]:
        return self._pipeline.restore(state, step)

    def draw_again(self, state: dict[str, Any]) -> None:
        self._pipeline.draw_again(state)


def facts_of(batch: Rollouts, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """A batch without texts and tokens, as JSON types and arrays. `prompts`: those of the run."""
    places = {id(prompt): i for i, prompt in enumerate(prompts)}
    groups = [{"prompt": places[id(g.prompt)], "completions": [_facts(c) for c in g.completions],
               "rewards": g.rewards, "named": g.named, "malformed": g.malformed} for g in batch.groups]
    chosen = {id(g) for g in batch.chosen}
    return {"groups": groups, "rejected": batch.rejected, "drawn": dict(batch.drawn),
            "chosen": [i for i, g in enumerate(batch.groups) if id(g) in chosen]}


def hollow(facts: dict[str, Any], prompts: Sequence[Prompt]) -> Rollouts:
    """The batch of `facts_of`, whose tokens and log-probabilities are zeros that take no memory."""
    groups = tuple(_hollow_group(prompts, **g) for g in facts["groups"])
    chosen = tuple(groups[i] for i in facts["chosen"])
    return Rollouts(groups, tuple(facts["rejected"]), chosen, facts["drawn"], hollow=True)


def _hollow_group(prompts: Sequence[Prompt], prompt: int, completions: Sequence[Sequence[Any]],
                  **scores: Any) -> Group:
    return Group(prompts[prompt], tuple(_hollow(*c) for c in completions), ("",) * len(completions), **scores)


def _facts(c: Completion) -> list[Any]:
    spans = [dataclasses.astuple(span) for span in c.version_spans]
    return [c.request_id, c.index, len(c.token_ids), c.finish_reason, spans]


def _hollow(request: str, index: int, length: int, finish: Any, spans: Sequence[Sequence[int]]) -> Completion:
    tokens, logprobs = (np.broadcast_to(np.zeros((), dtype), length) for dtype in (np.int32, np.float32))
    return Completion(request, index, tokens, logprobs, finish, tuple(VersionSpan(*span) for span in spans))
