"""Statistics of paired runs: intervals, tests of difference and equivalence, effect sizes, power.

Pure functions of a few numbers, one a seed. All of them treat values without any spread as what they are: the
interval is a point, and a mean off 0 is certain. Student's t stands in scipy; Holm's correction does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

Values = Sequence[float]
RESAMPLES = 10_000
SHOWN = 2000  # quantiles of the spread that pairs show, over which `equivalence_power` averages
GUESSES = 200  # and of the true spread


class Estimate(NamedTuple):
    """A mean with the ends of its interval. Both ends are NaN for a single value."""

    mean: float
    low: float
    high: float

    def within(self, margin: float) -> bool:
        """Whether the interval lies inside (-margin, margin)."""
        return -margin < self.low and self.high < margin


def interval(values: Values, level: float = 0.95, method: str = "student") -> Estimate:
    """The mean of `values` and its two-sided interval.

    method: "student", exact for normal values, or "bootstrap", scipy's percentile bootstrap, which is too
    narrow for a handful of values. Raises ValueError if there are no values.
    """
    x = _array(values)
    mean = float(x.mean())
    if x.size == 1:
        return Estimate(mean, math.nan, math.nan)
    if not x.std():
        return Estimate(mean, mean, mean)
    if method == "bootstrap":
        found = stats.bootstrap((x,), np.mean, confidence_level=level, n_resamples=RESAMPLES,
                                method="percentile", rng=0).confidence_interval
        return Estimate(mean, float(found.low), float(found.high))
    low, high = stats.t.interval(level, x.size - 1, loc=mean, scale=stats.sem(x))
    return Estimate(mean, float(low), float(high))


def p_above(values: Values) -> float:
    """The one-sided p of Student's t: the mean of `values` is above 0. 1 for a single value."""
    x = _array(values)
    if x.size == 1:
        return 1.0
    if not x.std():
        return 0.0 if x[0] > 0 else 1.0
    found: Any = stats.ttest_1samp(x, 0.0, alternative="greater")
    return float(found.pvalue)


def p_different(differences: Values) -> float:
    """The two-sided p of the paired t-test: the mean of `differences` is not 0."""
    x = _array(differences)
    return min(1.0, 2 * min(p_above(x.tolist()), p_above((-x).tolist())))


def p_equivalent(differences: Values, margins: Values | float) -> float:
    """The p of two one-sided tests (Schuirmann 1987): the mean of `differences` lies within the margin.

    margins: one margin, or one for each pair, whose own noise then counts, as in a margin that is a share of
    the control's gain. With one margin, p < a exactly if the interval of level 1 - 2a lies within it.
    """
    d, m = np.broadcast_arrays(_array(differences), np.asarray(margins, np.float64))
    return max(p_above((m + d).tolist()), p_above((m - d).tolist()))


def holm(ps: Values) -> list[float]:
    """The p-values `ps` adjusted for their number (Holm 1979), in the given order."""
    order, adjusted, least = np.argsort(ps, kind="stable"), [0.0] * len(ps), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(ps) - rank) * float(ps[place])))
        adjusted[place] = least
    return adjusted


def effect_size(differences: Values) -> float | None:
    """Hedges' g of paired `differences`: their mean in units of their spread, without the bias of few pairs.
    None where there is no spread."""
    x = _array(differences)
    if x.size < 2 or not x.std():
        return None
    return float(x.mean() / x.std(ddof=1)) * (1 - 3 / (4 * (x.size - 1) - 1))


class Spread(NamedTuple):
    """A standard deviation, and the degrees of freedom that it was measured with: infinite if it is known."""

    value: float
    free: float = math.inf


def equivalence_power(spread: Spread, margin: float, pairs: int, alpha: float = 0.05) -> float:
    """The probability that `p_equivalent` < alpha if the true difference is 0.

    spread: of a difference, as a pilot showed it. margin: one number. It averages over the spread that
    `pairs` pairs would show, which has a chi distribution, so that it is exact for normal differences; and
    over the true spread, which two seeds hardly tell: an inverse chi distribution (O'Hagan, Stevens and
    Campbell 2005, "Assurance in clinical trial design", section 2).
    """
    if pairs < 2 or margin <= 0:
        return 0.0
    if not spread.value:
        return 1.0
    free, middles = pairs - 1, lambda n: (np.arange(n) + 0.5) / n
    true = np.array([spread.value])
    if math.isfinite(spread.free):
        true = spread.value * np.sqrt(spread.free / stats.chi2.ppf(middles(GUESSES), spread.free))
    seen = true[:, None] * np.sqrt(stats.chi2.ppf(middles(SHOWN), free) / free / pairs)
    room = np.maximum(margin - stats.t.ppf(1 - alpha, free) * seen, 0.0)
    return float(np.mean(2 * stats.norm.cdf(room * math.sqrt(pairs) / true[:, None]) - 1))


def pooled_spread(groups: Sequence[Values]) -> Spread | None:
    """The standard deviation within `groups`, over all of them; None if no group has two values."""
    several = [_array(group) for group in groups if len(group) > 1]
    free = sum(x.size - 1 for x in several)
    squares = sum(float(np.sum((x - x.mean())**2)) for x in several)
    return Spread(math.sqrt(squares / free), free) if free else None


def _array(values: Values) -> np.ndarray:
    x = np.asarray(values, np.float64)
    if not x.size:
        raise ValueError("there are no values")
    return x
