"""Policy-gradient objectives: a loss per token from (logp, old_logp, advantages).

    loss, cut = policy_loss(logp, old_logp, advantages, mask, segment_ids, ObjectiveConfig("gspo"))

Notation: c = logp, the learner now. p = old_logp, the learner at the weights that sampled (three policies),
or the engine's own log-probability (two policies, "bypass"). d = c - p, held to +-20, and r = exp(d). A is
the advantage. sg( ) is a constant to the gradient. `aggregation.token_scale` has the sums, means and
denominators over tokens.

Each objective is one pure function of `Tokens` and its parameters, whose defaults are in its signature. It
returns the loss and the tokens that it clipped: "clip/high" (the ratio or probability was above its bound)
and "clip/low" (below).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxfp8rl.errors import ConfigError, nearest
from jaxfp8rl.losses.mismatch import LOG_RATIO_BOUND
from jaxfp8rl.losses.segments import sequence_mean
from jaxfp8rl.other_names import value_here

SEQUENCE_LOG_RATIO_CAP = 10.0  # the cap of a sequence's mean log-ratio, as in verl's GSPO
Cut = dict[str, Array]


class Tokens(NamedTuple):
    """The tokens of a batch, [..., T]: logp, old_logp and advantages are float32 and 0 off the mask.

    old_logp and advantages are constants to the gradient. `selected` bool: the tokens that
    jaxfp8rl.losses.covariance selected, False everywhere for an objective that selects none.
    """

    logp: Float[Array, "*B T"]
    old_logp: Float[Array, "*B T"]
    advantages: Float[Array, "*B T"]
    mask: Bool[Array, "*B T"]
    segment_ids: Int[Array, "*B T"]
    selected: Bool[Array, "*B T"]

    @property
    def log_ratio(self) -> Array:
        return self.logp - self.old_logp

    @property
    def ratio(self) -> Array:
        return jnp.exp(jnp.clip(self.log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


# The objectives
# ------------------------------------------------------------------------------------------------------


def ppo_clip(x: Tokens, clip_low: float = 0.2, clip_high: float = 0.2,
             dual_clip: float | None = None) -> tuple[Array, Cut]:
    """L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO (arXiv 1707.06347, eq. 7); GRPO with group
    advantages.

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476, section 3.1: 0.2, 0.28). dual_clip = c > 1
    holds the loss of a token with A < 0 to -c A, however large its ratio (arXiv 1912.09729); verl has c = 3
    on, NeMo RL off.
    """
    return _clipped(x.ratio, x.advantages, clip_low, clip_high, dual_clip)


def gspo(x: Tokens, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Array, Cut]:
    """PPO's clip of the sequence's ratio s = exp(mean_t d), mean_t d <= 10: GSPO (arXiv 2507.18071, section
    4.1), as in NeMo RL.

    Every token carries its sequence's loss, and the gradient goes through the mean: where weights differ
    within a sequence, each token gets the mean weight. Aggregate by seq_mean_token_mean for the paper's
    value.
    """
    ratio = jnp.exp(jnp.minimum(sequence_mean(x.log_ratio, x.mask, x.segment_ids), SEQUENCE_LOG_RATIO_CAP))
    return _clipped(ratio, x.advantages, clip_low, clip_high)


def gspo_token(x: Tokens, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Array, Cut]:
    """PPO's clip of sg(s) exp(c - sg(c)), each token with its own gradient: GSPO-token (arXiv 2507.18071,
    section 4.3), verl's "gspo".

    It has the value of "gspo", and also its gradient where advantage and weight are constant within a
    sequence.
    """
    sg = jax.lax.stop_gradient
    log_ratio = sg(sequence_mean(x.log_ratio, x.mask, x.segment_ids)) + (x.logp - sg(x.logp))
    return _clipped(jnp.exp(jnp.minimum(log_ratio, SEQUENCE_LOG_RATIO_CAP)), x.advantages, clip_low,
                    clip_high)


def cispo(x: Tokens, clip_low: float = 1.0, clip_high: float = 5.0) -> tuple[Array, Cut]:
    """L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A c: CISPO (MiniMax-M1, arXiv 2506.13585, section 3.1).

    The weight is clipped, and no token loses its gradient. clip_low = 1 means no lower bound, as in the
    paper, which gives no number for the upper bound. NeMo RL's recipe has 5, verl's example 0.2.
    """
    weight = jax.lax.stop_gradient(jnp.clip(x.ratio, 1 - clip_low, 1 + clip_high))
    cut = {"clip/high": x.ratio > 1 + clip_high, "clip/low": x.ratio < 1 - clip_low}
    return -weight * x.advantages * x.logp, cut


def sapo(x: Tokens, tau_positive: float = 1.0, tau_negative: float = 1.05) -> tuple[Array, Cut]:
    """L = -A (4/tau) sigmoid(tau (r - 1)), tau by the sign of A: SAPO (arXiv 2511.20347), which takes
    seq_mean_token_mean.

    A gate takes the place of the clip. With s = sigmoid(tau (r - 1)) the gradient is -A 4 s (1 - s) r dlogp,
    which at r = 1 is that of -A r. It fades on both sides, the faster the larger tau is.
    """
    tau = jnp.where(x.advantages > 0, tau_positive, tau_negative)
    z = tau * (x.ratio - 1)
    # keep s away from 1, where s (1 - s) would round to 0
    gate = jnp.where(z > 0, 1 - jax.nn.sigmoid(-z), jax.nn.sigmoid(z))
    return -x.advantages * (4 / tau) * gate, {}


def gmpo(x: Tokens, clip_low: float = 0.4, clip_high: float = 0.4) -> tuple[Array, Cut]:
    """L = -A exp(mean_t d'), d' = min(d, clip_high) where A > 0, max(d, -clip_low) where A < 0: GMPO (arXiv
    2507.20673).

    Bounds are in nats. A sequence should have one advantage. Every token carries its sequence's loss, so
    aggregate by seq_mean_token_mean for the paper's value. verl's "geo_mean" instead averages over rows,
    fully masked ones included, and weights a sequence by the geometric mean of its correction weights; ours
    takes the arithmetic mean.
    """
    d = x.log_ratio  # as in verl, the mean is held below 20, the tokens are not held to +-20
    high, low = (x.advantages > 0) & (d > clip_high), (x.advantages < 0) & (d < -clip_low)
    clipped = jnp.where(high, clip_high, jnp.where(low, -clip_low, d))
    ratio = jnp.exp(jnp.minimum(sequence_mean(clipped, x.mask, x.segment_ids), LOG_RATIO_BOUND))
    return -x.advantages * ratio, {"clip/high": high, "clip/low": low}


def dppo_tv(x: Tokens, clip_low: float = 0.15, clip_high: float = 0.15,
            ratio_cap: float = 3.0) -> tuple[Array, Cut]:
    """L = -sg(min(r, ratio_cap)) A c for tokens inside a trust region, else 0: DPPO-Binary-TV (arXiv
    2602.04879).

    A token is outside if e^c - e^p > clip_high with A > 0, or < -clip_low with A < 0. This is the total
    variation between the two policies reduced to a coin flip: the sampled token or another. verl's default
    amounts to a cap of 3; its DPPO example sets 1e4.
    """
    moved = jnp.exp(x.logp) - jnp.exp(x.old_logp)
    return _trust_region(x, moved > clip_high, moved < -clip_low, ratio_cap)


def dppo_kl(x: Tokens, clip_low: float = 0.05, clip_high: float = 0.05,
            ratio_cap: float = 3.0) -> tuple[Array, Cut]:
    """As "dppo_tv", measured by KL(old || now) of the coin in nats: DPPO-Binary-KL (arXiv 2602.04879).

    The KL is p' log(p'/c') + (1 - p') log((1 - p')/(1 - c')) with p' = e^p and c' = e^c. As in verl, 1e-8 is
    added to both complements. A token is outside if the KL is above clip_high with A > 0 and c > p, or above
    clip_low with A < 0 and c < p.
    """
    other, old_other = -jnp.expm1(x.logp) + 1e-8, -jnp.expm1(x.old_logp) + 1e-8
    kl = -jnp.exp(x.old_logp) * x.log_ratio + -jnp.expm1(x.old_logp) * jnp.log(old_other / other)
    rose, fell = x.logp > x.old_logp, x.logp < x.old_logp
    return _trust_region(x, rose & (kl > clip_high), fell & (kl > clip_low), ratio_cap)


def reinforce(x: Tokens, ratio_cap: float | None = None) -> tuple[Array, Cut]:
    """L = -A c (Williams 1992). With ratio_cap = C it is -sg(min(r, C)) A c: importance sampling, for a
    policy that has moved away from p.

    "clip/high" marks capped weights, as in "cispo".
    """
    if ratio_cap is None:
        return -x.advantages * x.logp, {}
    weight = jax.lax.stop_gradient(jnp.minimum(x.ratio, ratio_cap))
    return -weight * x.advantages * x.logp, {"clip/high": x.ratio > ratio_cap}


def prime_rl(x: Tokens, clip_low: float = 0.2, clip_high: float = 0.2,
             penalty: float = 1e-3) -> tuple[Array, Cut]:
    """L = -r A keep + penalty d^2: prime-rl's default, DPPO-Binary-TV with Kimi K2.5's penalty (arXiv
    2602.02276).

    `keep` drops the tokens that "dppo_tv" drops. The objective is for two policies: old_logp is the engine's,
    with no further correction, aggregated by token_mean. Quirks kept: the gradient goes through r, which has
    no cap (theirs overflows, ours is held at e^20), and the penalty includes the dropped tokens. Left out:
    where A = 0 they count a token whose probability fell as dropped, which changes only their metric.
    """
    moved = jnp.exp(x.logp) - jnp.exp(x.old_logp)
    high, low = (x.advantages > 0) & (moved > clip_high), (x.advantages < 0) & (moved < -clip_low)
    loss = -x.ratio * x.advantages * ~(high | low) + penalty * x.log_ratio**2
    return loss, {"clip/high": high, "clip/low": low}


def clip_cov(
    x: Tokens, clip_low: float = 0.2, clip_high: float = 0.2, cov_fraction: float = 2e-4,
    cov_low: float = 1.0, cov_high: float = 5.0,
) -> tuple[Array, Cut]:
    """PPO's clip, and no gradient from the selected tokens: Clip-Cov (arXiv 2505.22617, section 4.2), against
    entropy collapse.

    A share cov_fraction of the live tokens is selected. They are drawn among those whose covariance lies
    between cov_low and cov_high (`covariance.select_tokens`). As in verl, a selected token stays in the
    denominator.
    """
    loss, cut = _clipped(x.ratio, x.advantages, clip_low, clip_high)
    cut = {name: flags & ~x.selected for name, flags in cut.items()}
    return jnp.where(x.selected, 0.0, loss), cut | {"clip/covariance": x.selected}


def kl_cov(x: Tokens, cov_fraction: float = 2e-4, cov_kl_coef: float = 1.0) -> tuple[Array, Cut]:
    """L = -r A, plus cov_kl_coef |d| for the selected tokens: KL-Cov (arXiv 2505.22617, section 4.2). Nothing
    is clipped.

    The share cov_fraction of the live tokens with the largest covariance is selected
    (`covariance.select_tokens`).
    """
    return -x.ratio * x.advantages + jnp.where(x.selected, cov_kl_coef * jnp.abs(x.log_ratio), 0.0), {}


OBJECTIVES: dict[str, Callable[..., tuple[Array, Cut]]] = {
    f.__name__: f
    for f in (ppo_clip, gspo, gspo_token, cispo, sapo, gmpo, dppo_tv, dppo_kl, reinforce, prime_rl, clip_cov,
              kl_cov)
}
SELECTING = ("clip_cov", "kl_cov")  # objectives that need `selected`, which depends on the whole batch


# The interface
# -------------------------------------------------------------------------------------------------------


class ObjectiveConfig(NamedTuple):
    """An objective and its parameters. `kind` names one of OBJECTIVES. A parameter that is None takes the
    objective's own default.

    clip_low, clip_high: how far the measure may lie below and above "no change": a ratio from 1 (ppo_clip,
    gspo, gspo_token, cispo), a log-ratio from 0 in nats (gmpo), a change of probability (dppo_tv, prime_rl),
    or a KL in nats (dppo_kl).
    """

    kind: str = "ppo_clip"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_cap: float | None = None
    tau_positive: float | None = None
    tau_negative: float | None = None
    penalty: float | None = None
    cov_fraction: float | None = None
    cov_low: float | None = None
    cov_high: float | None = None
    cov_kl_coef: float | None = None


def policy_loss(
    logp: Float[Array, "*B T"], old_logp: Float[Array, "*B T"], advantages: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"], segment_ids: Int[Array, "*B T"], config: ObjectiveConfig,
    clip: tuple[Float[Array, ""], Float[Array, ""]] | None = None,
    selected: Bool[Array, "*B T"] | None = None,
) -> tuple[Float[Array, "*B T"], dict[str, Bool[Array, "*B T"]]]:
    """(loss of each token [..., T] float32, 0 off the mask; booleans [..., T] to average over the mask).

    logp, old_logp, advantages [..., T] of any float type. mask [..., T] bool. segment_ids [..., T] int, as in
    `segments`. clip = (clip_low, clip_high): two scalars that replace the config's without a new compilation
    (`calibration`). selected [..., T] bool, for clip_cov and kl_cov alone: the tokens that
    `covariance.select_tokens` chose from the whole batch.

    The booleans are "clip/fraction", which marks any clipped token, and the objective's own. Gradients reach
    `logp` alone. Values off the mask reach neither value nor gradient; a NaN on the mask comes through.
    Raises ConfigError while it is traced: for an unknown kind, an impossible parameter, or missing
    `selected`.
    """
    parameters = objective_parameters(config)
    if (config.kind in SELECTING) != (selected is not None):
        need = "needs" if selected is None else "takes no"
        raise ConfigError(f'the objective "{config.kind}" {need} `selected` tokens',
                          "jaxfp8rl.losses.covariance chooses them")
    if clip is not None:
        if "clip_low" not in parameters:
            raise ConfigError(f'the objective "{config.kind}" has no clip bounds to replace',
                              "leave `clip` out")
        parameters |= {"clip_low": clip[0], "clip_high": clip[1]}
    old_logp, advantages = jax.lax.stop_gradient((old_logp, advantages))
    clean = lambda x: jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0)
    chosen = jnp.zeros_like(mask) if selected is None else selected & mask
    tokens = Tokens(clean(logp), clean(old_logp), clean(advantages), mask, segment_ids, chosen)
    loss, cut = OBJECTIVES[config.kind](tokens, **parameters)
    cut["clip/fraction"] = functools.reduce(jnp.logical_or, cut.values(), jnp.zeros_like(mask))
    return jnp.where(mask, loss, 0.0), {name: mask & flags for name, flags in cut.items()}


def objective_parameters(config: ObjectiveConfig) -> dict[str, Any]:
    """The objective's parameters by name, defaults filled in: floats, and None for a bound that is off.

    Raises ConfigError for an unknown kind, and for a parameter that is impossible or another objective's.
    """
    if config.kind not in OBJECTIVES:
        ours = value_here("loss.objective", config.kind)
        hint = f": here it is {ours}" if ours else nearest(config.kind, OBJECTIVES)
        raise ConfigError(f'objective "{config.kind}" is unknown{hint}', "docs/objectives.md lists them")
    signature = inspect.signature(OBJECTIVES[config.kind]).parameters
    known = {name: p.default for name, p in signature.items() if name != "x"}
    given = {name: v for name, v in config._asdict().items() if name != "kind" and v is not None}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f'{name} = {value} has no effect on the objective "{config.kind}"',
                f"leave it out; its parameters: {', '.join(known)}",
            )
        _check(config.kind, name, value, known[name])
    return known | given


def off_policy(
    logp: Float[Array, "*B T"], sampled_logp: Float[Array, "*B T"], advantages: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"], segment_ids: Int[Array, "*B T"], delta: float
) -> Bool[Array, "*B T"]:
    """Off-policy sequence masking, OPSM (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    Returns bool [..., T]: the live tokens that have a negative advantage, and whose sequence has mean_t
    (sampled_logp - logp) > delta, in nats. slime's delta is 1e-4. sampled_logp [..., T] are the engine's own
    log-probabilities, so that both staleness and the engine's mismatch count. A sequence with a NaN is not
    marked, for the finite guard to see it.
    """
    gone = jnp.where(mask, jnp.asarray(sampled_logp, jnp.float32) - jax.lax.stop_gradient(logp), 0.0)
    return mask & (advantages < 0) & (sequence_mean(gone, mask, segment_ids) > delta)


# Parts
# ------------------------------------------------------------------------------------------------------------


def _clipped(ratio: Array, advantages: Array, clip_low: float, clip_high: float,
             dual_clip: float | None = None) -> tuple[Array, Cut]:
    """PPO's clip, written as a selection: with a minimum, a ratio on its bound would lose half its
    gradient."""
    gain, loss = advantages > 0, advantages < 0
    dual = jnp.inf if dual_clip is None else dual_clip
    high = (gain & (ratio > 1 + clip_high)) | (loss & (ratio > dual))
    low = loss & (ratio < 1 - clip_low)
    clipped = jnp.where(high, jnp.where(gain, 1 + clip_high, dual), jnp.where(low, 1 - clip_low, ratio))
    return -clipped * advantages, {"clip/high": high, "clip/low": low}


def _trust_region(x: Tokens, too_high: Array, too_low: Array, ratio_cap: float) -> tuple[Array, Cut]:
    high, low = (x.advantages > 0) & too_high, (x.advantages < 0) & too_low
    weight = jax.lax.stop_gradient(jnp.minimum(x.ratio, ratio_cap)) * ~(high | low)
    return -weight * x.advantages * x.logp, {"clip/high": high, "clip/low": low}


_LEAST = {"dual_clip": 1.0, "ratio_cap": 1.0}  # all others: 0
_ABOVE = ("dual_clip", "tau_positive", "tau_negative", "cov_fraction")  # must exceed their least value
_MEANING = {
    "clip_low": "the distance of the lower bound from no change, not the bound itself",
    "clip_high": "the distance of the upper bound from no change, not the bound itself",
    "dual_clip": "the largest ratio that counts if the advantage is negative",
    "ratio_cap": "the largest weight",
    "tau_positive": "the gate's temperature if the advantage is positive",
    "tau_negative": "the gate's temperature otherwise",
    "penalty": "the factor of the squared log-ratio",
    "cov_fraction": "the share of live tokens that are selected",
    "cov_low": "the smallest covariance of a selected token",
    "cov_high": "the largest covariance of a selected token",
    "cov_kl_coef": "the factor of a selected token's |log-ratio|",
}


def _check(kind: str, name: str, value: float, default: float | None) -> None:
    """Raise ConfigError for an impossible value. Ratios, probabilities and their changes have a lower
    distance of at most 1, since none is negative."""
    probability = kind in ("dppo_tv", "prime_rl") and name in ("clip_low", "clip_high")
    ratio = kind in ("ppo_clip", "gspo", "gspo_token", "cispo") and name == "clip_low"
    least, most = _LEAST.get(name, 0.0), 1.0 if probability or ratio or name == "cov_fraction" else math.inf
    if not math.isfinite(value) or not least <= value <= most or (name in _ABOVE and value == least):
        allowed = f"{'above' if name in _ABOVE else 'at least'} {least:g}" + (
            f" and at most {most:g}" if most == 1 else "")
        usual = "by default it is off" if default is None else f"the default is {default:g}"
        raise ConfigError(
            f'{name} = {value} is impossible for the objective "{kind}"',
            f"{name} is {_MEANING[name]}: a finite number {allowed}; {usual}",
        )
