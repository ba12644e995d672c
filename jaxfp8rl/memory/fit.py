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
from jaxfp8rl.config.resume_rules import MAY_CHANGE, changes
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError, OutOfMemory
from jaxfp8rl.memory.plan import F32, RESIDENT, memory_plan, warm_start_plan
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import param_table
from jaxfp8rl.monitors.clock import PHASE
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.publish.wire import wire_manifest
from jaxfp8rl.rollout.engines import device_memory, share_gpu

# CUDA contexts, graphs and workspaces: the memory that vLLM still held in sleep mode, as measured
ENGINE_REST = 5 * 2**29
MASTERS = 2  # the plan's first rows that exist at the start: masters and moments
KNOBS = 3  # the number of settings that an error suggests
WARM = "the warm start"
Change = dict[str, dict[str, object]]  # section -> key -> value


def needs(cfg: Config, model: ModelConfig, total: int, fresh: bool = True) -> dict[str, int]:
    """The bytes that each stage of the run needs on a device of `total` bytes.

    The stages are the start, when the weights are there in float32 too; the warm start of a `fresh` run; an
    update of the learner; and a rollout of the engine. Engines in other processes are not counted.
    """
    plan = [size for _, size in memory_plan(cfg, model)]
    warm = sum(size for _, size in warm_start_plan(cfg, model)) if fresh and cfg.sft.steps else 0
    if cfg.rollout.engine != "vllm":  # the embedded engine holds nothing before the first publish
        return {"an update": sum(plan)} | ({WARM: warm} if warm else {})
    whole = sum(math.prod(e.shape) for e in param_table(model)) * F32
    resident = RESIDENT + bool(cfg.loss.kl_coef)
    start = sum(plan[:MASTERS]) + (whole if cfg.sft.steps else whole // cfg.train.over_weights)
    if cfg.loss.kl_coef:  # the reference is made from float32 weights
        start += plan[RESIDENT] + whole // cfg.train.over_weights
    weights = manifest.nbytes(wire_manifest(model, engine_runs(cfg, model), cfg.precision.weight_dtype))
    share = int(cfg.rollout.gpu_memory_utilization * total)
    awake = share if cfg.rollout.kv_cache_gib is None else weights + int(cfg.rollout.kv_cache_gib * 2**30)
    asleep = 0 if cfg.rollout.sleep != "off" else awake
    return {
        "the start": start + awake + ENGINE_REST, **({WARM: warm + asleep + ENGINE_REST} if warm else {}),
        "an update": sum(plan) + asleep + ENGINE_REST,
        "a rollout": sum(plan[:resident]) + awake + ENGINE_REST,
    }


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
    apart = "; or run the warm start by itself: jaxfp8rl sft (docs/faq.md)" if moment == WARM and len(
        needed) > 1 else ""
    raise ConfigError(
        f"{moment} needs {needed[moment] / 2**30:.1f} GiB, the device has {total / 2**30:.1f} "
        "(`--dry-run` prints the plan)",
        _advice(cfg, lambda changed: needs_of(changed)[moment]) + apart,
    )


@contextlib.contextmanager
def explained(cfg: Config, fresh: bool = True) -> Iterator[None]:
    """If the device runs out of memory in this context, raise OutOfMemory with the phase, the plan and the
    settings that save most. If the run has a checkpoint, only settings that a resumed run may change are
    suggested."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        model, total = model_config(cfg), device_memory() or 0
        phase = next((note for note in getattr(e, "__notes__", ()) if note.startswith(PHASE)),
                     PHASE + "start")
        moments = needs(cfg, model, total, fresh)
        most = max(moments, key=moments.__getitem__)
        plan = ", ".join(f"{size / 2**30:.1f} GiB for {moment}" for moment, size in moments.items())
        saved = Checkpoints(Path(cfg.run.dir) / "checkpoints", 1).latest() is not None
        way_on = "; then --resume" if saved else "; then start again: nothing has been saved yet"
        raise OutOfMemory(
            f"the device's {total / 2**30:.1f} GiB of memory ran out ({phase}); the plan was {plan}\n"
            f"  {str(e).splitlines()[0]}",
            _advice(cfg, lambda changed: needs(changed, model, total, fresh)[most], resumed=saved) + way_on,
        ) from e


def _advice(cfg: Config, need: Callable[[Config], int], resumed: bool = False) -> str:
    """The settings that save most. `resumed`: only those that a resumed run may change."""
    found = sorted(_savings(cfg, need, resumed), reverse=True)[:KNOBS]
    settings = "; ".join(f"{setting} ({saved / 2**30:.1f} GiB less)" for saved, setting in found)
    return f"largest savings: {settings or 'a smaller model'}"


def format_needs(cfg: Config, model: ModelConfig) -> str:
    """Lines to print below the plan: the needs of each stage, if the engine's memory is known without a
    GPU."""
    if cfg.rollout.engine != "vllm" or cfg.rollout.kv_cache_gib is None:
        return ""
    moments = needs(cfg, model, 0)
    return "\nwith vLLM\n" + "\n".join(f"  {size / 2**20:12,.2f} MiB  during {moment}"
                                       for moment, size in moments.items())


def _savings(cfg: Config, need: Callable[[Config], int], resumed: bool) -> list[tuple[int, str]]:
    """(bytes saved, setting) for each single change that saves memory and is valid with the other
    settings."""
    before, found = need(cfg), []
    for change in _changes(cfg):
        changed = cfg.model_copy(update={name: getattr(cfg, name).model_copy(update=keys)
                                         for name, keys in change.items()})
        if resumed and any(key not in MAY_CHANGE.get(section, ()) for section, key in changes(cfg, changed)):
            continue
        try:
            check(changed)
        except ConfigError:
            continue
        setting = ", ".join(f"{name}.{key} = {_toml(value)}" for name, keys in change.items()
                            for key, value in keys.items())
        if (saved := before - need(changed)) > 0:
            found.append((saved, setting))
    return found


def _changes(cfg: Config) -> list[Change]:
    """Changes of the configuration that may save memory."""
    t, r = cfg.train, cfg.rollout
    # rounded up, so that each device has whole rows
    rows: Callable[[int, int], dict[str, object]] = lambda at_least, parts: {
        "rows_per_microbatch": -(-at_least // parts) * parts}
    changes: list[Change] = [
        {"optim": {"master": "bfloat16", "first_moment": "float8", "second_moment": "bfloat16"}},
        {"optim": {"offload": True}},
        {"train": {"remat": "layer"}},
        {"train": rows(t.rows_per_microbatch // 2, t.over_rows)} if t.rows_per_microbatch > t.over_rows
        else {},
        {"train": {"fsdp": 2 * t.fsdp} | rows(t.rows_per_microbatch, 2 * t.over_rows)},
    ]
    if r.engine == "vllm":
        cache = {"kv_cache_gib": r.kv_cache_gib / 2} if r.kv_cache_gib else {}
        changes += [{"rollout": {"sleep": "drop_weights", "one_copy": False}}, {"rollout": cache}]
    return changes


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
