"""The tokens that affect the entropy most: the selection of Clip-Cov and KL-Cov (arXiv 2505.22617, section
4.2).

A token's covariance is (A - mean A) (logp - mean logp), both means over the live tokens of the whole batch
(eq. 10 there). It is large if a likely token is rewarded or an unlikely one penalised. Other frameworks
select within a micro-batch and by the current policy, so the selection changes with the split. Here the
selection is made once, before a batch is split, by pi_old, which equals the current policy in the first
update of a step.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxfp8rl.losses.mismatch import mean_over
from jaxfp8rl.losses.objectives import ObjectiveConfig, objective_parameters

FROM_BITS = 0x9E3779B1  # 2^32 over the golden ratio: Knuth's multiplicative hash


def covariances(
    old_logp: Float[Array, "*B T"], advantages: Float[Array, "*B T"], mask: Bool[Array, "*B T"]
) -> Float[Array, "*B T"]:
    """float32 [..., T], 0 off the mask. All arguments are [..., T], of the whole batch."""
    of = [jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0) for x in (advantages, old_logp)]
    centred = [x - mean_over(mask, x) for x in of]
    return jnp.where(mask, jax.lax.stop_gradient(centred[0] * centred[1]), 0.0)


def select_tokens(
    old_logp: Float[Array, "*B T"], advantages: Float[Array, "*B T"], mask: Bool[Array, "*B T"],
    places: Int[Array, "*B T"], config: ObjectiveConfig
) -> Bool[Array, "*B T"]:
    """The tokens that the objective treats separately, bool [..., T]. All arrays are [..., T], of the *whole*
    batch. mask bool: the tokens that count. places int: a number for each token (of its id and position, for
    example) that does not depend on the packing.

    With N live tokens, n = max(1, floor(cov_fraction N)). "kl_cov" selects the n tokens of largest
    covariance, with ties for the last place. "clip_cov" draws n tokens with cov_low < covariance < cov_high,
    or all of them if there are fewer. verl draws with torch's generator. Here the order is a hash of
    log-probability and place, which does not depend on packing, sharding or resuming. A NaN is not selected.
    """
    p, cov = objective_parameters(config), covariances(old_logp, advantages, mask)
    count = jnp.maximum(jnp.floor(p["cov_fraction"] * jnp.sum(mask)).astype(jnp.int32), 1)
    if config.kind == "kl_cov":
        return _largest(_ordered(cov), mask & ~jnp.isnan(cov), count)
    among = mask & (cov > p["cov_low"]) & (cov < p["cov_high"])
    return _largest(_hash(old_logp, places), among, count)


def _largest(keys: Array, among: Array, count: Array) -> Array:
    """The `count` largest of the uint32 keys [..., T] where `among`, with ties for the last place. It bisects
    over the bits: a sort would need all tokens on one device."""
    reaches = lambda bound: jnp.sum(among & (keys >= bound)) >= count

    def halve(i: Array, bound: Array) -> Array:
        higher = bound | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(reaches(higher), higher, bound)

    return among & (keys >= jax.lax.fori_loop(0, 32, halve, jnp.uint32(0)))


def _ordered(x: Array) -> Array:
    """The float32 numbers as uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # -0 as 0
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _hash(logp: Array, places: Array) -> Array:
    mix: Callable[[Array], Array] = lambda x: (x ^ (x >> 16)) * jnp.uint32(FROM_BITS)
    bits = jax.lax.bitcast_convert_type(jnp.asarray(logp, jnp.float32), jnp.uint32)
    return mix(mix(mix(bits) + places.astype(jnp.uint32)))
