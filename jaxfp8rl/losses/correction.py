"""The correction of the rollout mismatch: importance weights from the engine's policy mu to the learner's
pi_old.

The engine samples from mu (FP8, other kernels); the gradient is meant for pi_old. All published corrections
are built from three moves on the log-ratio D_t = old_logp - rollout_logp of each sampled token, and a config
names them:

    weight      w = exp(D_t)              of the token,
                w = exp(sum_t D_t)        of its sequence, or
                w = exp(mean_t D_t)       its geometric mean
    action      truncate   min(w, upper)                              TIS: biased where the cap bites, bounded variance
                mask       w if lower <= w <= upper else 0            IcePop, MIS: the token says nothing
                clip       lower if w < lower, upper if w > upper     CIS
    rejections  a token or a whole sequence is left out when a statistic of its ratios leaves its bounds

then the loss is  sum_t scale_t sg(w_t) L_t,  with the scales of `jaxfp8rl.losses.aggregation` over the
returned mask. Presets under the names that other frameworks use: `jaxfp8rl.losses.presets`. Which to choose:
docs/corrections.md.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.errors import nearest
from jaxfp8rl.losses.mismatch import (
    LOG_RATIO_BOUND,
    kish,
    mean_over,
    mismatch_metrics,
    relative_spread,
    spread,
)
from jaxfp8rl.losses.segments import first_live, segment_total

INF = math.inf


class Rejection(NamedTuple):
    """Keep a token, or a sequence with all its tokens, iff lower <= statistic <= upper.

    statistic, of a token's log-ratio d: "ratio" e^d, "k1" d in nats, "k2" d^2/2, "k3" e^d - 1 - d (Schulman
    2020), "mult_error" e^|d| (NeMo RL). aggregation over a sequence's live tokens. Ratios multiply: their
    "sum" is the sequence's ratio exp(sum d), their "mean" the geometric mean exp(mean d). inverse: the
    statistic of mu/pi_old (d -> -d), as verl and AReaL define some of theirs. clamp: to +-20 a token, before
    the aggregation (verl); others sum what is there.
    """

    level: Literal["token", "sequence"]
    statistic: Literal["ratio", "k1", "k2", "k3", "mult_error"]
    aggregation: Literal["sum", "mean", "max", "min"] = "mean"
    lower: float = -INF
    upper: float = INF
    inverse: bool = False
    clamp: bool = True

    def name(self) -> str:
        """For metric keys: token_k2, sequence_mean_ratio, sequence_mean_k1_inverse, ..."""
        words = [self.level, *([self.aggregation] if self.level == "sequence" else []), self.statistic]
        return "_".join(words + ["inverse"] * self.inverse)


class AdaptiveMix(NamedTuple):
    """Adaptive importance sampling: the batch's weights become (1 - a) + a w, with one a in [0, 1] a batch.

    After "Adaptive Importance Sampling for Quantized RL" (arXiv 2605.13907), whose closed form is not public:
    the paper names three diagnostics, the formula that joins them is OUR RECONSTRUCTION.
        a = ESS^power * sigmoid((mean_t |D_t| - onset) / slope) / (1 + CV / cv_scale)
    Trust the correction while its weights are reliable (ESS, coefficient of variation CV), ask for it once
    the policies differ by more than `onset` nats a token.
    """

    power: float = 1.0
    onset: float = 0.02
    slope: float = 0.01
    cv_scale: float = 1.0


class CorrectionConfig(NamedTuple):
    """One correction. Hashable: a change of config is a new compilation, a change of data never is.

    overflow: "cap" clamps the log-ratio to +-20 before exp (verl); "zero" does not, and a weight past
    float32's range is 0 (NeMo RL). batch_normalize: after the action, divide by the mean weight (of tokens;
    of sequences' means). in_turn: rejections one after another, each over the tokens that those before it
    left, and the sequences' weights over what all of them left (SkyRL); else each looks at all tokens.
    denominator: rejected tokens leave the mask ("kept") or stay in it with weight 0 ("all"). m2_limit: drop
    the tokens of largest D^2 until the mean of those left is below this, at least one always staying (M2PO as
    AReaL has it; the paper, arXiv 2510.01161, clips ratios instead). A NaN weight stays NaN, where NeMo RL
    makes it 0.
    """

    weight: Literal["none", "token", "sequence", "geometric"] = "token"
    action: Literal["truncate", "mask", "clip"] = "truncate"
    lower: float = 0.0
    upper: float = 2.0
    overflow: Literal["cap", "zero"] = "cap"
    rejections: tuple[Rejection, ...] = ()
    in_turn: bool = False
    batch_normalize: bool = False
    denominator: Literal["kept", "all"] = "kept"
    m2_limit: float | None = None
    adaptive: AdaptiveMix | None = None

    @property
    def corrects(self) -> bool:
        """Whether it does anything at all."""
        return self.weight != "none" or bool(self.rejections) or self.m2_limit is not None

    @property
    def needs_segments(self) -> bool:
        return self.weight in ("sequence", "geometric") or any(r.level == "sequence" for r in self.rejections)

    @property
    def needs_batch(self) -> bool:
        """Whether a token's weight depends on other sequences: such a correction cannot be worked out by
        micro-batch."""
        return self.batch_normalize or self.adaptive is not None or self.m2_limit is not None

    def check(self) -> CorrectionConfig:
        """Raises ValueError for a word that is no choice, for bounds that are reversed, negative, missing or
        not a number, and for what has no effect; returns self."""
        for record in (self, *self.rejections):
            _check_words(record)
        _check_bounds("weight", self.lower, self.upper, positive=True)
        if self.action == "truncate" and self.lower > 0:
            raise ValueError(
                f'lower = {self.lower} has no effect under action "truncate": use "clip" or "mask"')
        if self.batch_normalize and self.weight == "none":
            raise ValueError('batch_normalize has no effect with weight "none"')
        if self.in_turn and not self.rejections:
            raise ValueError("in_turn has no effect without rejections")
        if self.adaptive and self.weight == "none":
            raise ValueError('adaptive has no effect with weight "none": it mixes weights with 1')
        names = [r.name() for r in self.rejections]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two rejections by {', '.join(sorted(twice))}: join their bounds in one")
        for r in self.rejections:
            _check_bounds(f"rejection {r.name()}", r.lower, r.upper, positive=r.statistic != "k1")
            least = {"k1": -INF, "mult_error": 1.0}.get(r.statistic, 0.0)
            if r.upper < least:
                raise ValueError(
                    f"rejection {r.name()}: upper = {r.upper} rejects all, the statistic never is below {least:g}")
            if r.lower <= least and r.upper == INF:
                raise ValueError(
                    f"rejection {r.name()} has no bounds and rejects nothing: set upper, or lower above {least:g}")
            if r.level == "token" and r.aggregation != "mean":
                raise ValueError(
                    f'rejection {r.name()}: aggregation "{r.aggregation}" has no effect at level "token": leave it out, or set '
                    'level = "sequence"'
                )
        if self.m2_limit is not None and not 0 < self.m2_limit < INF:
            raise ValueError(f"m2_limit = {self.m2_limit} must be positive and finite; M2PO uses 0.04")
        if self.adaptive and not all(0 < x < INF for x in self.adaptive[:1] + self.adaptive[2:]):
            raise ValueError(
                f"adaptive power, slope and cv_scale must be positive and finite: {self.adaptive}")
        return self


class Correction(NamedTuple):
    """weights: float32, a constant to the gradient, 0 off the mask and where a token is rejected. mask: the
    tokens that count in the loss's denominator. metrics: float32 scalars."""

    weights: Array
    mask: Array
    metrics: dict[str, Array]


