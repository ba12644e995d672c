"""The metrics turns/* of a step."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from bridges.api import Completion
from jaxfp8rl.environments.trajectory import Trajectory


def turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """turns/* of trajectories; {} if there are none."""
    found = [c for c in completions if isinstance(c, Trajectory)]
    if not found:
        return {}
    turns, ends = np.array([len(c.turns) for c in found]), collections.Counter(c.end.partition(":")[0]
                                                                               for c in found)
    cached, prompts = np.sum([c.cached() for c in found], 0).tolist()
    outside = np.array([len(c.token_ids) - c.sampled.sum() for c in found])
    return {
        "turns/mean": float(turns.mean()), "turns/max": int(turns.max()),
        "turns/outside_tokens_mean": float(outside.mean()),
        "turns/branches_mean": float(np.mean([len(c.branches) for c in found])),
        "turns/done_fraction": ends["done"] / len(found),
        "turns/overflowed_fraction": ends["length"] / len(found),
        "turns/timeouts": ends["timeout"], "turns/crashes": ends["crash"] + ends["lost"],
        "turns/errors": ends["error"],
        **({"turns/cached_fraction": cached / prompts} if prompts else {}),
        "turns/tool_calls": sum(c.counts.get("tool_calls", 0) for c in found),
        "turns/malformed_calls": sum(c.counts.get("malformed_calls", 0) for c in found),
    }
