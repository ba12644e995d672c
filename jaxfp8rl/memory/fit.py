"""Checks before anything loads whether a run fits on its GPU: the learner's plan plus the engine, at each
stage of the run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from bridges.proof import manifest
from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError, OutOfMemory
from jaxfp8rl.memory.advice import advice
from jaxfp8rl.memory.cache_bytes import least_gib
from jaxfp8rl.memory.held import format_usage, usage
from jaxfp8rl.memory.plan import F32, RESIDENT, Plan, left_free, memory_plan, warm_start_plan
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import param_table
from jaxfp8rl.monitors.clock import PHASE
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.publish.wire import wire_manifest
from jaxfp8rl.rollout.engines import device_memory, share_gpu

# CUDA contexts, graphs and workspaces: the memory that vLLM still held in sleep mode, as measured
ENGINE_REST = 5 * 2**29
MASTERS = 2  # the plan's first rows that exist at the start: masters and moments
WARM = "the warm start"
# phases of a run -> the stage whose plan they are in
STAGES = {"update": "an update", "score": "an update", "warm start": WARM,
          **dict.fromkeys(("rollout", "publish", "gate", "evaluate"), "a rollout")}


def needs(cfg: Config, model: ModelConfig, total: int, fresh: bool = True) -> dict[str, int]:
    """The bytes that each stage of the run needs on a device of `total` bytes.

    The stages are the start, when the weights are there in float32 too; the warm start of a `fresh` run; an
    update of the learner; and a rollout of the engine. Engines in other processes are not counted. A cache
    that is "auto" counts with the least of which vLLM starts.
    """
    plan = [size for _, size in memory_plan(cfg, model)]
    warm = sum(size for _, size in warm_start_plan(cfg, model)) if fresh and cfg.sft.steps else 0
    if cfg.rollout.engine != "vllm":  # the embedded engine holds nothing before the first publish
        return {"an update": sum(plan)} | ({WARM: warm} if warm else {})
    whole = sum(math.prod(e.shape) for e in param_table(model)) * F32
    resident = RESIDENT + bool(cfg.loss.kl_coef)
    start = sum(plan[:MASTERS]) + _in_float32_at_start(cfg, model, whole)
    if cfg.lora.rank:  # the policy is made of the base's weights, a stack of them at a time
        start = sum(plan[:resident]) + _in_float32_at_start(cfg, model, whole) // 2
    elif cfg.reference.path:  # its FP8 weights are made from those of its folder, which are there, too
        start += 2 * plan[RESIDENT]
    elif cfg.loss.kl_coef:  # the reference is made from float32 weights
        start += plan[RESIDENT] + whole // cfg.train.over_weights
    weights = manifest.nbytes(wire_manifest(model, engine_runs(cfg, model), cfg.precision.weight_dtype))
    share = int(cfg.rollout.gpu_memory_utilization * total)
    awake = share if cfg.rollout.kv_cache_gib is None else weights + _cache(cfg, model)
    asleep = 0 if cfg.rollout.sleep != "off" else awake
    return {
        "the start": start + awake + ENGINE_REST, **({WARM: warm + asleep + ENGINE_REST} if warm else {}),
        "an update": sum(plan) + asleep + ENGINE_REST,
        "a rollout": sum(plan[:resident]) + awake + ENGINE_REST,
    }


def _cache(cfg: Config, model: ModelConfig) -> int:
    """The bytes of a cache of rollout.kv_cache_gib; of one that is "auto" the least, and what is
    computed beside it."""
    gib = cfg.rollout.kv_cache_gib
    if gib == "auto":
        return int(least_gib(cfg, model) * 2**30) + left_free(cfg, model)
    return int((gib or 0.0) * 2**30)


def _in_float32_at_start(cfg: Config, model: ModelConfig, whole: int) -> int:
    """The bytes of the weights that are on the device in float32 while the masters are made: `whole`, all, or
    the largest stack of layers where they come from a folder, one at a time."""
    if cfg.sft.steps:
        return whole
    if not cfg.model.path or cfg.train.over_weights > 1:
        return whole // cfg.train.over_weights
    layers = model.num_hidden_layers
    return F32 * max(math.prod(e.shape) * (1 if e.layer is None else layers) for e in param_table(model))


def check_memory(cfg: Config, fresh: bool) -> None:
    """Run `check_fits` for this machine. On a CPU nothing is checked."""
    share_gpu(cfg)
    if total := device_memory():
        check_fits(cfg, model_config(cfg), total, fresh)


def check_fits(cfg: Config, model: ModelConfig, total: int, fresh: bool = True) -> None:
    """Raise ConfigError if a stage of the run needs more than `total` bytes. The error names the settings
    that save most."""
    _check(cfg, total, lambda changed: needs(changed, model, total, fresh))


def check_warm_start(cfg: Config, model: ModelConfig, total: int | None) -> None:
    """Like `check_fits`, for a warm start alone (`jaxfp8rl sft`). `total` is None on a CPU, and then nothing
    is checked."""
    if total:
        _check(cfg, total, lambda changed: {WARM: sum(size for _, size in warm_start_plan(changed, model))})


def _check(cfg: Config, total: int, needs_of: Callable[[Config], dict[str, int]]) -> None:
    needed = needs_of(cfg)
    moment = max(needed, key=needed.__getitem__)
    if needed[moment] <= total:
        return
    apart = "\n  or run the warm start by itself: jaxfp8rl sft (docs/faq.md)" if moment == WARM and len(
        needed) > 1 else ""
    raise ConfigError(
        f"{moment} needs {needed[moment] / 2**30:.1f} GiB, the device has {total / 2**30:.1f} "
        "(`--dry-run` prints the plan)",
        advice(cfg, lambda changed: max(needs_of(changed).values()), needed[moment] - total) + apart,
    )


@contextlib.contextmanager
def explained(cfg: Config, fresh: bool = True) -> Iterator[None]:
    """If the device runs out of memory in this context, raise OutOfMemory with the phase, the plan beside
    what was held, and the settings that would have made it fit. If the run has a checkpoint, only settings
    that a resumed run may change are suggested."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise _out_of_memory(cfg, fresh, e) from e