def rollout_correction(
    old_logp: Array, rollout_logp: Array, mask: Array, config: CorrectionConfig,
    segment_ids: Array | None = None
) -> Correction:
    """Weights, mask and metrics of a whole batch. Pure; config static.

    old_logp, rollout_logp [..., T] of any float type, mask [..., T] bool, segment_ids [..., T] int in runs
    along a row (a row that is one sequence: all ones). Metrics, whatever the config: `mismatch/*` as in
    `mismatch_metrics`; `correction/ess` and `correction/weight_{mean,std,max,min}` of the weights applied,
    `correction/raw_*` of those before the action (of exp(D_t) where the weight is "none"),
    `correction/raw_ess` also before clamp and overflow; `correction/truncated_fraction` and
    `correction/below_fraction`, the share of tokens whose weight lay above `upper` and below `lower`;
    `correction/rejected_fraction`, of tokens, and for each rejection `correction/rejected/NAME`. With
    segment_ids also the shares of sequences with a rejected token, `correction/rejected_sequences` (verl's
    seq_masked_fraction) and `correction/rejected_sequences/NAME`, and of those that lose all their tokens,
    `correction/lost_sequences`; and of the sequences' mean weights, over the tokens that are left,
    `correction/sequence_weight_{mean,std,max,min,max_deviation}`, the last the largest distance from 1
    (verl's rollout_is_seq_*).

    Laws: equal policies give weight 1 and neutral metrics; whatever stands where mask is False, NaN and Inf
    included, changes nothing; a NaN at a live token comes through to the weights, and so to the finite guard;
    an empty mask gives weights 0 and neutral metrics. Raises ValueError for a config that does not check, or
    one at the level of sequences without segment_ids.
    """
    config.check()
    if segment_ids is None and config.needs_segments:
        raise ValueError(
            "a correction at the level of sequences needs segment_ids [..., T]; rows of one sequence: all ones")
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


