"""Which problems are drawn more often: those that the policy solved neither always nor never, lately.

    weight = floor + (1 - floor) 4 p (1 - p)

p is the recent solve rate of the problem, or of its environment; 1/2 where there is none yet. p (1 - p) is
the variance of a completion's success, which bounds what a group's advantages teach ("learnability", arXiv
2502.12272). The stream of problems passes over the next problem of its permutation with probability 1 -
weight.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jaxfp8rl.errors import CheckpointError


class Curriculum:
    """The recent solve rates of a run. keys: of each problem, what its rate is kept by: its index, or the
    name of its environment. solved_at: the least reward that counts as solved. pace: the share of the newest
    rate in the recent one. floor: the least weight."""

    def __init__(self, keys: Sequence[Hashable], solved_at: float = 1.0, pace: float = 0.5,
                 floor: float = 0.1):
        self._keys, self._solved_at, self._pace, self._floor = keys, solved_at, pace, floor
        self._counts = collections.Counter(keys)
        self._names = {str(key): key for key in self._counts}
        self._rates: dict[Hashable, float] = {}

    def weight(self, problem: int) -> float:
        """The probability that the problem with this index is drawn when its turn has come."""
        return self._weight(self._rates.get(self._keys[problem], 0.5))

    def _weight(self, p: float) -> float:
        return self._floor + (1 - self._floor) * 4 * p * (1 - p)

    def learn(self, results: Sequence[tuple[int, np.ndarray]]) -> None:
        """Take in (index of the problem, rewards [n] of its completions, NaN where there is none) of a step.
        A key with several results takes the mean of all their completions."""
        found: dict[Hashable, list[np.ndarray]] = {}
        for problem, rewards in results:
            found.setdefault(self._keys[problem], []).append(rewards[~np.isnan(rewards)])
        for key, parts in found.items():
            if len(rewards := np.concatenate(parts)):
                before = self._rates.get(key, 0.5)
                self._rates[key] = before + self._pace * (float(np.mean(rewards >= self._solved_at)) - before)

    def metrics(self) -> dict[str, float]:
        """The metrics curriculum/*."""
        lost = sum(self._counts[key] * (1 - self._weight(p)) for key, p in self._rates.items())
        named = {f"curriculum/{key}/solved": p for key, p in self._rates.items() if isinstance(key, str)}
        return {
            "curriculum/known": len(self._rates) / len(self._counts),
            "curriculum/solved_mean": float(np.mean(list(self._rates.values()))) if self._rates
            else float("nan"),
            "curriculum/weight_mean": 1 - lost / len(self._keys), **named}

    def state(self) -> dict[str, float]:
        """The rates by name, for a checkpoint."""
        return {str(key): p for key, p in self._rates.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's rates. Raises CheckpointError if they are damaged."""
        try:
            self._rates = {self._names[name]: float(p) for name, p in state.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"the solve rates of the checkpoint are damaged: {e!r}",
                                  "resume from an older one") from e
        if not all(0 <= p <= 1 for p in self._rates.values()):
            raise CheckpointError("the solve rates of the checkpoint are damaged: a rate is between 0 and 1",
                                  "resume from an older one")
