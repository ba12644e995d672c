"""The configuration of a correction, and its validation. `jaxfp8rl.losses.correction` has the algebra."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

from jaxfp8rl.errors import nearest

INF = math.inf
Level = Literal["token", "sequence"]
Statistic = Literal["ratio", "k1", "k2", "k3", "mult_error"]
Aggregation = Literal["sum", "mean", "max", "min"]
Weight = Literal["none", "token", "sequence", "geometric"]


class Rejection(NamedTuple):
    """Keep a token, or a sequence with all its tokens, iff lower <= statistic <= upper.

    statistic: of a token's log-ratio d. "ratio" is e^d, "k1" d in nats, "k2" d^2/2, "k3" e^d - 1 - d
        (Schulman 2020), "mult_error" e^|d| (NeMo RL).
    aggregation: over the live tokens of a sequence. Ratios multiply: their "sum" is the sequence's ratio
        exp(sum d), their "mean" the geometric mean exp(mean d).
    inverse: take the statistic of mu/pi_old (d -> -d), as verl and AReaL do for some of theirs.
    clamp: hold each token's d to +-20 before the aggregation, as verl does. The others do not.
    """

    level: Level
    statistic: Statistic
    aggregation: Aggregation = "mean"
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

    After "Adaptive Importance Sampling for Quantized RL" (arXiv 2605.13907). The paper names three
    diagnostics and does not publish its closed form; the formula that joins them is OUR RECONSTRUCTION.

        a = ESS^power * sigmoid((mean_t |D_t| - onset) / slope) / (1 + CV / cv_scale)

    The correction counts while its weights are reliable (effective sample size ESS, coefficient of variation
    CV), and once the policies differ by more than `onset` nats a token.
    """

    power: float = 1.0
    onset: float = 0.02
    slope: float = 0.01
    cv_scale: float = 1.0


class CorrectionConfig(NamedTuple):
    """One correction. It is hashable: a new config triggers a compilation, new data never does.

    weight, action, lower, upper: see `jaxfp8rl.losses.correction`. A NaN weight stays NaN (0 in NeMo RL).
    overflow: "cap" clamps the log-ratio to +-20 before exp (verl). "zero" does not, and a weight past
        float32's range becomes 0 (NeMo RL).
    by_turn: a sequence is a turn: a run of sampled tokens, and no longer a whole trajectory.
    batch_normalize: after the action, divide by the mean weight, of tokens or of the sequences' means.
    in_turn: apply the rejections one after another, each to the tokens that the ones before it left, and take
        the sequences' weights over the tokens that all of them left (SkyRL). Otherwise each looks at all
        tokens.
    denominator: rejected tokens leave the mask ("kept") or stay in it with weight 0 ("all").
    m2_limit: drop the tokens of largest D^2 until the mean over the rest is below this. At least one token
        stays. This is M2PO as AReaL implements it; the paper (arXiv 2510.01161) clips ratios instead.
    """

    weight: Weight = "token"
    action: Literal["truncate", "mask", "clip"] = "truncate"
    lower: float = 0.0
    upper: float = 2.0
    overflow: Literal["cap", "zero"] = "cap"
    rejections: tuple[Rejection, ...] = ()
    in_turn: bool = False
    by_turn: bool = False
    batch_normalize: bool = False
    denominator: Literal["kept", "all"] = "kept"
    m2_limit: float | None = None
    adaptive: AdaptiveMix | None = None

    @property
    def corrects(self) -> bool:
        """Whether the correction has any effect."""
        return self.weight != "none" or bool(self.rejections) or self.m2_limit is not None

    @property
    def needs_segments(self) -> bool:
        return self.weight in ("sequence", "geometric") or any(r.level == "sequence" for r in self.rejections)

    @property
    def needs_batch(self) -> bool:
        """Whether a token's weight depends on other sequences. Such a correction needs the whole batch at
        once, not a micro-batch."""
        return self.batch_normalize or self.adaptive is not None or self.m2_limit is not None

    def check(self) -> CorrectionConfig:
        """Return self. Raises ValueError for an unknown choice, for bounds that are reversed, negative,
        missing or not a number, and for settings without effect."""
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
        if self.by_turn and not self.needs_segments:
            raise ValueError("by_turn has no effect where nothing looks at a whole sequence")
        if self.adaptive and self.weight == "none":
            raise ValueError('adaptive has no effect with weight "none": it mixes weights with 1')
        names = [r.name() for r in self.rejections]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two rejections by {', '.join(sorted(twice))}: join their bounds in one")
        for r in self.rejections:
            _check_rejection(r)
        if self.m2_limit is not None and not 0 < self.m2_limit < INF:
            raise ValueError(f"m2_limit = {self.m2_limit} must be positive and finite; M2PO uses 0.04")
        if self.adaptive and not all(0 < x < INF for x in self.adaptive[:1] + self.adaptive[2:]):
            raise ValueError(
                f"adaptive power, slope and cv_scale must be positive and finite: {self.adaptive}")
        return self


def _check_rejection(r: Rejection) -> None:
    _check_bounds(f"rejection {r.name()}", r.lower, r.upper, positive=r.statistic != "k1")
    least = {"k1": -INF, "mult_error": 1.0}.get(r.statistic, 0.0)
    if r.upper < least:
        raise ValueError(f"rejection {r.name()}: upper = {r.upper} rejects all, the statistic is never below "
                         f"{least:g}")
    if r.lower <= least and r.upper == INF:
        raise ValueError(f"rejection {r.name()} has no bounds and rejects nothing: set upper, or lower above "
                         f"{least:g}")
    if r.level == "token" and r.aggregation != "mean":
        raise ValueError(f'rejection {r.name()}: aggregation "{r.aggregation}" has no effect at level '
                         '"token": leave it out, or set level = "sequence"')


def _check_words(record: NamedTuple) -> None:
    """Hold each field to the choices of its annotation: a NamedTuple itself takes any string."""
    for field, annotation in get_type_hints(type(record)).items():
        choices = get_args(annotation) if get_origin(annotation) is Literal else ()
        value = getattr(record, field)
        if choices and value not in choices:
            raise ValueError(f'{field} "{value}" is not a choice{nearest(str(value), choices)}')


def _check_bounds(what: str, lower: float, upper: float, positive: bool) -> None:
    if math.isnan(lower) or math.isnan(upper):
        raise ValueError(f"{what}: bounds [{lower}, {upper}] must be numbers")
    if positive and (upper <= 0 or (lower < 0 and lower != -INF)):
        raise ValueError(
            f"{what}: bounds [{lower}, {upper}] must be positive: the statistic is never below 0")
    if lower > upper:
        raise ValueError(f"{what}: bounds [{lower}, {upper}] are reversed; write [{upper}, {lower}]")
