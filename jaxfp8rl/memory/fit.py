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
from jaxfp8rl.gpus import host_memory
from jaxfp8rl.memory.advice import advice
from jaxfp8rl.memory.cache_bytes import least_gib
from jaxfp8rl.memory.held import beside_jax, format_held, format_usage, kinds_of, usage
from jaxfp8rl.memory.plan import (
    F32,
    RESIDENT,
    Plan,
    evaluation_plan,
    left_free,
    memory_plan,
    moments_on_host,
    warm_start_plan,
)
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import param_table
from jaxfp8rl.monitors.clock import PHASE
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.publish.wire import wire_manifest
from jaxfp8rl.rollout.gpu_memory import device_memory, memory_of_jax, share_gpu

# CUDA contexts, graphs and workspaces: the memory that vLLM still held in sleep mode, as measured
ENGINE_REST = 5 * 2**29
OTHERS = 2 * 2**30  # more than the CUDA context of a process that has only begun
OF_HOST = ('set optim.first_moment = "float8" and optim.second_moment = "bfloat16" for a new run, or give the '
           "container more memory")
MASTERS = 2  # the plan's first rows that exist at the start: masters and moments
WARM, EVALUATION = "the warm start", "an evaluation"
NeedsOf = Callable[[Config], dict[str, int]]  # the bytes that each stage of a config needs
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
    awake = _awake(cfg, model, total)
    asleep = 0 if cfg.rollout.sleep != "off" else awake
    return {
        "the start": start + awake + ENGINE_REST, **({WARM: warm + asleep + ENGINE_REST} if warm else {}),
        "an update": sum(plan) + asleep + ENGINE_REST,
        "a rollout": sum(plan[:resident]) + awake + ENGINE_REST,
    }


def _awake(cfg: Config, model: ModelConfig, total: int) -> int:
    """The bytes that vLLM in this process takes of `total`, beside ENGINE_REST."""
    if cfg.rollout.kv_cache_gib is None:
        return int(cfg.rollout.gpu_memory_utilization * total)
    weights = manifest.nbytes(wire_manifest(model, engine_runs(cfg, model), cfg.precision.weight_dtype))
    return weights + _cache(cfg, model)


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
    """Run `check_fits` for this machine, and hold moments in host memory to what it has. On a CPU nothing is
    checked."""
    share_gpu(cfg)
    if room := _room(cfg):
        check_fits(cfg, model_config(cfg), room, fresh)
        _check_host(cfg)


def _check_host(cfg: Config) -> None:
    needed, there = moments_on_host(cfg, model_config(cfg)) // cfg.train.processes, host_memory()
    if needed > there:
        raise ConfigError(
            f"optim.offload: Adam's moments take {needed / 2**30:.1f} GiB of host memory, and there are "
            f"{there / 2**30:.1f}", OF_HOST)


def _room(cfg: Config) -> int | None:
    """The bytes of the first GPU that there are for a run: without vLLM those that JAX may take; None on a
    CPU."""
    return memory_of_jax() if cfg.rollout.engine == "jax" else device_memory()


def check_fits(cfg: Config, model: ModelConfig, total: int, fresh: bool = True) -> None:
    """Raise ConfigError if a stage of the run needs more than `total` bytes. The error names the settings
    that save most."""
    _check(cfg, total, lambda changed: needs(changed, model, total, fresh))


def check_warm_start(cfg: Config, model: ModelConfig, room: int | None) -> None:
    """Like `check_fits`, for a warm start alone (`jaxfp8rl sft`). `room` is None on a CPU, and then nothing
    is checked."""
    if room:
        _check(cfg, room, lambda changed: _needs_alone(changed, model))


def _needs_alone(cfg: Config, model: ModelConfig) -> dict[str, int]:
    """`needs` of a warm start alone."""
    return {WARM: sum(size for _, size in warm_start_plan(cfg, model))}


def _check(cfg: Config, room: int, needs_of: NeedsOf) -> None:
    needed = needs_of(cfg)
    moment = max(needed, key=needed.__getitem__)
    if needed[moment] <= room:
        return
    apart = "\n  or run the warm start by itself: jaxfp8rl sft (docs/faq.md)" if moment == WARM and len(
        needed) > 1 else ""
    raise ConfigError(
        f"{moment} needs {needed[moment] / 2**30:.1f} GiB, the device has {room / 2**30:.1f} for it "
        "(`--dry-run` prints the plan)",
        advice(cfg, lambda changed: max(needs_of(changed).values()), needed[moment] - room) + apart,
    )


