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
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import numpy as np

ADMIT = Literal["all", "cache"]
KNOWN = 4096  # lengths that are remembered
TIMES = 64  # at which the need is computed
MARGIN = 1  # standard deviations of the need that must fit, too


class Growing(NamedTuple):
    """A completion, of a prompt of `prompt` tokens whose whole pages its group shares. length: its tokens so
    far. most: that it may have."""

    group: Hashable
    prompt: int
    length: int
    most: int


class Admission:
    """Which completions may start. page: tokens by which the cache is given out."""

    def __init__(self, page: int):
        self._page = page
        self._lengths: collections.deque[int] = collections.deque(maxlen=KNOWN)

    def finished(self, length: int) -> None:
        """A completion has ended after `length` tokens."""
        self._lengths.append(length)

    def count(self, running: Sequence[Growing], waiting: Sequence[Growing], tokens: int) -> int:
        """How many of `waiting`, from the first on, may start beside `running` in a cache of so many tokens.
        One at least if nothing runs."""
        if not self._lengths or not waiting:
            return len(waiting)
        all_of_them, starts = [*running, *waiting], len(running)
        first = {g.group: i for i, g in reversed(list(enumerate(all_of_them)))}
        prompts = np.array([g.prompt // self._page * self._page * (first[g.group] == i)
                            for i, g in enumerate(all_of_them)])
        means, variances = self._own(all_of_them)
        need = prompts.cumsum()[:, None] + means.cumsum(0) + MARGIN * np.sqrt(variances.cumsum(0))
        fits = need[starts:].max(1) <= tokens
        return max(int(fits.cumprod().sum()), int(not running))

    def held(self, running: Sequence[Growing]) -> int:
        """The tokens of the cache that `running` take now, in whole pages."""
        own = sum(-(-(g.prompt % self._page + g.length) // self._page) for g in running)
        return (own + sum({g.group: g.prompt // self._page for g in running}.values())) * self._page

    def _own(self, completions: Sequence[Growing]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance, [n, S], of the tokens of the cache that each alone has at S times from now."""
        ended = np.sort(np.fromiter(self._lengths, float))
        prompt, length, most = np.array([g[1:] for g in completions], float).T[:, :, None]
        longer = len(ended) - np.searchsorted(ended, length, "right")
        end = np.where(longer, most, np.minimum(most, 2 * length))
        quantiles = ended[np.linspace(0, len(ended) - 1, TIMES).astype(int)]
        then = length + np.unique([1.0, *quantiles, *(end - length)[longer == 0]])
        lives = (len(ended) - np.searchsorted(ended, then)) / np.maximum(longer, 1)
        lives = np.where(longer, lives, 1.0) * (then <= end)
        takes = np.ceil((prompt % self._page + then) / self._page) * self._page
        return lives * takes, lives * (1 - lives) * takes**2


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
