"""The jitted programs of a learner, and their compilation while the engine starts (`ahead`).

A run needs them once the engine has started and sampled, and they depend on shapes alone. A later call with
arguments of these shapes, at these places, finds the compiled program in JAX's own cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from bridges.api import EngineFormats
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.packing import pack
from jaxfp8rl.distributed.mesh import MeshLayout
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim.adamw import Optimizer, make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.policy.adapters import adapter_product, masters_like
from jaxfp8rl.policy.hardware import attention_of, check_exact, products_of
from jaxfp8rl.policy.policy import over_base, partition
from jaxfp8rl.policy.shapes import microbatches_of
from jaxfp8rl.precision.jit import gradient_jit, rounding_exact_jit
from jaxfp8rl.precision.layer_runs import LayerRun, plain_runs
from jaxfp8rl.precision.recipe import get_recipe, resolve
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.rollout import support
from jaxfp8rl.training.ahead import Ahead, KeptLowered, compile_ahead
from jaxfp8rl.training.calibrate import KvCalibration
from jaxfp8rl.training.draft import draft_training, fresh_draft
from jaxfp8rl.training.step import DONATED, make_logprobs, make_policy, make_score, make_train_step, on_policy
from jaxfp8rl.types import Params, TrainBatch, TrainState


class Programs(NamedTuple):
    """The programs of a learner for an engine that computes in `formats`."""

    formats: EngineFormats
    precision: Precision
    optimizer: Optimizer
    logprobs: Callable
    policy: Callable
    score: Callable
    train_step: Callable
    kv_scales: KvCalibration | None


def make_programs(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...], formats: EngineFormats,
                  layout: MeshLayout) -> Programs:
    """The programs of a config. `runs`: the linears that the engine holds in FP8. Raises ConfigError for a
    recipe that does not suit the formats."""
    precision, temperature = learner_precision(cfg, model, runs, formats), cfg.rollout.temperature
    optimizer, draft = make_optimizer(cfg.optim, cfg.updates), draft_training(cfg, model, precision)
    logprobs = make_logprobs(model, precision, temperature, cfg.train.remat, layout)
    learned_from = make_logprobs(model, precision, temperature, cfg.train.remat, layout,
                                 True) if draft else logprobs
    return Programs(
        formats, precision, optimizer, logprobs,
        make_policy(precision, codes=not cfg.rollout.one_copy, layout=layout), make_score(logprobs, layout),
        make_train_step(learned_from, precision, cfg.loss, cfg.correction.resolve(), optimizer, layout,
                        cfg.moe.balance_coef, cfg.optim.gradient_sums, draft),
        KvCalibration(model, precision, temperature, cfg.rollout.kv_scale_decay)
        if cfg.rollout.kv_scales == "calibrated" else None,
    )


def learner_precision(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...],
                      formats: EngineFormats) -> Precision:
    """How the learner computes for an engine that holds the linears of `runs` in FP8. Raises ConfigError for
    a recipe that does not suit the formats."""
    p = cfg.precision
    precision = dataclasses.replace(resolve(
        get_recipe(p.recipe), runs, formats, p.compute_dtype, p.weight_dtype, p.gradients,
        p.saved_activations, products_of(p.products, p.compute_dtype),
        attention_of(p.attention, p.compute_dtype, model), p.wgrad_inputs, cfg.exact,
    ), adapters=adapter_product(cfg))
    check_exact(cfg, precision, model)
    return precision


def plain_precision(cfg: Config, model: ModelConfig) -> Precision:
    """The config's float types without FP8, and without the roundings of an engine."""
    compute = cfg.precision.compute_dtype
    return Precision(
        plain_runs(model.sparse_layers), compute_dtype=compute, weight_dtype=cfg.precision.weight_dtype,
        attention=attention_of(cfg.precision.attention, compute, model),
    )


class Shapes(NamedTuple):
    """The arguments of a learner's programs as jax.ShapeDtypeStructs, at the places of a run's arrays."""

    state: TrainState
    policy: Params
    batch: TrainBatch
    old_logp: jax.ShapeDtypeStruct


def shapes_of(programs: Programs, cfg: Config, model: ModelConfig, batch: TrainBatch,
              layout: MeshLayout) -> Shapes:
    """The shapes of a run whose updates take batches like `batch`."""
    initial = lambda params: init_state(params, programs.optimizer, cfg.precision.compute_dtype)
    state = layout.placed_shapes(jax.eval_shape(initial, masters_like(cfg, model))._replace(
        draft=jax.eval_shape(lambda: fresh_draft(cfg, model))))
    policy: Params = jax.eval_shape(programs.policy, state.params)
    if cfg.lora.rank:
        base = jax.eval_shape(programs.policy, jax.eval_shape(lambda: init_params(model, jax.random.key(0))))
        policy = over_base(policy, base)
    if programs.kv_scales:
        policy |= {"kv_scales": jax.eval_shape(programs.kv_scales.unit_scales)}
    policy = layout.placed_shapes(policy)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    batch = layout.placed_batch(jax.tree.map(like, batch))
    return Shapes(state, policy, batch, layout.placed_rows(jax.eval_shape(programs.score, policy, batch)))


def has_known_shapes(cfg: Config) -> bool:
    """Whether the shapes of a run's programs follow from its config. The engine decides them where it lends
    its codes (rollout.one_copy) or its routes (moe.replay)."""
    return not (cfg.rollout.one_copy or cfg.moe.replay != "none" or cfg.loss.calibrate_clip_every)


def ahead_of(programs: Programs, cfg: Config, model: ModelConfig, layout: MeshLayout) -> dict[str, Ahead]:
    """The programs of a run's steps with the arguments that they will get, by the names of their fields:
    first that of the first publish, then the slowest to compile."""
    batch = pack([], cfg.train.row_tokens, cfg.train.rows_per_microbatch, microbatches_of(cfg),
                 support=support.width(cfg.rollout, model.vocab_size), ages=cfg.loss.needs_ages,
                 share=cfg.train.shared_prefix, weighted=cfg.selection.weighs)
    state, policy, batch, old_logp = shapes_of(programs, cfg, model, batch, layout)
    update: Any = programs.train_step
    reference = old_logp if cfg.loss.kl_coef else None
    arguments = state, *partition(policy), batch, old_logp, reference, None
    found = {"policy": Ahead(programs.policy, rounding_exact_jit, (state.params,)),
             "train_step": Ahead(update.__wrapped__, gradient_jit, arguments, donate_argnums=DONATED)}
    if kv := programs.kv_scales:
        found["kv_scales"] = Ahead(kv.observe, rounding_exact_jit, (policy, batch))
    return found | {"score": Ahead(programs.score, rounding_exact_jit, (policy, batch))}


def compiled_ahead(programs: Programs, cfg: Config, model: ModelConfig, layout: MeshLayout,
                   kept: KeptLowered | None) -> Programs:
    """The same programs, which threads compile from now on. `kept`: where their lowered forms are."""
    found = ahead_of(programs, cfg, model, layout)
    compile_ahead(list(found.values()), kept)
    if programs.kv_scales:
        programs.kv_scales.observe = found["kv_scales"]
    return programs._replace(policy=found["policy"], score=found["score"],
                             train_step=on_policy(found["train_step"]))
