"""Compare runs: the settings in which they differ, and whether their results differ by more than seed
noise."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxfp8rl.monitors.report.runs import Run

_OF_THE_RUN = ("run.dir", "run.seed")  # may differ within a variant
EXACT_PAIRS = 16  # up to here all 65,536 sign patterns are counted; for more pairs as many are drawn


class Variant(NamedTuple):
    """Runs of one config with different seeds. `name` shows the settings that differ from other variants."""

    name: str
    runs: tuple[Run, ...]


class Paired(NamedTuple):
    """Two variants compared over their common seeds: the measure's mean in each, the mean and range of the
    differences, and p."""

    measure: str
    first: str
    second: str
    seeds: tuple[Any, ...]
    means: tuple[float, float]
    difference: float
    least: float
    largest: float
    p: float | None  # None for a single pair, which cannot be significant

    @property
    def smallest_p(self) -> float:
        """The value of p if all differences had the same sign."""
        return 2.0 ** (1 - len(self.seeds))


def variants(runs: Sequence[Run]) -> list[Variant]:
    """Group runs whose configs differ only in seed and directory, in the given order."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        key = tuple(sorted((k, repr(v)) for k, v in run.config.items() if k not in _OF_THE_RUN))
        groups.setdefault(key, []).append(run)
    differing = [k for k in config_differences(runs) if k not in _OF_THE_RUN]
    names = [_name(group[0], differing) if len(groups) > 1 else "" for group in groups.values()]
    if len(set(names)) < len(names):  # the settings shown do not tell them apart
        names = [group[0].name for group in groups.values()]
    return [Variant(name, tuple(group)) for name, group in zip(names, groups.values())]


def _name(run: Run, keys: Sequence[str]) -> str:
    shown = [f"{k.rpartition('.')[2]} {run.config.get(k, 'unset')}" for k in keys[:3]]
    return ", ".join(shown) + (", ..." if len(keys) > 3 else "")


def config_differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings that differ between the runs -> their value in each run, None if missing."""
    keys = sorted({k for run in runs for k in run.config})
    found = {k: [run.config.get(k) for run in runs] for k in keys}
    return {k: values for k, values in found.items() if any(v != values[0] for v in values)}


def final(run: Run, key: str, until: float = math.inf) -> float | None:
    """The final value of a metric up to the step `until`: the last evaluation, or, for a metric that is
    logged each step, the mean over the last quarter of the steps, which single steps hardly change."""
    values = [value for step, value in zip(*run.series(key)) if step <= until]
    if not values:
        return None
    return values[-1] if key.startswith("eval/") else statistics.fmean(values[-max(1, len(values) // 4) :])


def paired_tests(groups: Sequence[Variant], measures: Sequence[tuple[str, str]]) -> list[Paired]:
    """Test every pair of variants by each (metric, name) that both have for a common seed. Runs are compared
    up to the last step that all of them reached; the measure's name says so if they differ."""
    return [
        test
        for key, name in measures
        for first, second in itertools.combinations(groups, 2)
        if (test := _paired(name, key, first, second))
    ]


def _paired(name: str, key: str, first: Variant, second: Variant) -> Paired | None:
    have = [{run.seed for run in v.runs if final(run, key) is not None} for v in (first, second)]
    if not (common := have[0] & have[1]):
        return None
    ends = {run.series(key)[0][-1] for v in (first, second) for run in v.runs if run.seed in common
            and run.series(key)[0]}
    a, b = (_by_seed(v, key, min(ends)) for v in (first, second))
    if not (seeds := tuple(s for s in a if a[s] and b.get(s))):
        return None
    if not seeds:
        return None
    name += f", up to step {min(ends)}" if len(ends) > 1 else ""
    # the mean over runs with the same seed
    a, b = ({s: statistics.fmean(values[s]) for s in seeds} for values in (a, b))
    differences = [b[s] - a[s] for s in seeds]
    means = statistics.fmean(a[s] for s in seeds), statistics.fmean(b[s] for s in seeds)
    p = sign_flip_p(differences) if len(seeds) > 1 else None
    return Paired(
        name, first.name, second.name, seeds, means, statistics.fmean(differences), min(differences),
        max(differences), p
    )


def _by_seed(variant: Variant, key: str, until: float) -> dict[Any, list[float]]:
    found: dict[Any, list[float]] = {run.seed: [] for run in variant.runs}
    for run in variant.runs:
        if (value := final(run, key, until)) is not None:
            found[run.seed].append(value)
    return found


def sign_flip_p(differences: Sequence[float]) -> float:
    """The two-sided p of paired `differences`, by Fisher's sign-flip test (The Design of Experiments, 1935,
    section 21).

    If the variants did not differ, each difference could equally well have the other sign. p is the share of
    the 2^n sign patterns whose sum is at least as far from 0 as the observed sum. It is exact up to
    EXACT_PAIRS pairs and makes no assumption about the distribution. With n pairs it is at least 2^(1-n), so
    that p < 5% needs six seeds. For more pairs, 2^EXACT_PAIRS patterns are drawn with a fixed seed, including
    the observed one.
    """
    d = np.asarray(differences, np.float64)
    if d.size <= EXACT_PAIRS:
        signs = 1 - 2 * (np.arange(2**d.size)[:, None] >> np.arange(d.size) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], (2**EXACT_PAIRS, d.size))
        signs[0] = 1
    sums = np.abs(signs @ d)
    return float(np.mean(sums >= abs(d.sum()) * (1 - 1e-12)))
