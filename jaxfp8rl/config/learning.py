"""The sections about learning: [loss], [optim], [sft]. Their rules follow them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from jaxfp8rl.config.rule import Check, Rule, about, excludes, filled, no_effect
from jaxfp8rl.config.section import FloatType, Section
from jaxfp8rl.errors import ConfigError

if TYPE_CHECKING:  # it loads jax, which a misspelt key need not wait for
    from jaxfp8rl.losses.objectives import ObjectiveConfig


class Loss(Section):
    """Advantages, the objective, its regularisers, and how the losses of tokens become one number."""

    advantage: Literal[
        "grpo", "grpo_sample_std", "dr_grpo", "leave_one_out", "rloo", "reinforce_pp",
        "reinforce_pp_baseline", "pass_at_k", "none",
    ] = Field(
        default="grpo",
        description="how the rewards of a group become advantages (docs/objectives.md). none: rewards teach "
                    "nothing, the KL term alone does (docs/distillation.md)")
    pass_at_k: int | None = Field(default=None, ge=1, description='the k of advantage = "pass_at_k"')
    objective: Literal[
        "ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "reinforce",
        "prime_rl", "clip_cov", "kl_cov",
    ] = Field(
        default="ppo_clip",
        description="loss of a token, by its ratio pi/pi_old and its advantage (docs/objectives.md)")
    clip_low: float | None = Field(
        default=None,
        description="lower clip distance. Here and below, absent means the objective's own default")
    clip_high: float | None = Field(default=None, description="upper clip distance")
    dual_clip: float | None = Field(
        default=None, description="ppo_clip: largest ratio of a token with a negative advantage")
    ratio_cap: float | None = Field(default=None,
                                    description="dppo_tv, dppo_kl, reinforce: cap of the detached ratio")
    tau_positive: float | None = Field(
        default=None, description="sapo: temperature of the gate where the advantage is positive")
    tau_negative: float | None = Field(
        default=None, description="sapo: temperature of the gate where the advantage is negative")
    penalty: float | None = Field(default=None, description="prime_rl: weight of the squared log-ratio")
    cov_fraction: float | None = Field(
        default=None, description="clip_cov, kl_cov: share of the tokens that are selected")
    cov_low: float | None = Field(
        default=None, description="clip_cov: smallest covariance of a selected token")
    cov_high: float | None = Field(
        default=None, description="clip_cov: largest covariance of a selected token")
    cov_kl_coef: float | None = Field(
        default=None, description="kl_cov: weight of a selected token's |log-ratio|")
    aggregation: Literal[
        "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"
    ] = Field(
        default="token_mean",
        description="how the losses of tokens become one number; seq_: those of each sequence first "
                    "(docs/objectives.md)")
    horizon: int | None = Field(
        default=None, ge=1, description="seq_mean_token_sum_norm: number of tokens to divide by")
    old_policy: Literal["recomputed", "current", "rollout", "loglinear"] = Field(
        default="recomputed",
        description="pi_old. recomputed: scored before a step's updates. Without a scoring pass, current: "
        "the policy in the step's one update itself; rollout: the engine's log-probabilities (two policies); "
        "loglinear: between the engine's and the current policy's, by the age of the token (AReaL)")
    kl_coef: float = Field(
        default=0.0, ge=0, description="weight of the KL to the policy that the run began with, or to a "
                                       "teacher (reference.path)")
    kl: Literal[
        "k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "k1_score", "k2_score", "k3_score"
    ] = Field(
        default="k3+",
        description="estimator of that KL; with a + it has the gradient of k2, with _score also that of "
        "the score function (NeMo RL)")
    kl_baseline: bool = Field(
        default=False,
        description="estimators with a +: subtract an update's mean of log pi - log reference from each "
                    "token's in the gradient, which then varies less (docs/distillation.md)")
    unbiased_kl: bool = Field(
        default=False,
        description="weigh a token's KL by pi/mu, as if pi had sampled it (DeepSeek-V3.2); for an "
        "estimator with a + or _score")
    kl_weight_cap: float = Field(
        default=2.0, ge=1,
        description="unbiased_kl: largest such weight, so that no token dominates the update")
    sampled_by: Literal["rollout", "old"] = Field(
        default="rollout",
        description="the policy that unbiased_kl and opsm_delta measure pi from: the engine's mu, or pi_old "
        "(slime)"
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    opsm_delta: float | None = Field(
        default=None, ge=0,
        description="off-policy sequence masking (DeepSeek-V3.2): a sequence with a negative advantage is "
        "not learned from if its mean log mu/pi exceeds this, nats; absent: off")
    calibrate_clip_every: int = Field(
        default=0, ge=0,
        description="steps between calibrations of the clip bounds by a shadow learner without FP8; 0: never"
    )
    calibrate_clip_newest: float = Field(
        default=1.0, gt=0, le=1,
        description="weight of the newest calibration in the moving average of the bounds; 1: the newest "
                    "alone")
    calibrate_clip_start: tuple[float, ...] = Field(
        default=(), strict=False,
        description="clip distances [low, high] before the first calibration, [0.4, 0.8] for example; []: "
                    "those of the objective")
    dynamic_sampling_rounds: int = Field(
        default=1, ge=1,
        description="sample up to this many batches of prompts to find groups whose rewards differ (DAPO); "
        "1: take the first batch as it is")
    turn_advantages: Literal["trajectory", "returns"] = Field(
        default="trajectory",
        description="advantage of the turns of a trajectory. trajectory: the whole trajectory's for all; "
                    "returns: each turn's own, by its return, among the turns of the same number in its "
                    "group (docs/turns.md)")
    turn_discount: float = Field(
        default=1.0, gt=0, le=1, description="returns: factor of the return of the next turn")
    overlong_buffer: int = Field(
        default=0, ge=0,
        description="tokens before rollout.max_new_tokens over which the reward falls (DAPO)")
    overlong_penalty: float = Field(
        default=1.0, ge=0, description="how far the reward has fallen at the limit")
    mask_cut: bool = Field(
        default=False, description="do not learn from completions that the length limit cut off")

    @property
    def carries_ratio(self) -> bool:
        """Whether the objective's own ratio is the ratio to the engine."""
        return self.old_policy == "rollout" and (self.objective != "reinforce" or self.ratio_cap is not None)

    @property
    def needs_ages(self) -> bool:
        """Whether an update needs the age of each token (TrainBatch.ages)."""
        return self.old_policy == "loglinear"

    @property
    def objective_config(self) -> ObjectiveConfig:
        from jaxfp8rl.losses.objectives import ObjectiveConfig

        named = {name: getattr(self, name) for name in ObjectiveConfig._fields if name != "kind"}
        return ObjectiveConfig(self.objective, **named)


