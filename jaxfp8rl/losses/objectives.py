"""Policy-gradient objectives: a loss a token from (logp, old_logp, advantages).

    loss, cut = policy_loss(logp, old_logp, advantages, mask, segment_ids, ObjectiveConfig("gspo"))

Notation: c = logp, the learner now; p = old_logp, the learner at the weights that sampled (three policies),
or the engine's own log-probability (two policies, "bypass"); d = c - p and r = exp(d), with d held to +-20; A
the advantage; sg( ) a constant to the gradient. Sums, means and denominators over tokens are
`aggregation.token_scale`'s.

Each objective is one pure function of `Tokens` and its parameters, whose defaults stand in its signature. It
returns the loss and the tokens it cut: "clip/high" (the ratio or probability was above its bound), "clip/low"
(below).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.errors import ConfigError, nearest
from jaxfp8rl.losses.mismatch import LOG_RATIO_BOUND
from jaxfp8rl.losses.segments import segment_total
from jaxfp8rl.other_names import value_here

SEQUENCE_LOG_RATIO_CAP = 10.0  # of a mean over a sequence, as verl's GSPO
KL_CAP = 10.0  # of the k3 estimate, as verl and NeMo RL; NeMo RL caps k1 and k2 as well
KL_WEIGHT_CAP = 2.0  # of pi / mu on a token's KL, the bound that token TIS has on its weights
Cut = dict[str, Array]


class Tokens(NamedTuple):
    """float32 [..., T], all 0 off the mask; old_logp and advantages are constants to the gradient. `selected`
    bool [..., T]: the tokens that jaxfp8rl.losses.covariance chose, False everywhere for an objective that
    chooses none."""

    logp: Array
    old_logp: Array
    advantages: Array
    mask: Array
    segment_ids: Array
    selected: Array

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
    holds the loss of a token with A < 0 to -c A, whatever its ratio (arXiv 1912.09729); verl has c = 3 on,
    NeMo RL off.
    """
    return _clipped(x.ratio, x.advantages, clip_low, clip_high, dual_clip)


def gspo(x: Tokens, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Array, Cut]:
    """PPO's clip of the sequence's ratio s = exp(mean_t d): GSPO (arXiv 2507.18071, section 4.1), as NeMo RL
    has it.

    Every token carries its sequence's loss, and the gradient goes through the mean: with weights that differ
    within a sequence, each token gets the mean weight. Aggregate by seq_mean_token_mean for the paper's
    value. mean_t d <= 10.
    """
    ratio = jnp.exp(jnp.minimum(sequence_mean(x.log_ratio, x.mask, x.segment_ids), SEQUENCE_LOG_RATIO_CAP))
    return _clipped(ratio, x.advantages, clip_low, clip_high)


def gspo_token(x: Tokens, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Array, Cut]:
    """GSPO-token (arXiv 2507.18071, section 4.3), verl's "gspo": ratio sg(s) exp(c - sg(c)), each token its
    own gradient.

    The value of "gspo"; also its gradient where advantage and weight are constant within a sequence.
    """
    sg = jax.lax.stop_gradient
    log_ratio = sg(sequence_mean(x.log_ratio, x.mask, x.segment_ids)) + (x.logp - sg(x.logp))
    return _clipped(jnp.exp(jnp.minimum(log_ratio, SEQUENCE_LOG_RATIO_CAP)), x.advantages, clip_low,
                    clip_high)


def cispo(x: Tokens, clip_low: float = 1.0, clip_high: float = 5.0) -> tuple[Array, Cut]:
    """L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A c: CISPO (MiniMax-M1, arXiv 2506.13585, section 3.1).

    The weight is clipped, no token loses its gradient. clip_low = 1 means no lower bound, as the paper has
    it. The paper gives no upper bound; 5 is NeMo RL's recipe, verl's example has 0.2.
    """
    weight = jax.lax.stop_gradient(jnp.clip(x.ratio, 1 - clip_low, 1 + clip_high))
    cut = {"clip/high": x.ratio > 1 + clip_high, "clip/low": x.ratio < 1 - clip_low}
    return -weight * x.advantages * x.logp, cut


