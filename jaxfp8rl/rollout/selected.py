"""What a step learns from of what it has drawn: completions selected by their rewards
(jaxfp8rl.losses.selection).

    draw        the completions of all groups
    advantages  over all of a group, or over those kept (selection.baseline)
    units       what is learned from together: a group, or a pair or a completion that is replayed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxfp8rl.config.schema import Config
from jaxfp8rl.environments.trajectory import tokens_sampled
from jaxfp8rl.losses import selection
from jaxfp8rl.losses.advantages import informative_groups
from jaxfp8rl.losses.selection import Unit
from jaxfp8rl.rollout.explore import relative_inclusion
from jaxfp8rl.rollout.scored_groups import Group, Rollouts, learnable, length_parts, shaped_rewards
from jaxfp8rl.rollout.turn_advantages import advantages_of

DRAWS = 43  # apart from what else is drawn from (run.seed, step)


class Selected(NamedTuple):
    """The units of a step; the advantages [turns] of every completion of each chosen group; metrics
    trained/*."""

    units: list[Unit]
    advantages: list[list[np.ndarray]]
    metrics: dict[str, float]


def selected(batch: Rollouts, cfg: Config, step: int) -> Selected:
    """Select from the groups of `step`. Drawn from (run.seed, step), so that every process and a resumed run
    select the same."""
    s, rng = cfg.selection.resolve(), np.random.default_rng([cfg.run.seed, step, DRAWS])
    groups, loss = batch.chosen, cfg.loss
    rewards = [shaped_rewards(g, loss, cfg.rollout.max_new_tokens) for g in groups]
    usable = [learnable(g, loss) for g in groups]
    kept = [selection.keep(np.nan_to_num(r), u, s, rng) for r, u in zip(rewards, usable)]
    kept = [k._replace(inclusion=k.inclusion * relative_inclusion(g.completions))
            for k, g in zip(kept, groups)]
    compared = [_only(r, k.places) for r, k in zip(rewards, kept)] if s.baseline == "kept" else rewards
    advantages = advantages_of(groups, compared, loss)
    sizes = [np.array([np.abs(a).mean() if len(a) else 0.0 for a in group]) for group in advantages]
    units = selection.select(usable, kept, sizes, s, rng, _share(batch, cfg))
    unreachable = sum(int((u & (k.inclusion == 0)).sum()) for u, k in zip(usable, kept))
    return Selected(units, advantages, _metrics(groups, units, usable, unreachable))


def _share(batch: Rollouts, cfg: Config) -> float:
    """Of the groups drawn, those that teach, where only they are chosen."""
    if cfg.loss.dynamic_sampling_rounds == 1:
        return 1.0
    return selection.refill_share(informative_groups([g.rewards for g in batch.groups]),
                                  cfg.rollout.prompts_per_step)


def _only(rewards: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The rewards at these places; the others are undefined."""
    found = np.full(len(rewards), np.nan)
    found[places] = rewards[places]
    return found


def _metrics(groups: Sequence[Group], units: Sequence[Unit], usable: Sequence[np.ndarray],
             unreachable: int) -> dict[str, float]:
    """trained/*: of the completions that are learned from, each as often as it is."""
    pairs = [(groups[u.group], i) for u in units for i in u.members]
    weights = np.array([w for u in units for w in u.weights])
    drawn = sum(int(u.sum()) for u in usable)
    found: dict[str, float] = {
        "trained/completions": len(pairs),
        "trained/distinct": len({(id(g), i) for g, i in pairs}) / max(drawn, 1),
        "trained/unreachable": unreachable / max(drawn, 1),
    }
    if not pairs:
        return found
    lengths = np.array([tokens_sampled(g.completions[i]) for g, i in pairs])
    found |= {"trained/reward_mean": float(np.mean([g.rewards[i] for g, i in pairs])),
              "trained/length_mean": float(lengths.mean()),
              "trained/weights_ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))}
    return found | length_parts("trained", lengths)
