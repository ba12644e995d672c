"""How many completions an engine decodes at once, by what its cache holds.

Keys and values grow with each token. An engine that starts a completion in every place may find its cache
full of half-done ones: it then drops those of some, and computes them again later. Here a completion starts
only if all are expected to fit until they end, as in the Past-Future scheduler (Gong et al., arXiv
2507.10150). Each is taken to end as completions did before that were longer than it is now:

    need(s) = sum over completions of P(L >= t + s | L > t) (t + s)      s steps from now, t tokens so far

The largest need over s, and one standard deviation more, must fit. P is of the last completions that ended;
before any has ended, all start. One that is longer than all of these is taken to become twice as long as it
is. One always runs, so that each has its turn. A completion that starts later draws the same tokens: its
random numbers are its own.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

ADMIT = Literal["all", "cache"]
KNOWN = 4096  # lengths that are remembered
TIMES = 64  # at which the need is computed
MARGIN = 1  # standard deviations of the need that must fit, too


class Growing(NamedTuple):
    """A completion, in tokens. length: so far. most: that it may have. held: of the cache now, which are free
    again when it ends. shared: that it takes from the cache when it starts, of a prompt that its siblings
    use, too."""

    length: int
    most: int
    held: float = 0.0
    shared: float = 0.0


class Admission:
    """Which completions may start. page: tokens by which the cache is given out."""

    def __init__(self, page: int):
        self._page = page
        self._lengths: collections.deque[int] = collections.deque(maxlen=KNOWN)

    def finished(self, length: int) -> None:
        """A completion has ended after `length` tokens."""
        self._lengths.append(length)

    def count(self, running: Sequence[Growing], waiting: Sequence[Growing], free: float) -> int:
        """How many of `waiting`, from the first on, may start beside `running` in a cache that has room for
        `free` tokens. One at least if nothing runs."""
        if not self._lengths or not waiting:
            return len(waiting)
        means, variances = self._growth([*running, *waiting])
        starts = len(running)
        need = means[:starts].sum(0) + means[starts:].cumsum(0)
        spread = variances[:starts].sum(0) + variances[starts:].cumsum(0)
        fits = (need + MARGIN * np.sqrt(spread)).max(1) <= free
        return max(int(fits.cumprod().sum()), int(not running))

    def _growth(self, completions: Sequence[Growing]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance, [n, S], of the tokens of the cache that each takes beyond those it has, at S
        times from now on."""
        ended = np.sort(np.fromiter(self._lengths, float))
        length, most, held, shared = np.array(completions, float).T[:, :, None]
        quantiles = ended[np.linspace(0, len(ended) - 1, TIMES).astype(int)]
        longer = len(ended) - np.searchsorted(ended, length, "right")
        end = np.where(longer, most, np.minimum(most, 2 * length))
        then = length + np.unique([1.0, *quantiles, *(end - length)[longer == 0]])
        lives = (len(ended) - np.searchsorted(ended, then)) / np.maximum(longer, 1)
        lives = np.where(longer, lives, 1.0) * (then <= end)
        takes = then + self._page / 2  # the last page is half full, on average
        return lives * takes - held + shared, lives * (1 - lives) * takes**2


class Seen:
    """What an engine did since it was last asked: completions decoded at once, on average over looks; the
    largest share of its cache that was taken; completions whose keys and values it dropped, to compute them
    again later."""

    def __init__(self) -> None:
        self.preemptions, self._looks, self._running, self._use = 0, 0, 0, 0.0

    def look(self, running: int, use: float) -> None:
        """So many are decoded now, and this share of the cache is taken."""
        self._looks, self._running, self._use = self._looks + 1, self._running + running, max(self._use, use)

    def metrics(self) -> dict[str, float]:
        found = {"engine/concurrency": self._running / max(self._looks, 1), "engine/cache_use": self._use,
                 "engine/preemptions": self.preemptions}
        self.__init__()
        return found
