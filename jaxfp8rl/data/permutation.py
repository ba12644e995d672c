"""Permutations and coins that are the same on every machine and in every version of numpy."""

from __future__ import annotations

import numpy as np


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A uniform permutation of range(n), [n] int64, fixed by (seed, epoch).

    It sorts raw Philox words, whose stream numpy guarantees. `Generator.permutation` has no such guarantee
    (NEP 19).
    """
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(n)
    return np.argsort(words, kind="stable")


def coins(n: int, seed: int, epoch: int) -> np.ndarray:
    """Uniform numbers in [0, 1), [n] float64, fixed by (seed, epoch): of other words than the
    permutation's."""
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=2**255).random_raw(n)
    return (words >> np.uint64(11)) * 2.0**-53
