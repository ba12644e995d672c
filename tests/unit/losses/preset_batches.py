"""Random batches of log-probabilities and masks, for the tests that compare presets with the oracles."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

BATCHES, SEQUENCES, LENGTH = 600, 4, 8
WIDTH = SEQUENCES * LENGTH  # a row that holds all sequences of a batch
MISMATCH = (0.0, 1e-4, 1e-3, 0.01, 0.1, 0.5, 2.0, 10.0, 30.0)  # nats
GARBAGE = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -3.0], np.float32)


SOME = slice(1, 1 + 2 * len(MISMATCH))  # batches that the laws below are tried on: each mismatch twice
# those without mismatch, which no preset rejects
CALM = slice(len(MISMATCH), 3 * len(MISMATCH), len(MISMATCH))


class Batches(NamedTuple):
    """p, g, mask, segment_ids [2 N + ..., SEQUENCES, WIDTH]: one sequence a row, then the same packed, then
    CASES and NANS.

    where [N, SEQUENCES * WIDTH]: the flat index within its packed batch of each token of the unpacked one.
    """

    p: np.ndarray
    g: np.ndarray
    mask: np.ndarray
    segment_ids: np.ndarray
    where: np.ndarray


@functools.cache
def batches() -> Batches:
    """Seeded; lengths from 0, holes in the mask, empty rows and an empty batch, anything at all under the
    mask."""
    rng = np.random.default_rng(20261121)
    shape = (BATCHES, SEQUENCES, WIDTH)
    lengths = rng.integers(0, LENGTH + 1, (BATCHES, SEQUENCES, 1))
    holes = rng.choice([0.0, 0.3], (BATCHES, 1, 1))
    mask = (np.arange(WIDTH) < lengths) & (rng.random(shape) >= holes)
    mask[0] = False
    scale = np.array(MISMATCH)[np.arange(BATCHES) % len(MISMATCH)].reshape(-1, 1, 1)
    same_sign = rng.random((BATCHES, SEQUENCES, 1)) < 0.3  # one-sided sequences reach large sums
    d = scale * rng.uniform(-1, 1, shape)
    d = np.where(same_sign, np.abs(d), d)
    spikes = rng.random(shape) < 0.05  # calm sequences with a single bad token
    d = np.where(spikes, rng.uniform(-30, 30, shape), d) * (scale > 0)
    top = -rng.exponential(1.0, shape)  # the larger of the two log-probabilities
    p, g = (np.where(mask, top + np.minimum(x, 0), rng.choice(GARBAGE, shape)).astype(np.float32)
            for x in (d, -d))
    segment_ids = np.broadcast_to((np.arange(WIDTH) < lengths).astype(np.int32), shape)

    packed = [np.zeros(shape, a.dtype) for a in (p, g, mask, segment_ids)]
    packed[0][:], packed[1][:] = np.nan, np.inf
    where = np.zeros(shape, int)
    for n in range(BATCHES):
        start = 0
        for i, b in enumerate(rng.permutation(SEQUENCES)):  # into row 0, in any order
            size = int(lengths[n, b, 0])
            here = slice(start, start + size)
            for target, source in zip(packed[:3], (p, g, mask), strict=True):
                target[n, 0, here] = source[n, b, :size]
            packed[3][n, 0, here] = i + 1
            where[n, b, :size] = np.arange(start, start + size)
            start += size
    rows = (p, g, mask, segment_ids)
    special = variants(*(x[SOME] for x in rows)) + nans(*(x[CALM] for x in rows))
    everything = [np.concatenate(x) for x in zip(rows, packed, *special, strict=True)]
    return Batches(*everything, where.reshape(BATCHES, -1))


def variants(p: np.ndarray, g: np.ndarray, mask: np.ndarray, ids: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """CASES: one policy for both; nobody live; nothing odd under the mask; only the first two sequences
    live."""
    half = mask & (np.arange(SEQUENCES)[:, None] < 2)
    clean = (np.where(mask, p, -1), np.where(mask, g, -1))
    return [(p, p, mask, ids), (p, g, np.zeros_like(mask), ids), (*clean, mask, ids), (p, g, half, ids)]


def nans(p: np.ndarray, g: np.ndarray, mask: np.ndarray, ids: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """NANS: a NaN at the first token of the first sequence, which is live; from the learner, then from the
    engine."""
    p, g, mask, ids = (x.copy() for x in (p, g, mask, ids))
    mask[:, 0, :2], ids[:, 0, :2], p[:, 0, :2], g[:, 0, :2] = True, 1, -1.0, -1.0
    broken_p, broken_g = p.copy(), g.copy()
    broken_p[:, 0, 0] = broken_g[:, 0, 0] = np.nan
    return [(broken_p, g, mask, ids), (p, broken_g, mask, ids)]


@functools.cache
def live_ratios() -> np.ndarray:
    """D [N, SEQUENCES, WIDTH] of the unpacked batches, 0 under the mask."""
    p, g = (np.where(batches().mask, x, 0).astype(np.float64)[:BATCHES] for x in batches()[:2])
    return p - g
