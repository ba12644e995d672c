"""A counter of spikes in a series of losses, robust against the spikes themselves.

Value x is a spike when x > median + threshold * sigma, where median and sigma = 1.4826 * MAD (the median
absolute deviation from the median: a normal distribution's standard deviation, Rousseeuw and Croux 1993) are
those of the last `window` finite values before it; or when x is not finite. Nothing counts before `warmup`
values are known. A spike enters the window too: the median does not mind a few, and a lasting change of level
soon is the new normal instead of a spike for ever.
"""

from __future__ import annotations

import collections
import math
import statistics
from typing import Any

NORMAL = 1.4826  # MAD of a normal distribution is sigma / 1.4826
FLOOR = 1e-3  # sigma is at least this share of |median|: the last digits of a constant series are not spikes


class SpikeCounter:
    """`count`: the spikes so far. Only rises count, since a loss that falls fast does no harm."""

    def __init__(self, window: int = 100, threshold: float = 6.0, warmup: int = 10):
        self.count, self._threshold, self._warmup = 0, threshold, warmup
        self._last: collections.deque[float] = collections.deque(maxlen=window)

    def add(self, value: float) -> bool:
        """Add the next value -> whether it is a spike, which is then counted."""
        finite = math.isfinite(value)
        spike = not finite or (len(self._last) >= self._warmup and value > self._limit())
        if finite:
            self._last.append(value)
        self.count += int(spike)
        return spike

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON types."""
        return {"count": self.count, "last": list(self._last)}

    def take_up(self, state: dict[str, Any]) -> None:
        self.count, self._last = state["count"], collections.deque(state["last"], self._last.maxlen)

    def _limit(self) -> float:
        median = statistics.median(self._last)
        sigma = NORMAL * statistics.median(abs(x - median) for x in self._last)
        return median + self._threshold * max(sigma, FLOOR * abs(median))
