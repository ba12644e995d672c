"""The sections about the run and its samples: [run], [model], [task], [rollout]. Their rules are in
`jaxfp8rl.config.sampling_rules`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxfp8rl.config.section import File, Section, day, listed, size_or_auto
from jaxfp8rl.data.tokenizer import DATE
from jaxfp8rl.verifiers.scorers import CALLABLE, THINK_TAGS


class Run(Section):
    """The run as a whole."""

    dir: File = Field(min_length=1,
        description="run directory: config.toml, metrics.jsonl, samples.jsonl, checkpoints/, events/")
    steps: int = Field(ge=1, description="GRPO steps; one step is one rollout batch")
    seed: int = Field(
        default=0, ge=0, lt=2**31,
        description="seed of the initialisation, the order of problems, and sampling")
    eval_every: int = Field(
        default=20, ge=0,
        description="steps between evaluations on held-out problems; 0: only the first and the last")
    eval_problems: int = Field(
        default=200, ge=1, description="held-out problems that an evaluation scores, once each")
    save_every: int = Field(
        default=50, ge=0,
        description="steps between checkpoints; the first and the last are always written. 0: no "
        "checkpoints, and so no resuming")
    keep_checkpoints: int = Field(default=2, ge=1, description="how many of the newest checkpoints are kept")
    save_patience_s: float = Field(
        default=600.0, ge=0,
        description="seconds for which a run goes on when no checkpoint can be written (a full disk); then "
        "it stops")
    watchdog_s: float = Field(
        default=3600.0, ge=0,
        description="seconds in one phase of a step after which the run reports where it is stuck, and "
        "ends; 0: never")
    samples_per_step: int = Field(
        default=4, ge=0,
        description="completions written to samples.jsonl each step; from two on, the best and the worst "
        "are among them")
    samples_top_k: int = Field(
        default=0, ge=0,
        description="write the learner's k most likely tokens at each position, too; 0: do not")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), strict=False,
        description='metric sinks besides the console and JSONL, for example ["wandb"]')


class Model(Section):
    """Where the policy comes from: an HF folder, or an HF config given inline and initialised at random."""

    path: File = Field(
        default="", description="HF folder with config.json and safetensors; empty: use `config`. Its "
        "architectures entry is LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
        "Qwen3MoeForCausalLM or Gemma3ForCausalLM (docs/models.md)")
    config: dict[str, Any] = Field(
        default={}, description="an HF config.json as a table, for a model from scratch")
    tokenizer: File = Field(
        default="", description='HF folder with tokenizer.json, or "chars:..."; empty: `path`')


class RewardSection(Section):
    """One of several rewards; see jaxfp8rl.data.task.Reward."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    scorer: str
    weight: float = 1.0
    extract: Literal["", "all", "tag", "last_line", "last_number", "raw"] = ""


class Task(Section):
    """The problems and their scorer."""

    kind: Literal["arithmetic", "reasoning_gym", "file", "environment"] = Field(
        description="sums, a generator of reasoning-gym, your own rows, or an environment with "
                    "problems of its own")
    name: str = Field(
        default="", description='name of the reasoning-gym generator, or of the environment: guess, '
                                'calculator, or your own "module:Class" (docs/turns.md)')
    path: File = Field(default="",
        description="rows of prompts and answers: a file (JSON Lines, JSON, CSV, Parquet), a folder or a "
        "glob")
    held_out_path: File = Field(
        default="", description="held-out rows, given like `path`; empty: a seeded fraction of `path`")
    seed: int = Field(
        default=0, ge=0, lt=2**31,
        description="seed of the problems, and of which are held out; run.seed changes neither")
    options: dict[str, Any] = Field(
        default={}, description="options of the kind of task, which checks them (docs/tasks.md)")
    system_prompt: str = Field(
        default="", description="system message before a prompt that is rendered with the chat template")
    chat: bool = Field(default=False, description="render prompts with the tokenizer's chat template")
    date: Annotated[str, pydantic.AfterValidator(day)] = Field(
        default=DATE,
        description="the day that a chat template prints as today, so that a resumed run has the prompts "
        "that it began with")
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        description="variables for the chat template: enable_thinking, reasoning_effort, tools, ...")
    think_tags: tuple[str, ...] = Field(
        default=THINK_TAGS, strict=False,
        description="opening and closing tag of a model's thoughts; the answer is looked for behind them. "
        "[]: anywhere")
    scorer: str = Field(
        default="",
        description="scorer of a file task: exact (also when empty), math_verify, or your own "
        '"module:function" (docs/tasks.md)')
    scorer_folder: File = Field(
        default="",
        description="where the module of your own scorer is looked for first; empty: the folder of the "
        "config file")
    rewards: tuple[RewardSection, ...] = Field(
        default=(), strict=False,
        description="several scorers, each with metrics of its own: [[task.rewards]] with name, scorer, "
        "weight, extract (docs/tasks.md)")
    reward_timeout_s: float = Field(
        default=5.0, gt=0,
        description="seconds after which a score is undefined and the process that computes it is killed")
    reward_workers: int = Field(
        default=0, ge=0,
        description="processes that score in parallel, for a scorer that needs them; 0: one per core, at "
        "most 8")
    max_prompt_tokens: int = Field(
        ge=1, description="longest prompt, tokens; a longer one is an error, or is skipped and counted")
    skip_bad_rows: bool = Field(default=False,
                                description="count malformed rows and unusable prompts instead of stopping")

    @property
    def scorers(self) -> list[str]:
        """The names of all scorers."""
        return [reward.scorer for reward in self.rewards] or [self.scorer or "exact"]

    @property
    def has_own_scorer(self) -> bool:
        """Whether a scorer, or an environment, comes from a module or a file of the user."""
        own = any(":" in scorer and not scorer.startswith(CALLABLE) for scorer in self.scorers)
        return own or (self.kind == "environment" and ":" in self.name)


