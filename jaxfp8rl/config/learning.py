"""The sections that say how a run learns: [loss], [correction], [optim]."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from jaxfp8rl.config.section import FloatType, Section
from jaxfp8rl.errors import ConfigError

if TYPE_CHECKING:  # they load jax, which a misspelt key need not wait for
    from jaxfp8rl.losses.correction import CorrectionConfig
    from jaxfp8rl.losses.objectives import ObjectiveConfig


class Loss(Section):
    """Advantages, the objective, its regularisers, and how the losses of tokens become one number."""

    advantage: Literal[
        "grpo", "grpo_sample_std", "dr_grpo", "leave_one_out", "rloo", "reinforce_pp",
        "reinforce_pp_baseline", "pass_at_k"
    ] = Field(default="grpo", description="see jaxfp8rl/losses/advantages.py")
    pass_at_k: int | None = Field(default=None, ge=1, description='the k of advantage = "pass_at_k"')
    objective: Literal[
        "ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "reinforce",
        "prime_rl", "clip_cov",
        "kl_cov",
    ] = Field(default="ppo_clip", description="see jaxfp8rl/losses/objectives.py")
    clip_low: float | None = Field(
        default=None, description="lower clip distance; absent, as below: the objective's own default")
    clip_high: float | None = Field(default=None, description="upper clip distance")
    dual_clip: float | None = Field(
        default=None, description="ppo_clip: largest ratio of a token with a negative advantage")
    ratio_cap: float | None = Field(default=None,
                                    description="dppo_tv, dppo_kl, reinforce: cap of the detached ratio")
    tau_positive: float | None = Field(
        default=None, description="sapo: temperature of the gate where the advantage is positive")
    tau_negative: float | None = Field(default=None, description="sapo: and where it is negative")
    penalty: float | None = Field(default=None, description="prime_rl: weight of the squared log-ratio")
    cov_fraction: float | None = Field(default=None,
                                       description="clip_cov, kl_cov: share of the tokens that is selected")
    cov_low: float | None = Field(default=None, description="clip_cov: least covariance of a selected token")
    cov_high: float | None = Field(default=None, description="clip_cov: its largest covariance")
    cov_kl_coef: float | None = Field(default=None, description="kl_cov: weight of a selected token's |log-ratio|")
    aggregation: Literal[
        "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"
    ] = Field(default="token_mean", description="see jaxfp8rl/losses/aggregation.py")
    horizon: int | None = Field(default=None, ge=1, description="seq_mean_token_sum_norm: tokens to divide by")
    old_policy: Literal["recomputed", "current", "rollout"] = Field(
        default="recomputed",
        description="pi_old: scored before a step's updates; or, with no scoring pass, what its one update has itself, or the "
        "engine's word (two policies)",
    )
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the policy that the run began with")
    kl: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "k1_score", "k2_score",
                "k3_score"] = Field(
        default="k3+",
        description="its estimator; with a + it has the gradient of k2, with _score also the score function's (NeMo RL)"
    )
    unbiased_kl: bool = Field(
        default=False,
        description="weigh a token's KL by pi/mu, as if pi had sampled it (DeepSeek-V3.2); of an estimator with a + or "
        "_score"
    )
    kl_weight_cap: float = Field(
        default=2.0, ge=1, description="unbiased_kl: largest such weight, so that no token owns the update")
    sampled_by: Literal["rollout", "old"] = Field(
        default="rollout",
        description="the policy that unbiased_kl and opsm_delta measure pi from: the engine's mu, or pi_old (slime)"
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    opsm_delta: float | None = Field(
        default=None, ge=0,
        description="off-policy sequence masking (DeepSeek-V3.2): where its advantage is negative, a sequence whose "
        "mean log mu/pi exceeds this, in nats, is not learned from; absent: off"
    )
    calibrate_clip_every: int = Field(
        default=0, ge=0,
        description="steps between calibrations of the clip bounds by a shadow learner without FP8; 0: never"
    )
    dynamic_sampling_rounds: int = Field(
        default=1, ge=1,
        description="sample up to so many batches of prompts for groups whose rewards differ (DAPO); 1: take what comes"
    )
    overlong_buffer: int = Field(
        default=0, ge=0, description="tokens before rollout.max_new_tokens over which the reward falls (DAPO)")
    overlong_penalty: float = Field(default=1.0, ge=0, description="by how much, at the limit")
    mask_cut: bool = Field(default=False, description="completions cut at the length limit are not learned from")

    @property
    def objective_config(self) -> ObjectiveConfig:
        from jaxfp8rl.losses.objectives import ObjectiveConfig

        named = {name: getattr(self, name) for name in ObjectiveConfig._fields if name != "kind"}
        return ObjectiveConfig(self.objective, **named)


class RejectionSection(Section):
    """One rejection; see losses.correction.Rejection."""

    level: Literal["token", "sequence"]
    statistic: Literal["ratio", "k1", "k2", "k3", "mult_error"]
    aggregation: Literal["sum", "mean", "max", "min"] = "mean"
    lower: float = Field(default=-math.inf, allow_inf_nan=True)
    upper: float = Field(default=math.inf, allow_inf_nan=True)
    inverse: bool = False
    clamp: bool = True


class AdaptiveSection(Section):
    """Adaptive mixing; see losses.correction.AdaptiveMix."""

    power: float = 1.0
    onset: float = 0.02
    slope: float = 0.01
    cv_scale: float = 1.0


class Correction(Section):
    """The correction of the mismatch between engine and learner: a preset, and what to change in it."""

    preset: str = Field(
        default="token_tis", description="a name from jaxfp8rl/losses/presets.py; docs/corrections.md compares them")
    allow_uncorrected_fp8: bool = Field(
        default=False,
        description='the baseline of papers: an engine in FP8 with a preset that corrects nothing ("none") is not refused'
    )
    weight: Literal["none", "token", "sequence", "geometric"] | None = Field(
        default=None, description="importance weight; absent, as below: the preset's"
    )
    action: Literal["truncate", "mask",
                    "clip"] | None = Field(default=None, description="what happens to it outside the bounds")
    lower: float | None = Field(default=None, description="its lower bound")
    upper: float | None = Field(default=None, allow_inf_nan=True, description="its upper bound")
    overflow: Literal["cap", "zero"] | None = Field(
        default=None, description="log-ratios clamped to +-20, or overflow to weight 0")
    rejections: tuple[RejectionSection, ...] | None = Field(
        default=None, strict=False,
        description='[{level = "sequence", statistic = "ratio", lower = 0.99, upper = 1.01}]'
    )
    in_turn: bool | None = Field(
        default=None, description="rejections one after another, each over what those before it left (SkyRL)")
    batch_normalize: bool | None = Field(default=None, description="divide by the batch's mean weight")
    denominator: Literal["kept", "all"] | None = Field(default=None,
                                                       description="whether rejected tokens still count")
    m2_limit: float | None = Field(default=None, description="M2PO: limit of the mean squared log-ratio")
    adaptive: AdaptiveSection | None = Field(
        default=None, description="{onset = 0.02}: adaptive mixing of weighted and plain gradient")

    def resolve(self) -> CorrectionConfig:
        """Raises ConfigError for an unknown preset or bounds that cannot be."""
        from jaxfp8rl.losses.correction import AdaptiveMix, Rejection
        from jaxfp8rl.losses.presets import get_preset

        own = ("preset", "allow_uncorrected_fp8")
        given = {name: value for name, value in self if name not in own and value is not None}
        if self.rejections is not None:
            given["rejections"] = tuple(Rejection(**r.model_dump()) for r in self.rejections)
        if self.adaptive is not None:
            given["adaptive"] = AdaptiveMix(**self.adaptive.model_dump())
        try:
            found = get_preset(self.preset)._replace(**given).check()
            if found.weight == "none" and (idle := given.keys() & {"action", "lower", "upper"}):
                raise ValueError(f'{", ".join(sorted(idle))}: no effect with weight "none"')
            return found
        except ConfigError:
            raise
        except ValueError as e:
            raise ConfigError(f"correction.preset {self.preset!r} with the changes given: {e}") from e


class Optim(Section):
    """AdamW with linear warm-up, global-norm clipping, states in few bits, and a guard against non-finite
    updates."""

    lr: float = Field(default=1e-6, gt=0, description="learning rate after the warm-up")
    warmup_steps: int = Field(default=0, ge=0, description="updates over which the learning rate rises to lr")
    schedule: Literal["constant", "cosine",
                      "linear"] = Field(default="constant", description="what follows the warm-up")
    total_steps: int | None = Field(
        default=None, ge=1,
        description="cosine, linear: updates, with the warm-up, after which the learning rate has fallen to lr * "
        "min_lr_ratio; absent: those of run.steps as the run is begun, which a resumed run keeps"
    )
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1,
                                description="cosine, linear: the share of lr at which the decay ends")
    b1: float = Field(default=0.9, ge=0, lt=1, description="Adam: what is left of the first moment after an update")
    b2: float = Field(default=0.95, ge=0, lt=1, description="Adam: and of the second")
    eps: float = Field(default=1e-8, gt=0, description="Adam: added to the root of the second moment")
    weight_decay: float = Field(
        default=0.0, ge=0, description="share of a weight, times lr, that an update takes away; norms are spared")
    clip_norm: float = Field(default=1.0, gt=0, description="gradients are scaled down to this global norm")
    max_bad_steps: int = Field(default=3, ge=1, description="non-finite updates in a row after which the run stops")
    master: FloatType = Field(
        default="float32", description="format the parameters are kept in between updates (docs/optimizer.md)")
    first_moment: Literal["float32", "bfloat16",
                          "float8"] = Field(default="float32", description="format of Adam's first moment")
    second_moment: FloatType = Field(default="float32", description="format of Adam's second moment")
    offload: bool = Field(default=False, description="moments in pinned host memory, on the device a layer at a time")