class Optim(Section):
    """AdamW with linear warm-up, global-norm clipping, states in few bits, and a guard against non-finite
    updates."""

    lr: float = Field(default=1e-6, gt=0, description="learning rate after the warm-up")
    warmup_steps: int = Field(default=0, ge=0, description="updates over which the learning rate rises to lr")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="course of the learning rate after the warm-up")
    total_steps: int | None = Field(
        default=None, ge=1,
        description="cosine, linear: updates, with the warm-up, after which the learning rate has fallen "
        "to lr * min_lr_ratio; absent: those of run.steps when the run begins, which a resumed run keeps")
    min_lr_ratio: float = Field(
        default=0.1, ge=0, le=1, description="cosine, linear: share of lr at which the decay ends")
    b1: float = Field(default=0.9, ge=0, lt=1, description="Adam: decay of the first moment per update")
    b2: float = Field(default=0.95, ge=0, lt=1, description="Adam: decay of the second moment per update")
    eps: float = Field(default=1e-8, gt=0, description="Adam: added to the root of the second moment")
    weight_decay: float = Field(
        default=0.0, ge=0,
        description="share of a weight, times lr, that an update subtracts; norms are spared")
    clip_norm: float = Field(default=1.0, gt=0, description="gradients are scaled down to this global norm")
    max_bad_steps: int = Field(
        default=3, ge=1, description="non-finite updates in a row after which the run stops")
    master: FloatType = Field(
        default="float32", description="format of the parameters between updates (docs/optimizer.md)")
    first_moment: Literal["float32", "bfloat16",
                          "float8"] = Field(default="float32", description="format of Adam's first moment")
    second_moment: FloatType = Field(default="float32", description="format of Adam's second moment")
    gradient_sums: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="type in which the gradients of micro-batches are summed; bfloat16 rounds stochastically "
        "and takes half the memory (docs/optimizer.md)")
    offload: bool = Field(
        default=False,
        description="keep the moments in pinned host memory, and move them to the device a layer at a time")


