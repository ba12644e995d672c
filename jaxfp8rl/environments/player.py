"""Plays trajectories: the policy's turns by an engine, their answers by environments, in rounds for all at
once.

With several lanes, groups are dealt out to them, and each plays rounds of its own in a thread: while
environments of one answer, the engine samples for another.

A Player has an engine's `generate`, and so stands where an engine samples. Turn 0 of a group is one request
of n completions, exactly what would be asked without an environment. A later turn is a request of its own,
whose prompt is the exact tokens before it and whose seed follows from the trajectory's. All turns of a group
are one session: their prefixes are in the cache of the replica that sampled its turn 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from bridges.api import Completion, GenRequest, Health
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.environments.conversation import Conversation
from jaxfp8rl.environments.pool import Ask, Pool
from jaxfp8rl.environments.protocol import Answer
from jaxfp8rl.environments.trajectory import Trajectory, trajectory
from jaxfp8rl.errors import DataError

Cut = Callable[[GenRequest, Completion], Completion]


@dataclasses.dataclass(frozen=True)
class ProblemRequest(GenRequest):
    """A request that knows its problem, for who plays it."""

    problem: Problem | None = None


class Generates(Protocol):
    """The methods of a RolloutEngine that sample a batch."""

    def generate(self, requests: Sequence[GenRequest], /) -> list[list[Completion]]: ...

    def health(self) -> Health: ...


class Episode:
    """A trajectory as it is played. end: why it is over, "" while it is not."""

    def __init__(self, number: int, request: ProblemRequest, index: int, tokenizer: Tokenizer):
        assert request.problem is not None  # jaxfp8rl.rollout.scored_groups gives it
        self.number, self.request, self.index, self.problem = number, request, index, request.problem
        self.talk = Conversation(tokenizer, self.problem.prompt, request.prompt_token_ids)
        self.rewards, self.counts, self.end = list[float](), dict[str, int](), ""
        self._longest = len(request.prompt_token_ids) + request.sampling.max_tokens

    @property
    def left(self) -> int:
        """Tokens that the next turn may have."""
        return self._longest - len(self.talk.context)

    def turn(self, limit: int) -> GenRequest:
        """The request of the next turn, of at most `limit` tokens, 0 for what is left."""
        r, turn = self.request, len(self.rewards)
        tokens = min(self.left, limit or self.left)
        seed = r.seed
        if seed is not None and turn:
            seed = int(np.random.SeedSequence([seed, self.index, turn]).generate_state(1)[0])
        name = f"{r.request_id}#{self.index}.{turn}"
        return GenRequest(name, self.talk.context, dataclasses.replace(r.sampling, max_tokens=tokens), 1,
                          seed,
                          r.request_id)

    def began(self, answer: Answer | str) -> None:
        """Take the environment's answer to the problem, or why there is none."""
        if isinstance(answer, str):
            self.end = answer
        else:
            self._observe(answer)

    def heard(self, answer: Answer | str, max_turns: int, penalty: float = 0.0) -> None:
        """Take the environment's answer to a turn, or why there is none. penalty: for each malformed call."""
        if isinstance(answer, str):
            self.rewards.append(0.0)
            self.end = answer
            return
        self.rewards.append(answer.reward - penalty * answer.counts.get("malformed_calls", 0))
        for name, count in answer.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        if answer.done:
            self.end = "done"
        elif self.left < 1 or len(self.rewards) >= max_turns:
            self.end = "length" if self.left < 1 else "turns"
        else:
            self._observe(answer)

    def finished(self, answer: Answer | str) -> None:
        """Take what the environment still gives for a trajectory that a limit of the run ended."""
        if isinstance(answer, str):
            self.end = answer
        else:
            self.rewards[-1] += answer.reward

    def _observe(self, answer: Answer) -> None:
        try:
            self.talk.heard(answer.observation, answer.tools)
        except DataError as e:
            self.end = f"error: {e.message}"
        if not self.end and self.left < 1:
            self.end = "length"

    def trajectory(self) -> Trajectory:
        return trajectory(self.request.request_id, self.index, self.talk.branches(), self.end, self.left < 1,
                          self.rewards, self.counts)