def sapo(x: Tokens, tau_positive: float = 1.0, tau_negative: float = 1.05) -> tuple[Array, Cut]:
    """L = -A (4/tau) sigmoid(tau (r - 1)), tau by the sign of A: SAPO (arXiv 2511.20347), which takes
    seq_mean_token_mean.

    A gate in place of a clip: with s = sigmoid(tau (r - 1)) the gradient is -A 4 s (1 - s) r dlogp, that of
    -A r at r = 1, and it fades on both sides, the faster the larger tau.
    """
    tau = jnp.where(x.advantages > 0, tau_positive, tau_negative)
    z = tau * (x.ratio - 1)
    # or s (1 - s) would lose what is left where s is near 1
    gate = jnp.where(z > 0, 1 - jax.nn.sigmoid(-z), jax.nn.sigmoid(z))
    return -x.advantages * (4 / tau) * gate, {}


def gmpo(x: Tokens, clip_low: float = 0.4, clip_high: float = 0.4) -> tuple[Array, Cut]:
    """L = -A exp(mean_t d'), d' = min(d, clip_high) where A > 0, max(d, -clip_low) where A < 0: GMPO (arXiv
    2507.20673).

    Bounds are in nats. One advantage a sequence is meant; every token carries its sequence's loss, so
    aggregate by seq_mean_token_mean for the paper's value. verl's "geo_mean" instead averages over rows,
    fully masked ones included, and weighs a sequence by the geometric mean of its correction weights, where
    ours takes the arithmetic mean.
    """
    d = x.log_ratio  # not held to +-20 one by one, as in verl; their mean is held below 20
    high, low = (x.advantages > 0) & (d > clip_high), (x.advantages < 0) & (d < -clip_low)
    clipped = jnp.where(high, clip_high, jnp.where(low, -clip_low, d))
    ratio = jnp.exp(jnp.minimum(sequence_mean(clipped, x.mask, x.segment_ids), LOG_RATIO_BOUND))
    return -x.advantages * ratio, {"clip/high": high, "clip/low": low}


def dppo_tv(x: Tokens, clip_low: float = 0.15, clip_high: float = 0.15,
            ratio_cap: float = 3.0) -> tuple[Array, Cut]:
    """L = -sg(min(r, ratio_cap)) A c for tokens inside a trust region, else 0: DPPO-Binary-TV (arXiv
    2602.04879).

    Outside is e^c - e^p > clip_high with A > 0, or < -clip_low with A < 0: the total variation between the
    two policies seen as a coin, the sampled token or another. A cap of 3 is what verl's default comes to; its
    DPPO example sets 1e4.
    """
    moved = jnp.exp(x.logp) - jnp.exp(x.old_logp)
    return _trust_region(x, moved > clip_high, moved < -clip_low, ratio_cap)


def dppo_kl(x: Tokens, clip_low: float = 0.05, clip_high: float = 0.05,
            ratio_cap: float = 3.0) -> tuple[Array, Cut]:
    """As "dppo_tv" with KL(old || now) of the coin in nats as the measure: DPPO-Binary-KL (arXiv 2602.04879).

    p' log(p'/c') + (1 - p') log((1 - p')/(1 - c')), p' = e^p and c' = e^c, 1e-8 added to both complements as
    in verl; outside is above clip_high with A > 0 and c > p, or above clip_low with A < 0 and c < p.
    """
    other, old_other = -jnp.expm1(x.logp) + 1e-8, -jnp.expm1(x.old_logp) + 1e-8
    kl = -jnp.exp(x.old_logp) * x.log_ratio + -jnp.expm1(x.old_logp) * jnp.log(old_other / other)
    rose, fell = x.logp > x.old_logp, x.logp < x.old_logp
    return _trust_region(x, rose & (kl > clip_high), fell & (kl > clip_low), ratio_cap)


