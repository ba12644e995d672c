"""The sections that say what is sampled, and where to: [run], [model], [task], [rollout]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxfp8rl.config.section import File, Section, _day, _listed
from jaxfp8rl.data.tokenizer import DATE
from jaxfp8rl.verifiers.scorers import CALLABLE, THINK_TAGS

if TYPE_CHECKING:  # they load jax, which a misspelt key need not wait for
    pass


class Run(Section):
    """The run as a whole."""

    dir: File = Field(min_length=1,
                      description="run directory: config.toml, metrics.jsonl, samples.jsonl, checkpoints/, events/")
    steps: int = Field(ge=1, description="GRPO steps; one step is one rollout batch")
    seed: int = Field(default=0, ge=0, lt=2**31,
                      description="seed of initialisation, the order of problems, and sampling")
    eval_every: int = Field(
        default=20, ge=0, description="steps between evaluations on held-out problems; 0: only first and last")
    eval_problems: int = Field(default=200, ge=1, description="held-out problems an evaluation scores, once each")
    save_every: int = Field(
        default=50, ge=0,
        description="steps between checkpoints; the first and the last are always saved. 0: none, there is no resuming"
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="newest checkpoints kept")
    save_patience_s: float = Field(
        default=600.0, ge=0,
        description="seconds that a run goes on when no checkpoint can be written (a full disk); then it stops"
    )
    watchdog_s: float = Field(
        default=3600.0, ge=0,
        description="seconds in one phase of a step after which the run says where it stands, and ends; 0: never"
    )
    samples_per_step: int = Field(
        default=4, ge=0,
        description="completions written to samples.jsonl each step, from two on the best and the worst among them"
    )
    samples_top_k: int = Field(
        default=0, ge=0, description="with the learner's k likeliest tokens in place of each; 0: without")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), strict=False, description='metric sinks besides console and JSONL, for example ["wandb"]'
    )


class Model(Section):
    """Where the policy comes from: an HF folder, or an HF config given inline and initialised at random."""

    path: File = Field(default="", description="HF folder with config.json and safetensors; empty: use `config`")
    config: dict[str, Any] = Field(default={}, description="an HF config.json as a table, for a model from scratch")
    tokenizer: File = Field(default="", description='HF folder with tokenizer.json, or "chars:..." ; empty: `path`')


class RewardSection(Section):
    """One of several rewards; see jaxfp8rl.data.task.Reward."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    scorer: str
    weight: float = 1.0
    extract: Literal["", "all", "tag", "last_line", "last_number", "raw"] = ""


