"""The section about another reference of loss.kl_coef, [reference], and its rules."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from jaxfp8rl.config.rule import Rule, excludes, no_effect
from jaxfp8rl.config.section import File, Section


class Reference(Section):
    """The policy to which loss.kl_coef draws the one that learns: a teacher (docs/distillation.md)."""

    path: File = Field(
        default="", description="HF folder of a frozen teacher with the tokens of the run's tokenizer; "
                                "empty: the policy with which the run begins")
    recipe: Literal["bf16", "fp8"] = Field(
        default="bf16", description="the teacher's linears in its forward pass. bf16: in "
                                    "precision.compute_dtype; fp8: weights and activations in FP8, where "
                                    "its shape allows")


REFERENCE = (
    Rule(lambda c: c.reference.path and c.reference.recipe == "fp8"
         and c.precision.compute_dtype == "float16",
         'reference.recipe = "fp8" with precision.compute_dtype = "float16": FP8 products have '
         'no such results',
         'set reference.recipe = "bf16"'),
    *excludes(
        'loss.advantage = "none"', lambda c: c.loss.advantage == "none",
        Rule(lambda c: not c.loss.kl_coef, "without loss.kl_coef nothing is learned",
             "set loss.kl_coef = 1 and reference.path to a teacher, or choose another advantage"),
        Rule(lambda c: c.loss.dynamic_sampling_rounds > 1,
             "loss.dynamic_sampling_rounds = {loss.dynamic_sampling_rounds} looks for rewards that differ",
             "set it to 1"),
        Rule(lambda c: c.selection.selects and (c.selection.by != "random" or c.selection.replay != "none"),
             "[selection] selects by rewards", 'leave it out, or set selection.by = "random" without replay'),
        Rule(lambda c: c.loss.turn_advantages == "returns", 'loss.turn_advantages = "returns" is of rewards',
             'set it to "trajectory"'),
        Rule(lambda c: not (c.reference.path or c.loss.entropy_coef),
             "without reference.path the policy is drawn to itself as it begins, and nothing is learned",
             "set reference.path to a teacher, or choose another advantage"),
    ),
)

IDLE_REFERENCE = (
    no_effect("reference.path", when=lambda c: not c.loss.kl_coef, under="loss.kl_coef = 0",
              instead="loss.kl_coef"),
    no_effect("reference.recipe", when=lambda c: not c.reference.path, under="no reference.path",
              instead="reference.path"),
    no_effect("loss.overlong_buffer", when=lambda c: c.loss.advantage == "none",
              under='loss.advantage = "none"', instead="another advantage"),
)