class Rollout(Section):
    """How many completions a step samples, how, and by which engine."""

    engine: Literal["jax", "vllm", "served", "auto"] = Field(
        default="jax",
        description="jax: the embedded engine; vllm: vLLM in this process; served: stock `vllm serve` "
                    "processes, started by the run or at rollout.engine_urls; auto: jax or vllm, whichever "
                    "was measured faster at such a run, chosen when the config is read (docs/engine.md)")
    prompts_per_step: int = Field(ge=1, description="prompts (groups) per step")
    samples_per_prompt: int = Field(ge=1, description="completions per prompt: the size of a group")
    max_new_tokens: int = Field(ge=1, description="longest completion, tokens")
    temperature: float = Field(default=1.0, gt=0,
                               description="logits are divided by it, in the engine and in the learner")
    top_k: int = Field(default=0, ge=0, description="sample from the k most likely tokens; 0: off")
    top_p: float = Field(
        default=1.0, gt=0, le=1,
        description="sample from the most likely tokens that together have this probability: at most the "
        "128 most likely, or top_k, or all of a vocabulary of 1,024; 1: off")
    stop_token_ids: Annotated[tuple[int | str, ...], pydantic.BeforeValidator(listed)] = Field(
        default=(), strict=False,
        description="tokens that end a completion, besides the tokenizer's eos and the chat template's end "
        'of a turn: ids, or tokens as they are written, ["<|im_end|>"]')
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], pydantic.BeforeValidator(listed)
    ] = Field(
        default=(), strict=False,
        description="strings that end a completion; the token that completes one is the completion's last "
        "(docs/tasks.md)")
    kv_cache: Literal["auto", "fp8"] = Field(
        default="auto", description='"fp8": keys and values are cached in E4M3')
    kv_scales: Literal["one", "calibrated"] = Field(
        default="one",
        description="scales of an FP8 cache: 1, or a power of two per layer, calibrated in the scoring pass")
    kv_scale_decay: float = Field(
        default=0.9, ge=0, le=1,
        description="calibrated: factor, each step, of the largest key or value seen so far")
    max_num_seqs: int = Field(default=256, ge=1, description="sequences that the engine decodes at once")
    min_num_seqs: int = Field(
        default=0, ge=0,
        description='engine "jax": sequences that its smallest batch has room for; 0: as many as a step has, '
                    'so that gate, evaluation and steps run the same programs')
    gpu_memory_utilization: float = Field(
        default=0.4, gt=0, lt=1, description="share of the GPU's memory that vLLM may take")
    kv_cache_gib: Annotated[float | Literal["auto"] | None, pydantic.BeforeValidator(size_or_auto)] = Field(
        default=None,
        description="size of the engine's cache, GiB. auto: as large as fits beside the learner on a GPU and "
                    "a step can use, chosen when a run begins; absent: as much as "
                    "gpu_memory_utilization leaves for vLLM's, and for engine \"jax\" as much as "
                    "max_num_seqs sequences fill")
    fp8_kernel: Literal["native", "deep_gemm", "emulated"] = Field(
        default="native",
        description="vLLM's FP8 products. native: CUTLASS; deep_gemm: the same numbers, faster, compiled "
        "by nvcc; emulated: in float32, slow, for a CPU without AMX")
    attention: Literal["auto", "triton"] = Field(
        default="auto",
        description="vLLM's attention. auto: vLLM's choice, FlashAttention 3 on Hopper, which rounds "
        "queries and probabilities to FP8 over an FP8 cache; triton: its Triton kernels, which keep them "
        "in high precision")
    publish: Literal["auto", "in_place", "reload"] = Field(
        default="auto",
        description="how weights get into vLLM: written into its tensors, or by its own reload; auto: in "
        "place where possible")
    one_copy: bool = Field(
        default=False,
        description="the learner's FP8 forward pass reads the codes of its weights in vLLM's own memory")
    enforce_eager: bool = Field(default=False, description="vLLM without CUDA graphs and compilation")
    torch_compile: bool = Field(
        default=True,
        description="vLLM compiles its model by torch.compile; false: it starts sooner, and captures its "
        "own kernels in CUDA graphs")
    sleep: Literal["off", "keep_weights", "drop_weights"] = Field(
        default="off",
        description="GPU memory that vLLM frees while the learner learns: none, its cache, or its cache "
        "and its weights")
    link: Literal["file", "shared_memory", "cuda_ipc", "nccl"] = Field(
        default="file",
        description='how weights get to engine "served": cuda_ipc on GPUs of one host, nccl between GPUs '
        "anywhere (docs/remote_engine.md)")
    engines: int = Field(
        default=1, ge=1,
        description='servers that engine "served" starts; they share the requests of a step')
    tensor_parallel_size: int = Field(
        default=1, ge=1, description='GPUs over which engine "served" spreads each of its servers')
    engine_urls: Annotated[tuple[str, ...], pydantic.BeforeValidator(listed)] = Field(
        default=(), strict=False,
        description='addresses of `vllm serve` processes that run already, for engine "served" '
        "(docs/vllm_server.md); empty: the run starts its own")
    engine_token_file: File = Field(default="", description="file with the token of these servers, mode 600")
    request_timeout_s: float = Field(
        default=1800.0, gt=0,
        description='seconds for one completion of engine "served"; then another server is asked')
    server_gpus: tuple[int, ...] = Field(
        default=(), strict=False,
        description="GPUs that these servers see, in equal shares (CUDA_VISIBLE_DEVICES); empty: those "
        "that this process sees")
    order: Literal["fifo", "longest"] = Field(
        default="fifo",
        description="order in which completions start when a step has more than max_num_seqs. fifo: as they "
                    "came; longest: one of each group, then the groups whose finished completions were "
                    "longest (Seer)")
    admit: Literal["all", "cache"] = Field(
        default="all",
        description="which completions start, of max_num_seqs at once. all: as many as there are; cache: as "
                    "many as the engine's cache is expected to hold until they end, by the lengths of "
                    "completions that have ended (docs/engine.md)")
    speculation: Literal["off", "suffix", "head"] = Field(
        default="off",
        description='speculative decoding: guessed tokens are verified several at once, and the distribution'
                    ' stays the same (docs/engine.md). suffix: guess the tokens that followed the same words'
                    ' before, in this completion or its siblings; head, for engine "jax": a draft head '
                    'guesses, and learns beside the policy')
    draft_tokens: int = Field(
        default=4, ge=1, le=16,
        description="suffix, head: most guessed tokens of a completion that are verified at once")
    draft_lr: float = Field(default=1e-3, gt=0, description="head: learning rate of the draft head")
    max_staleness: int = Field(
        default=0, ge=0,
        description="versions by which the weights that sampled a token may be older than those that learn "
        "from it; above 0 the engine samples ahead (docs/async.md)")
    in_flight: bool = Field(
        default=False,
        description="a publish interrupts completions, which go on at the new weights; otherwise it waits "
        "until they are done")
    recompute_kv: bool = Field(
        default=False,
        description="in_flight: compute the keys and values of interrupted completions again by the new "
        "weights, not keep them")
    oversample: float = Field(
        default=1.0, ge=1,
        description="in_flight: groups in flight, as a multiple of those that a step takes. It takes the "
                    "first that are done; the slowest go on")
    restarts: int = Field(
        default=3, ge=0,
        description='how often a run restarts servers of engine "served" that have died or hang')

    @property
    def smallest_batch(self) -> int:
        """How many sequences the smallest batch of the embedded engine has room for."""
        return self.min_num_seqs or self.prompts_per_step * self.samples_per_prompt

    @property
    def rows(self) -> int:
        """How many sequences the embedded engine decodes at once, at most: those of a step, or of
        min_num_seqs if that is more, rounded up to eights. An evaluation of more takes turns, so that it needs
        no more memory."""
        wanted = max(self.min_num_seqs, self.prompts_per_step * self.samples_per_prompt)
        return min(self.max_num_seqs, -(-wanted // 8) * 8)

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile makes vLLM's program, if vLLM is the engine."""
        return self.torch_compile and not self.enforce_eager
