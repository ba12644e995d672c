"""The configuration: every setting of a run, typed, with its default, its unit and what it does.

Frozen pydantic models that refuse unknown keys. `jaxfp8rl.config.toml` reads them from TOML files and
command-line overrides and turns a refusal into a line of the file. Checks that span sections stand in
`jaxfp8rl.config.rules`.
"""

from __future__ import annotations

import datetime
import math
import os
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxfp8rl.data.tokenizer import CHARS_PREFIX, DATE
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.verifiers.scorers import CALLABLE, THINK_TAGS

if TYPE_CHECKING:  # they load jax, which a misspelt key need not wait for
    from jaxfp8rl.losses.correction import CorrectionConfig
    from jaxfp8rl.losses.objectives import ObjectiveConfig

FloatType = Literal["float32", "bfloat16", "float16"]


def _day(text: str) -> str:
    """Raises ValueError, which pydantic reports, for what is none."""
    return datetime.date.fromisoformat(text).isoformat()


def _listed(value: Any) -> Any:
    """One of a list, given alone."""
    return (value,) if isinstance(value, int | str) and not isinstance(value, bool) else value


def _expanded(path: str) -> str:
    """With ~ and $NAME, which a shell would have put in, and a file has not. Raises ValueError for a name
    that is not set."""
    if path.startswith(CHARS_PREFIX):
        return path
    found = os.path.expanduser(os.path.expandvars(path))
    if unset := re.search(r"\$(\w+|\{\w+\})", found):
        raise ValueError(f"{path}: the environment has no {unset[0]}")
    return found


File = Annotated[str, pydantic.AfterValidator(_expanded)]  # the name of a file or folder


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Run(Section):
    """The run as a whole."""

    dir: File = Field(min_length=1,
                      description="run directory: config.toml, metrics.jsonl, samples.jsonl, checkpoints/, events/")
    steps: int = Field(ge=1, description="GRPO steps; one step is one rollout batch")
    seed: int = Field(0, ge=0, lt=2**31,
                      description="seed of initialisation, the order of problems, and sampling")
    eval_every: int = Field(
        20, ge=0, description="steps between evaluations on held-out problems; 0: only first and last")
    eval_problems: int = Field(200, ge=1, description="held-out problems an evaluation scores, once each")
    save_every: int = Field(
        50, ge=0,
        description="steps between checkpoints; the first and the last are always saved. 0: none, there is no resuming"
    )
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept")
    save_patience_s: float = Field(
        600.0, ge=0,
        description="seconds that a run goes on when no checkpoint can be written (a full disk); then it stops"
    )
    watchdog_s: float = Field(
        3600.0, ge=0,
        description="seconds in one phase of a step after which the run says where it stands, and ends; 0: never"
    )
    samples_per_step: int = Field(
        4, ge=0,
        description="completions written to samples.jsonl each step, from two on the best and the worst among them"
    )
    samples_top_k: int = Field(
        0, ge=0, description="with the learner's k likeliest tokens in place of each; 0: without")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        (), strict=False, description='metric sinks besides console and JSONL, for example ["wandb"]'
    )


class Model(Section):
    """Where the policy comes from: an HF folder, or an HF config given inline and initialised at random."""

    path: File = Field("", description="HF folder with config.json and safetensors; empty: use `config`")
    config: dict[str, Any] = Field({}, description="an HF config.json as a table, for a model from scratch")
    tokenizer: File = Field("", description='HF folder with tokenizer.json, or "chars:..." ; empty: `path`')