def reinforce(x: Tokens, ratio_cap: float | None = None) -> tuple[Array, Cut]:
    """L = -A c (Williams 1992); with ratio_cap = C, -sg(min(r, C)) A c: importance sampling for a policy that
    has left p.

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

    keep drops what "dppo_tv" drops. Meant for two policies: old_logp is the engine's, no further correction,
    token_mean. Quirks kept: the gradient goes through r, which has no cap (theirs overflows, ours is held at
    e^20), and the penalty also covers the tokens that keep drops. Left out: where A = 0 they count a token
    whose probability fell as dropped, which changes their metric alone.
    """
    moved = jnp.exp(x.logp) - jnp.exp(x.old_logp)
    high, low = (x.advantages > 0) & (moved > clip_high), (x.advantages < 0) & (moved < -clip_low)
    return -x.ratio * x.advantages * ~(high
                                       | low) + penalty * x.log_ratio**2, {"clip/high": high, "clip/low": low}


def clip_cov(
    x: Tokens, clip_low: float = 0.2, clip_high: float = 0.2, cov_fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> tuple[Array, Cut]:
    """PPO's clip, and no gradient from the selected tokens: Clip-Cov (arXiv 2505.22617, section 4.2), against
    entropy collapse.

    Selected is a share cov_fraction of the live tokens, drawn among those whose covariance lies between
    cov_low and cov_high (`covariance.select_tokens`). As in verl, a selected token stays in the denominator.
    """
    loss, cut = _clipped(x.ratio, x.advantages, clip_low, clip_high)
    return jnp.where(x.selected, 0.0, loss), {name: flags & ~x.selected for name, flags in cut.items()} | {
        "clip/covariance": x.selected
    }


def kl_cov(x: Tokens, cov_fraction: float = 2e-4, cov_kl_coef: float = 1.0) -> tuple[Array, Cut]:
    """L = -r A, for the selected tokens + cov_kl_coef |d|: KL-Cov (arXiv 2505.22617, section 4.2). Nothing is
    clipped.

    Selected is the share cov_fraction of the live tokens with the largest covariance
    (`covariance.select_tokens`).
    """
    return -x.ratio * x.advantages + jnp.where(x.selected, cov_kl_coef * jnp.abs(x.log_ratio), 0.0), {}


OBJECTIVES: dict[str, Callable[..., tuple[Array, Cut]]] = {
    f.__name__: f
    for f in (ppo_clip, gspo, gspo_token, cispo, sapo, gmpo, dppo_tv, dppo_kl, reinforce, prime_rl, clip_cov,
              kl_cov)
}
SELECTING = ("clip_cov", "kl_cov")  # a token's loss depends on the whole batch, through `selected`


# The interface
# -------------------------------------------------------------------------------------------------------


class ObjectiveConfig(NamedTuple):
    """kind names one of OBJECTIVES. A parameter left None takes that objective's own default.

    clip_low, clip_high: distances below and above "nothing has changed": of a ratio from 1 (ppo_clip, gspo,
    gspo_token, cispo), of a log-ratio from 0 in nats (gmpo), of a probability (dppo_tv, prime_rl), or a KL in
    nats (dppo_kl).
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
    logp: Array, old_logp: Array, advantages: Array, mask: Array, segment_ids: Array, config: ObjectiveConfig,
    clip: tuple[Array, Array] | None = None, selected: Array | None = None,
) -> tuple[Array, Cut]:
    """The loss of each token [..., T] float32, 0 off the mask, and booleans [..., T] to average over the
    mask.

    logp, old_logp, advantages [..., T]; mask bool; segment_ids as in `segments`. `clip` = (clip_low,
    clip_high), two scalars that replace the config's without compiling anew (`calibration`). `selected` bool
    [..., T]: of clip_cov and kl_cov, the tokens that `covariance.select_tokens` chose from the whole batch.
    The booleans: "clip/fraction", any cut, and the objective's own. Gradients reach `logp` alone. What stands
    off the mask reaches neither value nor gradient; a NaN on it comes through. Raises ConfigError for an
    unknown kind, an impossible parameter, or `selected` missing, when traced.
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
    clean = (jnp.where(mask, jnp.asarray(a, jnp.float32), 0.0) for a in (logp, old_logp, advantages))
    chosen = jnp.zeros_like(mask) if selected is None else selected & mask
    loss, cut = OBJECTIVES[config.kind](Tokens(*clean, mask, segment_ids, chosen), **parameters)
    cut["clip/fraction"] = functools.reduce(jnp.logical_or, cut.values(), jnp.zeros_like(mask))
    return jnp.where(mask, loss, 0.0), {name: mask & flags for name, flags in cut.items()}


def objective_parameters(config: ObjectiveConfig) -> dict[str, float | None]:
    """The objective's parameters, defaults filled in. Raises ConfigError: unknown kind, foreign or impossible
    parameter."""
    if config.kind not in OBJECTIVES:
        ours = value_here("loss.objective", config.kind)
        hint = f": here it is {ours}" if ours else nearest(config.kind, OBJECTIVES)
        raise ConfigError(f'objective "{config.kind}" is unknown{hint}')
    signature = inspect.signature(OBJECTIVES[config.kind]).parameters
    known = {name: p.default for name, p in signature.items() if name != "x"}
    given = {name: v for name, v in config._asdict().items() if name != "kind" and v is not None}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f'{name} = {value} means nothing to the objective "{config.kind}"',
                f"leave it out; its parameters: {', '.join(known)}",
            )
        _check(config.kind, name, value, known[name])
    return known | given


