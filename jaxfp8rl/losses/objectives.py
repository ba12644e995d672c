"""Policy-gradient objectives: per-token losses of (logp, old_logp, advantages)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxfp8rl.losses.correction import LOG_RATIO_BOUND


def clipped_objective(
    logp: Array, old_logp: Array, advantages: Array, clip_low: float, clip_high: float
) -> tuple[Array, Array]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) a token, with the asymmetric bounds of DAPO (arXiv 2503.14476).

    All inputs one shape. With r = exp(logp - old_logp), the log-ratio clamped to +-20:
    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). Returns (loss, clipped), clipped True where the clip cut the
    gradient. Gradients reach `logp` alone when the others are constants.
    """
    ratio = jnp.exp(jnp.clip(logp - old_logp, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    plain = ratio * advantages
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    return -jnp.minimum(plain, clipped), clipped < plain
