"""The section [correction]. Its rules follow it."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from pydantic import Field

from jaxfp8rl.config.rule import Rule
from jaxfp8rl.config.section import Section
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses.correction_config import AdaptiveMix, CorrectionConfig, Rejection
from jaxfp8rl.losses.presets import get_preset, two_policy_only


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
        default="token_tis",
        description="name of a correction; docs/corrections.md compares them")
    allow_uncorrected_fp8: bool = Field(
        default=False,
        description='accept an engine in FP8, or with noise, with a preset that corrects nothing ("none"), '
                    "as in the baselines of papers")
    weight: Literal["none", "token", "sequence", "geometric"] | None = Field(
        default=None, description="importance weight. Here and below, absent means the preset's")
    action: Literal["truncate", "mask", "clip"] | None = Field(
        default=None, description="treatment of a weight outside its bounds")
    lower: float | None = Field(default=None, description="lower bound of the weight")
    upper: float | None = Field(default=None, allow_inf_nan=True, description="upper bound of the weight")
    overflow: Literal["cap", "zero"] | None = Field(
        default=None, description="cap log-ratios at +-20, or let them overflow to weight 0")
    rejections: tuple[RejectionSection, ...] | None = Field(
        default=None, strict=False,
        description='[{level = "sequence", statistic = "ratio", lower = 0.99, upper = 1.01}]'
    )
    in_turn: bool | None = Field(
        default=None,
        description="apply the rejections one after another, each to the tokens that are left (SkyRL)")
    by_turn: bool | None = Field(
        default=None,
        description="compute the weights and rejections of sequences for each turn, not for the whole "
                    "trajectory")
    batch_normalize: bool | None = Field(
        default=None, description="divide the weights by their mean over the batch")
    denominator: Literal["kept", "all"] | None = Field(
        default=None,
        description="whether rejected tokens leave the denominators (kept) or still count in them (all)")
    m2_limit: float | None = Field(default=None, description="M2PO: limit of the mean squared log-ratio")
    adaptive: AdaptiveSection | None = Field(
        default=None, description="{onset = 0.02}: adaptive mixing of weighted and plain gradient")

    def resolve(self) -> CorrectionConfig:
        """The preset with the changes. Raises ConfigError for an unknown preset or impossible bounds."""
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
            named = re.sub(r"^(weight: )?bounds \[", "correction.lower, correction.upper = [", str(e))
            raise ConfigError(f'{named} (correction.preset = "{self.preset}" with your changes)',
                              "change or leave out that setting; docs/corrections.md explains each") from e


# Rules


def is_uncorrected(cfg: Any) -> bool:
    """Whether the engine samples in FP8 and nothing weighs its tokens by the probabilities that they were
    sampled with."""
    return (cfg.precision.resolve().engine_fp8 and not cfg.correction.resolve().corrects
            and not cfg.loss.carries_ratio)


CORRECTION = (lambda c: c.correction.resolve(),)

# The correction against the recipe, and both against the policies that loss.old_policy keeps apart.
POLICIES = (
    Rule(lambda c: is_uncorrected(c) and not c.correction.allow_uncorrected_fp8,
         'precision.recipe "{precision.recipe}" samples in FP8 and correction.preset = '
         '"{correction.preset}" does nothing: runs collapse that way',
         'set correction.preset = "token_tis"; or, for a baseline that may collapse, '
         "correction.allow_uncorrected_fp8 = true"),
    Rule(lambda c: c.loss.old_policy != "rollout" and two_policy_only(c.correction.preset),
         'correction.preset "{correction.preset}" is made for two policies',
         'set loss.old_policy = "rollout"'),
    Rule(lambda c: c.loss.old_policy != "rollout" and c.loss.objective == "prime_rl",
         'loss.objective "prime_rl" is made for two policies', 'set loss.old_policy = "rollout"'),
    Rule(lambda c: c.loss.old_policy == "current" and c.train.updates_per_step > 1,
         'loss.old_policy = "current" with train.updates_per_step = {train.updates_per_step}: an update '
         "would be measured by itself, not by the policy before the step, and nothing would be clipped",
         'set loss.old_policy = "recomputed", or train.updates_per_step = 1'),
)

# Without a scoring pass the correction is computed for one micro-batch at a time, from the current policy.
UNSCORED = (
    Rule(lambda c: c.loss.carries_ratio and c.correction.resolve().weight != "none",
         'loss.old_policy = "rollout" with loss.objective "{loss.objective}": its ratio is already the '
         'ratio to the engine, and correction.preset "{correction.preset}" would weigh by it again',
         'set correction.weight = "none", or loss.objective = "reinforce"'),
    Rule(lambda c: c.loss.old_policy != "recomputed" and c.correction.resolve().needs_batch,
         'correction.preset "{correction.preset}" looks at the whole batch (normalisation, M2PO or adaptive '
         'mixing), which loss.old_policy = "{loss.old_policy}" never sees at once',
         'set loss.old_policy = "recomputed"'),
    Rule(lambda c: c.loss.old_policy != "recomputed" and c.correction.resolve().rejections
         and c.correction.resolve().denominator == "kept",
         'loss.old_policy = "{loss.old_policy}": the denominators are needed before it is known which '
         "tokens are rejected", 'set correction.denominator = "all"'),
)