def off_policy(
    logp: Array, sampled_logp: Array, advantages: Array, mask: Array, segment_ids: Array, delta: float
) -> Array:
    """Off-policy sequence masking, OPSM (DeepSeek-V3.2, arXiv 2512.02556, section 3.1): the live tokens, bool
    [..., T], whose advantage is negative and in whose sequence mean_t (sampled_logp - logp) > delta, in nats.

    sampled_logp [..., T]: the engine's own log-probabilities, so that staleness and the engine's mismatch
    both count. slime's delta is 1e-4. A sequence with a NaN stays, for the finite guard to see it.
    """
    gone = jnp.where(mask, jnp.asarray(sampled_logp, jnp.float32) - jax.lax.stop_gradient(logp), 0.0)
    return mask & (advantages < 0) & (sequence_mean(gone, mask, segment_ids) > delta)


def kl_penalty(
    logp: Array, ref_logp: Array, mask: Array, kind: str, sampled_logp: Array | None = None,
    weight_cap: float = KL_WEIGHT_CAP
) -> Array:
    """Estimate of KL(now || reference) from a sampled token [..., T], float32, 0 off the mask; gradients
    reach `logp` alone.

    With d = logp - ref_logp (Schulman 2020, "Approximating KL divergence"): k1 = d; abs = |d|; k2 = d^2/2; k3
    = e^-d + d - 1 with d held to +-20 and the estimate to 10, as in verl and NeMo RL: beyond that it gives no
    gradient.

    A suffix keeps the value and changes the gradient. Sampled from the policy now, the gradient of "k1" is 0
    in expectation and that of "k3" the gradient of KL(reference || now).

    - "+": the gradient of k2, d dlogp, whose expectation is the gradient of the KL (verl's "+").
    - "_score", of k1, k2 and k3: the estimate times e^(logp - sg(logp)), as NeMo RL has it: the gradient of
      the estimate and the score function's, k dlogp. k1: (d + 1) dlogp; k2: (d + d^2/2) dlogp; k3: d dlogp.
      k1 and k3 are unbiased. As in NeMo RL d is held to +-20 and each estimate to +-10, and beyond both the
      whole gradient is 0.

    With sampled_logp [..., T] of the policy that sampled, each token is weighed by the constant min(e^(logp -
    sampled_logp), weight_cap), the exponent held to +-20: up to the cap, value and gradient (of a kind with
    "+" or "_score") are unbiased whatever policy sampled. The cap keeps one token that the policy now finds
    likelier by far from owning the update. "k3+" is DeepSeek-V3.2's unbiased estimate (arXiv 2512.02556,
    section 3.1) with that cap: r k3 with the gradient through r as well, r (k3 + 1 - e^-d) dlogp = r d dlogp.
    Raises ConfigError for another kind, and a cap that is not at least 1.
    """
    if kind not in KL_KINDS:
        raise ConfigError(f'KL estimator "{kind}" is unknown{nearest(kind, KL_KINDS)}')
    if not weight_cap >= 1:
        raise ConfigError(
            f"kl_weight_cap = {weight_cap} would shrink the KL of tokens from the policy itself",
            f"choose at least 1; the default is {KL_WEIGHT_CAP:g}")
    sg, now = jax.lax.stop_gradient, jnp.where(mask, jnp.asarray(logp, jnp.float32), 0.0)
    d = jnp.where(mask, now - sg(jnp.asarray(ref_logp, jnp.float32)), 0.0)
    value = _with_gradient(kind, d, now)
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
        k2 = _KL["k2"](d)
        return k2 - sg(k2) + sg(_KL[base](d))
    return _KL[base](d)


