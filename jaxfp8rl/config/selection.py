"""The section [selection]: which of the sampled completions are learned from, and its rules
(docs/selection.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from jaxfp8rl.config.rule import Rule, excludes, no_effect
from jaxfp8rl.config.section import Section

if TYPE_CHECKING:
    from jaxfp8rl.losses import selection


class Selection(Section):
    """Which of the sampled completions are learned from, and how often (docs/selection.md)."""

    keep: int | None = Field(
        default=None, ge=1, description="completions of each group that are learned from; absent: all")
    by: Literal["best_worst", "mean_deviation", "random"] = Field(
        default="best_worst",
        description="which are kept: half the best and half the worst, those farthest from the "
                    "mean reward, or any")
    explore: float = Field(
        default=0.0, ge=0, le=1,
        description="probability that a group's completions are kept at random instead, so that "
                    "each has a chance")
    baseline: Literal["all", "kept"] = Field(
        default="all", description="completions over which advantages are taken: all of a "
                                   "group, or those kept")
    replay: Literal["none", "pairs", "completions"] = Field(
        default="none",
        description="draw as many again, in proportion to their advantages: completions, or pairs of the "
                    "i-th best with the i-th worst (Shuffle-R1)")
    copies: int = Field(default=8, ge=1, description="replay: most copies of one of them")
    weights: Literal["none", "inverse"] = Field(
        default="none",
        description="inverse: weigh each loss by 1 / how often it was expected, so that the mean gradient "
                    "is that of all completions")

    explore_samples: int = Field(
        default=0, ge=0,
        description="drafts of each prompt by an engine in FP8, of which rollout.samples_per_prompt go on "
                    "in the training precision; 0: none (docs/selection.md)")
    explore_tokens: int = Field(default=256, ge=1, description="explore_samples: longest draft, tokens")
    explore_kept: float = Field(
        default=1.0, ge=0, le=1,
        description="explore_samples: share of a draft's tokens that stay; what follows is drawn anew. 1: "
                    "all, and a draft that has ended is a completion")

    def resolve(self) -> selection.Selection:
        from jaxfp8rl.losses.selection import Selection

        return Selection(**{name: value for name, value in self if name in Selection._fields})

    @property
    def weighs(self) -> bool:
        return self.weights == "inverse"

    @property
    def selects(self) -> bool:
        return self.keep is not None or self.replay != "none" or self.explore_samples > 0


EXPLORE = excludes(
    "selection.explore_samples = {selection.explore_samples}", lambda c: c.selection.explore_samples,
    Rule(lambda c: c.selection.explore_samples < c.rollout.samples_per_prompt,
         "rollout.samples_per_prompt = {rollout.samples_per_prompt} of them cannot go on", "draft more"),
    Rule(lambda c: c.rollout.engine != "jax",
         'rollout.engine = "{rollout.engine}" has no second engine in FP8 beside it',
         'set rollout.engine = "jax"'),
    Rule(lambda c: c.precision.resolve().engine_fp8,
         'the engine of precision.recipe = "{precision.recipe}" computes in FP8 itself, so that drafts '
         'are not cheaper',
         'set precision.recipe = "bf16"'),
    Rule(lambda c: c.precision.exact != "off",
         "what FP8 drew does not have the learner's log-probabilities, which precision.exact promises",
         'set precision.exact = "off"'),
    Rule(lambda c: c.task.kind == "environment", "turns with an environment are not drafted", "leave it out"),
    Rule(lambda c: c.rollout.max_staleness or c.train.processes > 1,
         "a queue of what is sampled ahead, and several processes, do not know drafts",
         "set rollout.max_staleness = 0 and train.processes = 1"),
    Rule(lambda c: c.rollout.speculation == "head", "the drafting engine has no draft head",
         'set another rollout.speculation'),
    Rule(lambda c: c.lora.rank, "the drafting engine holds no adapters", "leave out lora.rank"),
    Rule(lambda c: c.selection.keep is not None, "selection.keep = {selection.keep} selects once more",
         "leave it out: selection.by selects among the drafts"),
)


SELECTION = (
    lambda c: c.selection.resolve().check(),
    Rule(lambda c: c.selection.replay == "pairs" and c.selection.keep is None
         and c.rollout.samples_per_prompt % 2,
         'selection.replay = "pairs" leaves one of rollout.samples_per_prompt = {rollout.samples_per_prompt} '
         "completions without a partner",
         "sample an even number, or set an even selection.keep"),
    Rule(lambda c: c.selection.keep and c.selection.keep > c.rollout.samples_per_prompt,
         "selection.keep = {selection.keep} exceeds rollout.samples_per_prompt = "
         "{rollout.samples_per_prompt}",
         "keep fewer, or sample more"),
    Rule(lambda c: c.selection.baseline == "kept" and c.selection.keep == 1
         and c.loss.advantage != "reinforce_pp",
         'selection.keep = 1 with selection.baseline = "kept": loss.advantage "{loss.advantage}" is '
         '0 in a group of '
         "one, and nothing is learned", 'keep more, or set selection.baseline = "all"'),
    Rule(lambda c: c.selection.baseline == "kept" and c.loss.pass_at_k and c.selection.keep
         and c.loss.pass_at_k >= c.selection.keep,
         "loss.pass_at_k = {loss.pass_at_k} of selection.keep = {selection.keep} kept completions "
         "teaches nothing",
         'keep more, or set selection.baseline = "all"'),
    Rule(lambda c: c.selection.weighs and c.selection.replay != "none"
         and (c.loss.kl_coef or c.loss.entropy_coef),
         'selection.weights = "inverse" with selection.replay = "{selection.replay}": a completion without '
         'an advantage is '
         "never drawn again, so that the mean of loss.kl_coef's and loss.entropy_coef's terms is not that "
         "of all completions",
         "leave out the terms, or set selection.replay or selection.weights to none"),
)

IDLE_SELECTION = (
    no_effect("selection.by", "selection.explore",
              when=lambda c: c.selection.keep is None and not c.selection.explore_samples,
              under="selection.keep absent", instead="selection.keep"),
    no_effect("selection.baseline", when=lambda c: c.selection.keep is None,
              under="selection.keep absent", instead="selection.keep"),
    no_effect("selection.explore_tokens", "selection.explore_kept",
              when=lambda c: not c.selection.explore_samples,
              under="selection.explore_samples = 0", instead="selection.explore_samples"),
    no_effect("selection.explore", when=lambda c: c.selection.by == "random",
              under='selection.by = "random"', instead="another selection.by"),
    no_effect("selection.copies", when=lambda c: c.selection.replay == "none",
              under='selection.replay = "none"', instead="selection.replay"),
    no_effect("selection.weights",
              when=lambda c: not c.selection.selects and c.loss.dynamic_sampling_rounds == 1,
              under="everything being learned from", instead="selection.keep or selection.replay"),
)

