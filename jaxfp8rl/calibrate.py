"""Clip bounds for a noisy FP8 ratio, set from time to time by what the same learner without FP8 would have clipped.

FP8 rounding noise in both log-probabilities widens the distribution of pi / pi_old; tokens with a negative advantage then
fall below the lower bound and keep their probability though nobody wanted them (arXiv 2609.22870).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfp8rl.config import Loss
from jaxfp8rl.losses.calibration import calibrated_bounds
from jaxfp8rl.losses.mismatch import LOG_RATIO_BOUND
from jaxfp8rl.losses.objectives import objective_parameters
from jaxfp8rl.types import Params, TrainBatch


class ClipCalibration:
    """`clip` are the distances in force. `shadow_score(params, batch)`: the learner's log-probabilities without FP8.

    In a step that is due, `begin` scores the last update's batch before the step's updates move the policy, and `finish`
    compares the ratios of both learners just before that update.
    """

    def __init__(self, shadow_score: Callable, loss: Loss):
        nominal = objective_parameters(loss.objective_config)
        self.nominal = (nominal["clip_low"], nominal["clip_high"])
        self.clip = tuple(map(np.float32, self.nominal))
        self._score, self._every = shadow_score, loss.calibrate_clip_every

    def begin(self, step: int, params: Params, batch: TrainBatch) -> Array | None:
        return self._score(params, batch) if step % self._every == 0 else None

    def finish(self, params: Params, batch: TrainBatch, logp: Array, old_logp: Array, shadow_old: Array) -> None:
        ratio, shadow = _ratio(logp, old_logp), _ratio(self._score(params, batch), shadow_old)
        bounds = jax.device_get(_bounds(ratio, shadow, batch.advantages, batch.response_mask, *self.nominal))
        if np.isfinite(bounds).all():  # else the update that follows is not finite either, and its guard reports it
            self.clip = tuple(map(np.float32, bounds))


_bounds = jax.jit(calibrated_bounds)


@jax.jit
def _ratio(logp: Array, old_logp: Array) -> Array:
    return jnp.exp(jnp.clip(logp - old_logp, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
