"""The supervised warm start: cross-entropy on the answers of a task, in high precision.

`train` runs it before step 1 when `sft.steps` > 0; `jaxfp8rl sft` runs it alone and writes an HF folder.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfp8rl.config.learning import Optim
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.dataset import demonstrable
from jaxfp8rl.data.packing import Sample, microbatches_needed, pack
from jaxfp8rl.data.seen import Questions, write_seen
from jaxfp8rl.data.task import Task
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.errors import ConfigError, NonFiniteStep, check_writable
from jaxfp8rl.memory.fit import check_warm_start
from jaxfp8rl.microbatch import accumulate
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import check_empty, check_weights, save_params
from jaxfp8rl.monitors.console import ConsoleMonitor
from jaxfp8rl.monitors.quiet import FOLDER as LOGS
from jaxfp8rl.monitors.quiet import quiet
from jaxfp8rl.optim.adamw import Optimizer, make_optimizer
from jaxfp8rl.optim.guard import guarded_update, init_state
from jaxfp8rl.optim.low_bit import decode, is_scaled
from jaxfp8rl.policy.hardware import attention_of, check_kernels
from jaxfp8rl.policy.initial import starting_params
from jaxfp8rl.policy.policy import gradients_like, outer, policy_of
from jaxfp8rl.policy.routing_replay import with_options
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.policy.warnings import version_warnings
from jaxfp8rl.precision.jit import check_kept, gradient_jit, keep_compiled
from jaxfp8rl.precision.layer_runs import plain_runs
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.rollout.engines import device_memory
from jaxfp8rl.rollout.problems import Data, load_data
from jaxfp8rl.rollout.scored_groups import Prompt
from jaxfp8rl.training.step import make_logprobs
from jaxfp8rl.types import Params, StepMetrics, TrainBatch, TrainState


def run_sft(cfg: Config) -> None:
    """`jaxfp8rl sft`: warm-start the config's model and write it to <run.dir>/sft, a Hugging Face folder that
    `model.path` accepts."""
    model, data, questions = prepare_sft(cfg)
    keep_compiled(cfg.train.compilation_cache)
    with quiet(Path(cfg.run.dir) / LOGS / "stderr.txt"):
        _run_sft(cfg, model, data, questions)


def _run_sft(cfg: Config, model: ModelConfig, data: Data, questions: Questions) -> None:
    check_warm_start(cfg, model, device_memory())
    for note in (*version_warnings(cfg), *data.stops.notes):
        print(note)
    try:
        with contextlib.closing(ConsoleMonitor(cfg.sft.steps)) as console:
            console.phase("warm start")
            began = lambda step: console.bar("warm start", step - 1, cfg.sft.steps)
            params = starting_params(cfg, model)
            params = warm_start(cfg, model, params, data.task, data.train, data.tokenizer, console.note,
                                began)
    except KeyboardInterrupt:
        print(f"stopped; {lost(cfg.sft.steps)}")
        raise
    folder = sft_folder(cfg)
    save_params(folder, model, params, dtype=cfg.precision.weight_dtype)
    data.tokenizer.save(str(folder))
    write_seen(folder, questions.seen)
    print(f"wrote {folder}")


def prepare_sft(cfg: Config) -> tuple[ModelConfig, Data, Questions]:
    """Check all of a warm start that needs no device, as `context.preflight` does for a run."""
    check_sft(cfg)
    model = with_options(model_config(cfg), cfg)
    check_kernels("auto", cfg.precision.attention, cfg.precision.compute_dtype, model)
    if cfg.model.path:
        check_weights(cfg.model.path, model)
    data = load_data(cfg, model)
    return model, data, data.questions(cfg)


def check_sft(cfg: Config) -> None:
    """Raise UserErrors for a warm start that cannot begin, before anything loads."""
    if not cfg.sft.steps:
        raise ConfigError("sft.steps = 0: nothing to train",
                          "set sft.steps, sft.lr and sft.examples_per_step")
    check(cfg)
    check_empty(sft_folder(cfg))
    check_writable(sft_folder(cfg))
    check_kept(cfg.train.compilation_cache)


def sft_folder(cfg: Config) -> Path:
    return Path(cfg.run.dir) / "sft"


def warm_start(
    cfg: Config, model: ModelConfig, params: Params, task: Task, prompts: Sequence[Prompt],
    tokenizer: Tokenizer, note: Callable,
    began: Callable[[int], None] = lambda step: None,
) -> Params:
    """Make `sft.steps` updates on the task's demonstrations and return the float32 parameters.

    The demonstrations are drawn by (run.seed, step). `began(step)` is called before each update, once the
    update before it has finished. The learning rate warms up to `sft.lr` and falls linearly to 0, so that the
    policy averages over the demonstrations instead of following the last ones.
    """
    precision = Precision(
        plain_runs(model.sparse_layers), compute_dtype=cfg.precision.compute_dtype,
        weight_dtype=cfg.precision.weight_dtype,
        attention=attention_of(cfg.precision.attention, cfg.precision.compute_dtype, model),
    )
    optimizer = make_optimizer(optim_of(cfg), cfg.sft.steps)
    step_fn = make_sft_step(make_logprobs(model, precision, 1.0, cfg.train.remat), precision, optimizer)
    shape = cfg.train.row_tokens, cfg.train.rows_per_microbatch
    microbatches = microbatches_needed(cfg.sft.examples_per_step, cfg.max_model_len, *shape)
    state, prompts = init_state(params, optimizer,
                                cfg.precision.compute_dtype), demonstrable(prompts, task.name)
    for step in range(1, cfg.sft.steps + 1):
        batch = pack(_drawn(cfg, task, prompts, tokenizer, step), *shape, microbatches)
        jax.block_until_ready(state)
        began(step)
        state, metrics = step_fn(state, batch)
        if step % max(cfg.sft.steps // 10, 1) == 0 or step == cfg.sft.steps:
            note(f"warm start {step}/{cfg.sft.steps}  loss {float(metrics['loss']):.4f}")
            if int(state.bad_steps):
                raise NonFiniteStep("the warm start's loss is not finite", "lower sft.lr")
    return jax.tree.map(decode, state.params, is_leaf=is_scaled)


def check_demonstrations(cfg: Config, data: Data) -> None:
    """Raise DataError, as the warm start would, if the tokenizer cannot encode a demonstration that the warm
    start draws."""
    prompts = demonstrable(data.train, data.task.name)
    for step in range(1, cfg.sft.steps + 1):
        _drawn(cfg, data.task, prompts, data.tokenizer, step)


def _drawn(cfg: Config, task: Task, prompts: Sequence[Prompt], tokenizer: Tokenizer,
           step: int) -> list[Sample]:
    """The demonstrations of an update."""
    rng = np.random.default_rng([cfg.run.seed, step])
    chosen = [prompts[i] for i in rng.integers(len(prompts), size=cfg.sft.examples_per_step)]
    longest = cfg.rollout.max_new_tokens
    return [_example(p.token_ids, task.demonstrate(p.problem, rng), tokenizer, longest) for p in chosen]


def lost(steps: int, done: int | None = None) -> str:
    """The message about a warm start of `steps` updates that ends after `done` of them."""
    progress = "its updates are" if done is None else f"{done} of its {steps} updates are"
    return (
        f"nothing is saved: a warm start cannot be resumed, and {progress} lost. The same command starts it "
        "again. `jaxfp8rl sft` saves its warm start, which any number of runs can use as model.path")


def optim_of(cfg: Config) -> Optim:
    """The run's optimiser settings with the learning-rate schedule of the warm start."""
    schedule = {"lr": cfg.sft.lr, "warmup_steps": cfg.sft.warmup_steps, "schedule": "linear",
                "total_steps": None, "min_lr_ratio": 0.0}
    return cfg.optim.model_copy(update=schedule)