class Sft(Section):
    """The supervised warm start of `jaxfp8rl sft`, also run by `train` before step 1 when steps > 0."""

    steps: int = Field(default=0, ge=0, description="updates; 0: no warm start")
    examples_per_step: int = Field(default=64, ge=1, description="demonstrations per update")
    lr: float = Field(
        default=1e-3, gt=0, description="learning rate after the warm-up, from which it falls to 0")
    warmup_steps: int = Field(default=0, ge=0, description="updates over which the learning rate rises")
    save_every: int = Field(
        default=200, ge=0,
        description="`jaxfp8rl sft`: updates between checkpoints, of which the newest is kept until the warm "
        "start is done; one more is written when the command is told to end. 0: none, and so no resuming")


# Rules


def _advantage(cfg: Any) -> None:
    from jaxfp8rl.losses.advantages import check_advantage

    check_advantage(cfg.loss.advantage, cfg.loss.pass_at_k, cfg.rollout.samples_per_prompt)


def _aggregation(cfg: Any) -> None:
    from jaxfp8rl.losses.aggregation import check_aggregation

    check_aggregation(cfg.loss.aggregation, cfg.loss.horizon)


def _objective(cfg: Any) -> None:
    from jaxfp8rl.losses.objectives import objective_parameters

    objective_parameters(cfg.loss.objective_config)


def _selects_tokens(cfg: Any) -> bool:
    from jaxfp8rl.losses.objectives import SELECTING

    return cfg.loss.objective in SELECTING


OBJECTIVE = (
    about("loss.advantage", _advantage),
    about("loss.aggregation", _aggregation),
    about("loss.objective", _objective),
    Rule(lambda c: c.loss.kl_coef and c.loss.unbiased_kl and not c.loss.kl.endswith(("+", "_score")),
         'loss.unbiased_kl with loss.kl = "{loss.kl}": its gradient is not the KL\'s, whatever weight it has',
         'set loss.kl = "{loss.kl}+", the same value with the gradient of k2'),
    Rule(lambda c: c.loss.kl_coef and c.loss.kl_baseline and not c.loss.kl.endswith("+"),
         'loss.kl_baseline with loss.kl = "{loss.kl}": it is for estimators with a +', 'set loss.kl = "k1+"'),
    Rule(lambda c: c.loss.old_policy == "current" and _selects_tokens(c),
         'loss.objective "{loss.objective}" needs pi_old before the update, which loss.old_policy = '
         '"current" does not have', 'set loss.old_policy = "recomputed"'),
    Rule(lambda c: c.loss.old_policy == "current" and c.loss.sampled_by == "old",
         'loss.sampled_by = "old" needs pi_old before the update, which loss.old_policy = "current" does '
         'not have',
         'set loss.old_policy = "recomputed"'),
)

# The completions of a prompt are each other's baseline.
GROUPS = (
    Rule(lambda c: c.rollout.samples_per_prompt == 1 and c.loss.advantage not in ("reinforce_pp", "none"),
         'rollout.samples_per_prompt = 1: loss.advantage "{loss.advantage}" is 0 in a group of one, and '
         "nothing is learned", 'sample more, or set loss.advantage = "reinforce_pp"'),
    Rule(lambda c: c.rollout.samples_per_prompt == 1 and c.loss.dynamic_sampling_rounds > 1,
         "loss.dynamic_sampling_rounds = {loss.dynamic_sampling_rounds}: of a group of one no rewards "
         "differ, so every round is sampled and nothing is learned",
         "set it to 1, or rollout.samples_per_prompt higher"),
    Rule(lambda c: c.loss.advantage == "pass_at_k" and c.loss.overlong_buffer,
         'loss.overlong_buffer: rewards of loss.advantage = "pass_at_k" are 0 or 1, not shaped for length',
         "set it to 0, or choose another advantage"),
    Rule(lambda c: c.loss.advantage == "pass_at_k" and c.loss.turn_advantages == "returns",
         'loss.turn_advantages = "returns": rewards of loss.advantage = "pass_at_k" are those of a '
         'whole trajectory',
         'set it to "trajectory", or choose another advantage'),
)