class Task(Section):
    """The problems and their scorer."""

    kind: Literal["arithmetic", "reasoning_gym",
                  "file"] = Field(description="sums, a generator of reasoning-gym, or your rows")
    name: str = Field(default="", description="generator of reasoning-gym")
    path: File = Field(default="",
                       description="rows of prompts and answers: a file (JSON Lines, JSON, CSV, Parquet), a folder or a glob")
    held_out_path: File = Field(default="",
                                description="held-out rows, as `path`; empty: a seeded fraction of `path`")
    seed: int = Field(default=0, ge=0, lt=2**31,
                      description="draws problems and which are held out; run.seed does not")
    options: dict[str, Any] = Field(default={},
                                    description="options of the kind of task, checked by it (docs/tasks.md)")
    system_prompt: str = Field(default="", description="put before a prompt that is rendered with the chat template")
    chat: bool = Field(default=False, description="render prompts with the tokenizer's chat template")
    date: Annotated[str, pydantic.AfterValidator(_day)] = Field(
        default=DATE,
        description="the day that a chat template prints, whatever day it is: a resumed run has the prompts it began with",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        description="variables that the chat template reads: enable_thinking, reasoning_effort, tools, ..."
    )
    think_tags: tuple[str, ...] = Field(
        default=THINK_TAGS, strict=False,
        description="what a model's thoughts stand between: the answer is looked for behind them; []: anywhere",
    )
    scorer: str = Field(
        default="",
        description='of a file task: exact (also when empty), math_verify, or "module:function" of your own (docs/tasks.md)'
    )
    scorer_folder: File = Field(
        default="",
        description="where the module of a scorer of your own is looked for first; empty: the folder of the config file"
    )
    rewards: tuple[RewardSection, ...] = Field(
        default=(), strict=False,
        description='several scorers, each in the metrics: [[task.rewards]] with name, scorer, weight, extract (docs/tasks.md)',
    )
    reward_timeout_s: float = Field(default=5.0, gt=0,
                                    description="a score that takes longer is undefined, its child is killed")
    reward_workers: int = Field(
        default=0, ge=0,
        description="processes that score side by side, where the scorer needs one; 0: one a core, at most 8"
    )
    max_prompt_tokens: int = Field(ge=1, description="a longer prompt is an error, or is skipped and counted")
    skip_bad_rows: bool = Field(default=False,
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

    engine: Literal["jax", "vllm", "remote"] = Field(default="jax",
                                                     description="remote: vLLM in a process of its own")
    prompts_per_step: int = Field(ge=1, description="prompts (groups) a step")
    samples_per_prompt: int = Field(ge=1, description="completions a prompt: the group")
    max_new_tokens: int = Field(ge=1, description="longest completion, tokens")
    temperature: float = Field(default=1.0, gt=0,
                               description="logits are divided by it, in the engine and in the learner")
    top_k: int = Field(default=0, ge=0, description="sample from the k likeliest tokens; 0: off")
    top_p: float = Field(
        default=1.0, gt=0, le=1,
        description="sample from the likeliest tokens that have this probability, the 128 likeliest at most, or "
        "top_k, or all of a vocabulary of 1,024; 1: off"
    )
    stop_token_ids: Annotated[tuple[int | str, ...], pydantic.BeforeValidator(_listed)] = Field(
        default=(), strict=False,
        description="tokens that end a completion besides the tokenizer's eos and the chat template's end of "
        'a turn: ids, or tokens as they are written, ["<|im_end|>"]'
    )
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...],
                    pydantic.BeforeValidator(_listed)] = Field(
        default=(), strict=False,
        description="strings that end a completion; the token that completes one is its last (docs/tasks.md)"
    )
    kv_cache: Literal["auto", "fp8"] = Field(default="auto", description='"fp8": keys and values cached in E4M3')
    kv_scales: Literal["one", "calibrated"] = Field(
        default="one",
        description='scales of an FP8 cache: 1, or a power of two a layer from what the scoring pass saw'
    )
    kv_scale_decay: float = Field(default=0.9, ge=0, le=1,
                                  description="what is left after a step of the largest key or value seen")
    max_num_seqs: int = Field(default=256, ge=1, description="sequences the engine decodes at once")
    gpu_memory_utilization: float = Field(default=0.4, gt=0, lt=1, description="share of the GPU that vLLM may take")
    kv_cache_gib: float | None = Field(
        default=None, gt=0, description="GiB of vLLM's cache, instead of what gpu_memory_utilization leaves for it"
    )
    fp8_kernel: Literal["native", "deep_gemm", "emulated"] = Field(
        default="native",
        description="vLLM's FP8 products by CUTLASS; by DeepGEMM, the same numbers sooner, compiled by nvcc; or in "
        "float32, slowly, on a CPU without AMX"
    )
    attention: Literal["auto", "triton"] = Field(
        default="auto",
        description="vLLM's attention: what it takes, FlashAttention 3 on Hopper, which has queries and probabilities in "
        "FP8 over an FP8 cache; or its Triton kernels, which have them high"
    )
    publish: Literal["auto", "in_place", "reload"] = Field(
        default="auto",
        description="weights to vLLM: written into its tensors, or by vLLM's own reload; auto: in place where it can"
    )
    one_copy: bool = Field(
        default=False, description="the learner's FP8 forward reads its weights' codes in vLLM's own memory")
    enforce_eager: bool = Field(default=False, description="vLLM without CUDA graphs and compilation")
    sleep: Literal["off", "keep_weights", "drop_weights"] = Field(
        default="off",
        description="what vLLM gives up of the GPU while the learner learns: nothing, its cache, or its weights, too"
    )
    link: Literal["file", "shared_memory", "cuda_ipc", "nccl"] = Field(
        default="file",
        description='way of the weights to engine "remote": cuda_ipc on one GPU, nccl between two (docs/remote_engine.md)'
    )
    engines: int = Field(
        default=1, ge=1, description='servers that engine "remote" starts, which share the requests of a step')
    server_gpus: tuple[int, ...] = Field(
        default=(), strict=False,
        description='GPUs that these servers see, in equal shares (CUDA_VISIBLE_DEVICES); empty: as here'
    )
    server_url: str = Field(
        default="", description='a server that runs already, for engine "remote"; empty: one is started')
    server_token_file: File = Field(default="", description="the file with that server's token")
    lag: int = Field(
        default=0, ge=0, le=1,
        description="1: a step's batch is sampled while the step before learns, at weights one version older"
    )
    restarts: int = Field(default=3, ge=0,
                          description='how often a run starts an engine "remote" anew that has died or hangs')
