"""Selection: which of a step's completions are learned from, how often, and how often they were expected to
be.

    keep      of each group some completions: the best and the worst, those far from the mean, or any
    replay    of what was kept the same number again, large advantages more often
              (Shuffle-R1, arXiv 2508.05612)
    refill    groups whose rewards are all equal are replaced (DAPO's dynamic sampling, arXiv 2503.14476)

Each part draws at random and knows its expectations: `inclusion` is the probability that a completion is
kept, given the rewards, and `expected` how often it is replayed, given what was kept. A gradient weighed by 1
/ (inclusion * expected) therefore has the mean of the gradient of all completions (Horvitz and Thompson
1952): `Selection.weights = "inverse"`. A completion with inclusion 0 has no such weight.

Groups that are kept whole and not replayed draw no random number. Everything here is numpy, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args, get_type_hints

import numpy as np
from jaxtyping import Bool, Float64, Int64, Real

from jaxfp8rl.errors import ConfigError, nearest


class Selection(NamedTuple):
    """keep: completions of each group, None for all. by:

    - best_worst: the keep // 2 best and the rest from the worst (Sol-RL, arXiv 2604.06916; the pairs of best
      and worst that Shuffle-R1 keeps are the same completions)
    - mean_deviation: those whose rewards are farthest from the group's mean
    - random: any

    Ties are in random order, so that rewards of 0 and 1 leave no completion without a chance, where both
    occur and `by` looks at both ends. explore: the probability that a group is kept by "random" instead.
    baseline: of advantages, over "all" completions of a group or over those "kept". replay: units of which as
    many as there are are drawn again, in proportion to their |advantage|: "completions", or "pairs" of the
    i-th best with the i-th worst; at most `copies` of each. weights: "none", or "inverse".
    """

    keep: int | None = None
    by: Literal["best_worst", "mean_deviation", "random"] = "best_worst"
    explore: float = 0.0
    baseline: Literal["all", "kept"] = "all"
    replay: Literal["none", "pairs", "completions"] = "none"
    copies: int = 8
    weights: Literal["none", "inverse"] = "none"

    def check(self) -> Selection:
        """Return self. Raises ConfigError for what cannot be."""
        for name, annotation in get_type_hints(type(self)).items():
            choices = [c for c in get_args(annotation) if isinstance(c, str)]
            if choices and (value := getattr(self, name)) not in choices:
                raise ConfigError(f'selection.{name} "{value}" is not a choice{nearest(value, choices)}',
                                  "docs/selection.md lists them")
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"selection.keep = {self.keep}: keep at least one completion",
                              "leave it out to keep all")
        if self.copies < 1 or not 0 <= self.explore <= 1:
            raise ConfigError(f"selection.copies = {self.copies}, selection.explore = {self.explore:g}",
                              "copies is at least 1, explore a probability")
        if self.replay == "pairs" and (self.by != "best_worst" or (self.keep or 0) % 2):
            raise ConfigError('selection.replay = "pairs" pairs the best with the worst',
                              'set selection.by = "best_worst" and an even selection.keep')
        if self.weights == "inverse" and self.baseline == "kept":
            raise ConfigError('selection.weights = "inverse" with selection.baseline = "kept": no '
                              'weight gives a '
                              "completion the advantage that it has among all",
                              'set selection.baseline = "all"')
        return self


class Kept(NamedTuple):
    """Some completions of a group, the best first: their `places` in it [k], and the `inclusion` of all
    [n]."""

    places: Int64[np.ndarray, " k"]
    inclusion: Float64[np.ndarray, " n"]


class Unit(NamedTuple):
    """What is learned from together: `members`, places in group number `group`, and the factors of their
    losses."""

    group: int
    members: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def whole(cls, group: int, usable: np.ndarray) -> Unit:
        """All usable completions of a group, in order."""
        at = tuple(np.flatnonzero(usable).tolist())
        return cls(group, at, (1.0,) * len(at))


def keep(rewards: Real[np.ndarray, " n"], usable: Bool[np.ndarray, " n"], s: Selection,
         rng: np.random.Generator) -> Kept:
    """Keep `s.keep` of a group's usable completions, or all where there are no more. rewards: without NaN
    where usable. Inclusion is 0 for what is not usable."""
    among, count = np.flatnonzero(usable), s.keep
    inclusion = np.zeros(len(rewards))
    if count is None or count >= len(among):
        inclusion[among] = 1.0
        return Kept(among[np.argsort(-np.asarray(rewards, float)[among], kind="stable")], inclusion)
    r = np.asarray(rewards, np.float64)[among]
    any_of, n = np.arange(len(r)) < count, len(r)
    key, taken = {
        "best_worst": (r, (np.arange(n) < count // 2) | (np.arange(n) >= n - (count - count // 2))),
        "mean_deviation": (np.round(np.abs(r - r.mean()), 9), any_of),
        "random": (np.zeros(n), any_of),
    }[s.by]
    inclusion[among] = (1 - s.explore) * _chance(key, taken) + s.explore * count / n
    if s.explore and rng.random() < s.explore:
        key, taken = np.zeros(n), any_of
    tie = rng.permutation(n)
    kept = among[np.lexsort((tie, -key))[taken]]
    order = np.lexsort((tie[np.searchsorted(among, kept)], -np.asarray(rewards, np.float64)[kept]))
    return Kept(kept[order], inclusion)


def _chance(key: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """[n]: the chance of each item to be at one of the `taken` places, sorted by the largest key with ties in
    random order."""
    ordered, of_item = np.sort(-key), np.arange(len(key))
    first, last = np.searchsorted(ordered, -key, "left"), np.searchsorted(ordered, -key, "right")
    before = np.concatenate([[0], np.cumsum(taken)])
    return ((before[last] - before[first]) / (last - first))[of_item]


def replay(sizes: Real[np.ndarray, " u"], draws: int, copies: int,
           rng: np.random.Generator) -> tuple[Int64[np.ndarray, " u"], Float64[np.ndarray, " u"]]:
    """How often each of u units is learned from, if `draws` are drawn in proportion to their sizes, at most
    `copies` of each -> (counts [u], what they are expected to be [u]).

    The counts are the expectations, rounded up or down: systematic sampling in random order (Madow 1949).
    Shuffle-R1 draws several sets without replacement instead, whose expectations have no closed form and
    whose counts vary more. There are fewer draws if all units of a size have `copies`. If all sizes are 0,
    each unit is drawn as often.
    """
    sizes = np.asarray(sizes, np.float64)
    expected = _in_proportion(sizes if sizes.any() else np.ones_like(sizes), draws, copies)
    order = rng.permutation(len(sizes))
    ends = np.cumsum(expected[order])
    if len(ends):
        ends[-1] = np.round(ends[-1])
    counts = np.zeros(len(sizes), np.int64)
    counts[order] = np.diff(np.floor(ends + rng.random()), prepend=0)
    return counts, expected


def _in_proportion(sizes: np.ndarray, total: int, most: int) -> np.ndarray:
    """Numbers in proportion to sizes, none above `most`, whose sum is `total` or all that there can be."""
    full = np.zeros(len(sizes), bool)
    sizes = sizes / sizes.max(initial=0.0)
    while True:
        left = total - most * full.sum()
        rest = sizes[~full].sum()
        share = np.where(full, most, np.where(full, 0, sizes) / rest * left if rest else 0.0)
        over = ~full & (share > most)
        if not over.any():
            return share
        full |= over


def refill_share(found: Sequence[bool] | np.ndarray, wanted: int) -> float:
    """An unbiased estimate of the share of groups that teach, where groups were drawn until `wanted` of them
    did, or until there were no more: found [G], in order.

    With the mean gradient of the chosen groups it gives the mean gradient of all that are drawn. wanted
    groups among the first m: (wanted - 1) / (m - 1); fewer among all G: their share (Girshick, Mosteller and
    Savage 1946).
    """
    found = np.asarray(found, bool)
    at = np.flatnonzero(found)
    if len(at) < wanted:
        return float(found.mean()) if len(found) else 0.0
    m = int(at[wanted - 1]) + 1
    return (wanted - 1) / (m - 1) if m > 1 else 1.0


def select(usable: Sequence[np.ndarray], kept: Sequence[Kept], sizes: Sequence[np.ndarray], s: Selection,
           rng: np.random.Generator, share: float = 1.0) -> list[Unit]:
    """The units of a step, of which each group has one if nothing is replayed. Of each group: which
    completions are usable [n], which were kept, and the sizes of their advantages [n]. share: of
    `refill_share`.

    Under "inverse" the mean over what is learned from, each loss times its weight, has the mean over all
    usable completions as its expectation, times `share`.
    """
    units = [Unit(g, members, (1.0,) * len(members)) for g, k in enumerate(kept)
             for members in _members(k.places, s.replay)]
    expected = np.ones(len(units))
    if s.replay != "none":
        size = np.array([sum(float(sizes[u.group][i]) for i in u.members) for u in units])
        counts, expected = replay(size, len(units), s.copies, rng)
        chosen = rng.permutation(np.repeat(np.arange(len(units)), counts))
        units, expected = [units[i] for i in chosen], expected[chosen]
    if s.weights == "none":
        return units
    drawn, learned = sum(int(u.sum()) for u in usable), sum(len(u.members) for u in units)
    factor = share * learned / max(drawn, 1)
    return [u._replace(weights=tuple(float(factor / (kept[u.group].inclusion[i] * e)) for i in u.members))
            for u, e in zip(units, expected)]


def _members(places: np.ndarray, replay: str) -> list[tuple[int, ...]]:
    """The units of a group. An odd completion, the middle one, is a unit of its own."""
    at = tuple(int(i) for i in places)
    if replay == "none":  # in the order of the group, as if nothing had been selected
        return [tuple(sorted(at))]
    if replay == "completions":
        return [(i,) for i in at]
    half = len(at) // 2
    return [*((at[i], at[-1 - i]) for i in range(half)), *((i,) for i in at[half : len(at) - half])]
