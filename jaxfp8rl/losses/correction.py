"""The correction of the rollout mismatch: importance weights from the engine's policy mu to the learner's
pi_old.

The engine samples from mu (FP8, other kernels), while the gradient is meant for pi_old. All published
corrections combine three operations on the log-ratio D_t = old_logp - rollout_logp of each sampled token. A
`CorrectionConfig` names them:

    weight      w = exp(D_t)              of the token,
                w = exp(sum_t D_t)        of its sequence, or
                w = exp(mean_t D_t)       its geometric mean
    action      truncate   min(w, upper)                         TIS: biased beyond the cap, bounded variance
                mask       w if lower <= w <= upper else 0       IcePop, MIS: the token has no gradient
                clip       lower if w < lower, upper if w > upper  CIS
    rejections  a token or a whole sequence is dropped if a statistic of its ratios is out of bounds

The loss is then  sum_t scale_t sg(w_t) L_t,  with the scales of `jaxfp8rl.losses.aggregation` over the
returned mask. `jaxfp8rl.losses.presets` has the corrections of other frameworks under their names, and
docs/corrections.md explains which to choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxfp8rl.losses.correction_config import INF, AdaptiveMix, Aggregation, CorrectionConfig, Rejection
from jaxfp8rl.losses.mismatch import (
    LOG_RATIO_BOUND,
    kish,
    mean_over,
    mismatch_metrics,
    relative_spread,
    spread,
)
from jaxfp8rl.losses.segments import first_live, segment_total, turns_of

__all__ = ["AdaptiveMix", "Correction", "CorrectionConfig", "Rejection", "mixing_share", "rollout_correction"]


class Correction(NamedTuple):
    """weights [..., T] float32: constants to the gradient, 0 off the mask and where a token is rejected.

    mask [..., T] bool: the tokens that count in the loss's denominator. metrics: float32 scalars.
    """

    weights: Float[Array, "*B T"]
    mask: Bool[Array, "*B T"]
    metrics: dict[str, Float[Array, ""]]


def rollout_correction(
    old_logp: Float[Array, "*B T"], rollout_logp: Float[Array, "*B T"], mask: Bool[Array, "*B T"],
    config: CorrectionConfig, segment_ids: Int[Array, "*B T"] | None = None
) -> Correction:
    """Weights, mask and metrics of a whole batch. Pure; `config` is static.

    old_logp, rollout_logp [..., T]: of any float type. mask [..., T] bool: the sampled tokens. segment_ids
    [..., T] int, in runs along a row, one number for each sequence (a row that is one sequence: all ones).
    With config.by_turn each run of sampled tokens in it is a sequence.

    Metrics of every config are those of `mismatch_metrics`, and:

    - `correction/ess`, `correction/weight_{mean,std,max,min}`: of the weights that are applied.
    - `correction/raw_*`: the same before the action, or of exp(D_t) where the weight is "none".
      `correction/raw_ess` is also before clamp and overflow.
    - `correction/truncated_fraction`, `correction/below_fraction`: shares of tokens whose weight was above
      `upper` and below `lower`.
    - `correction/rejected_fraction`: share of tokens rejected. `correction/rejected/NAME`: by each rejection.

    With segment_ids also, over sequences:

    - `correction/rejected_sequences` (verl's seq_masked_fraction), `correction/rejected_sequences/NAME`:
      shares with a rejected token. `correction/lost_sequences`: share that loses all tokens.
    - `correction/sequence_weight_{mean,std,max,min,max_deviation}`: of the sequences' mean weights over the
      tokens that are left; the last is the largest distance from 1 (verl's rollout_is_seq_*).

    Laws: equal policies give weight 1 and neutral metrics. Values where mask is False, NaN and Inf included,
    change nothing. A NaN at a live token reaches the weights, and so the finite guard. An empty mask gives
    weights 0 and neutral metrics. Raises ValueError for an invalid config, and for a sequence-level config
    without segment_ids.
    """
    config.check()
    if config.by_turn:
        segment_ids = turns_of(mask, _required(segment_ids))
    diff = old_logp.astype(jnp.float32) - rollout_logp.astype(jnp.float32)
    diff = jax.lax.stop_gradient(jnp.where(mask, diff, 0.0))

    keep, rejected = _rejections(diff, mask, config, segment_ids)
    log_weight = _log_weights(diff, mask & keep if config.in_turn else mask, config, segment_ids)
    raw = _raw_weights(log_weight, mask, config)
    weights, facts = _act(raw, mask, config, segment_ids)
    applied = weights if config.weight != "none" else jnp.ones_like(raw)
    applied = jnp.where(mask & keep, applied, 0.0)
    if config.adaptive:
        a = mixing_share(diff, applied, mask & keep, config.adaptive)
        applied = jnp.where(mask & keep, (1 - a) + a * applied, 0.0)
        facts["correction/mix"] = a
    kept = mask & keep
    metrics = mismatch_metrics(diff, old_logp, rollout_logp, mask, segment_ids) | facts | rejected
    metrics |= _weight_metrics("correction/raw_", raw, mask) | _weight_metrics("correction/", applied, kept)
    metrics["correction/raw_ess"] = _unclamped_ess(log_weight, mask)
    metrics["correction/rejected_fraction"] = mean_over(mask, ~keep)
    if segment_ids is not None:
        metrics |= _of_sequences(applied, mask, kept, segment_ids)
    return Correction(applied, kept if config.denominator == "kept" else mask, metrics)


def _required(segment_ids: Array | None) -> Array:
    if segment_ids is None:
        raise ValueError(
            "a sequence-level correction needs segment_ids [..., T]; for rows of one sequence, all ones")
    return segment_ids


def mixing_share(diff: Array, weights: Array, mask: Array, mix: AdaptiveMix) -> Array:
    """The share a of AdaptiveMix, a scalar in [0, 1]. diff: D_t [..., T]; weights [..., T]."""
    _, mean, std = relative_spread(weights, mask)
    cv = std / jnp.maximum(mean, 1e-8)
    want = jax.nn.sigmoid((mean_over(mask, jnp.abs(diff)) - mix.onset) / mix.slope)
    return (1 + cv**2) ** -mix.power * want / (1 + cv / mix.cv_scale)  # ESS = 1 / (1 + CV^2)


def _log_weights(diff: Array, mask: Array, config: CorrectionConfig, segment_ids: Array | None) -> Array:
    """Logarithms of the weights [..., T] float32, without any bound."""
    if config.weight in ("sequence", "geometric"):
        return _per_sequence(diff, mask, _required(segment_ids),
                             "sum" if config.weight == "sequence" else "mean")
    return diff


def _raw_weights(log_weight: Array, mask: Array, config: CorrectionConfig) -> Array:
    """Weights before the action [..., T] float32, 1 off the mask."""
    if config.overflow == "cap":
        raw = jnp.exp(jnp.clip(log_weight, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    else:
        raw = jnp.exp(log_weight)
        raw = jnp.where(jnp.isposinf(raw), 0.0, raw)
    return jnp.where(mask, raw, 1.0)


def _act(raw: Array, mask: Array, config: CorrectionConfig,
         segment_ids: Array | None) -> tuple[Array, dict[str, Array]]:
    above, below = raw > config.upper, raw < config.lower
    if config.action == "mask":
        weights = jnp.where(above | below, 0.0, raw)
    else:
        weights = jnp.clip(raw, config.lower, config.upper)
    acts = config.weight != "none"
    facts = {
        "correction/truncated_fraction": mean_over(mask, above & acts),
        "correction/below_fraction": mean_over(mask, below & acts),
    }
    if config.batch_normalize and acts:
        members = mask if config.weight == "token" else first_live(mask, _required(segment_ids))
        mean = mean_over(members, weights, 1.0)
        weights = weights / jnp.where(mean > 1e-8, mean, 1.0)
        facts["correction/batch_norm_factor"] = mean
    return weights, facts


def _rejections(
    diff: Array, mask: Array, config: CorrectionConfig, segment_ids: Array | None
) -> tuple[Array, dict[str, Array]]:
    """(keep [..., T] bool, the shares of tokens and of sequences that each rejection drops, alone or in
    turn).

    A comparison with NaN is False. So tokens "outside the bounds" are dropped, rather than those "inside"
    kept: a NaN stays, for the finite guard to see.
    """
    keep, facts = jnp.ones_like(mask), {}

    def reject(outside: Array, name: str) -> None:
        nonlocal keep
        facts[f"correction/rejected/{name}"] = mean_over(mask, outside)
        if segment_ids is not None:
            facts[f"correction/rejected_sequences/{name}"] = _share_touched(mask, outside, segment_ids)
        keep &= ~outside

    for r in config.rejections:
        over = mask & keep if config.in_turn else mask
        value, lower, upper = _statistic(diff, r)
        if r.level == "sequence":
            value = _per_sequence(value, over, _required(segment_ids), r.aggregation)
        outside = (value < lower) | (value > upper)
        reject(outside & over if config.in_turn else outside, r.name())
    if config.m2_limit is not None:
        reject(diff**2 > _m2_cut(diff**2, mask, config.m2_limit), "m2")
    return keep, facts


def _statistic(diff: Array, r: Rejection) -> tuple[Array, float, float]:
    """(statistic of each token, bounds on it). Ratios are compared by their logarithms, which cannot
    overflow."""
    d = -diff if r.inverse else diff
    d = jnp.clip(d, -LOG_RATIO_BOUND, LOG_RATIO_BOUND) if r.clamp else d
    match r.statistic:
        case "ratio":
            lower, upper = (math.log(bound) if bound > 0 else -INF for bound in (r.lower, r.upper))
            return d, lower, upper
        case "k1":
            return d, r.lower, r.upper
        case "k2":
            return d**2 / 2, r.lower, r.upper
        case "k3":
            return jnp.expm1(d) - d, r.lower, r.upper
        case "mult_error":
            return jnp.exp(jnp.abs(d)), r.lower, r.upper


def _per_sequence(x: Array, mask: Array, segment_ids: Array, aggregation: Aggregation) -> Array:
    """For each token, its sequence's sum, mean, max or min of x over the live tokens; 0 for a sequence
    without any."""
    if aggregation in ("max", "min"):
        neutral = -INF if aggregation == "max" else INF
        extreme = jnp.maximum if aggregation == "max" else jnp.minimum
        total = segment_total(jnp.where(mask, x, neutral), segment_ids, extreme)
        return jnp.where(total == neutral, 0.0, total)
    total, count = segment_total(jnp.stack([jnp.where(mask, x, 0.0), mask.astype(x.dtype)]), segment_ids)
    return total / jnp.maximum(count, 1) if aggregation == "mean" else total


def _m2_cut(squares: Array, mask: Array, limit: float) -> Array:
    """The largest c such that the mean of the live squares up to c is below `limit`, or else the smallest
    square: a scalar.

    That mean grows with c, so that bisection finds it. It halves the floats' bits, which order positive
    floats, and 32 halvings are exact. A sort would need all tokens on one device.
    """
    live = jnp.where(mask, squares, INF)

    def halve(_, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        kept, dropped = bracket
        middle = kept + (dropped - kept) // 2
        inside = live <= jax.lax.bitcast_convert_type(middle, jnp.float32)
        fits = mean_over(inside, live) < limit
        return jnp.where(fits, middle, kept), jnp.where(fits, dropped, middle)

    bits = jax.lax.bitcast_convert_type(jnp.stack([jnp.nanmin(live), jnp.float32(INF)]), jnp.int32)
    return jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 32, halve, (bits[0], bits[1]))[0], jnp.float32)


def _weight_metrics(prefix: str, weights: Array, mask: Array) -> dict[str, Array]:
    unit, mean, std = relative_spread(weights, mask, 1.0)
    return {
        prefix + "weight_mean": unit * mean,
        prefix + "weight_std": unit * std,
        prefix + "weight_max": _extreme(jnp.max, weights, mask, -INF),
        prefix + "weight_min": _extreme(jnp.min, weights, mask, INF),
        prefix + "ess": kish(mean, std),
    }


def _of_sequences(applied: Array, mask: Array, kept: Array, segment_ids: Array) -> dict[str, Array]:
    """Shares of sequences, and statistics of their mean weights."""
    left, live = segment_total(kept.astype(jnp.float32), segment_ids), first_live(kept, segment_ids)
    # divide before the sum: large weights would overflow it
    shares = jnp.where(kept, applied / jnp.maximum(left, 1), 0.0)
    means = segment_total(shares, segment_ids)
    unit, mean, std = relative_spread(means, live, 1.0)
    highest, lowest = _extreme(jnp.max, means, live, -INF), _extreme(jnp.min, means, live, INF)
    return {
        "correction/sequence_weight_mean": unit * mean,
        "correction/sequence_weight_std": unit * std,
        "correction/sequence_weight_max": highest,
        "correction/sequence_weight_min": lowest,
        "correction/sequence_weight_max_deviation": jnp.maximum(jnp.abs(highest - 1), jnp.abs(lowest - 1)),
        "correction/rejected_sequences": _share_touched(mask, ~kept, segment_ids),
        "correction/lost_sequences": mean_over(first_live(mask, segment_ids), left == 0),
    }


def _share_touched(mask: Array, outside: Array, segment_ids: Array) -> Array:
    """Share of the sequences with a live token that have a live token outside."""
    touched = segment_total((mask & outside).astype(jnp.int32), segment_ids) > 0
    return mean_over(first_live(mask, segment_ids), touched)


def _unclamped_ess(log_weight: Array, mask: Array) -> Array:
    """Effective sample size of exp(log_weight), divided by the largest weight. After the clamp, weights
    beyond it would all be equal and hide a collapse."""
    # an infinity stays far from finite numbers, and the difference of two infinities is not NaN
    log_weight = jnp.clip(log_weight, -1e30, 1e30)
    largest = jnp.max(jnp.where(mask, log_weight, -1e30), initial=-1e30)
    return kish(*spread(jnp.exp(log_weight - largest), mask, 1.0))


def _extreme(reduce: Callable[[Array], Array], x: Array, mask: Array, neutral: float) -> Array:
    return jnp.where(mask.any(), reduce(jnp.where(mask, x, neutral)), 1.0)
