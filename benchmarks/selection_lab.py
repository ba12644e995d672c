"""What selection does to the gradient: the exact bias and variance of each way to choose among a group's
completions.

    jaxfp8rl bench selection_lab    # about a minute, CPU

The world. A policy over three answers, softmax of three logits; a group is N answers, of which KEEP are
learned from. Rewards: "rare" (one answer in ten is right), "even" (half are), "graded" (1, 1/2 and 0). The
target is the gradient of the expected reward. The code under test is `jaxfp8rl.losses.selection` with
advantages "rloo" over all of the group or over those kept.

Exact results. A group is known by how often it has each answer; all such groups, all orders of ties, the coin
of `explore` and all values of the uniform number of a replay are enumerated. So is dynamic sampling, whose
groups are conditional on having two rewards. The error is that of a step that learns from LEARNED
completions, as many for each way: bias and variance together, relative to the square of the gradient.

Needs no GPU.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write
from jaxfp8rl.losses import selection
from jaxfp8rl.losses.advantages import advantages
from jaxfp8rl.losses.selection import Selection

N, KEEP, LEARNED = 6, 2, 256
WORLDS = {  # rewards and chances of the answers
    "rare": ((1.0, 0.0, 0.0), (0.1, 0.3, 0.6)),
    "even": ((1.0, 0.0, 0.0), (0.5, 0.2, 0.3)),
    "graded": ((1.0, 0.5, 0.0), (0.2, 0.5, 0.3)),
}
WAYS = {
    "all": Selection(),
    "refill": Selection(),
    "refill, weighed": Selection(),
    "best and worst": Selection(KEEP),
    "best and worst, over the kept": Selection(KEEP, baseline="kept"),
    "best and worst, weighed": Selection(KEEP, weights="inverse"),
    "best and worst, explored, weighed": Selection(KEEP, explore=0.25, weights="inverse"),
    "mean deviation": Selection(KEEP, "mean_deviation"),
    "random": Selection(KEEP, "random"),
    "pairs replayed": Selection(replay="pairs"),
    "completions replayed": Selection(replay="completions"),
    "completions replayed, weighed": Selection(replay="completions", weights="inverse"),
}


class Draws:
    """A generator that draws given numbers: one order of ties, then one of units, and a uniform number."""

    def __init__(self, orders: list[tuple[int, ...]], uniform: float):
        self.orders, self.uniform = list(orders), uniform

    def permutation(self, x):
        if isinstance(x, np.ndarray):  # the last of a step, in which sums do not depend on order
            return x
        return np.array((self.orders.pop(0) if len(self.orders) > 1 else self.orders[0])[:x])

    def random(self) -> float:
        return self.uniform


class Moments(NamedTuple):
    """Of a group's mean gradient: its mean [D], its mean square, and how many completions it is of."""

    mean: np.ndarray
    square: float
    learned: float


def groups(chances: tuple[float, ...]) -> Iterator[tuple[np.ndarray, float]]:
    """Every group, as answers [N] in order, and its chance."""
    for answers in itertools.combinations_with_replacement(range(len(chances)), N):
        counts = np.bincount(answers, minlength=len(chances))
        ways = math.factorial(N) / math.prod(map(math.factorial, counts.tolist()))
        yield np.array(answers), ways * math.prod(p**int(c) for p, c in zip(chances, counts))


def arranged(answers: np.ndarray) -> list[tuple[int, ...]]:
    """Orders of a group's places, one for each sequence of answers that they give; each is as likely."""
    found: dict[tuple, tuple[int, ...]] = {}
    for order in itertools.permutations(range(len(answers))):
        found.setdefault(tuple(answers[list(order)]), order)
    return list(found.values())


