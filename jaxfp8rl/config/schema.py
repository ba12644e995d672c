"""The configuration: every setting of a run, typed, with its default, its unit and what it does.

Frozen pydantic models that refuse unknown keys. `jaxfp8rl.config.toml` reads them from TOML files and
command-line overrides and turns a refusal into a line of the file. Checks that span sections stand in
`jaxfp8rl.config.rules`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from jaxfp8rl.config.learning import Correction, Loss, Optim
from jaxfp8rl.config.sampling import Model, Rollout, Run, Task
from jaxfp8rl.config.section import File, FloatType, Section


class PrecisionSection(Section):
    """Which product runs in which format; see jaxfp8rl/precision/recipe.py."""

    recipe: str = Field(default="bf16",
                        description="bf16, fp8_rollout, fp8_unified, fp8_forward or fp16 (docs/precision.md)")
    compute_dtype: FloatType = Field(default="bfloat16", description="float type of everything that is not FP8")
    weight_dtype: FloatType = Field(default="bfloat16", description="float type the published weights are rounded to")
    gradients: Literal["e4m3", "e5m2"] = Field(default="e4m3",
                                               description="format of gradients in a backward pass in FP8")
    saved_activations: Literal["high", "fp8"] = Field(
        default="high",
        description='what wgrad gets of an FP8 product\'s input: as it was, or the forward\'s codes (Jet-RL)'
    )
    wgrad_inputs: Literal["1x128", "128x128"] = Field(
        default="1x128",
        description="blocks that an FP8 wgrad quantises a product's input in; 128x128: faster, by a coarser scale"
    )
    products: Literal["auto", "float32", "tensor_core", "pallas"] = Field(
        default="auto",
        description="what computes FP8 products; auto: pallas on Hopper, tensor_core on others with FP8 tensor cores"
    )
    attention: Literal["auto", "xla", "pallas"] = Field(
        default="auto",
        description="what computes the learner's attention; auto: pallas on Hopper, in 16 bits, heads of 64 to 256"
    )
    embedded_activations: Literal["fp8", "high"] = Field(default="fp8",
                                                         description="W8A8 or W8A16 in the embedded engine")
    first_layers_bf16: int = Field(default=0, ge=0, description="so many layers at the start stay unquantised")
    last_layers_bf16: int = Field(default=0, ge=0, description="and at the end")
    exclude: str = Field(default="",
                         description="regular expression; HF module names it is found in stay unquantised")


class Train(Section):
    """How a rollout batch becomes updates. Shapes are static: rows [rows, row_tokens]."""

    row_tokens: int = Field(ge=16, description="length of a packed row, tokens")
    rows_per_microbatch: int = Field(default=8, ge=1, description="rows that go through the model at once")
    updates_per_step: int = Field(
        default=1, ge=1, description="optimiser updates a rollout batch is split into, by whole groups")
    remat: Literal["none", "layer", "products", "mlp"] = Field(
        default="none",
        description="what of a layer the backward pass computes again: less is faster, for memory (docs/performance.md)"
    )
    compilation_cache: File = Field(
        default="",
        description="folder where compiled programs are kept for later runs; empty: what JAX_COMPILATION_CACHE_DIR says"
    )
    data: int = Field(
        default=1, ge=1, description="groups of devices that the rows of a micro-batch lie over (docs/sharding.md)")
    fsdp: int = Field(default=1, ge=1,
                      description="devices of a group that weights, and the rows of a micro-batch, lie over")
    tensor: int = Field(
        default=1, ge=1, description="devices that share the heads, the MLP's width, the experts and the words")

    processes: int = Field(
        default=1, ge=1,
        description="processes that the learner runs in, one a host or a GPU, each started by itself (docs/sharding.md)"
    )

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def over_rows(self) -> int:
        """Parts that the rows of a micro-batch lie in."""
        return self.data * self.fsdp

    @property
    def over_weights(self) -> int:
        """Parts that a weight lies in."""
        return self.fsdp * self.tensor


class Moe(Section):
    """Mixtures of experts (docs/moe.md). Of a dense model there is nothing to set."""

    replay: Literal["none", "R2", "R3"] = Field(
        default="none",
        description="whose experts the learner computes with: its own every time, those of its scoring pass, the engine's"
    )
    measure_every: int = Field(
        default=0, ge=0, description="R3: steps between scoring passes without replay, to be compared; 0: never")
    balance_coef: float = Field(default=0.0, ge=0, description="weight of the load-balancing loss; RL does without")
    freeze_router: bool = Field(default=False, description="routers are not trained")


class Sft(Section):
    """The supervised warm start of `jaxfp8rl sft`, also run by `train` before step 1 when steps > 0."""

    steps: int = Field(default=0, ge=0, description="updates; 0: no warm start")
    examples_per_step: int = Field(default=64, ge=1, description="demonstrations an update")
    lr: float = Field(default=1e-3, gt=0, description="learning rate after the warm-up, from which it falls to 0")
    warmup_steps: int = Field(default=0, ge=0, description="updates over which the learning rate rises")


class Gate(Section):
    """The start-up check that learner and engine agree at equal weights.

    The limits part an engine with other weights (a nat and more a token) from FP8's own noise: 0.01 to 0.06
    nats on average were seen between this learner and vLLM with FP8 weights and FP8 KV.
    """

    completions: int = Field(default=16, ge=1, description="completions sampled and scored by both")
    max_new_tokens: int = Field(
        default=256, ge=1, description="their length at most, tokens; rollout.max_new_tokens where that is less")
    max_mean_gap: float = Field(default=0.2, gt=0,
                                description="nats: largest mean |learner - engine| log-probability")
    max_gap: float = Field(default=5.0, gt=0, description="nats: largest single one")


class Monitor(Section):
    """What is measured besides the step itself."""

    profile_step: int = Field(
        default=0, ge=0, description="step traced by jax.profiler, for XProf, to run.dir/profile; 0: none")
    precision_every: int = Field(
        default=0, ge=0, description="steps between probes of the FP8 roundings (docs/precision.md); 0: never")


class Config(Section):
    """A whole run."""

    run: Run
    model: Model
    task: Task
    rollout: Rollout
    train: Train
    precision: PrecisionSection = PrecisionSection()
    loss: Loss = Loss()
    correction: Correction = Correction()
    optim: Optim = Optim()
    moe: Moe = Moe()
    sft: Sft = Sft()
    gate: Gate = Gate()
    monitor: Monitor = Monitor()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, tokens."""
        return self.task.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def updates(self) -> int:
        """Of the optimiser, in all steps."""
        return self.run.steps * self.train.updates_per_step


SECTIONS: dict[str, Any] = {n: f.annotation for n, f in Config.model_fields.items()}  # name -> type[Section]
