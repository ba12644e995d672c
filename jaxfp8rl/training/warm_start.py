"""The supervised warm start: cross-entropy on the answers of a task.

Its update is that of `train` (jaxfp8rl.training.step) with another loss: REINFORCE without a correction, and
with an advantage of 1 for each token of an answer, is the mean negative log-likelihood. Under a recipe whose
learner computes in FP8, a warm start does so too, from a policy that is quantised once an update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bridges.api import EngineFormats
from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.dataset import demonstrable
from jaxfp8rl.data.packing import Sample, microbatches_needed, pack
from jaxfp8rl.data.task import Task
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.errors import ConfigError, NonFiniteStep
from jaxfp8rl.losses.presets import get_preset
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.optim.adamw import Optimizer, make_optimizer
from jaxfp8rl.optim.low_bit import decode, is_scaled
from jaxfp8rl.policy.initial import fresh_state
from jaxfp8rl.policy.shapes import engine_runs
from jaxfp8rl.precision.records import Gradients, Precision
from jaxfp8rl.rollout.engines import expected_formats
from jaxfp8rl.rollout.problems import Data
from jaxfp8rl.rollout.scored_groups import Prompt
from jaxfp8rl.training.draft import DraftTraining, draft_training, fresh_draft
from jaxfp8rl.training.programs import learner_precision, plain_precision
from jaxfp8rl.training.step import make_logprobs, make_policy, make_train_step
from jaxfp8rl.types import Params, TrainBatch, TrainState

NLL = Loss(objective="reinforce")
Demonstrations = tuple[Task, Sequence[Prompt], Tokenizer]  # what an update draws them from


def warm_start(
    cfg: Config, model: ModelConfig, params: Params, data: Demonstrations,
    note: Callable[[str], None], began: Callable[[int], None], formats: EngineFormats | None = None,
) -> tuple[Params, TrainState | None]:
    """Make `sft.steps` updates on the task's demonstrations -> (the float32 parameters, the state of the
    config's draft head, which learns beside them; None without one).

    `began(step)` is called before each update, once the update before it has finished. formats: those of the
    run's engine, which an FP8 learner mirrors; None: those that the engine is expected to report.
    """
    updates = WarmStart.of(cfg, model, data, formats, with_draft=True)
    note(updates.described)
    state = updates.run(updates.begin(params)._replace(draft=ONE.place(fresh_draft(cfg, model))),
                        note, began)
    return masters(state), state.draft


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """The updates of a warm start.

    The demonstrations are drawn by (run.seed, step). The learning rate warms up to `sft.lr` and falls
    linearly to 0, so that the policy averages over the demonstrations instead of following the last ones.
    """

    cfg: Config
    precision: Precision
    optimizer: Optimizer
    policy: Callable[[Params], Params]
    update: Callable[[TrainState, Params, TrainBatch], tuple]
    task: Task
    prompts: Sequence[Prompt]
    tokenizer: Tokenizer

    @classmethod
    def of(cls, cfg: Config, model: ModelConfig, data: Demonstrations,
           formats: EngineFormats | None = None, with_draft: bool = False) -> WarmStart:
        """with_draft: a draft head in the state learns beside the policy. Raises ConfigError as
        `warm_precision` does."""
        precision = warm_precision(cfg, model, formats)
        optimizer = make_optimizer(optim_of(cfg), cfg.sft.steps)
        draft = draft_training(cfg, model, precision) if with_draft else None
        logprobs = make_logprobs(model, precision, 1.0, cfg.train.remat, with_hidden=draft is not None)
        task, prompts, tokenizer = data
        return cls(cfg, precision, optimizer, make_policy(precision),
                   make_sft_step(logprobs, precision, optimizer, cfg.optim.gradient_sums, draft),
                   task, demonstrable(prompts, task.name), tokenizer)

    @property
    def described(self) -> str:
        """The formats in which it computes, for the log."""
        p = self.precision
        if not p.any_fp8:
            return f"warm start: computes in {p.compute_dtype}, without FP8"
        backward = "in high precision" if p.gradients == Gradients.HIGH else "in FP8"
        return f'warm start: computes as "{self.cfg.precision.recipe}", forward in FP8, backward {backward}'

    def begin(self, params: Params) -> TrainState:
        """The initial state of float32 parameters, on one device."""
        return fresh_state(params, self.optimizer, self.cfg.precision.compute_dtype, ONE)

    def run(self, state: TrainState, note: Callable[[str], None], began: Callable[[int], None], done: int = 0,
            after: Callable[[int, TrainState], None] = lambda step, state: None) -> TrainState:
        """The updates after the first `done`. `after(step, state)` may save the state, which the next update
        donates. Raises NonFiniteStep."""
        steps, policy = self.cfg.sft.steps, self.policy(state.params)
        for step in range(done + 1, steps + 1):
            batch = self.batch(step)
            jax.block_until_ready(state)
            began(step)
            state, policy, metrics = self.update(state, policy, batch)
            if step % max(steps // 10, 1) == 0 or step == steps:
                note(f"warm start {step}/{steps}  loss {float(metrics['loss']):.4f}")
                if int(state.bad_steps):
                    raise NonFiniteStep("the warm start's loss is not finite", "lower sft.lr")
            after(step, state)
        return state

    def batch(self, step: int) -> TrainBatch:
        """The demonstrations of an update, [M, R, T], in the same shape each time."""
        cfg = self.cfg
        shape = cfg.train.row_tokens, cfg.train.rows_per_microbatch
        microbatches = microbatches_needed(cfg.sft.examples_per_step, cfg.max_model_len, *shape)
        return pack(drawn(cfg, self.task, self.prompts, self.tokenizer, step), *shape, microbatches)


def masters(state: TrainState) -> Params:
    """The parameters of a state, in float32."""
    return jax.tree.map(decode, state.params, is_leaf=is_scaled)


def warm_precision(cfg: Config, model: ModelConfig, formats: EngineFormats | None = None) -> Precision:
    """How a warm start computes: as the learner, if its forward pass is FP8; otherwise in the config's float
    types alone, without the roundings of an engine.

    Raises ConfigError if an FP8 learner would mirror an engine whose formats are not known before it starts.
    """
    if not cfg.precision.resolve().forward_fp8:
        return plain_precision(cfg, model)
    if (formats := formats or expected_formats(cfg, model)) is None:
        raise ConfigError(
            f'precision.recipe = "{cfg.precision.recipe}" mirrors the formats of rollout.engine = '
            f'"{cfg.rollout.engine}", which are not known on this machine before it starts',
            'for the warm start set rollout.engine = "jax", or precision.recipe = "bf16"')
    return learner_precision(cfg, model, engine_runs(cfg, model), formats)


def check_demonstrations(cfg: Config, data: Data) -> None:
    """Raise DataError, as the warm start would, if the tokenizer cannot encode a demonstration that the warm
    start draws."""
    prompts = demonstrable(data.train, data.task.name)
    steps = range(1, cfg.sft.steps + 1)
    for answer in dict.fromkeys(a for step in steps for _, a in demonstrated(cfg, data.task, prompts, step)):
        data.tokenizer.encode(answer, add_special_tokens=False)


def drawn(cfg: Config, task: Task, prompts: Sequence[Prompt], tokenizer: Tokenizer,
          step: int) -> list[Sample]:
    """The demonstrations of an update."""
    longest = cfg.rollout.max_new_tokens
    return [_example(prompt.token_ids, answer, tokenizer, longest)
            for prompt, answer in demonstrated(cfg, task, prompts, step)]


def demonstrated(cfg: Config, task: Task, prompts: Sequence[Prompt], step: int) -> list[tuple[Prompt, str]]:
    """The prompts of an update, each with its demonstration."""
    rng = np.random.default_rng([cfg.run.seed, step])
    chosen = [prompts[i] for i in rng.integers(len(prompts), size=cfg.sft.examples_per_step)]
    return [(p, task.demonstrate(p.problem, rng)) for p in chosen]


def _example(prompt: Sequence[int], answer: str, tokenizer: Tokenizer, longest: int) -> Sample:
    """Prompt, answer and stop token as a sample. Answer and stop token are cut to `longest` tokens together,
    so that a cut answer does not teach the policy to stop where it was cut."""
    completion = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_ids[0]][:longest]
    return Sample(prompt, completion, np.zeros(len(completion), np.float32), 1.0)


def optim_of(cfg: Config) -> Optim:
    """The run's optimiser settings with the learning-rate schedule of the warm start."""
    schedule = {"lr": cfg.sft.lr, "warmup_steps": cfg.sft.warmup_steps, "schedule": "linear",
                "total_steps": None, "min_lr_ratio": 0.0}
    return cfg.optim.model_copy(update=schedule)


def make_sft_step(logprobs: Callable, precision: Precision, optimizer: Optimizer,
                  gradient_sums: str = "float32", draft: DraftTraining | None = None) -> Callable:
    """step(state, policy, batch) -> (state, policy, metrics), the jitted update of `train` with the loss of a
    warm start; state and policy are donated.

    The loss is the mean negative log-likelihood of the response tokens, in nats, whatever the advantages of
    the batch are. draft: how the draft head of state.draft learns beside it.
    """
    step = make_train_step(logprobs, precision, NLL, get_preset("none"), optimizer,
                           gradient_sums=gradient_sums, draft=draft)

    def update(state: TrainState, policy: Params, batch: TrainBatch) -> tuple:
        batch = batch._replace(advantages=jnp.asarray(batch.response_mask, jnp.float32))
        return step(state, policy, batch, batch.rollout_logp)

    return update