def draws(answers: np.ndarray, sizes: np.ndarray,
          s: Selection) -> Iterator[tuple[list[tuple[int, ...]], float, float]]:
    """Every draw that a group's selection may make: its orders, its uniform number, its chance. Counts of a
    replay are constant between the numbers with which a sum of expectations passes a whole."""
    if s.replay == "none":
        ranks = [tuple(np.argsort(order).tolist())
                 for order in arranged(answers)] if s.keep else [tuple(range(N))]
        for rank in ranks:
            yield [rank, (0,)], 1.0, (1 - s.explore) / len(ranks)
            if s.explore:
                yield [rank, (0,)], 0.0, s.explore / len(ranks)
        return
    any_order = itertools.permutations(range(len(sizes)))
    orders = arranged(answers) if s.replay == "completions" else list(any_order)
    for order in orders:
        expected = selection.replay(sizes, len(sizes), s.copies, Draws([order], 0.5))[1]
        cuts = np.unique(np.round([0, 1, *(1 - np.cumsum(expected[list(order)]) % 1)], 12))
        for a, b in itertools.pairwise(cuts):
            yield [order], (a + b) / 2, (b - a) / len(orders)


def moments(rewards: np.ndarray, chances: np.ndarray, s: Selection, informative: bool) -> Moments:
    score = np.eye(len(chances)) - chances
    mean, square, learned, total = np.zeros(len(chances)), 0.0, 0.0, 0.0
    for answers, chance in groups(tuple(chances)):
        r, usable = rewards[answers], np.ones(N, bool)
        if informative and np.ptp(r) == 0:
            continue
        total += chance
        over_all = np.asarray(advantages([r], "rloo")[0], float)
        best = selection.keep(r, usable, Selection(), Draws([], 0.0)).places
        sizes = np.array([sum(abs(over_all[i]) for i in u) for u in selection._members(best, s.replay)])
        for orders, uniform, of_draw in draws(answers, sizes, s):
            given = Draws(orders, uniform)
            kept = selection.keep(r, usable, s, given)
            compared = np.where(np.isin(np.arange(N), kept.places), r, np.nan) if s.baseline == "kept" else r
            advantage = np.asarray(advantages([compared], "rloo")[0], float)
            units = selection.select([usable], [kept], [np.abs(advantage)], s, Draws(orders[-1:], uniform))
            terms = [w * advantage[i] * score[answers[i]] for u in units
                     for i, w in zip(u.members, u.weights)]
            g = np.mean(terms, 0)
            mean, square = mean + chance * of_draw * g, square + chance * of_draw * float(g @ g)
            learned += chance * of_draw * len(terms)
    return Moments(mean / total, square / total, learned / total)


def measure(world: str, way: str) -> dict:
    """One record: bias, variance and angle relative to the true gradient."""
    rewards, chances = map(np.array, WORLDS[world])
    truth = chances * (rewards - chances @ rewards)
    refill = way.startswith("refill")
    m = moments(rewards, chances, WAYS[way], refill)
    mean, square = m.mean, m.square
    if way == "refill, weighed":  # by the share of groups that teach, whose estimate is unbiased
        share = 1 - sum(float(chances[rewards == r].sum()) ** N for r in set(rewards))
        mean, square = mean * share, square * share**2
    norm, variance = float(truth @ truth), square - float(mean @ mean)
    bias = float((mean - truth) @ (mean - truth)) / norm
    steps = LEARNED / m.learned  # groups of a step
    along = float(mean @ truth) / norm  # Adam does not see the length of a gradient
    turned = float((mean - along * truth) @ (mean - along * truth)) / norm
    return {
        "world": world, "way": way, "bias": math.sqrt(max(bias, 0.0)), "length": along,
        "angle_degrees": math.degrees(math.atan2(math.sqrt(max(turned, 0.0)), along)),
        "variance": variance / norm, "learned_of_group": m.learned, "error": bias + variance / norm / steps,
        # of the direction alone: the gradient scaled to the true one's length along it
        "direction_error": (turned + variance / norm / steps) / along**2,
    }


def main() -> None:
    args = arguments(__doc__, "selection_lab").parse_args()
    records = [measure(world, way) for world in WORLDS for way in WAYS]
    rows = []
    for r in records:
        plain = next(x for x in records if x["world"] == r["world"] and x["way"] == "all")
        if r is not plain:
            case = f"{r['world']}, {r['way']}"
            rows += [row(case, f"error of {LEARNED} learned, direction", "of |gradient|^2",
                         r["direction_error"],
                         plain["direction_error"], "all of a group", True),
                     row(case, "relative bias", "of |gradient|", r["bias"], plain["bias"], "all of a group",
                         True)]
    write(args.out, "selection_lab", rows, args.plot, records=records)


if __name__ == "__main__":
    main()
