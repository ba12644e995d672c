"""The section about low-rank adapters, [lora], and its rules."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxfp8rl.config.rule import Rule, excludes, no_effect
from jaxfp8rl.config.section import File, Section, listed

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
MLP = "gate_proj", "up_proj", "down_proj"


class Lora(Section):
    """Low-rank adapters over a base that does not learn (docs/lora.md)."""

    rank: int = Field(default=0, ge=0, description="rank r of the adapters; 0: all parameters learn")
    alpha: float = Field(default=32.0, gt=0,
                         description="the factor of an adapter's product B A is alpha / r")
    rslora: bool = Field(default=False, description="the factor is alpha / sqrt(r) instead")
    targets: Annotated[tuple[Target, ...], pydantic.BeforeValidator(listed)] = Field(
        default=ATTENTION + MLP,
        strict=False, min_length=1, description="the linears that get an adapter; all by default")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="float type in which the adapters compute and are published; their "
        "masters are in optim.master")

    path: File = Field(
        default="", description="a PEFT adapter folder with which the run begins; empty: fresh adapters")
    base: Literal["stored", "nvfp4", "mxfp4", "int4"] = Field(
        default="stored", description="the base's linears: as model.path has them, or in four bits, "
        "quantised when it is loaded as `jaxfp8rl quantize` does (docs/lora.md)")
    publish: Literal["adapters", "merged"] = Field(
        default="adapters", description="what the engine gets: the adapters beside the base, or weights "
                                        "with the adapters merged in, rounded to the engine's format "
                                        "(docs/lora.md)")

    @property
    def scale(self) -> float:
        """The factor of an adapter's product B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def _in_slots(c: Any) -> bool:
    """Whether the run's adapters lie in vLLM's slots."""
    return c.rollout.engine == "vllm" and c.lora.publish == "adapters"


_LEARNS_ALL = "it is for a learner of all parameters"

LORA = excludes(
    "lora.rank = {lora.rank}", lambda c: c.lora.rank,
    Rule(lambda c: c.rollout.engine == "served",
         "an engine in another process does not take adapters yet", 'set rollout.engine = "vllm" or "jax"'),
    Rule(lambda c: _in_slots(c) and c.lora.rank > 512, "vLLM takes adapters of rank 512 at most",
         'set lora.rank = 512, lora.publish = "merged", or rollout.engine = "jax"'),
    Rule(lambda c: _in_slots(c) and c.lora.dtype != c.precision.weight_dtype,
         'lora.dtype = "{lora.dtype}": vLLM holds adapters in the type of its weights, '
         'precision.weight_dtype = "{precision.weight_dtype}"',
         'set lora.dtype = "{precision.weight_dtype}", or '
                                       'lora.publish = "merged"'),
    Rule(lambda c: c.sft.steps, f"sft.steps = {{sft.steps}}: {_LEARNS_ALL}",
         "warm the base up first: `jaxfp8rl sft` writes RUN_DIR/sft, which model.path may name with "
         "sft.steps = 0"),
    Rule(lambda c: c.precision.exact != "off",
         'precision.exact = "{precision.exact}": its kernels have no adapters',
         'set precision.exact = "off"'),
    Rule(lambda c: c.loss.calibrate_clip_every, f"loss.calibrate_clip_every: {_LEARNS_ALL}", "set it to 0"),
    Rule(lambda c: c.monitor.precision_every,
         "monitor.precision_every measures how masters are rounded, and the base has none", "set it to 0"),
    Rule(lambda c: c.moe.freeze_router, "moe.freeze_router: the base does not learn, nor do its routers",
         "leave it out"),
    Rule(lambda c: c.moe.balance_coef, "moe.balance_coef: the routers do not learn", "set it to 0"),
    Rule(lambda c: c.train.tensor > 1,
         "train.tensor = {train.tensor}: adapters are not divided among devices",
         "use train.data or train.fsdp instead"),
    Rule(lambda c: c.train.processes > 1, "a learner of several processes has no adapters yet",
         "set train.processes = 1: train.data and train.fsdp spread over the GPUs of one process"),
    Rule(lambda c: c.rollout.one_copy,
         "rollout.one_copy is for weights that each update quantises anew, and this base "
         "is published once", "set rollout.one_copy = false"),
    Rule(lambda c: c.lora.dtype == "float32" and c.optim.master != "float32",
         'lora.dtype = "float32" has more digits than optim.master = "{optim.master}"',
         'set lora.dtype = "bfloat16", or optim.master = "float32"'),
    Rule(lambda c: len(set(c.lora.targets)) < len(c.lora.targets), "lora.targets = {lora.targets}",
         "name each linear once"),
)

IDLE_LORA = (
    no_effect("lora.alpha", "lora.rslora", "lora.targets", "lora.dtype", "lora.path", "lora.base",
              "lora.publish",
              when=lambda c: not c.lora.rank,
              under="lora.rank = 0", instead="lora.rank"),
)
