"""The configuration: every setting of a run, typed, with its default, its unit and what it does.

Frozen pydantic models that refuse unknown keys. `jaxfp8rl.toml_config` reads them from TOML files and command-line
overrides and turns a refusal into a line of the file. Checks that span sections stand in `Config.check`.
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from pydantic import Field

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.precision.recipe import get_recipe

FloatType = Literal["float32", "bfloat16"]


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Run(Section):
    """The run as a whole."""

    dir: str = Field(description="run directory: config.toml, metrics.jsonl, samples.jsonl, checkpoints/, events/")
    steps: int = Field(ge=1, description="GRPO steps; one step is one rollout batch")
    seed: int = Field(0, description="seed of initialisation, data order and sampling")
    eval_every: int = Field(20, ge=0, description="steps between evaluations on held-out problems; 0: only first and last")
    eval_problems: int = Field(200, ge=1, description="held-out problems an evaluation scores, once each")
    save_every: int = Field(50, ge=1, description="steps between checkpoints; the last step is always saved")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept")
    samples_per_step: int = Field(4, ge=0, description="completions written to samples.jsonl each step")
    trackers: tuple[Literal["tensorboard"], ...] = Field((), strict=False, description="metric sinks besides console and JSONL")


class Model(Section):
    """Where the policy comes from: an HF folder, or an HF config given inline and initialised at random."""

    path: str = Field("", description="HF folder with config.json and safetensors; empty: use `config`")
    config: dict[str, Any] = Field({}, description="an HF config.json as a table, for a model from scratch")
    tokenizer: str = Field("", description='HF folder with tokenizer.json, or "chars:..." ; empty: `path`')


class Task(Section):
    """The problems and their scorer."""

    kind: Literal["arithmetic", "reasoning_gym", "file"]
    name: str = Field("", description="generator of reasoning-gym")
    path: str = Field("", description="JSONL or Parquet file of prompts and answers")
    held_out_path: str = Field("", description="file of held-out rows; empty: a seeded fraction of `path`")
    options: dict[str, Any] = Field({}, description="options of the task, passed through and checked by it")
    system_prompt: str = Field("", description="put before a prompt that is rendered with the chat template")
    chat: bool = Field(False, description="render prompts with the tokenizer's chat template")
    scorer: Literal["", "exact", "math_verify"] = Field("", description="scorer of a file task; empty: the task's own")
    reward_timeout_s: float = Field(5.0, gt=0, description="a score that takes longer is undefined, its child is killed")
    max_prompt_tokens: int = Field(ge=1, description="a longer prompt is an error, or is skipped and counted")
    skip_bad_rows: bool = Field(False, description="count malformed rows and unusable prompts instead of stopping")


class Rollout(Section):
    """What is sampled each step, and by which engine."""

    engine: Literal["jax", "vllm"] = "jax"
    prompts_per_step: int = Field(ge=1, description="prompts (groups) a step")
    samples_per_prompt: int = Field(ge=1, description="completions a prompt: the group")
    max_new_tokens: int = Field(ge=1, description="longest completion, tokens")
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0, description="0: off")
    top_p: float = Field(1.0, gt=0, le=1)
    kv_cache: Literal["auto", "fp8"] = Field("auto", description='"fp8": keys and values cached in E4M3')
    max_num_seqs: int = Field(256, ge=1, description="sequences the engine decodes at once")
    gpu_memory_utilization: float = Field(0.4, gt=0, lt=1, description="share of the GPU that vLLM may take")
    fp8_kernel: Literal["native", "emulated"] = Field(
        "native", description='"emulated": vLLM on a CPU without AMX computes FP8 products slowly, in float32'
    )
    enforce_eager: bool = Field(False, description="vLLM without CUDA graphs and compilation")


class PrecisionSection(Section):
    """Which product runs in which format; see jaxfp8rl/precision/recipe.py."""

    recipe: str = "bf16"
    compute_dtype: FloatType = Field("bfloat16", description="float type of everything that is not FP8")
    weight_dtype: FloatType = Field("bfloat16", description="float type the published weights are rounded to")
    embedded_activations: Literal["fp8", "high"] = Field("fp8", description="W8A8 or W8A16 in the embedded engine")
    first_layers_bf16: int = Field(0, ge=0)
    last_layers_bf16: int = Field(0, ge=0)
    exclude: str = Field("", description="regular expression; HF module names it is found in stay unquantised")


class Loss(Section):
    """Group-relative advantages, the clipped objective, and the correction of the rollout mismatch."""

    advantage: Literal["grpo", "dr_grpo"] = Field("grpo", description="divide by the group's standard deviation or not")
    clip_low: float = Field(0.2, gt=0, lt=1, description="ratio is clipped below at 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="and above at 1 + clip_high")
    correction: Literal["none", "token_tis"] = Field("token_tis", description="truncated importance weight a token")
    tis_cap: float = Field(2.0, gt=0, description="cap of the importance weight")


class Optim(Section):
    """AdamW with linear warm-up, global-norm clipping and a guard against non-finite updates."""

    lr: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    b1: float = Field(0.9, ge=0, lt=1)
    b2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    max_bad_steps: int = Field(3, ge=1, description="non-finite updates in a row after which the run stops")


class Train(Section):
    """How a rollout batch becomes updates. Shapes are static: rows [rows, row_tokens]."""

    row_tokens: int = Field(ge=16, description="length of a packed row, tokens")
    rows_per_microbatch: int = Field(8, ge=1, description="rows that go through the model at once")
    updates_per_step: int = Field(1, ge=1, description="optimiser updates a rollout batch is split into, by whole groups")
    remat: bool = Field(False, description="recompute each layer in the backward pass")


class Sft(Section):
    """The supervised warm start of `jaxfp8rl sft`, also run by `train` before step 1 when steps > 0."""

    steps: int = Field(0, ge=0)
    examples_per_step: int = Field(64, ge=1)
    lr: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(0, ge=0)


class Gate(Section):
    """The start-up check that learner and engine agree at equal weights.

    The limits part an engine with other weights (a nat and more a token) from FP8's own noise: 0.02 to 0.13 nats on average
    were seen between this learner and vLLM with FP8 weights and FP8 KV.
    """

    completions: int = Field(16, ge=1, description="completions sampled and scored by both")
    max_mean_gap: float = Field(0.2, gt=0, description="nats: largest mean |learner - engine| log-probability")
    max_gap: float = Field(5.0, gt=0, description="nats: largest single one")


class Config(Section):
    """A whole run."""

    run: Run
    model: Model
    task: Task
    rollout: Rollout
    train: Train
    precision: PrecisionSection = PrecisionSection()
    loss: Loss = Loss()
    optim: Optim = Optim()
    sft: Sft = Sft()
    gate: Gate = Gate()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, tokens."""
        return self.task.max_prompt_tokens + self.rollout.max_new_tokens

    def check(self) -> Config:
        """Refuse combinations that cannot work, before anything loads. Raises ConfigError; returns self."""
        recipe = get_recipe(self.precision.recipe)
        if recipe.engine_fp8 and self.loss.correction == "none":
            raise ConfigError(
                f'precision.recipe "{recipe.name}" samples in FP8 with loss.correction = "none": runs collapse that way',
                'set loss.correction = "token_tis"',
            )
        if bool(self.model.path) == bool(self.model.config):
            raise ConfigError("model: give either `path` (an HF folder) or `config` (a table), not both or neither")
        if not (self.model.tokenizer or self.model.path):
            raise ConfigError("model.tokenizer: a model from scratch needs one", 'an HF folder, or "chars:0123456789+="')
        if self.max_model_len > self.train.row_tokens:
            raise ConfigError(
                f"train.row_tokens = {self.train.row_tokens} cannot hold task.max_prompt_tokens + rollout.max_new_tokens"
                f" = {self.max_model_len}",
                f"set train.row_tokens to at least {self.max_model_len}",
            )
        if self.rollout.prompts_per_step % self.train.updates_per_step:
            raise ConfigError(
                f"train.updates_per_step = {self.train.updates_per_step} does not divide rollout.prompts_per_step = "
                f"{self.rollout.prompts_per_step}: a group stays whole"
            )
        if self.rollout.samples_per_prompt == 1:
            raise ConfigError("rollout.samples_per_prompt = 1: a group of one has advantage 0 and nothing is learned")
        if self.task.kind == "reasoning_gym" and not self.task.name:
            raise ConfigError("task.name: reasoning_gym needs the name of a generator", 'for example "chain_sum"')
        if self.task.kind == "file" and not self.task.path:
            raise ConfigError("task.path: a file task needs a JSONL or Parquet file")
        return self
