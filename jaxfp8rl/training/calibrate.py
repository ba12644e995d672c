"""Calibration during a run: clip bounds for a noisy FP8 ratio, and scales of FP8 attention.

FP8 rounding noise in both log-probabilities widens the distribution of pi / pi_old. Tokens with a negative
advantage then fall below the lower bound, where they have no gradient, and keep a probability that the update
should lower (arXiv 2609.22870). From time to time the bounds are therefore reset so that they clip the tokens
that the same learner would have clipped without FP8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfp8rl.config.learning import Loss
from jaxfp8rl.losses.calibration import calibrated_bounds
from jaxfp8rl.losses.logprobs import token_logprobs
from jaxfp8rl.losses.mismatch import LOG_RATIO_BOUND
from jaxfp8rl.losses.objectives import objective_parameters
from jaxfp8rl.microbatch import map_live
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.transformer import forward_and_amax, head_weight
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.kv_scales import NAMES, KvScales, finite, remember, scales_from
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.types import Params, TrainBatch


class ClipCalibration:
    """Calibrates the clip distances of the objective; `clip` holds the current pair (low, high): at first
    loss.calibrate_clip_start, or the nominal pair, then a moving average of those found.

    `shadow_score(params, batch)` gives the learner's log-probabilities without FP8. Every
    loss.calibrate_clip_every steps, `begin` scores the last update's batch before the step's updates move the
    policy, and `finish` compares the ratios of both learners just before that update.
    """

    def __init__(self, shadow_score: Callable, loss: Loss):
        nominal = objective_parameters(loss.objective_config)
        self.nominal = (nominal["clip_low"], nominal["clip_high"])
        self.clip = tuple(map(np.float32, loss.calibrate_clip_start or self.nominal))
        self._score, self._every = shadow_score, loss.calibrate_clip_every
        self._newest = np.float32(loss.calibrate_clip_newest)

    def begin(self, step: int, params: Params, batch: TrainBatch) -> Array | None:
        return self._score(params, batch) if step % self._every == 0 else None

    def finish(self, params: Params, batch: TrainBatch, logp: Array, old_logp: Array,
               shadow_old: Array) -> None:
        ratio, shadow = _ratio(logp, old_logp), _ratio(self._score(params, batch), shadow_old)
        bounds = jax.device_get(_bounds(ratio, shadow, batch.advantages, batch.response_mask, *self.nominal))
        # if the bounds are not finite, neither is the update that follows, and its guard reports it
        if np.isfinite(bounds).all():
            self.clip = tuple(self._newest * np.float32(found) + (1 - self._newest) * before
                              for found, before in zip(bounds, self.clip))

    def state(self) -> dict[str, list[float]]:
        """The state for a checkpoint, as JSON types."""
        return {"clip": [float(x) for x in self.clip], "clip_of": list(self.nominal)}

    def take_up(self, state: dict[str, Any]) -> None:
        """Continue with the distances of a checkpoint, unless they were calibrated from other nominal
        distances than this run's: a fork may set its own."""
        if "clip" in state and tuple(state.get("clip_of", self.nominal)) == self.nominal:
            self.clip = tuple(map(np.float32, state["clip"]))


class KvCalibration:
    """Scales of FP8 attention, from the largest queries, keys and values in the scoring pass.

    This class runs the scoring pass in order to see them. `amax` holds, for each of "q", "k" and "v", the
    largest magnitude of each layer [L], which decays by `decay` a step (jaxfp8rl/precision/kv_scales.py); it
    is None before the first step. A step ends with one `apply`, however many batches were scored.
    """

    def __init__(self, model: ModelConfig, precision: Precision, temperature: float, decay: float):
        self.amax: KvScales | None = None
        self._seen: KvScales | None = None  # in this step
        self._decay, self._layers = decay, model.num_hidden_layers
        observe = functools.partial(_observe, model, precision, temperature)
        self.observe: Callable = rounding_exact_jit(observe)

    def unit_scales(self) -> KvScales:
        """The scales of a policy that has not been observed yet, [L] float32: an engine computes the same
        without scales."""
        return {name: jnp.ones(self._layers) for name in NAMES}

    def score(self, policy: Params, batch: TrainBatch) -> Array:
        """old_logp [M, R, T], as from the plain scoring pass; the largest values are recorded."""
        logp, amax = self.observe(policy, batch)
        self._seen = remember(self._seen, amax, 1.0)
        return logp

    def metrics(self) -> dict[str, float]:
        """The maxima over all layers: `kv/amax_q`, `kv/amax_k`, `kv/amax_v`."""
        return {f"kv/amax_{name}": float(x.max()) for name, x in (self.amax or {}).items()}

    def apply(self, policy: Params) -> Params:
        """The policy with the scales that it is to be published with."""
        if self._seen is not None:
            self.amax, self._seen = remember(self.amax, self._seen, self._decay), None
        assert self.amax is not None  # a policy is observed before it is published
        return {**policy, "kv_scales": scales_from(self.amax)}


def _observe(model: ModelConfig, precision: Precision, temperature: float, policy: Params, batch: TrainBatch):
    """(log-probabilities [M, R, T], {"q", "k", "v": [L]}) of the policy on `batch`; empty micro-batches are
    skipped."""

    def one(micro: TrainBatch) -> tuple[Array, KvScales]:
        hidden, amax = forward_and_amax(policy, model, micro.tokens, micro.positions, micro.segment_ids,
                                        precision, ends_BT=micro.ends)
        logp, _ = token_logprobs(hidden, head_weight(policy, model), micro.tokens, temperature,
                                 logits_dtype=precision.rounding.logits_dtype, mask=micro.response_mask,
                                 support=micro.support, softcap=model.final_logit_softcapping)
        return logp, amax

    logp, amax = map_live(one, batch)
    # values that are not finite are dropped, so that a bad micro-batch does not hide the others
    return logp, jax.tree.map(lambda x: finite(x).max(0), amax)


_bounds = jax.jit(calibrated_bounds)


@jax.jit
def _ratio(logp: Array, old_logp: Array) -> Array:
    return jnp.exp(jnp.clip(logp - old_logp, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