def explained(cfg: Config, fresh: bool = True) -> contextlib.AbstractContextManager[str]:
    """If the device runs out of memory in this context, raise OutOfMemory with the phase, the plan beside
    what was held, and the settings that would have made it fit. If the run has a checkpoint, only settings
    that a resumed run may change are suggested. Enter it before the run takes memory: it gives a note about
    what others hold, "" if that is little."""
    needs_of = lambda c, model: needs(c, model, device_memory() or 0, fresh)
    return _explained(lambda e, others: _of_run(cfg, e, others, needs_of, _room(cfg), "checkpoints"))


def explained_alone(cfg: Config, checkpoints: str) -> contextlib.AbstractContextManager[str]:
    """The same for a warm start alone, whose checkpoints are in that folder of run.dir."""
    return _explained(lambda e, others: _of_run(cfg, e, others, _needs_alone, memory_of_jax(), checkpoints))


def explained_evaluation(cfg: Config, of_run: bool) -> contextlib.AbstractContextManager[str]:
    """The same for an evaluation by a checkpoint `of_run`, or by a config's weights.
    Settings that would not suit the checkpoint are not suggested."""
    masters = "bfloat16" if of_run and cfg.optim.master == "bfloat16" else "float32"  # others are decoded
    plan = lambda c, model: evaluation_plan(c, model, masters)

    def needs_of(c: Config, model: ModelConfig) -> dict[str, int]:
        engine = _awake(c, model, device_memory() or 0) + ENGINE_REST if c.rollout.engine == "vllm" else 0
        return {EVALUATION: sum(size for _, size in plan(c, model)) + engine}

    return _explained(lambda e, others: _out_of_memory(
        cfg, e, others, needs_of, _room(cfg), lambda _, *of: plan(*of), of_run, "then run the command again",
        learns=False))


def explanation(e: Exception, next_step: str) -> OutOfMemory:
    """What the device held when XLA's error `e` was raised by work that no config describes."""
    return OutOfMemory(f"the device's memory ran out; it held:\n{format_held(usage(str(e)))}\n"
                       f"  {str(e).splitlines()[0]}", next_step)


@contextlib.contextmanager
def _explained(explain: Callable[[Exception, str], OutOfMemory]) -> Iterator[str]:
    """Where memory runs out, raise what `explain` makes of XLA's error and of a line about what others held
    before."""
    others = _others()
    try:
        yield others
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        if "host memory" in str(e):
            raise OutOfMemory(f"{host_memory() / 2**30:.1f} GiB of host memory ran out ({_phase_of(e)})\n  "
                              f"{str(e).splitlines()[0]}", OF_HOST) from e
        raise explain(e, others and f"\n  when this began, {others}") from e


def _others() -> str:
    """What other processes hold of the first GPU, before this one takes memory; "" if that is little."""
    total = device_memory()
    if not total or (held := beside_jax()) < OTHERS:
        return ""
    return (f"other processes held {held / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB: beside them this "
            "may not fit (`nvidia-smi` lists them; CUDA_VISIBLE_DEVICES chooses another GPU)")


def _phase_of(e: Exception) -> str:
    return next((note for note in getattr(e, "__notes__", ()) if note.startswith(PHASE)), PHASE + "start")


def _of_run(cfg: Config, e: Exception, others: str, needs_of: Callable[[Config, ModelConfig], dict[str, int]],
            room: int | None, checkpoints: str) -> OutOfMemory:
    saved = Checkpoints(Path(cfg.run.dir) / checkpoints, 1).latest() is not None
    again = "then --resume" if saved else "then start again: nothing has been saved yet"
    return _out_of_memory(cfg, e, others, needs_of, room, _rows_of, saved, again)


def _out_of_memory(
    cfg: Config, e: Exception, others: str, needs_of: Callable[[Config, ModelConfig], dict[str, int]],
    room: int | None, rows_of: Callable[[str, Config, ModelConfig], Plan], saved: bool, again: str,
    learns: bool = True,
) -> OutOfMemory:
    """saved: whether there is a checkpoint that the suggested settings must suit. again: how to go on."""
    model, phase, room = model_config(cfg), _phase_of(e), room or 0
    stages = needs_of(cfg, model)
    stage = STAGES.get(phase.removeprefix(PHASE), "the start")
    stage = stage if stage in stages else max(stages, key=stages.__getitem__)
    held = usage(str(e), kinds_of(cfg, model, learns))
    table = format_usage(rows_of(stage, cfg, model), held, stages[stage])
    # what was seen counts, where it is more than the plan
    over = max(held.wanted, stages[stage]) - room if room else 0
    help_ = advice(cfg, lambda changed: needs_of(changed, model)[stage],
                   over if over > 0 else max(held.asked, 1), resumed=saved)
    return OutOfMemory(
        f"the {room / 2**30:.1f} GiB of the device that this run may take ran out ({phase}); "
        f"the plan of {stage} beside what was held:\n{table}{others}\n  {str(e).splitlines()[0]}",
        f"{help_}\n  {again}")


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
