"""Advantages from rewards of groups: completions of one prompt are each other's baseline."""

from __future__ import annotations

import numpy as np

STD_FLOOR = 1e-6


def group_advantages(rewards: np.ndarray, kind: str = "grpo") -> np.ndarray:
    """Rewards [G, n] of G groups of n completions -> advantages [G, n] float32.

    "grpo" (DeepSeekMath, section 4.1): (r - mean) / std over the group, population std. "dr_grpo" (Dr. GRPO, section 3):
    r - mean. A group whose rewards are all equal has advantage exactly 0. A NaN reward (undefined score) gets advantage 0
    and stays out of the group's mean and std.
    """
    rewards = np.asarray(rewards, np.float64)
    defined = ~np.isnan(rewards)
    count = np.maximum(defined.sum(-1, keepdims=True), 1)
    mean = np.where(defined, rewards, 0).sum(-1, keepdims=True) / count
    centred = np.where(defined, rewards - mean, 0.0)
    std = np.sqrt((centred**2).sum(-1, keepdims=True) / count)
    if kind == "dr_grpo":
        return np.where(std > STD_FLOOR, centred, 0.0).astype(np.float32)
    if kind == "grpo":
        return np.where(std > STD_FLOOR, centred / np.maximum(std, STD_FLOOR), 0.0).astype(np.float32)
    raise ValueError(f'advantage kind "{kind}" is not one of "grpo", "dr_grpo"')
