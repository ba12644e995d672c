"""The proximal policy of a step that learns from completions of several weight versions, without a forward
pass.

AReaL (arXiv 2505.24298) keeps three policies apart: mu sampled, the proximal policy pi_prox holds the clip,
and pi learns. Its decoupled loss of a token is  w max(-A r, -A clip(r)),  r = pi / pi_prox,  w = pi_prox /
mu. Here w is the rollout correction of pi_prox against mu, and the maximum is the objective "ppo_clip".

    loss.old_policy = "recomputed"   pi_prox is the learner at the weights before the step, scored
    loss.old_policy = "loglinear"    log pi_prox = log mu + a (log pi - log mu), as below
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float


def proximal_logp(
    logp: Float[Array, "*B T"], rollout_logp: Float[Array, "*B T"], ages: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"]
) -> Float[Array, "*B T"]:
    """The log-linear proximal policy's log-probabilities [..., T] float32, in nats, 0 off the mask.

    logp, rollout_logp [..., T]: of any float type. ages [..., T] float32: by how many versions the weights
    before the step are newer than those that sampled the token. AReaL's a = (v_prox - v_b) / (v - v_b) is
    ages / (ages + 1), since the step makes version v = v_prox + 1. A token of age 0 has pi_prox = mu. With
    its age, pi_prox approaches pi. AReaL: areal/utils/functional, prox_logp_method = "loglinear".
    """
    ages = jnp.where(mask, jnp.maximum(ages, 0), 0.0)
    clean = lambda x: jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0)
    logp, sampled = clean(logp), clean(rollout_logp)
    return jnp.where(ages > 0, sampled + ages / (ages + 1) * (logp - sampled), sampled)
