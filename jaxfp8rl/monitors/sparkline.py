"""A series of values as one line of text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
# a series that varies by less than this share of its size is drawn level, so that rounding shows no trend
FLAT = 1e-3


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The means of at most `width` parts of `values` as bars, from the smallest to the largest mean. A
    constant is drawn level, in the middle."""
    parts = min(width, len(values))
    edges = [i * len(values) // parts for i in range(parts + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in zip(edges, edges[1:])]
    low, span = min(means), max(means) - min(means)
    if span <= FLAT * max(map(abs, means)):
        return BARS[len(BARS) // 2] * parts
    return "".join(BARS[min(int((m - low) / span * len(BARS)), len(BARS) - 1)] for m in means)
