"""Random batches of log-probabilities, for the tests of objectives."""


import numpy as np
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
SHAPE = (6, 9)


def batch(seed: int, gap: float = 1.0):
    """One sequence a row, ragged, with holes in the mask; row 0 is masked whole. One advantage a sequence."""
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(1.0, SHAPE).astype(np.float32)
    old = np.minimum(logp + gap * rng.normal(size=SHAPE), 0).astype(np.float32)
    length = rng.integers(1, SHAPE[1] + 1, (SHAPE[0], 1))
    segment_ids = (np.arange(SHAPE[1]) < length).astype(np.int32)
    mask = (segment_ids > 0) & (rng.random(SHAPE) < 0.8)
    mask[0] = False
    advantages = np.broadcast_to(rng.normal(size=(SHAPE[0], 1)), SHAPE).astype(np.float32)
    return logp, old, advantages, mask, segment_ids
