"""Explain why an update has nothing to learn from: its cause, with an example and the next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxfp8rl.config.schema import Config
from jaxfp8rl.losses.advantages import informative_groups
from jaxfp8rl.monitors.end.extremes import completion_lines
from jaxfp8rl.rollout.scored_groups import Group, Rollouts
from jaxfp8rl.types import TrainBatch

HARDER = "use problems that are neither too easy nor too hard (loss.dynamic_sampling_rounds looks for them)"


class Cause(NamedTuple):
    """The cause in words, an example that shows it, and the next step."""

    text: str
    example: str
    next_step: str

    @property
    def detail(self) -> str:
        return f"{self.example}\n  next step: {self.next_step}"


def cause(sampled: Rollouts, batch: TrainBatch, cfg: Config, metrics: Mapping[str, float]) -> Cause:
    """Why the metrics of an update of `batch` count no token. `sampled`: the completions of the whole
    step."""
    live = batch.response_mask
    if not live.any() and (left_out := _left_out(sampled, cfg)):
        return left_out
    if np.any(batch.advantages[live]):
        return _rejected(sampled, metrics)
    return equal_rewards(sampled, cfg) or Cause(
        "the rewards are equal within each group of this update", _example(sampled.groups[0]),
        f"{HARDER}, or make fewer updates a step"
    )


def equal_rewards(sampled: Rollouts, cfg: Config) -> Cause | None:
    """The cause if the rewards are equal within each group of the whole step, else None."""
    rewards = np.concatenate([g.rewards for g in sampled.groups])
    values = np.unique(rewards[~np.isnan(rewards)])
    if informative_groups([g.rewards for g in sampled.groups]).any() or not values.size:
        return None
    example = _example(next(g for g in sampled.groups if not np.isnan(g.rewards).all()))
    if len(values) > 1:
        greedy = "" if cfg.rollout.temperature else " (at rollout.temperature = 0 completions do not differ)"
        return Cause("the rewards are equal in every group", example,
                     f"raise rollout.samples_per_prompt or the temperature{greedy}, or {HARDER}")
    if values[0] == 0:
        return Cause("every reward is 0", example, _without_reward(sampled, cfg))
    return Cause(f"every reward is {values[0]:g}", example,
                 "check that the scorer tells right answers from wrong ones (docs/tasks.md); "
                 f"if it does, {HARDER}")


def _without_reward(sampled: Rollouts, cfg: Config) -> str:
    cut = np.mean([c.finish_reason == "length" for g in sampled.groups for c in g.completions])
    if cut > 0.5:
        limit = f"rollout.max_new_tokens (now {cfg.rollout.max_new_tokens})"
        return f"{cut:.0%} of the completions were cut: raise {limit}"
    if broken := sum(g.malformed for g in sampled.groups):
        return (f"the scorer failed on {broken} completions, which got 0 (reward/malformed): "
                "score one by hand (docs/tasks.md)")
    return ("if the completion is right, check the extraction and the scorer (docs/tasks.md); "
            "if it is wrong, use easier problems or a warm start (sft.steps)")


def _left_out(sampled: Rollouts, cfg: Config) -> Cause | None:
    """The cause if every completion was left out because it was cut or has no score, else None."""
    of = [(g, c, reward) for g in sampled.chosen for c, reward in zip(g.completions, g.rewards)]
    cut = [g for g, c, reward in of if cfg.loss.mask_cut and c.finish_reason == "length"]
    undefined = [g for g, _, reward in of if np.isnan(reward)]
    if not of or len(cut) + len(undefined) < len(of):
        return None
    if len(cut) >= len(undefined):
        text = f"every completion was cut at {cfg.rollout.max_new_tokens} tokens and left out (loss.mask_cut)"
        next_step = "raise rollout.max_new_tokens, or learn from cut completions too: --loss.mask_cut false"
        return Cause(text, _example(cut[0]), next_step)
    return Cause("no completion has a score", _example(undefined[0]), "score one by hand (docs/tasks.md)")


def _rejected(sampled: Rollouts, metrics: Mapping[str, float]) -> Cause:
    names = ("correction/rejected_fraction", "opsm/fraction", "mismatch/token_mult_prob_error")
    facts = ", ".join(f"{name} {metrics[name]:.3g}" for name in names if name in metrics)
    return Cause("the correction rejected every token that had an advantage", f"  {facts}",
                 "find out why engine and learner disagree (docs/health.md), "
                 "or widen the correction's bounds (docs/corrections.md)")


def _example(group: Group) -> str:
    problem = group.prompt.problem
    row = {"prompt": problem.prompt, "completion": group.texts[0], "answer": problem.answer}
    return completion_lines(row, f"  for example, with reward {group.rewards[0]:g}:").replace("\n", "\n  ")
