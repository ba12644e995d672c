"""Permutations that are the same on every machine and in every version of numpy."""

from __future__ import annotations

import numpy as np


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A uniform permutation of range(n), [n] int64, fixed by (seed, epoch).

    It sorts raw Philox words, whose stream numpy guarantees. `Generator.permutation` has no such guarantee
    (NEP 19).
    """
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(n)
    return np.argsort(words, kind="stable")
