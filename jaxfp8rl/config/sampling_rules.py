"""The rules of the sections about the run and its samples (`jaxfp8rl.config.sampling`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxfp8rl.config.rule import Rule, changed, excludes, no_effect
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.verifiers.scorers import check_scorer_name


def _run_dir_is_no_file(cfg: Any) -> None:
    folder = Path(cfg.run.dir)
    if file := next((p for p in (folder, *folder.parents) if os.path.isfile(p)), None):
        raise ConfigError(f"run.dir: {file} is a file", "choose another --run.dir")


RUN = (_run_dir_is_no_file,)

MODEL = (
    Rule(lambda c: bool(c.model.path) == bool(c.model.config),
         "model: give either `path` (an HF folder) or `config` (a table), and not both",
         "--model.path FOLDER, and where the file has a [model.config] also --model.config '{{}}'"),
    Rule(lambda c: not (c.model.tokenizer or c.model.path),
         "model.tokenizer: a model from scratch needs one", 'give an HF folder, or "chars:0123456789+="'),
)

KV_SCALES = excludes(
    'rollout.kv_scales = "calibrated"', lambda c: c.rollout.kv_scales == "calibrated",
    Rule(lambda c: c.rollout.kv_cache != "fp8",
         'rollout.kv_cache = "{rollout.kv_cache}" has no scales', 'set rollout.kv_cache = "fp8"'),
    Rule(lambda c: c.loss.old_policy != "recomputed",
         'with loss.old_policy = "{loss.old_policy}" no scoring pass sees keys',
         'set loss.old_policy = "recomputed"'),
)

ONE_COPY = excludes(
    "rollout.one_copy", lambda c: c.rollout.one_copy,
    Rule(lambda c: c.rollout.engine != "vllm" or c.rollout.publish != "in_place",
         "it is for weights that are written into vLLM's tensors in this process",
         'set rollout.engine = "vllm" and rollout.publish = "in_place"'),
    Rule(lambda c: not c.precision.resolve().forward_fp8,
         'the learner of recipe "{precision.recipe}" has no FP8 forward',
         'set precision.recipe = "fp8_unified"'),
    Rule(lambda c: c.optim.master == "float16",
         'the published weights are quantised from the masters, and optim.master = "float16" keeps these '
         'with scales',
         'set optim.master = "bfloat16" or "float32"'),
    Rule(lambda c: c.train.updates_per_step > 1,
         "nothing is published between the updates of a step, and the later ones would read old weights",
         "set train.updates_per_step = 1"),
    Rule(lambda c: c.rollout.sleep != "off",
         'rollout.sleep = "{rollout.sleep}" takes away what the learner reads', 'set rollout.sleep = "off"'),
    Rule(lambda c: c.rollout.kv_scales != "one",
         "the first scales are calibrated before there are weights in the engine",
         'set rollout.kv_scales = "one"'),
)

# What is sampled ahead outlives a publish, so neither engine nor learner may need what the other has then.
STALENESS = excludes(
    "rollout.max_staleness = {rollout.max_staleness}", lambda c: c.rollout.max_staleness,
    Rule(lambda c: c.rollout.sleep != "off",
         'rollout.sleep = "{rollout.sleep}" stops the engine while the learner learns',
         'set rollout.sleep = "off"'),
    Rule(lambda c: _served(c) and c.rollout.restarts and not c.rollout.engine_urls and c.rollout.engines == 1,
         "rollout.restarts = {rollout.restarts} gives a new engine the last weights, which an update may "
         "have overwritten", "set rollout.restarts = 0; a run goes on with --resume"),
)

IN_FLIGHT = excludes(
    "rollout.in_flight", lambda c: c.rollout.in_flight,
    Rule(lambda c: not c.rollout.max_staleness and c.rollout.oversample == 1,
         "with rollout.max_staleness = 0 every completion is done before a publish",
         "set rollout.max_staleness = 1 or more"),
    Rule(lambda c: c.rollout.sleep != "off",
         'rollout.sleep = "{rollout.sleep}" drops the cache of completions that a publish interrupts',
         'set rollout.sleep = "off"'),
    Rule(lambda c: c.rollout.engine != "jax" and c.rollout.speculation != "off",
         'rollout.speculation = "{rollout.speculation}": that vLLM can be interrupted between '
         'drafts and their '
         "verification has not been shown", 'set rollout.speculation = "off", or rollout.engine = "jax"'),
    Rule(lambda c: c.moe.replay == "R3",
         'moe.replay = "R3" replays the routes of one version of the weights', 'set moe.replay = "none"'),
    Rule(lambda c: c.rollout.kv_scales == "calibrated" and not c.rollout.recompute_kv,
         'rollout.kv_scales = "calibrated" changes the scales of keys and values that are kept',
         "set rollout.recompute_kv = true"),
)

SERVED_SETTINGS = ("rollout.link", "rollout.engines", "rollout.server_gpus", "rollout.restarts",
                   "rollout.tensor_parallel_size", "rollout.engine_urls", "rollout.engine_token_file",
                   "rollout.request_timeout_s")
SERVER_SETTINGS = ("rollout.engines", "rollout.server_gpus", "rollout.max_num_seqs",
                   "rollout.gpu_memory_utilization", "rollout.kv_cache_gib", "rollout.fp8_kernel",
                   "rollout.attention", "rollout.publish", "rollout.enforce_eager",
                   "rollout.torch_compile", "rollout.speculation", "rollout.sleep",
                   "rollout.restarts", "rollout.tensor_parallel_size")


def _served(cfg: Any) -> bool:
    """Whether the engine is in a process of its own."""
    return cfg.rollout.engine == "served"


def _a_running_server_has_its_settings(cfg: Any) -> None:
    if cfg.rollout.engine_urls and (given := changed(cfg, SERVER_SETTINGS)):
        where = ", ".join(cfg.rollout.engine_urls)
        raise ConfigError(
            f"{', '.join(given)}: the server at {where} runs already, with settings of its own",
            "leave it out, and give it to the server when that is started")


SERVER = (
    Rule(lambda c: c.rollout.engine == "jax" and c.rollout.sleep != "off",
         'rollout.sleep = "{rollout.sleep}": the embedded engine has none', 'set rollout.engine = "vllm"'),
    no_effect("rollout.min_num_seqs", when=lambda c: c.rollout.engine != "jax",
              under='rollout.engine = "{rollout.engine}"', instead='rollout.engine = "jax"'),
    no_effect(*SERVED_SETTINGS, when=lambda c: not _served(c),
              under='rollout.engine = "{rollout.engine}"', instead='rollout.engine = "served"'),
    Rule(lambda c: _served(c) and c.rollout.publish == "reload",
         'rollout.publish = "reload": engine "served" is written in place', "leave it out"),
    Rule(lambda c: bool(c.rollout.engine_urls) != bool(c.rollout.engine_token_file),
         "rollout.engine_urls and rollout.engine_token_file go together: give both or neither",
         "give both for servers that run already, neither to have them started"),
    _a_running_server_has_its_settings,
    Rule(lambda c: c.rollout.link == "nccl" and not (c.rollout.server_gpus or c.rollout.engine_urls),
         'rollout.link = "nccl" is between two GPUs', "set rollout.server_gpus, to [1] for example"),
    Rule(lambda c: len(c.rollout.server_gpus) % (c.rollout.engines * c.rollout.tensor_parallel_size),
         "rollout.engines = {rollout.engines} times rollout.tensor_parallel_size = "
         "{rollout.tensor_parallel_size} does not divide the number of rollout.server_gpus = "
         "{rollout.server_gpus}", "give each engine the same number of GPUs"),
    Rule(lambda c: c.rollout.kv_cache_gib == "auto" and _served(c),
         'rollout.kv_cache_gib = "auto": the plan does not know the GPU of rollout.engine = '
         '"{rollout.engine}"',
         "leave it out: vLLM measures that GPU and takes rollout.gpu_memory_utilization of it, 0.9 where it "
         "is alone; or give the size"),
)

COOLEST, HOTTEST = 0.01, 2.0  # vLLM raises a lower temperature without a word, and refuses a higher one

TEMPERATURE = (
    Rule(lambda c: c.rollout.engine != "jax" and not COOLEST <= c.rollout.temperature <= HOTTEST,
         f"rollout.temperature = {{rollout.temperature:g}}: vLLM samples at {COOLEST:g} to {HOTTEST:g}",
         'set one of these, or rollout.engine = "jax"'),
)

IDLE_VLLM = (
    no_effect("rollout.gpu_memory_utilization", "rollout.fp8_kernel", "rollout.attention",
              "rollout.enforce_eager", "rollout.torch_compile", when=lambda c: c.rollout.engine == "jax",
              under='rollout.engine = "jax"', instead='rollout.engine = "vllm"'),
    no_effect("rollout.admit", when=lambda c: c.rollout.engine == "jax" and c.rollout.kv_cache_gib is None,
              under='rollout.engine = "jax", whose cache has room for rollout.max_num_seqs sequences',
              instead="rollout.kv_cache_gib"),
    Rule(lambda c: _served(c) and c.rollout.admit == "cache" and c.moe.replay == "R3",
         'rollout.admit = "cache" has completions streamed, and a stream of vLLM tells no routed experts',
         'set rollout.admit = "all", or moe.replay = "none"'),
    no_effect("rollout.torch_compile", when=lambda c: c.rollout.enforce_eager,
              under="rollout.enforce_eager = true", instead="rollout.enforce_eager = false"),
)

IDLE_IN_FLIGHT = (
    no_effect("rollout.recompute_kv", "rollout.oversample", when=lambda c: not c.rollout.in_flight,
              under="rollout.in_flight = false", instead="rollout.in_flight"),
)

DRAFT_HEAD = excludes(
    'rollout.speculation = "head"', lambda c: c.rollout.speculation == "head",
    Rule(lambda c: c.rollout.engine != "jax",
         'rollout.engine = "{rollout.engine}" does not know the draft head that this project trains',
         'set rollout.engine = "jax", or rollout.speculation = "suffix"'),
    Rule(lambda c: c.precision.compute_dtype == "float16",
         'the draft head has no loss scale, and precision.compute_dtype = "float16" would lose its gradients',
         'set precision.compute_dtype = "bfloat16", or rollout.speculation = "suffix"'),
    Rule(lambda c: c.train.devices > 1,
         "a learner on several devices trains no draft head yet",
         'leave out train.data, train.fsdp and train.tensor, or set rollout.speculation = "suffix"'),
)

IDLE_SPECULATION = (
    no_effect("rollout.draft_tokens", when=lambda c: c.rollout.speculation == "off",
              under='rollout.speculation = "off"', instead='rollout.speculation = "suffix" or "head"'),
    no_effect("rollout.draft_lr", when=lambda c: c.rollout.speculation != "head",
              under='rollout.speculation = "{rollout.speculation}"', instead='rollout.speculation = "head"'),
)

IDLE_KV_SCALES = (
    no_effect("rollout.kv_scale_decay", when=lambda c: c.rollout.kv_scales == "one",
              under='rollout.kv_scales = "one"', instead='rollout.kv_scales = "calibrated"'),
)

IDLE_TASK = (
    no_effect("task.reward_workers", "task.reward_timeout_s",
              when=lambda c: set(c.task.scorers) == {"exact"} and c.task.kind != "reasoning_gym",
              under="a scorer that runs in the learner's process", instead="task.scorer"),
    no_effect("task.think_tags", when=lambda c: c.task.kind == "arithmetic",
              under='task.kind = "arithmetic"', instead='task.kind = "reasoning_gym" or "file"'),
    # The rows of a file may be messages, which are rendered without task.chat.
    no_effect("task.date", "task.chat_template_kwargs",
              when=lambda c: not c.task.chat and c.task.kind != "file",
              under="task.chat = false", instead="task.chat"),
)

IDLE_RUN = (
    no_effect("run.samples_top_k", when=lambda c: not c.run.samples_per_step,
              under="run.samples_per_step = 0", instead="run.samples_per_step"),
)


def _scorer_exists(cfg: Any) -> None:
    if cfg.task.scorer:
        check_scorer_name(cfg.task.scorer)


TASK = (
    Rule(lambda c: c.task.kind == "reasoning_gym" and not c.task.name,
         "task.name: reasoning_gym needs the name of a generator", 'for example "chain_sum"'),
    Rule(lambda c: c.task.kind == "file" and not c.task.path,
         "task.path: a file task needs a file of rows", "for example data/problems.jsonl (docs/datasets.md)"),
    Rule(lambda c: c.task.scorer and c.task.kind != "file",
         'task.scorer: a task of kind "{task.kind}" scores by itself',
         'leave it out, or give [[task.rewards]], of which one may be "generator"'),
    Rule(lambda c: c.task.rewards and c.task.scorer,
         "task.rewards with task.scorer: give one of the two", "name the scorer in one of [[task.rewards]]"),
    _scorer_exists,
    Rule(lambda c: c.task.scorer_folder and not (c.task.has_own_scorer or c.environment.has_own_tool),
         "task.scorer_folder: there is no scorer of your own to look for",
         "leave it out, or set task.scorer"),
    Rule(lambda c: c.task.think_tags and (len(set(c.task.think_tags)) != 2 or len(c.task.think_tags) != 2
                                          or "" in c.task.think_tags),
         "task.think_tags = {task.think_tags}: give two tags, what opens a block of thoughts and what "
         "closes it",
         'for example ["<think>", "</think>"]; [] if there are none'),
)
