"""The penalty that keeps the policy close to a reference: estimates of a KL divergence from sampled tokens.

    kl = kl_penalty(logp, ref_logp, mask, "k3+")
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxfp8rl.errors import ConfigError, nearest
from jaxfp8rl.losses.mismatch import LOG_RATIO_BOUND

KL_CAP = 10.0  # the cap of the k3 estimate, as in verl and NeMo RL; NeMo RL caps k1 and k2 as well
KL_WEIGHT_CAP = 2.0  # the cap of pi / mu on a token's KL, the bound of token TIS


def _k3(d: Array) -> Array:
    return jnp.expm1(-d) + d


_ESTIMATES: dict[str, Callable[[Array], Array]] = {
    "k1": lambda d: d,
    "abs": jnp.abs,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: jnp.minimum(_k3(jnp.clip(d, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)), KL_CAP),
}
KL_KINDS = (*_ESTIMATES, *(f"{kind}+" for kind in _ESTIMATES), "k1_score", "k2_score", "k3_score")


def kl_penalty(
    logp: Float[Array, "*B T"], ref_logp: Float[Array, "*B T"], mask: Bool[Array, "*B T"], kind: str,
    sampled_logp: Float[Array, "*B T"] | None = None, weight_cap: float = KL_WEIGHT_CAP,
    baseline: Float[Array, "*B T"] | None = None,
) -> Float[Array, "*B T"]:
    """Estimate of KL(now || reference) from each sampled token: [..., T] float32, 0 off the mask. Gradients
    reach `logp` alone.

    logp, ref_logp [..., T]: the learner now and the reference. mask [..., T] bool: the sampled tokens.

    With d = logp - ref_logp (Schulman 2020, "Approximating KL divergence"):

    - "k1": d. "abs": |d|. "k2": d^2/2.
    - "k3": e^-d + d - 1, with d held to +-20 and the estimate to 10, as in verl and NeMo RL. Beyond either
      bound it gives no gradient.

    A suffix keeps the value and changes the gradient. If the tokens are sampled from the policy now, the
    gradient of "k1" is 0 in expectation, and that of "k3" is the gradient of KL(reference || now).

    - "+": the gradient of k2, d dlogp, whose expectation is the gradient of the KL (verl's "+").
    - "_score", of k1, k2 and k3: the estimate times e^(logp - sg(logp)), as in NeMo RL. Its gradient is that
      of the estimate plus that of the score function, k dlogp. k1: (d + 1) dlogp; k2: (d + d^2/2) dlogp; k3:
      d dlogp. k1 and k3 are unbiased. As in NeMo RL, d is held to +-20 and each estimate to +-10. Beyond
      either bound the whole gradient is 0.

    sampled_logp [..., T]: log-probabilities under the policy that sampled. With them, each token is weighted
    by the constant min(e^(logp - sampled_logp), weight_cap), its exponent held to +-20. Up to the cap, value
    and gradient (of a kind with "+" or "_score") are then unbiased for any sampling policy. The cap keeps a
    single token that has become far more likely from dominating the update. "k3+" is then DeepSeek-V3.2's
    unbiased estimate (arXiv 2512.02556, section 3.1) with that cap: r k3, and the gradient through r as well,
    r (k3 + 1 - e^-d) dlogp = r d dlogp.

    baseline [..., T]: constants b by which the gradient of a kind with "+" is (d - b) dlogp. The mean
    gradient stays if b does not depend on the token that is sampled, since the mean of dlogp is 0; a b near
    the mean of d makes it vary less (Williams 1992, section 4).

    Raises ConfigError for an unknown kind, a cap below 1, or a baseline of a kind without "+".
    """
    if kind not in KL_KINDS:
        raise ConfigError(f'KL estimator "{kind}" is unknown{nearest(kind, KL_KINDS)}',
                          "docs/objectives.md lists them")
    if not weight_cap >= 1:
        raise ConfigError(
            f"kl_weight_cap = {weight_cap} would shrink the KL of tokens from the policy itself",
            f"choose at least 1; the default is {KL_WEIGHT_CAP:g}")
    if baseline is not None and not kind.endswith("+"):
        raise ConfigError(f'a baseline of the KL estimator "{kind}", whose gradient is not d dlogp',
                          f'take "{kind.removesuffix("_score")}+"')
    sg, now = jax.lax.stop_gradient, jnp.where(mask, jnp.asarray(logp, jnp.float32), 0.0)
    d = jnp.where(mask, now - sg(jnp.asarray(ref_logp, jnp.float32)), 0.0)
    value = _with_gradient(kind, d, now)
    if baseline is not None:
        value -= sg(baseline) * (now - sg(now))
    if sampled_logp is not None:
        moved = jnp.where(mask, sg(now) - sampled_logp, 0.0)
        value *= jnp.minimum(jnp.exp(jnp.clip(moved, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)), weight_cap)
    return jnp.where(mask, value, 0.0)


def _with_gradient(kind: str, d: Array, logp: Array) -> Array:
    sg, base = jax.lax.stop_gradient, kind.removesuffix("+").removesuffix("_score")
    if kind.endswith("_score"):
        held = jnp.clip(d, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        estimate = {"k1": held, "k2": held**2 / 2, "k3": _k3(held)}[base]
        score = jnp.where(held == d, jnp.exp(logp - sg(logp)), 1.0)
        return jnp.clip(score * estimate, -KL_CAP, KL_CAP)
    if kind.endswith("+"):
        k2 = _ESTIMATES["k2"](d)
        return k2 - sg(k2) + sg(_ESTIMATES[base](d))
    return _ESTIMATES[base](d)
