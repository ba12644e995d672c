"""Whether a run fits on its GPU, asked before anything loads: the learner's plan and an engine beside it,
moment by moment."""

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

# CUDA contexts, graphs and workspaces: what vLLM was seen to hold when all that sleeps is asleep
ENGINE_REST = 5 * 2**29
MASTERS = 2  # of the plan's first rows those that the start has: masters and moments
KNOBS = 3
WARM = "the warm start"
Change = dict[str, dict[str, object]]  # section -> key -> value


def needs(cfg: Config, model: ModelConfig, total: int, fresh: bool = True) -> dict[str, int]:
    """Bytes on a device of `total` bytes at the start, when the weights are there in float32, too, in the
    warm start of a `fresh` run, while the learner updates and while the engine samples. Engines of other
    processes are left out."""
    plan = [size for _, size in memory_plan(cfg, model)]
    warm = sum(size for _, size in warm_start_plan(cfg, model)) if fresh and cfg.sft.steps else 0
    if cfg.rollout.engine != "vllm":  # the embedded one holds nothing before a publish
        return {"an update": sum(plan)} | ({WARM: warm} if warm else {})
    whole = sum(math.prod(e.shape) for e in param_table(model)) * F32
    resident = RESIDENT + bool(cfg.loss.kl_coef)
    start = sum(plan[:MASTERS]) + (whole if cfg.sft.steps else whole // cfg.train.over_weights)
    if cfg.loss.kl_coef:  # in float32, too, while it is made
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
    """`check_fits` on this machine; on a CPU nothing is checked."""
    share_gpu(cfg)
    if total := device_memory():
        check_fits(cfg, model_config(cfg), total, fresh)


def check_fits(cfg: Config, model: ModelConfig, total: int, fresh: bool = True) -> None:
    """Raise ConfigError, with the settings that would give most, where a moment of the run needs more than
    `total` bytes."""
    _check(cfg, total, lambda changed: needs(changed, model, total, fresh))


def check_warm_start(cfg: Config, model: ModelConfig, total: int | None) -> None:
    """The same of a warm start alone, `jaxfp8rl sft`; None: a CPU's memory."""
    if total:
        _check(cfg, total, lambda changed: {WARM: sum(size for _, size in warm_start_plan(changed, model))})


def _check(cfg: Config, total: int, needs_of: Callable[[Config], dict[str, int]]) -> None:
    needed = needs_of(cfg)
    moment = max(needed, key=needed.__getitem__)
    if needed[moment] <= total:
        return
    apart = "; or make it apart, as it fits: jaxfp8rl sft (docs/faq.md)" if moment == WARM and len(
        needed) > 1 else ""
    raise ConfigError(
        f"{moment} needs {needed[moment] / 2**30:.1f} GiB, the device has {total / 2**30:.1f} (`--dry-run` prints the plan)",
        _advice(cfg, lambda changed: needs_of(changed)[moment]) + apart,
    )


@contextlib.contextmanager
def explained(cfg: Config, fresh: bool = True) -> Iterator[None]:
    """Say of memory that ran out all the same in which phase, what the plan was, and what would give most: of
    settings with which a run may go on alone, where it has saved something to go on from."""
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
        way_on = "; then --resume" if saved else "; then begin anew: nothing is saved yet"
        raise OutOfMemory(
            f"the device's memory of {total / 2**30:.1f} GiB ran out ({phase}); planned were {plan}\n"
            f"  {str(e).splitlines()[0]}",
            _advice(cfg, lambda changed: needs(changed, model, total, fresh)[most], resumed=saved) + way_on,
        ) from e


def _advice(cfg: Config, need: Callable[[Config], int], resumed: bool = False) -> str:
    """`resumed`: of settings with which a run may go on alone."""
    found = sorted(_savings(cfg, need, resumed), reverse=True)[:KNOBS]
    said = "; ".join(f"{what} ({saved / 2**30:.1f} GiB less)" for saved, what in found)
    return f"what would give most: {said or 'a smaller model'}"


def format_needs(cfg: Config, model: ModelConfig) -> str:
    """Lines below the plan's, where the engine's part is known without a GPU."""
    if cfg.rollout.engine != "vllm" or cfg.rollout.kv_cache_gib is None:
        return ""
    moments = needs(cfg, model, 0)
    return "\nwith vLLM\n" + "\n".join(f"  {size / 2**20:12,.2f} MiB  during {moment}"
                                       for moment, size in moments.items())


def _savings(cfg: Config, need: Callable[[Config], int], resumed: bool) -> list[tuple[int, str]]:
    """(bytes saved, setting) of each single change that saves any and is allowed beside the rest."""
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
        said = ", ".join(f"{name}.{key} = {_toml(value)}" for name, keys in change.items()
                         for key, value in keys.items())
        if (saved := before - need(changed)) > 0:
            found.append((saved, said))
    return found


def _changes(cfg: Config) -> list[Change]:
    t, r = cfg.train, cfg.rollout
    # whole ones in each part
    rows: Callable[[int, int], dict[str, object]] = lambda at_least, parts: {"rows_per_microbatch": -(-at_least // parts) * parts}
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
