"""The section [noise]: noise on the gains of the policy that samples, and its rules (docs/noise.md)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from jaxfp8rl.config.rule import Rule, excludes, no_effect
from jaxfp8rl.config.section import Section

BITS = {"bfloat16": 7, "float16": 10, "float32": 23}  # of a significand after its leading one


class Noise(Section):
    """Adaptive quantisation noise (QeRL, arXiv 2510.11696): the engine's RMSNorm gains are the policy's plus
    Z ~ N(0, sigma^2), whose sigma falls from stage to stage, or stays."""

    start: float = Field(default=0.0, ge=0,
                         description="sigma of the second stage, the first with noise; 0: no noise")
    end: float = Field(default=0.0, ge=0,
                       description="sigma of the last stage, noise.start at most; those between are a "
                       "geometric row")
    unit: Literal["absolute", "ulp"] = Field(
        default="absolute",
        description="unit of sigma: 1, or the unit in the last place of each gain as it is published")
    stages: int = Field(default=10, ge=2, description="equal parts of the run; the first is without noise")
    total_steps: int = Field(default=0, ge=0, description="steps that the stages divide; 0: run.steps")
    where: Literal["all", "inputs"] = Field(
        default="all",
        description="gains of all RMSNorms, or of those alone that attention and MLP read their input from")

    def sigma(self, version: int, steps: int) -> float:
        """Of the weights of `version`, which step version + 1 samples from, in a run of `steps`. As in QeRL's
        code the steps are cut into `stages` intervals, and interval j > 0 has start (end / start)^((j - 1) /
        (stages - 2))."""
        if not (self.start and (stage := version * self.stages // (self.total_steps or steps))):
            return 0.0
        return self.start * (self.end / self.start) ** ((min(stage, self.stages - 1) - 1) / max(self.stages
                                                                                                - 2, 1))

    @property
    def least(self) -> float:
        """The smallest sigma of a run."""
        return self.end if self.stages > 2 else self.start


def gain_type(cfg: Any) -> str:
    """The coarser of the types in which a gain is published and in which an engine multiplies by it."""
    return min(cfg.precision.weight_dtype, cfg.precision.compute_dtype, key=BITS.__getitem__)


def is_unseen(cfg: Any) -> bool:
    """Whether nothing weighs tokens by the probabilities that they were sampled with."""
    return not cfg.correction.resolve().corrects and not cfg.loss.carries_ratio


NOISE = excludes(
    "noise.start = {noise.start}", lambda c: c.noise.start,
    Rule(lambda c: not c.noise.end, "noise.end = 0 is no end of a geometric row",
         "set noise.end, for example to noise.start / 100"),
    Rule(lambda c: c.noise.end > c.noise.start,
         "noise.end = {noise.end} is larger, but the noise falls over a run, as QeRL's does",
         "exchange the two; equal ones keep the noise as it is"),
    Rule(lambda c: c.noise.stages > (c.noise.total_steps or c.run.steps),
         "noise.stages = {noise.stages} exceeds the steps that it divides: noise.total_steps = "
         "{noise.total_steps}, run.steps = {run.steps}",
         "set noise.stages to the first of the two at most, or to the second where the first is 0"),
    Rule(lambda c: c.noise.unit == "ulp" and gain_type(c) == "float32",
         'noise.unit = "ulp": gains are published in float32, whose last place no product sees',
         'set noise.unit = "absolute"'),
    Rule(lambda c: c.noise.unit == "ulp" and c.noise.least < 0.5,
         'noise.unit = "ulp" with a sigma of {config.noise.least}: rounding takes most of what is '
         'below half a unit',
         "set noise.start and noise.end to 0.5 or more"),
    Rule(lambda c: c.precision.exact != "off",
         'precision.exact = "{precision.exact}" asks for an engine with the learner\'s own log-probabilities',
         'set precision.exact = "off"'),
    Rule(lambda c: c.rollout.in_flight,
         "rollout.in_flight: an evaluation and the start-up gate take the noise out of the engine, in which "
         "completions would be in flight", "leave out rollout.in_flight, or the noise"),
    Rule(lambda c: is_unseen(c) and not c.correction.allow_uncorrected_fp8,
         'correction.preset = "{correction.preset}" does nothing: what was sampled with noise '
         'would count as the '
         "learner's own",
         'set correction.preset = "token_tis"; or, as QeRL does, correction.allow_uncorrected_fp8 = true'),
)

IDLE_NOISE = (
    no_effect("noise.end", "noise.unit", "noise.stages", "noise.total_steps", "noise.where",
              when=lambda c: not c.noise.start, under="noise.start = 0", instead="noise.start"),
)
