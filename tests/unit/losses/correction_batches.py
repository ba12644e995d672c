"""Batches of random log-probabilities and varied configs, for the laws of the correction."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import Array

from jaxfp8rl.losses.correction import (
    Correction,
    CorrectionConfig,
    rollout_correction,
)

B, T = 3, 8
SHAPE = (5, 24)  # room for the same sequences moved, padded or packed: one shape, one compilation a config
GARBAGE = np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0], np.float32)
# one of each kind of dependence: none, a sequence, two sequence statistics, the batch's mean, its order, its
# spread
VARIED = ["token_tis", "verl/decoupled_seq_is_rs", "nemo/seq_mask_tis", "slime/mis", "slime/mis_sequence",
          "areal/m2po", "ais"]


class Data(NamedTuple):
    """old, rollout, mask, ids, all of SHAPE: B sequences, one a row from its first token; lengths 0 to T,
    holes in the mask, garbage under it."""

    old: Array
    rollout: Array
    mask: Array
    ids: Array

    def correct(self, config: CorrectionConfig) -> Correction:
        return rollout_correction(self.old, self.rollout, self.mask, config, self.ids)

    def moved(self, move: Callable[[Array], Array]) -> Data:
        return Data(*(move(x) for x in self))


@cache
def compiled(config: CorrectionConfig) -> Callable[[Data], Correction]:
    return jax.jit(lambda batch: batch.correct(config))


def data(seed: int, scale: float, rows: int = B) -> Data:
    """scale: mismatch in nats; the live log-probabilities are at most 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, T + 1, (SHAPE[0], 1)) * (np.arange(SHAPE[0]) < rows)[:, None]
    spans = np.arange(SHAPE[1]) < lengths
    mask = spans & (rng.random(SHAPE) < 0.8)
    d, top = scale * rng.uniform(-1, 1, SHAPE), -rng.exponential(1.0, SHAPE)
    old, rollout = (np.where(mask, top + np.minimum(x, 0), rng.choice(GARBAGE, SHAPE)).astype(np.float32)
                    for x in (d, -d))
    return Data(*(jnp.asarray(x) for x in (old, rollout, mask, spans.astype(np.int32))))


@st.composite
def batches(draw, scales=(1e-3, 0.1, 1.0, 10.0, 30.0)) -> Data:
    return data(draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(scales)))


def with_live_tokens(batch: Data) -> Data:
    """At least one live token, with a mismatch of 1 nat."""
    old, rollout, mask, ids = batch
    return Data(old.at[0, 0].set(-1), rollout.at[0, 0].set(-2), mask.at[0, 0].set(True), ids.at[0, 0].set(1))
