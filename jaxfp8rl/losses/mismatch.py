"""The disagreement of engine and learner about the sampled tokens: diagnostics, never part of a gradient.

D_t = old_logp - rollout_logp, rho = exp(D). Means are over live tokens, or over sequences where stated.
Log-ratios are clamped to +-20 before exp, so that one broken token reads as 5e8 and not as infinity.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxfp8rl.losses.segments import segment_ends, segment_total

LOG_RATIO_BOUND = 20.0


def mean_over(mask: Array, x: Array | float, neutral: float = 0.0) -> Array:
    """The mean of x where mask; `neutral` if mask is empty. A scalar, float32."""
    count = jnp.sum(mask)
    total = jnp.sum(jnp.where(mask, x, 0).astype(jnp.float32))
    return jnp.where(count == 0, neutral, total / jnp.maximum(count, 1))


def spread(x: Array, mask: Array, neutral: float = 0.0) -> tuple[Array, Array]:
    """(mean, population standard deviation) of x where mask; (neutral, 0) if mask is empty."""
    mean = mean_over(mask, x, neutral)
    return mean, jnp.sqrt(mean_over(mask, (x - mean) ** 2))


def relative_spread(x: Array, mask: Array, neutral: float = 0.0) -> tuple[Array, Array, Array]:
    """(unit, mean / unit, standard deviation / unit) of x [..., T] >= 0 where mask, scalars. unit is about
    the largest x (1 if that is 0), so that no square overflows."""
    peak = jnp.max(jnp.where(mask, x, 0.0), initial=0.0)
    # XLA multiplies by 1 / unit, which must not underflow
    unit = jnp.where(peak > 0, jnp.clip(peak, 1e-30, 1e30), 1.0)
    return unit, *spread(x / unit, mask, neutral)


def kish(mean: Array, std: Array) -> Array:
    """The effective sample size as a share, (sum w)^2 / (n sum w^2) (Kish 1965), from mean and standard
    deviation in any unit."""
    return mean**2 / jnp.maximum(mean**2 + std**2, 1e-30)


def mismatch_metrics(
    diff: Float[Array, "*B T"], old_logp: Float[Array, "*B T"], rollout_logp: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"], segment_ids: Int[Array, "*B T"] | None = None
) -> dict[str, Float[Array, ""]]:
    """Scalars under `mismatch/`; diff = D where mask, 0 elsewhere. All arrays [..., T].

    Estimators of KL(mu || pi_old): k1 = mean(-D), k3 = mean(rho - 1 - D) (Schulman 2020). k3_reverse =
    mean(1/rho - 1 + D). js = the k3 terms of both against their mixture (NeMo RL's js_divergence_error).
    abs_logp_diff = mean |D| (slime). max_logp_diff = max |D|. token_mult_prob_error = mean(e^|D|) (NeMo RL).
    equal_fraction = the share of tokens of which D is 0.
    chi2_token = mean(rho^2) - 1. prob_diff_{mean,max,std} of |e^old_logp - e^rollout_logp| and
    prob_correlation, Pearson's, of the two (MiniMax-M1).

    With segment_ids also, over sequences: learner_ppl and rollout_ppl = mean_i exp(-mean_t logp); ppl_ratio =
    mean_i exp(-mean_t D); log_ppl_diff_{mean,abs_mean,max,min} of -mean_t D; chi2_seq = mean_i exp(2 sum_t D)
    - 1; seq_mult_prob_error_max = max_i mean_t e^|D| (verl's rollout_corr metrics; NeMo RL's per-sequence
    error).
    """
    d = jnp.clip(diff, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    old, rollout = (jnp.where(mask, jax.lax.stop_gradient(x).astype(jnp.float32), 0.0)
                    for x in (old_logp, rollout_logp))
    mult = jnp.exp(jnp.abs(d))
    mixture = jnp.logaddexp(old, rollout) - jnp.log(2.0)
    js = sum(jnp.expm1(x - mixture) - (x - mixture) for x in (old, rollout)) / 2
    p, q = jnp.exp(old), jnp.exp(rollout)
    (p_mean, p_std), (q_mean, q_std) = spread(p, mask), spread(q, mask)
    gap_mean, gap_std = spread(jnp.abs(p - q), mask)
    covariance = mean_over(mask, (p - p_mean) * (q - q_mean))
    metrics = {
        "k1": mean_over(mask, -diff),
        "k3": mean_over(mask, jnp.expm1(d) - d),
        "k3_reverse": mean_over(mask, jnp.expm1(-d) + d),
        "js": mean_over(mask, js),
        "abs_logp_diff": mean_over(mask, jnp.abs(diff)),
        "max_logp_diff": jnp.max(jnp.abs(diff), initial=0.0),
        "token_mult_prob_error": mean_over(mask, mult, 1.0),
        "equal_fraction": mean_over(mask, diff == 0, 1.0),
        "chi2_token": mean_over(mask, jnp.expm1(2 * d)),
        "prob_diff_mean": gap_mean,
        "prob_diff_std": gap_std,
        "prob_diff_max": jnp.max(jnp.where(mask, jnp.abs(p - q), 0.0), initial=0.0),
        # two constants correlate perfectly: where nothing varies there is nothing to disagree on
        "prob_correlation": jnp.where(p_std * q_std > 0,
                                      covariance / jnp.where(p_std * q_std > 0, p_std * q_std, 1.0), 1.0),
    }
    if segment_ids is not None:
        metrics |= _sequence_metrics(diff, mult, old, rollout, mask, segment_ids)
    return {f"mismatch/{name}": value for name, value in metrics.items()}


def _sequence_metrics(diff, mult, old, rollout, mask, segment_ids) -> dict[str, Array]:
    stacked = jnp.stack([jnp.where(mask, x, 0.0) for x in (jnp.ones_like(diff), diff, mult, old, rollout)])
    count, total, mult_total, old_total, rollout_total = segment_total(stacked, segment_ids)
    # every token holds its sequence's totals; use one token per sequence
    sequences = segment_ends(segment_ids) & (count > 0)
    count = jnp.maximum(count, 1)
    log_ppl_diff = -total / count
    bound = LOG_RATIO_BOUND

    def largest(x: Array) -> Array:
        return jnp.where(sequences.any(), jnp.max(jnp.where(sequences, x, -jnp.inf)), 0.0)

    return {
        "learner_ppl": mean_over(sequences, jnp.exp(-old_total / count), 1.0),
        "rollout_ppl": mean_over(sequences, jnp.exp(-rollout_total / count), 1.0),
        "ppl_ratio": mean_over(sequences, jnp.exp(jnp.clip(log_ppl_diff, -bound, bound)), 1.0),
        "log_ppl_diff_mean": mean_over(sequences, log_ppl_diff),
        "log_ppl_diff_abs_mean": mean_over(sequences, jnp.abs(log_ppl_diff)),
        "log_ppl_diff_max": largest(log_ppl_diff),
        "log_ppl_diff_min": -largest(-log_ppl_diff),
        "chi2_seq": mean_over(sequences, jnp.expm1(2 * jnp.clip(total, -bound, bound))),
        "seq_mult_prob_error_max": jnp.maximum(largest(mult_total / count), 1.0),
    }


def advantage_skew(
    old_logp: Float[Array, "*B T"], rollout_logp: Float[Array, "*B T"], advantages: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"]
) -> dict[str, Float[Array, ""]]:
    """The effect of the mismatch on each sign of advantage: the mean of (rho - 1) A over live tokens with A >
    0 and over those with A < 0.

    VeXact (arXiv 2605.14220) traced damage to this one-sided skew, which KL estimates do not show. Both are 0
    if the policies agree.
    """
    diff = jnp.where(mask, old_logp.astype(jnp.float32) - rollout_logp.astype(jnp.float32), 0.0)
    excess = jnp.expm1(jnp.clip(jax.lax.stop_gradient(diff), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)) * advantages
    return {
        "mismatch/skew_positive": mean_over(mask & (advantages > 0), excess),
        "mismatch/skew_negative": mean_over(mask & (advantages < 0), excess),
    }
