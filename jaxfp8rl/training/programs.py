"""The jitted programs of a learner, and their compilation while the engine starts.

A run needs them once the engine has started and sampled. They depend on shapes alone, so threads can compile
them before: XLA's compiler does not hold Python's lock. A later call with arguments of these shapes, at these
places, finds the compiled program in JAX's own cache.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from bridges.api import EngineFormats
from jaxfp8rl.config.schema import Config
from jaxfp8rl.distributed.mesh import MeshLayout
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim.adamw import Optimizer, make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.policy.hardware import attention_of, products_of
from jaxfp8rl.policy.policy import partition
from jaxfp8rl.precision.layer_runs import LayerRun, plain_runs
from jaxfp8rl.precision.recipe import get_recipe, resolve
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.training.calibrate import KvCalibration
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step
from jaxfp8rl.types import Params, TrainBatch, TrainState

PATIENCE = 60.0  # seconds that the end of a process waits for a compiler


class Programs(NamedTuple):
    """The programs of a learner for an engine that computes in `formats`."""

    formats: EngineFormats
    precision: Precision
    optimizer: Optimizer
    logprobs: Callable
    policy: jax.stages.Wrapped
    score: jax.stages.Wrapped
    train_step: Callable
    kv_scales: KvCalibration | None


def make_programs(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...], formats: EngineFormats,
                  layout: MeshLayout) -> Programs:
    """The programs of a config. `runs`: the linears that the engine holds in FP8. Raises ConfigError for a
    recipe that does not suit the formats."""
    precision, temperature = learner_precision(cfg, model, runs, formats), cfg.rollout.temperature
    optimizer = make_optimizer(cfg.optim, cfg.updates)
    logprobs = make_logprobs(model, precision, temperature, cfg.train.remat, layout)
    return Programs(
        formats, precision, optimizer, logprobs,
        make_policy(precision, codes=not cfg.rollout.one_copy, layout=layout), make_score(logprobs, layout),
        make_train_step(logprobs, precision, cfg.loss, cfg.correction.resolve(), optimizer, layout,
                        cfg.moe.balance_coef, cfg.optim.gradient_sums),
        KvCalibration(model, precision, temperature, cfg.rollout.kv_scale_decay)
        if cfg.rollout.kv_scales == "calibrated" else None,
    )


def learner_precision(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...],
                      formats: EngineFormats) -> Precision:
    """How the learner computes for an engine that holds the linears of `runs` in FP8. Raises ConfigError for
    a recipe that does not suit the formats."""
    p = cfg.precision
    return resolve(
        get_recipe(p.recipe), runs, formats, p.compute_dtype, p.weight_dtype, p.gradients,
        p.saved_activations, products_of(p.products, p.compute_dtype),
        attention_of(p.attention, p.compute_dtype, model), p.wgrad_inputs,
    )


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
    initial = lambda key: init_state(init_params(model, key), programs.optimizer, cfg.precision.compute_dtype)
    state = layout.placed_shapes(jax.eval_shape(initial, jax.random.key(0)))
    policy: Params = jax.eval_shape(programs.policy, state.params)
    if programs.kv_scales:
        policy |= {"kv_scales": jax.eval_shape(programs.kv_scales.unit_scales)}
    policy = layout.placed_shapes(policy)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    batch = jax.tree.map(like, batch)
    return Shapes(state, policy, batch, layout.placed_rows(jax.eval_shape(programs.score, policy, batch)))


def has_known_shapes(cfg: Config) -> bool:
    """Whether the shapes of a run's programs follow from its config. The engine decides them where it lends
    its codes (rollout.one_copy) or its routes (moe.replay)."""
    return not (cfg.rollout.one_copy or cfg.moe.replay != "none" or cfg.loss.calibrate_clip_every)


def lowered(programs: Programs, cfg: Config, shapes: Shapes) -> list[Callable[[], jax.stages.Lowered]]:
    """Functions that trace and lower a program each, the slowest to compile first."""
    state, policy, batch, old_logp = shapes
    update: Any = programs.train_step
    reference = old_logp if cfg.loss.kl_coef else None
    found = [lambda: update.__wrapped__.lower(state, *partition(policy), batch, old_logp, reference, None),
             lambda: programs.score.lower(policy, batch), lambda: programs.policy.lower(state.params)]
    if kv := programs.kv_scales:
        found.insert(1, lambda: kv.observe.lower(policy, batch))
    return found


def compile_ahead(lower: Sequence[Callable[[], jax.stages.Lowered]]) -> list[threading.Thread]:
    """Compile each program in a thread of its own, and return the threads.

    A program that does not compile raises its error again where the run calls it. The process waits for a
    compiler at its end, because XLA does not survive being ended in the middle.
    """

    def work(make: Callable[[], jax.stages.Lowered]) -> None:
        try:
            make().compile()
        except Exception:  # noqa: BLE001 - the run's own call raises it, with its phase
            return

    threads = [threading.Thread(target=work, args=(make,), name="compiler", daemon=True) for make in lower]
    for thread in threads:
        thread.start()
        atexit.register(thread.join, PATIENCE)
    return threads