def make_sft_step(logprobs: Callable, precision: Precision,
                  optimizer: Optimizer) -> Callable:
    """Jitted step(state, batch) -> (state, metrics); the state is donated.

    The loss is the mean negative log-likelihood of the response tokens, in nats.
    """

    def loss_fn(weights: Params, sums: Params, micro: tuple, policy: Params,
                tokens: Array) -> tuple[Array, StepMetrics]:
        (batch,) = micro
        logp, *_ = logprobs(policy | weights | {"sums": sums}, batch)
        return -jnp.sum(jnp.where(batch.response_mask, logp, 0.0)) / tokens, {}

    @functools.partial(gradient_jit, donate_argnums=0)
    def step(state: TrainState, batch: TrainBatch) -> tuple[TrainState, StepMetrics]:
        tokens = jnp.maximum(jnp.sum(batch.response_mask), 1).astype(jnp.float32)
        policy = policy_of(state.params, precision)  # its precision quantises nothing
        loss, live = functools.partial(loss_fn, policy=policy, tokens=tokens), batch.response_mask.any((1, 2))
        value, _, grads = accumulate(loss, outer(policy), gradients_like(policy), (batch,), live,
                                     state.loss_scale)
        state, metrics = guarded_update(optimizer, state, value, grads)
        return state, {"loss": value, **metrics}

    return step


def _example(prompt: Sequence[int], answer: str, tokenizer: Tokenizer, longest: int) -> Sample:
    """Prompt, answer and stop token as a sample. Answer and stop token are cut to `longest` tokens together,
    so that a cut answer does not teach the policy to stop where it was cut."""
    completion = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_ids[0]][:longest]
    return Sample(prompt, completion, np.zeros(len(completion), np.float32), 0.0)