def _out_of_memory(cfg: Config, fresh: bool, e: Exception) -> OutOfMemory:
    model, total = model_config(cfg), device_memory() or 0
    phase = next((note for note in getattr(e, "__notes__", ()) if note.startswith(PHASE)), PHASE + "start")
    stages = needs(cfg, model, total, fresh)
    stage = STAGES.get(phase.removeprefix(PHASE), "the start")
    stage = stage if stage in stages else max(stages, key=stages.__getitem__)
    held = usage(cfg, model, str(e))
    table = format_usage(_rows_of(stage, cfg, model), held, stages[stage])
    # what was seen counts, where it is more than the plan
    over = max(held.wanted, stages[stage]) - total if total else 0
    saved = Checkpoints(Path(cfg.run.dir) / "checkpoints", 1).latest() is not None
    help_ = advice(cfg, lambda changed: needs(changed, model, total, fresh)[stage],
                   over if over > 0 else max(held.asked, 1), resumed=saved)
    return OutOfMemory(
        f"the device's {total / 2**30:.1f} GiB of memory ran out ({phase}); the plan of {stage} beside what "
        f"was held:\n{table}\n  {str(e).splitlines()[0]}",
        help_ + ("\n  then --resume" if saved else "\n  then start again: nothing has been saved yet"))


def _rows_of(stage: str, cfg: Config, model: ModelConfig) -> Plan:
    """The rows of the plan that are there in a stage."""
    if stage == WARM:
        return warm_start_plan(cfg, model)
    there = {"the start": MASTERS, "a rollout": RESIDENT + bool(cfg.loss.kl_coef)}
    return memory_plan(cfg, model)[: there.get(stage)]


def format_needs(cfg: Config, model: ModelConfig) -> str:
    """Lines to print below the plan: the needs of each stage, if the engine's memory is known without a
    GPU."""
    if cfg.rollout.engine != "vllm" or cfg.rollout.kv_cache_gib in (None, "auto"):
        return ""
    moments = needs(cfg, model, 0)
    return "\nwith vLLM\n" + "\n".join(f"  {size / 2**20:12,.2f} MiB  during {moment}"
                                       for moment, size in moments.items())