# Parts
# ---------------------------------------------------------------------------------------------------------------


def sequence_mean(x: Array, mask: Array, segment_ids: Array) -> Array:
    """Mean of x over the live tokens of each sequence, handed to all its tokens; [..., T] float32, 0 for a
    masked one."""
    count = segment_total(mask.astype(jnp.int32), segment_ids)
    return _segment_sum(jnp.where(mask, x, 0.0), segment_ids) / jnp.maximum(count, 1)


@jax.custom_vjp
def _segment_sum(x: Array, segment_ids: Array) -> Array:
    return segment_total(x, segment_ids)


# A sum over segments is its own transpose. Autodiff would turn the gather in it into a scatter, in no fixed
# order on a GPU.
_segment_sum.defvjp(
    lambda x, segment_ids: (segment_total(x, segment_ids), segment_ids),
    lambda ids, g: (segment_total(g, ids), None)
)


def _clipped(ratio: Array, advantages: Array, clip_low, clip_high,
             dual_clip: float | None = None) -> tuple[Array, Cut]:
    """PPO's clip. Written as a choice, not as a minimum of two, so that a ratio on its bound keeps its whole
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


_KL: dict[str, Callable[[Array], Array]] = {
    "k1": lambda d: d,
    "abs": jnp.abs,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: jnp.minimum(_k3(jnp.clip(d, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)), KL_CAP),
}
_k3 = lambda d: jnp.expm1(-d) + d
KL_KINDS = (*_KL, *(f"{kind}+" for kind in _KL), "k1_score", "k2_score", "k3_score")

_LEAST = {"dual_clip": 1.0, "ratio_cap": 1.0}  # of the others: 0
_ABOVE = ("dual_clip", "tau_positive", "tau_negative", "cov_fraction")  # their least value itself is out
_MEANING = {
    "clip_low": "how far the measure may fall below no change, not the bound itself",
    "clip_high": "how far the measure may rise above no change, not the bound itself",
    "dual_clip": "the largest ratio that counts where the advantage is negative",
    "ratio_cap": "the largest weight",
    "tau_positive": "the gate's temperature where the advantage is positive",
    "tau_negative": "the gate's temperature elsewhere",
    "penalty": "the factor of the squared log-ratio",
    "cov_fraction": "the share of the live tokens that is selected",
    "cov_low": "the least covariance of a selected token",
    "cov_high": "its largest covariance",
    "cov_kl_coef": "the factor of a selected token's |log-ratio|",
}


def _check(kind: str, name: str, value: float, default: float | None) -> None:
    """Ratios and probabilities are not negative, so their lower distance ends at 1; so does any change of a
    probability."""
    probability = kind in ("dppo_tv", "prime_rl") and name in ("clip_low", "clip_high")
    ratio = kind in ("ppo_clip", "gspo", "gspo_token", "cispo") and name == "clip_low"
    least, most = _LEAST.get(name, 0.0), 1.0 if probability or ratio or name == "cov_fraction" else math.inf
    if not math.isfinite(value) or not least <= value <= most or (name in _ABOVE and value == least):
        allowed = f"{'above' if name in _ABOVE else 'at least'} {least:g}" + (
            f" and at most {most:g}" if most == 1 else "")
        usual = "left out, it is off" if default is None else f"the default is {default:g}"
        raise ConfigError(
            f'{name} = {value} is impossible for the objective "{kind}"',
            f"{name} is {_MEANING[name]}: a finite number {allowed}; {usual}",
        )