class Player:
    """Generates trajectories of at most `max_turns` turns, each of at most `turn_tokens` tokens (0: no limit
    of its own). `cut` shortens a turn at a stop string. `penalty`: what a malformed call takes from the
    reward of its turn. With more than one of `lanes` the engine is called from several threads."""

    def __init__(self, engine: Generates, pool: Pool, tokenizer: Tokenizer, cut: Cut, max_turns: int,
                 turn_tokens: int = 0, lanes: int = 1, penalty: float = 0.0):
        self._engine, self._pool, self._tokenizer, self._cut = engine, pool, tokenizer, cut
        self._max_turns, self._turn_tokens = max_turns, turn_tokens
        self._lanes, self._penalty = lanes, penalty

    def generate(self, requests: Sequence[Any], told: Callable[[int, int], None] = lambda done, of: None,
                 ) -> list[list[Completion]]:
        """The n trajectories of each ProblemRequest, in order. `told` is called after each round with (the
        requests whose trajectories have all ended, all requests), with several lanes from their threads."""
        numbers = iter(self._pool.begin(sum(r.n for r in requests)))
        groups = [[Episode(next(numbers), r, i, self._tokenizer) for i in range(r.n)] for r in requests]
        lanes = [groups[i :: self._lanes] for i in range(min(self._lanes, len(groups)))]
        after = lambda: told(sum(all(e.end for e in group) for group in groups), len(groups))
        if len(lanes) == 1:
            self._play(groups, after)
        else:
            with ThreadPoolExecutor(len(lanes), "lane") as threads:
                list(threads.map(lambda lane: self._play(lane, after), lanes))
        return [[e.trajectory() for e in group] for group in groups]

    def health(self) -> Health:
        return self._engine.health()

    def close(self) -> None:
        self._pool.close()

    def _play(self, groups: Sequence[Sequence[Episode]], after: Callable[[], None]) -> None:
        """All turns of these. `after` is called after each round."""
        episodes = [e for group in groups for e in group]
        self._reset(episodes)
        while live := [e for e in episodes if not e.end]:
            self._round(live)
            after()
        self._finish([e for e in episodes if e.end in ("turns", "length") and e.rewards])
        self._pool.forget([e.number for e in episodes])

    def _reset(self, episodes: Sequence[Episode]) -> None:
        asks = [Ask(e.number, {"do": "reset", "problem": dataclasses.asdict(e.problem)}) for e in episodes]
        for e, answer in zip(episodes, self._pool.ask(asks)):
            e.began(answer)

    def _round(self, live: Sequence[Episode]) -> None:
        """One turn of each, and the environment's answer to it."""
        asks = []
        for e, completion in zip(live, self._turns(live)):
            asks.append(Ask(e.number, {"do": "step", "action": e.talk.said(completion)}))
        for e, answer in zip(live, self._pool.ask(asks)):
            e.heard(answer, self._max_turns, self._penalty)

    def _finish(self, ended: Sequence[Episode]) -> None:
        for e, answer in zip(ended, self._pool.ask([Ask(e.number, {"do": "finish"}) for e in ended])):
            e.finished(answer)

    def _turns(self, live: Sequence[Episode]) -> list[Completion]:
        """The next turn of each. Those of a whole group with one prompt are one request."""
        asked = [e.turn(self._turn_tokens) for e in live]
        requests, at = list[GenRequest](), 0
        while at < len(asked):
            size = _whole(live, asked, at)
            requests.append(dataclasses.replace(asked[at], n=size))
            at += size
        answers = self._engine.generate(requests)
        return [self._cut(r, c) for r, group in zip(requests, answers, strict=True) for c in group]


def _whole(live: Sequence[Episode], asked: Sequence[GenRequest], at: int) -> int:
    """The size of the group that begins at `at`, if all of it is there and takes its first turn; else 1."""
    n = live[at].request.n
    group = live[at : at + n]
    fresh = all(e.request is live[at].request and not e.rewards for e in group) and len(group) == n
    return n if fresh and all(r.prompt_token_ids == asked[at].prompt_token_ids
                              for r in asked[at : at + n]) else 1
