"""The advantages of a step's completions, one a trajectory or one a turn.

    loss.turn_advantages    "trajectory"   every turn has the advantage of the whole: the sum of its rewards
                            "returns"      a turn has that of its return, G_t = r_t + discount * G_(t+1),
                                           among the turns of the same number in its group (turn-level GRPO)

What belongs to no turn, the task's score and the penalty for length, is part of the last turn's reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxfp8rl.config.learning import Loss
from jaxfp8rl.environments.trajectory import Trajectory
from jaxfp8rl.losses.advantages import advantages


def advantages_of(groups: Sequence[Any], rewards: Sequence[np.ndarray], loss: Loss) -> list[list[np.ndarray]]:
    """For each completion of each group its advantage [turns]. groups: scored_groups.Group. rewards: of each
    group [n], shaped, NaN where undefined."""
    if loss.turn_advantages == "trajectory":
        whole = advantages(rewards, loss.advantage, loss.pass_at_k)
        return [[np.full(turns_of(c), a) for c, a in zip(g.completions, found)]
                for g, found in zip(groups, whole)]
    returns = [[returns_of(c, r, loss.turn_discount) for c, r in zip(g.completions, of_group)]
               for g, of_group in zip(groups, rewards)]
    places = [(i, t) for i, g in enumerate(returns) for t in range(max(map(len, g), default=0))]
    rows = [np.array([x[t] for x in returns[i] if len(x) > t]) for i, t in places]
    found = [[np.zeros(len(x)) for x in g] for g in returns]
    for (i, t), values in zip(places, advantages(rows, loss.advantage, loss.pass_at_k)):
        for x, value in zip([x for x in found[i] if len(x) > t], values):
            x[t] = value
    return found


def turns_of(c: Any) -> int:
    return len(c.turns) if isinstance(c, Trajectory) else 1


def returns_of(c: Any, reward: float, discount: float) -> np.ndarray:
    """The returns of the turns [turns] of a completion whose whole reward is `reward`."""
    rewards = np.array(c.rewards if isinstance(c, Trajectory) else [0.0])[: turns_of(c)]
    if len(rewards):
        rewards[-1] += reward - rewards.sum()
    found = np.zeros(len(rewards))
    for t in reversed(range(len(rewards))):
        found[t] = rewards[t] + (discount * found[t + 1] if t + 1 < len(rewards) else 0.0)
    return found
