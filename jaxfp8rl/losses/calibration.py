"""Calibrated clipping (arXiv 2609.22870): PPO bounds for noisy FP8 ratios that have the same effect as the
nominal bounds on BF16 ratios.

FP8 noise in both log-probabilities widens the ratios. Tokens with a negative advantage then fall below 1 -
clip_low from noise alone and lose their gradient, so that bad samples are not penalised. Every N steps a
shadow forward pass in BF16 gives the ratios without the noise, and the bounds are moved until they clip the
FP8 ratios as often.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

BISECTIONS = 40  # each halves the bracket: enough for float32's resolution


def calibrated_bounds(
    ratio: Float[Array, "*B T"], shadow_ratio: Float[Array, "*B T"], advantages: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"], clip_low: Float[Array, ""] | float, clip_high: Float[Array, ""] | float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """ratio = exp(logp - old_logp) in FP8 and its BF16 shadow, advantages, mask bool, all [..., T] of the
    whole batch -> (clip_low', clip_high'), float32 scalars for `policy_loss(clip=...)` of the objectives that
    clip a ratio.

    The paper's lower bound is L = F_fp8^-1(F_bf16(1 - clip_low)), F the distributions over tokens with A < 0;
    its upper bound H makes the ratio of positive to negative contributions that of BF16. Our interpretation
    of the rest:

    - L: a quantile of n numbers is an interval between two of them; L is its point nearest to 1 - clip_low,
      so that exactly as many FP8 tokens are below L as BF16 tokens are below 1 - clip_low, and nothing moves
      without need. L <= 1.
    - a token's contribution is its term in the clipped surrogate: A min(r, H) where A > 0, |A| max(r, L)
      where A < 0. The positive side grows with H, so bisection finds it. If the target exceeds the value at
      H = max r, H = max r (no positive token is cut); if it is below the value at H = 1, H = 1.

    Equal ratios give back the nominal bounds. With no token of one sign, the bounds that need it stay
    nominal. Values off the mask have no effect; a NaN on the mask makes both bounds NaN. Jittable, no
    gradient.
    """
    ratio, shadow_ratio, advantages = jax.lax.stop_gradient((ratio, shadow_ratio, advantages))
    ratio, shadow = (jnp.where(mask, jnp.asarray(r, jnp.float32), 1.0) for r in (ratio, shadow_ratio))
    advantages = jnp.where(mask, jnp.asarray(advantages, jnp.float32), 0.0)
    low, high = jnp.float32(clip_low), jnp.float32(clip_high)
    lower = _lower_bound(ratio, shadow, advantages < 0, 1 - low)
    upper = _upper_bound(ratio, shadow, advantages, lower, 1 - low, 1 + high)
    bad = jnp.isnan(ratio + shadow + advantages).any()
    bounds = jnp.where(lower == 1 - low, low, 1 - lower), jnp.where(upper == 1 + high, high, upper - 1)
    low, high = (jnp.where(bad, jnp.nan, b) for b in bounds)
    return low, high


def _lower_bound(ratio: Array, shadow: Array, negative: Array, nominal: Array) -> Array:
    """The point nearest to `nominal` with as many negative-advantage ratios below it as shadow ratios below
    `nominal`."""
    below = jnp.sum(negative & (shadow < nominal))
    ordered = jnp.sort(jnp.where(negative, ratio, jnp.inf).ravel())
    ordered = jnp.concatenate([jnp.array([-jnp.inf]), ordered, jnp.array([jnp.inf])])
    last_below, first_kept = ordered[below], ordered[below + 1]
    just_above = jnp.nextafter(last_below, jnp.float32(jnp.inf))
    return jnp.minimum(jnp.clip(nominal, just_above, first_kept), 1.0)


def _upper_bound(ratio: Array, shadow: Array, advantages: Array, lower: Array, nominal_low: Array,
                 nominal: Array) -> Array:
    """H with P(ratio, H) / N(ratio, lower) = P(shadow, nominal) / N(shadow, nominal_low), P and N the sides'
    contributions.

    Both sides are taken as their differences from the shadow's, token by token, so that equal ratios give
    exactly 0.
    """
    gain, loss = jnp.maximum(advantages, 0), jnp.maximum(-advantages, 0)
    shadow_gain, shadow_loss = jnp.minimum(shadow, nominal), jnp.maximum(shadow, nominal_low)
    positive, negative = jnp.sum(gain * shadow_gain), jnp.sum(loss * shadow_loss)
    target = positive * jnp.sum(loss * (jnp.maximum(ratio, lower) - shadow_loss))

    def excess(h: Array) -> Array:
        return negative * jnp.sum(gain * (jnp.minimum(ratio, h) - shadow_gain)) - target

    def halve(_, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        a, b = bracket
        middle = (a + b) / 2
        short = excess(middle) < 0
        return jnp.where(short, middle, a), jnp.where(short, b, middle)

    at_nominal = excess(nominal)
    most = jnp.maximum(nominal, jnp.max(jnp.where(gain > 0, ratio, 0.0), initial=0.0))
    bracket = (jnp.where(at_nominal < 0, nominal, 1.0), jnp.where(at_nominal < 0, most, nominal))
    found = jax.lax.fori_loop(0, BISECTIONS, halve, bracket)[1]
    usable = (at_nominal != 0) & (gain > 0).any() & (loss > 0).any()
    return jnp.where(usable, found, nominal)