class RewardSection(Section):
    """One of several rewards; see jaxfp8rl.data.tasks.Reward."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    scorer: str
    weight: float = 1.0
    extract: Literal["", "all", "tag", "last_line", "last_number", "raw"] = ""


class Task(Section):
    """The problems and their scorer."""

    kind: Literal["arithmetic", "reasoning_gym",
                  "file"] = Field(description="sums, a generator of reasoning-gym, or your rows")
    name: str = Field("", description="generator of reasoning-gym")
    path: File = Field("",
                       description="rows of prompts and answers: a file (JSON Lines, JSON, CSV, Parquet), a folder or a glob")
    held_out_path: File = Field("",
                                description="held-out rows, as `path`; empty: a seeded fraction of `path`")
    seed: int = Field(0, ge=0, lt=2**31,
                      description="draws problems and which are held out; run.seed does not")
    options: dict[str, Any] = Field({},
                                    description="options of the kind of task, checked by it (docs/tasks.md)")
    system_prompt: str = Field("", description="put before a prompt that is rendered with the chat template")
    chat: bool = Field(False, description="render prompts with the tokenizer's chat template")
    date: Annotated[str, pydantic.AfterValidator(_day)] = Field(
        DATE,
        description="the day that a chat template prints, whatever day it is: a resumed run has the prompts it began with",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="variables that the chat template reads: enable_thinking, reasoning_effort, tools, ..."
    )
    think_tags: tuple[str, ...] = Field(
        THINK_TAGS, strict=False,
        description="what a model's thoughts stand between: the answer is looked for behind them; []: anywhere",
    )
    scorer: str = Field(
        "",
        description='of a file task: exact (also when empty), math_verify, or "module:function" of your own (docs/tasks.md)'
    )
    scorer_folder: File = Field(
        "",
        description="where the module of a scorer of your own is looked for first; empty: the folder of the config file"
    )
    rewards: tuple[RewardSection, ...] = Field(
        (), strict=False,
        description='several scorers, each in the metrics: [[task.rewards]] with name, scorer, weight, extract (docs/tasks.md)',
    )
    reward_timeout_s: float = Field(5.0, gt=0,
                                    description="a score that takes longer is undefined, its child is killed")
    reward_workers: int = Field(
        0, ge=0,
        description="processes that score side by side, where the scorer needs one; 0: one a core, at most 8"
    )
    max_prompt_tokens: int = Field(ge=1, description="a longer prompt is an error, or is skipped and counted")
    skip_bad_rows: bool = Field(False,
                                description="count malformed rows and unusable prompts instead of stopping")

    @property
    def scorers(self) -> list[str]:
        """The names of all there are."""
        return [reward.scorer for reward in self.rewards] or [self.scorer or "exact"]

    @property
    def has_own_scorer(self) -> bool:
        """Of a module or a file."""
        return any(":" in scorer and not scorer.startswith(CALLABLE) for scorer in self.scorers)


class Rollout(Section):
    """What is sampled each step, and by which engine."""

    engine: Literal["jax", "vllm", "remote"] = Field("jax",
                                                     description="remote: vLLM in a process of its own")
    prompts_per_step: int = Field(ge=1, description="prompts (groups) a step")
    samples_per_prompt: int = Field(ge=1, description="completions a prompt: the group")
    max_new_tokens: int = Field(ge=1, description="longest completion, tokens")
    temperature: float = Field(1.0, gt=0,
                               description="logits are divided by it, in the engine and in the learner")
    top_k: int = Field(0, ge=0, description="sample from the k likeliest tokens; 0: off")
    top_p: float = Field(
        1.0, gt=0, le=1,
        description="sample from the likeliest tokens that have this probability, the 128 likeliest at most, or "
        "top_k, or all of a vocabulary of 1,024; 1: off"
    )
    stop_token_ids: Annotated[tuple[int | str, ...], pydantic.BeforeValidator(_listed)] = Field(
        (), strict=False,
        description="tokens that end a completion besides the tokenizer's eos and the chat template's end of "
        'a turn: ids, or tokens as they are written, ["<|im_end|>"]'
    )
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...],
                    pydantic.BeforeValidator(_listed)] = Field(
        (), strict=False,
        description="strings that end a completion; the token that completes one is its last (docs/tasks.md)"
    )
    kv_cache: Literal["auto", "fp8"] = Field("auto", description='"fp8": keys and values cached in E4M3')
    kv_scales: Literal["one", "calibrated"] = Field(
        "one",
        description='scales of an FP8 cache: 1, or a power of two a layer from what the scoring pass saw'
    )
    kv_scale_decay: float = Field(0.9, ge=0, le=1,
                                  description="what is left after a step of the largest key or value seen")
    max_num_seqs: int = Field(256, ge=1, description="sequences the engine decodes at once")
    gpu_memory_utilization: float = Field(0.4, gt=0, lt=1, description="share of the GPU that vLLM may take")
    kv_cache_gib: float | None = Field(
        None, gt=0, description="GiB of vLLM's cache, instead of what gpu_memory_utilization leaves for it"
    )
    fp8_kernel: Literal["native", "deep_gemm", "emulated"] = Field(
        "native",
        description="vLLM's FP8 products by CUTLASS; by DeepGEMM, the same numbers sooner, compiled by nvcc; or in "
        "float32, slowly, on a CPU without AMX"
    )
    attention: Literal["auto", "triton"] = Field(
        "auto",
        description="vLLM's attention: what it takes, FlashAttention 3 on Hopper, which has queries and probabilities in "
        "FP8 over an FP8 cache; or its Triton kernels, which have them high"
    )
    publish: Literal["auto", "in_place", "reload"] = Field(
        "auto",
        description="weights to vLLM: written into its tensors, or by vLLM's own reload; auto: in place where it can"
    )
    one_copy: bool = Field(
        False, description="the learner's FP8 forward reads its weights' codes in vLLM's own memory")
    enforce_eager: bool = Field(False, description="vLLM without CUDA graphs and compilation")
    sleep: Literal["off", "keep_weights", "drop_weights"] = Field(
        "off",
        description="what vLLM gives up of the GPU while the learner learns: nothing, its cache, or its weights, too"
    )
    link: Literal["file", "shared_memory", "cuda_ipc", "nccl"] = Field(
        "file",
        description='way of the weights to engine "remote": cuda_ipc on one GPU, nccl between two (docs/remote_engine.md)'
    )
    engines: int = Field(
        1, ge=1, description='servers that engine "remote" starts, which share the requests of a step')
    server_gpus: tuple[int, ...] = Field(
        (), strict=False,
        description='GPUs that these servers see, in equal shares (CUDA_VISIBLE_DEVICES); empty: as here'
    )
    server_url: str = Field(
        "", description='a server that runs already, for engine "remote"; empty: one is started')
    server_token_file: File = Field("", description="the file with that server's token")
    lag: int = Field(
        0, ge=0, le=1,
        description="1: a step's batch is sampled while the step before learns, at weights one version older"
    )
    restarts: int = Field(3, ge=0,
                          description='how often a run starts an engine "remote" anew that has died or hangs')


class PrecisionSection(Section):
    """Which product runs in which format; see jaxfp8rl/precision/recipe.py."""

    recipe: str = Field("bf16",
                        description="bf16, fp8_rollout, fp8_unified, fp8_forward or fp16 (docs/precision.md)")
    compute_dtype: FloatType = Field("bfloat16", description="float type of everything that is not FP8")
    weight_dtype: FloatType = Field("bfloat16", description="float type the published weights are rounded to")
    gradients: Literal["e4m3", "e5m2"] = Field("e4m3",
                                               description="format of gradients in a backward pass in FP8")
    saved_activations: Literal["high", "fp8"] = Field(
        "high",
        description='what wgrad gets of an FP8 product\'s input: as it was, or the forward\'s codes (Jet-RL)'
    )
    wgrad_inputs: Literal["1x128", "128x128"] = Field(
        "1x128",
        description="blocks that an FP8 wgrad quantises a product's input in; 128x128: faster, by a coarser scale"
    )
    products: Literal["auto", "float32", "tensor_core", "pallas"] = Field(
        "auto",
        description="what computes FP8 products; auto: pallas on Hopper, tensor_core on others with FP8 tensor cores"
    )
    attention: Literal["auto", "xla", "pallas"] = Field(
        "auto",
        description="what computes the learner's attention; auto: pallas on Hopper, in 16 bits, heads of 64 or 128"
    )
    embedded_activations: Literal["fp8", "high"] = Field("fp8",
                                                         description="W8A8 or W8A16 in the embedded engine")
    first_layers_bf16: int = Field(0, ge=0, description="so many layers at the start stay unquantised")
    last_layers_bf16: int = Field(0, ge=0, description="and at the end")
    exclude: str = Field("",
                         description="regular expression; HF module names it is found in stay unquantised")


class Loss(Section):
    """Advantages, the objective, its regularisers, and how the losses of tokens become one number."""

    advantage: Literal[
        "grpo", "grpo_sample_std", "dr_grpo", "leave_one_out", "rloo", "reinforce_pp",
        "reinforce_pp_baseline", "pass_at_k"
    ] = Field("grpo", description="see jaxfp8rl/losses/advantages.py")
    pass_at_k: int | None = Field(None, ge=1, description='the k of advantage = "pass_at_k"')
    objective: Literal[
        "ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "reinforce",
        "prime_rl", "clip_cov",
        "kl_cov",
    ] = Field("ppo_clip", description="see jaxfp8rl/losses/objectives.py")
    clip_low: float | None = Field(
        None, description="lower clip distance; absent, as below: the objective's own default")
    clip_high: float | None = Field(None, description="upper clip distance")
    dual_clip: float | None = Field(
        None, description="ppo_clip: largest ratio of a token with a negative advantage")
    ratio_cap: float | None = Field(None,
                                    description="dppo_tv, dppo_kl, reinforce: cap of the detached ratio")
    tau_positive: float | None = Field(
        None, description="sapo: temperature of the gate where the advantage is positive")
    tau_negative: float | None = Field(None, description="sapo: and where it is negative")
    penalty: float | None = Field(None, description="prime_rl: weight of the squared log-ratio")
    cov_fraction: float | None = Field(None,
                                       description="clip_cov, kl_cov: share of the tokens that is selected")
    cov_low: float | None = Field(None, description="clip_cov: least covariance of a selected token")
    cov_high: float | None = Field(None, description="clip_cov: its largest covariance")
    cov_kl_coef: float | None = Field(None, description="kl_cov: weight of a selected token's |log-ratio|")
    aggregation: Literal[
        "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"
    ] = Field("token_mean", description="see jaxfp8rl/losses/aggregation.py")
    horizon: int | None = Field(None, ge=1, description="seq_mean_token_sum_norm: tokens to divide by")
    old_policy: Literal["recomputed", "current", "rollout"] = Field(
        "recomputed",
        description="pi_old: scored before a step's updates; or, with no scoring pass, what its one update has itself, or the "
        "engine's word (two policies)",
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the policy that the run began with")
    kl: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "k1_score", "k2_score",
                "k3_score"] = Field(
        "k3+",
        description="its estimator; with a + it has the gradient of k2, with _score also the score function's (NeMo RL)"
    )
    unbiased_kl: bool = Field(
        False,
        description="weigh a token's KL by pi/mu, as if pi had sampled it (DeepSeek-V3.2); of an estimator with a + or "
        "_score"
    )
    kl_weight_cap: float = Field(
        2.0, ge=1, description="unbiased_kl: largest such weight, so that no token owns the update")
    sampled_by: Literal["rollout", "old"] = Field(
        "rollout",
        description="the policy that unbiased_kl and opsm_delta measure pi from: the engine's mu, or pi_old (slime)"
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    opsm_delta: float | None = Field(
        None, ge=0,
        description="off-policy sequence masking (DeepSeek-V3.2): where its advantage is negative, a sequence whose "
        "mean log mu/pi exceeds this, in nats, is not learned from; absent: off"
    )
    calibrate_clip_every: int = Field(
        0, ge=0,
        description="steps between calibrations of the clip bounds by a shadow learner without FP8; 0: never"
    )
    dynamic_sampling_rounds: int = Field(
        1, ge=1,
        description="sample up to so many batches of prompts for groups whose rewards differ (DAPO); 1: take what comes"
    )
    overlong_buffer: int = Field(
        0, ge=0, description="tokens before rollout.max_new_tokens over which the reward falls (DAPO)")
    overlong_penalty: float = Field(1.0, ge=0, description="by how much, at the limit")
    mask_cut: bool = Field(False, description="completions cut at the length limit are not learned from")

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
    lower: float = Field(-math.inf, allow_inf_nan=True)
    upper: float = Field(math.inf, allow_inf_nan=True)
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
        "token_tis", description="a name from jaxfp8rl/losses/presets.py; docs/corrections.md compares them")
    allow_uncorrected_fp8: bool = Field(
        False,
        description='the baseline of papers: an engine in FP8 with a preset that corrects nothing ("none") is not refused'
    )
    weight: Literal["none", "token", "sequence", "geometric"] | None = Field(
        None, description="importance weight; absent, as below: the preset's"
    )
    action: Literal["truncate", "mask",
                    "clip"] | None = Field(None, description="what happens to it outside the bounds")
    lower: float | None = Field(None, description="its lower bound")
    upper: float | None = Field(None, allow_inf_nan=True, description="its upper bound")
    overflow: Literal["cap", "zero"] | None = Field(
        None, description="log-ratios clamped to +-20, or overflow to weight 0")
    rejections: tuple[RejectionSection, ...] | None = Field(
        None, strict=False,
        description='[{level = "sequence", statistic = "ratio", lower = 0.99, upper = 1.01}]'
    )
    in_turn: bool | None = Field(
        None, description="rejections one after another, each over what those before it left (SkyRL)")
    batch_normalize: bool | None = Field(None, description="divide by the batch's mean weight")
    denominator: Literal["kept", "all"] | None = Field(None,
                                                       description="whether rejected tokens still count")
    m2_limit: float | None = Field(None, description="M2PO: limit of the mean squared log-ratio")
    adaptive: AdaptiveSection | None = Field(
        None, description="{onset = 0.02}: adaptive mixing of weighted and plain gradient")

    def resolve(self) -> CorrectionConfig:
        """Raises ConfigError for an unknown preset or bounds that cannot be."""
        from jaxfp8rl.losses.correction import AdaptiveMix, Rejection
        from jaxfp8rl.losses.presets import get_preset

        own = ("preset", "allow_uncorrected_fp8")
        given = {name: value for name, value in self if name not in own and value is not None}
        if "rejections" in given:
            given["rejections"] = tuple(Rejection(**r.model_dump()) for r in self.rejections)
        if "adaptive" in given:
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

    lr: float = Field(1e-6, gt=0, description="learning rate after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="updates over which the learning rate rises to lr")
    schedule: Literal["constant", "cosine",
                      "linear"] = Field("constant", description="what follows the warm-up")
    total_steps: int | None = Field(
        None, ge=1,
        description="cosine, linear: updates, with the warm-up, after which the learning rate has fallen to lr * "
        "min_lr_ratio; absent: those of run.steps as the run is begun, which a resumed run keeps"
    )
    min_lr_ratio: float = Field(0.1, ge=0, le=1,
                                description="cosine, linear: the share of lr at which the decay ends")
    b1: float = Field(0.9, ge=0, lt=1, description="Adam: what is left of the first moment after an update")
    b2: float = Field(0.95, ge=0, lt=1, description="Adam: and of the second")
    eps: float = Field(1e-8, gt=0, description="Adam: added to the root of the second moment")
    weight_decay: float = Field(
        0.0, ge=0, description="share of a weight, times lr, that an update takes away; norms are spared")
    clip_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this global norm")
    max_bad_steps: int = Field(3, ge=1, description="non-finite updates in a row after which the run stops")
    master: FloatType = Field(
        "float32", description="format the parameters are kept in between updates (docs/optimizer.md)")
    first_moment: Literal["float32", "bfloat16",
                          "float8"] = Field("float32", description="format of Adam's first moment")
    second_moment: FloatType = Field("float32", description="format of Adam's second moment")
    offload: bool = Field(False, description="moments in pinned host memory, on the device a layer at a time")


class Train(Section):
    """How a rollout batch becomes updates. Shapes are static: rows [rows, row_tokens]."""

    row_tokens: int = Field(ge=16, description="length of a packed row, tokens")
    rows_per_microbatch: int = Field(8, ge=1, description="rows that go through the model at once")
    updates_per_step: int = Field(
        1, ge=1, description="optimiser updates a rollout batch is split into, by whole groups")
    remat: Literal["none", "layer", "products", "mlp"] = Field(
        "none",
        description="what of a layer the backward pass computes again: less is faster, for memory (docs/performance.md)"
    )
    compilation_cache: File = Field(
        "",
        description="folder where compiled programs are kept for later runs; empty: what JAX_COMPILATION_CACHE_DIR says"
    )
    data: int = Field(
        1, ge=1, description="groups of devices that the rows of a micro-batch lie over (docs/sharding.md)")
    fsdp: int = Field(1, ge=1,
                      description="devices of a group that weights, and the rows of a micro-batch, lie over")
    tensor: int = Field(
        1, ge=1, description="devices that share the heads, the MLP's width, the experts and the words")

    processes: int = Field(
        1, ge=1,
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
        "none",
        description="whose experts the learner computes with: its own every time, those of its scoring pass, the engine's"
    )
    measure_every: int = Field(
        0, ge=0, description="R3: steps between scoring passes without replay, to be compared; 0: never")
    balance_coef: float = Field(0.0, ge=0, description="weight of the load-balancing loss; RL does without")
    freeze_router: bool = Field(False, description="routers are not trained")


class Sft(Section):
    """The supervised warm start of `jaxfp8rl sft`, also run by `train` before step 1 when steps > 0."""

    steps: int = Field(0, ge=0, description="updates; 0: no warm start")
    examples_per_step: int = Field(64, ge=1, description="demonstrations an update")
    lr: float = Field(1e-3, gt=0, description="learning rate after the warm-up, from which it falls to 0")
    warmup_steps: int = Field(0, ge=0, description="updates over which the learning rate rises")


class Gate(Section):
    """The start-up check that learner and engine agree at equal weights.

    The limits part an engine with other weights (a nat and more a token) from FP8's own noise: 0.01 to 0.06
    nats on average were seen between this learner and vLLM with FP8 weights and FP8 KV.
    """

    completions: int = Field(16, ge=1, description="completions sampled and scored by both")
    max_new_tokens: int = Field(
        256, ge=1, description="their length at most, tokens; rollout.max_new_tokens where that is less")
    max_mean_gap: float = Field(0.2, gt=0,
                                description="nats: largest mean |learner - engine| log-probability")
    max_gap: float = Field(5.0, gt=0, description="nats: largest single one")


class Monitor(Section):
    """What is measured besides the step itself."""

    profile_step: int = Field(
        0, ge=0, description="step traced by jax.profiler, for XProf, to run.dir/profile; 0: none")
    precision_every: int = Field(
        0, ge=0, description="steps between probes of the FP8 roundings (docs/precision.md); 0: never")


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