CALIBRATION = excludes(
    "loss.calibrate_clip_every has nothing to calibrate", lambda c: c.loss.calibrate_clip_every,
    Rule(lambda c: c.loss.objective not in ("ppo_clip", "cispo"),
         'loss.objective "{loss.objective}" does not clip the ratio of a token', "set it to 0"),
    Rule(lambda c: not c.precision.resolve().forward_fp8,
         'precision.recipe "{precision.recipe}" has no FP8 forward to compare with', "set it to 0"),
    Rule(lambda c: c.train.updates_per_step == 1,
         "with train.updates_per_step = 1 every ratio is 1", "set it to 0"),
    Rule(lambda c: c.loss.calibrate_clip_start and (
             len(c.loss.calibrate_clip_start) != 2 or min(c.loss.calibrate_clip_start) < 0
             or c.loss.calibrate_clip_start[0] > 1),
         "loss.calibrate_clip_start = {loss.calibrate_clip_start} are not two distances, of which the "
         "lower is at most 1",
         "for example [0.4, 0.8]"),
    Rule(lambda c: c.loss.old_policy != "recomputed",
         'it compares ratios to the recomputed pi_old, not loss.old_policy = "{loss.old_policy}"',
         "set it to 0"),
)

OVERLONG = (
    Rule(lambda c: c.loss.overlong_buffer > c.rollout.max_new_tokens,
         "loss.overlong_buffer = {loss.overlong_buffer} exceeds rollout.max_new_tokens = "
         "{rollout.max_new_tokens}", "set loss.overlong_buffer to {rollout.max_new_tokens} at most"),
)


def _warm_up(section: str, end: Callable[[Any], int | None], why: str) -> Check:
    """Refuse a warm-up after which no update is left. `end` counts the updates, where there is an end."""
    def check(cfg: Any) -> None:
        steps, last = getattr(cfg, section).warmup_steps, end(cfg)
        if last and steps >= last:
            raise ConfigError(
                f"{section}.warmup_steps = {steps}: {filled(why, cfg)}, none of them after the warm-up",
                f"set {section}.warmup_steps to {last - 1} at most")

    return check


SCHEDULES = (
    _warm_up("optim", lambda c: c.updates,
             "the run has {config.updates} updates (run.steps * train.updates_per_step)"),
    _warm_up("optim", lambda c: c.optim.total_steps, "optim.total_steps = {optim.total_steps}"),
    no_effect("optim.total_steps", "optim.min_lr_ratio", when=lambda c: c.optim.schedule == "constant",
              under='optim.schedule = "constant"', instead='optim.schedule = "cosine"'),
    Rule(lambda c: c.optim.schedule != "constant" and not c.optim.min_lr_ratio
         and (c.optim.total_steps or c.updates) < c.updates,
         "optim.total_steps = {optim.total_steps} with optim.min_lr_ratio = 0: the learning rate is 0 from "
         "then to the last update, {config.updates}",
         "set optim.total_steps = {config.updates}, which changes the rate at once, or optim.min_lr_ratio "
         "above 0"),
    _warm_up("sft", lambda c: c.sft.steps, "sft.steps = {sft.steps}"),
)

DIGITS = {"float32": 24, "float16": 11, "bfloat16": 8}  # binary ones, the leading one counted


def _master_has_the_digits(cfg: Any) -> None:
    """The published weights are the masters rounded, so they cannot have more digits."""
    master, weights = cfg.optim.master, cfg.precision.weight_dtype
    if DIGITS[master] < DIGITS[weights]:
        raise ConfigError(
            f'optim.master = "{master}" keeps {DIGITS[master]} binary digits of a weight, '
            f'precision.weight_dtype = "{weights}" publishes {DIGITS[weights]}',
            f'set optim.master = "{weights}", or precision.weight_dtype = "{master}"')


MASTER = (_master_has_the_digits,)

IDLE_LOSS = (
    no_effect("loss.calibrate_clip_newest", "loss.calibrate_clip_start",
              when=lambda c: not c.loss.calibrate_clip_every,
              under="loss.calibrate_clip_every = 0", instead="loss.calibrate_clip_every"),
    no_effect("loss.turn_discount", when=lambda c: c.loss.turn_advantages == "trajectory",
              under='loss.turn_advantages = "trajectory"', instead='loss.turn_advantages = "returns"'),
    no_effect("loss.overlong_penalty", when=lambda c: not c.loss.overlong_buffer,
              under="loss.overlong_buffer = 0", instead="loss.overlong_buffer"),
    no_effect("loss.kl", "loss.unbiased_kl", "loss.kl_baseline", when=lambda c: not c.loss.kl_coef,
              under="loss.kl_coef = 0", instead="loss.kl_coef"),
    no_effect("loss.kl_weight_cap", when=lambda c: not c.loss.unbiased_kl,
              under="loss.unbiased_kl = false", instead="loss.unbiased_kl"),
    no_effect("loss.sampled_by", when=lambda c: not c.loss.unbiased_kl and c.loss.opsm_delta is None,
              under="loss.unbiased_kl and loss.opsm_delta both off", instead="one of them"),
)
