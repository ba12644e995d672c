"""Axes of plots: limits that keep rounding noise level, round ticks, and labels that distinguish the
ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence

SPAN = 0.05  # an axis spans at least this share of its largest value
TINY, HUGE = 1e-300, 1e300
Bounds = tuple[float | None, float | None]


def value_axis(ys: Sequence[float], bounds: Bounds = (None, None)) -> tuple[tuple[float, float], list[float]]:
    """((low, high), ticks) of a linear axis.

    It spans at least SPAN of the largest value, so that a constant stays level although its last digits vary.
    It stays within `bounds`, the limits of the metric, unless a value exceeds them.
    """
    ys = [min(max(y, -HUGE), HUGE) for y in ys if math.isfinite(y)]
    low, high = min(ys, default=0.0), max(ys, default=1.0)
    least, most = (end if end is None or not ys else f(end, x)
                   for end, f, x in zip(bounds, (min, max), (low, high)))
    largest = max(abs(low), abs(high))
    missing = (SPAN * largest if largest > TINY else 1.0) - (high - low)
    if missing > 0:
        low, high = low - missing / 2, high + missing / 2
        moved = max(0.0, least - low) if least is not None else 0.0
        moved -= max(0.0, high - most) if most is not None else 0.0
        low, high = low + moved, high + moved
    low = 0.0 if 0 <= low <= 0.5 * (high - low) else low  # an axis that nearly reaches 0 includes it
    found = ticks(low, high)
    return (found[0], found[-1]), found


def log_axis(ys: Sequence[float]) -> tuple[tuple[float, float], list[float]]:
    ys = [min(max(y, TINY), HUGE) for y in ys if 0 < y < math.inf]
    low, high = math.floor(math.log10(min(ys, default=1))), math.ceil(math.log10(max(ys, default=1)))
    high = max(high, low + 1)
    return (low, high), [10.0**p for p in range(low, high + 1, math.ceil((high - low) / 6))]


def labels(found: Sequence[float]) -> list[str]:
    """Labels of ticks, with just enough digits to distinguish each from its neighbours."""
    largest = max(map(abs, found), default=0)
    apart = min((b - a for a, b in zip(found, found[1:])), default=largest)
    scientific = largest >= 1e6 or 0 < largest < 1e-3 or (len(found) > 2 and apart < 1e-4)
    write = _scientific if scientific else lambda x, digits: f"{x + 0.0:,.{digits}f}"
    texts = list[str]()
    for digits in range(17):
        texts = [write(x, digits) for x in found]
        read = [float(t.replace(",", "")) for t in texts]
        if len(set(texts)) == len(texts) and all(abs(a - b) <= 0.02 * apart for a, b in zip(read, found)):
            break
    return texts


def power(x: float) -> str:
    """The label of a tick on a logarithmic axis."""
    return f"{x:,g}" if 1e-4 < x < 1e6 else _scientific(x, 0)


def step(x: float) -> str:
    return f"{x:,.0f}"


def _scientific(x: float, digits: int) -> str:
    if not x:
        return "0"
    mantissa, exponent = f"{x:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`: 1, 2 or 5 times a power of ten apart (Heckbert
    1990)."""
    span = (high - low) / max(wanted - 1, 1)
    power = 10.0 ** math.floor(math.log10(span))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.75 * span)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]
