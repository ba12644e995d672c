"""The correction of the rollout mismatch: importance weights from the engine's policy mu to the learner's pi_old.

The engine samples from mu (FP8, other kernels), the gradient is meant for pi_old. With rho_t = exp(old_logp - rollout_logp),
truncated importance sampling (TIS; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training") multiplies the loss of token t by min(rho_t, C): bias where the cap bites, bounded variance everywhere.

Diagnostics are always computed, also when the correction is off. Log-ratios are clamped to +-20 before exp.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

LOG_RATIO_BOUND = 20.0


class CorrectionConfig(NamedTuple):
    """weight: "none" leaves the loss alone, "token" weighs each token. upper: the cap C."""

    weight: Literal["none", "token"] = "token"
    upper: float = 2.0


class Correction(NamedTuple):
    """weights: float32, a constant to the gradient, 0 under the mask. mask: the tokens that count. metrics: scalars."""

    weights: Array
    mask: Array
    metrics: dict[str, Array]


def rollout_correction(old_logp: Array, rollout_logp: Array, mask: Array, config: CorrectionConfig) -> Correction:
    """Importance weights and mismatch metrics of a whole batch; all arrays one shape, any rank, mask bool.

    Whatever stands where mask is False, NaN and Inf included, changes nothing. A NaN at a live token goes through to the
    weights, and so to the finite guard. With equal policies every weight is 1 and every metric neutral. An empty mask
    gives weights 0 and neutral metrics.

    Metrics (means over live tokens; D = old_logp - rollout_logp): mismatch/k1 = mean(-D) and mismatch/k3 =
    mean(e^D - D - 1), the two estimators of KL(mu || pi_old) (Schulman 2020); mismatch/token_mult_prob_error =
    mean(e^|D|) (NeMo RL); mismatch/max_logp_diff = max |D|; correction/weight_mean; correction/ess =
    mean(w)^2 / mean(w^2), the effective sample size as a fraction; correction/truncated_fraction;
    correction/rejected_fraction.
    """
    diff = jnp.where(mask, old_logp.astype(jnp.float32) - rollout_logp.astype(jnp.float32), 0.0)
    diff = jax.lax.stop_gradient(diff)
    bounded = jnp.clip(diff, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    rho = jnp.exp(bounded)
    weights = jnp.minimum(rho, config.upper) if config.weight == "token" else jnp.ones_like(rho)
    weights = jnp.where(mask, weights, 0.0)
    truncated = mask & (rho > config.upper) & (config.weight == "token")

    count = jnp.sum(mask)
    empty = count == 0
    total = jnp.maximum(count, 1).astype(jnp.float32)

    def mean(x: Array, neutral: float = 0.0) -> Array:
        return jnp.where(empty, neutral, jnp.sum(jnp.where(mask, x, 0.0)) / total)

    weight_mean = mean(weights, 1.0)
    metrics = {
        "mismatch/k1": mean(-diff),
        "mismatch/k3": mean(rho - bounded - 1.0),
        "mismatch/token_mult_prob_error": mean(jnp.exp(jnp.abs(bounded)), 1.0),
        "mismatch/max_logp_diff": jnp.max(jnp.abs(diff), initial=0.0),
        "correction/weight_mean": weight_mean,
        "correction/ess": weight_mean**2 / jnp.maximum(mean(weights**2, 1.0), 1e-30),
        "correction/truncated_fraction": mean(truncated.astype(jnp.float32)),
        "correction/rejected_fraction": jnp.zeros(()),
    }
    return Correction(weights, mask, metrics)