def mixing_share(diff: Array, weights: Array, mask: Array, mix: AdaptiveMix) -> Array:
    """a of AdaptiveMix, a scalar in [0, 1]. diff: D_t [..., T]; weights [..., T]."""
    _, mean, std = relative_spread(weights, mask)
    cv = std / jnp.maximum(mean, 1e-8)
    want = jax.nn.sigmoid((mean_over(mask, jnp.abs(diff)) - mix.onset) / mix.slope)
    return (1 + cv**2) ** -mix.power * want / (1 + cv / mix.cv_scale)  # ESS = 1 / (1 + CV^2)


def _log_weights(diff: Array, mask: Array, config: CorrectionConfig, segment_ids: Array | None) -> Array:
    """[..., T] float32, of any size."""
    if config.weight in ("sequence", "geometric"):
        return _per_sequence(diff, mask, segment_ids, "sum" if config.weight == "sequence" else "mean")
    return diff


def _raw_weights(log_weight: Array, mask: Array, config: CorrectionConfig) -> Array:
    """[..., T] float32, 1 off the mask."""
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
        members = mask if config.weight == "token" else first_live(mask, segment_ids)
        mean = mean_over(members, weights, 1.0)
        weights = weights / jnp.where(mean > 1e-8, mean, 1.0)
        facts["correction/batch_norm_factor"] = mean
    return weights, facts


def _rejections(
    diff: Array, mask: Array, config: CorrectionConfig, segment_ids: Array | None
) -> tuple[Array, dict[str, Array]]:
    """(keep [..., T] bool, share of tokens, and of sequences, that each rejection alone would drop, or drops
    in its turn).

    A comparison with NaN is False, hence "outside the bounds" and not "inside": a NaN is kept, to be seen by
    the guard.
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
            value = _per_sequence(value, over, segment_ids, r.aggregation)
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
            return d, *(math.log(b) if b > 0 else -INF for b in (r.lower, r.upper))
        case "k1":
            return d, r.lower, r.upper
        case "k2":
            return d**2 / 2, r.lower, r.upper
        case "k3":
            return jnp.expm1(d) - d, r.lower, r.upper
        case "mult_error":
            return jnp.exp(jnp.abs(d)), r.lower, r.upper
    raise AssertionError(r.statistic)


def _per_sequence(x: Array, mask: Array, segment_ids: Array, aggregation: str) -> Array:
    """Each token gets its sequence's sum, mean, max or min of x over the live tokens; 0 for a sequence
    without any."""
    if aggregation in ("max", "min"):
        neutral = -INF if aggregation == "max" else INF
        extreme = jnp.maximum if aggregation == "max" else jnp.minimum
        total = segment_total(jnp.where(mask, x, neutral), segment_ids, extreme)
        return jnp.where(total == neutral, 0.0, total)
    total, count = segment_total(jnp.stack([jnp.where(mask, x, 0.0), mask.astype(x.dtype)]), segment_ids)
    return total / jnp.maximum(count, 1) if aggregation == "mean" else total


def _m2_cut(squares: Array, mask: Array, limit: float) -> Array:
    """The largest c such that the mean of the live squares up to c is below `limit`, or the smallest square:
    a scalar.

    That mean grows with c, so bisection finds it, over the floats themselves: positive ones are ordered as
    their bits are, and 32 halvings are exact. (A sort would need all tokens on one device.)
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
    # divided first: a sum of large weights would overflow
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
    """Of exp(log_weight) over the largest: weights that all lie beyond the clamp are equal after it, and may
    have collapsed."""
    # infinities are as far from the others, and not from each other
    log_weight = jnp.clip(log_weight, -1e30, 1e30)
    largest = jnp.max(jnp.where(mask, log_weight, -1e30), initial=-1e30)
    return kish(*spread(jnp.exp(log_weight - largest), mask, 1.0))


def _extreme(reduce, x: Array, mask: Array, neutral: float) -> Array:
    return jnp.where(mask.any(), reduce(jnp.where(mask, x, neutral)), 1.0)


def _check_words(record: NamedTuple) -> None:
    """A NamedTuple takes any string; the choices are its annotations'."""
    for field, annotation in get_type_hints(type(record)).items():
        choices = get_args(annotation) if get_origin(annotation) is Literal else ()
        value = getattr(record, field)
        if choices and value not in choices:
            raise ValueError(f'{field} "{value}" is not a choice{nearest(str(value), choices)}')


def _check_bounds(what: str, lower: float, upper: float, positive: bool) -> None:
    if math.isnan(lower) or math.isnan(upper):
        raise ValueError(f"{what}: bounds [{lower}, {upper}] must be numbers")
    if lower > upper:
        raise ValueError(f"{what}: bounds [{lower}, {upper}] are reversed; write [{upper}, {lower}]")
    if positive and (upper <= 0 or (lower < 0 and lower != -INF)):
        raise ValueError(
            f"{what}: bounds [{lower}, {upper}] must be positive: the statistic never is below 0")
