"""`--dry-run`: print the resolved config and a memory plan, and make every check of a run that needs no
device.

It calls the same functions as a run (`resume.check_start`, `run_directory.check_claimable`, `preflight`,
`open_rewards`), so that both accept and refuse the same configs with the same messages. It writes nothing and
uses no accelerator, so that it runs on a login node.
"""

from __future__ import annotations

import time
from pathlib import Path

from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config
from jaxfp8rl.data.task import Task
from jaxfp8rl.data.tasks import make_task
from jaxfp8rl.distributed.process_group import check_environment
from jaxfp8rl.errors import DataError
from jaxfp8rl.memory.cache import format_cache
from jaxfp8rl.memory.fit import format_needs
from jaxfp8rl.memory.plan import format_plan, memory_plan, warm_start_plan
from jaxfp8rl.models.config import ModelConfig, how_to_get
from jaxfp8rl.models.known import awaited, known_shape
from jaxfp8rl.policy.routing_replay import with_options
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.rollout.engines import engine_lacks
from jaxfp8rl.run.run_directory import check_claimable
from jaxfp8rl.training.context import open_rewards
from jaxfp8rl.training.preflight import check_shape, preflight
from jaxfp8rl.training.resume import check_data, check_start
from jaxfp8rl.training.sft import check_learns, check_sft, prepare_sft
from jaxfp8rl.training.warm_start import check_demonstrations

CARDS = {"a GPU of 80 GB": int(79.2 * 2**30), "a GPU of 141 GB": int(140.4 * 2**30)}  # as the driver counts
WARM_START = "memory of the warm start, on one device, without an engine"


def dry_run(cfg: Config, resume: bool = False, fork_of: str = "") -> None:
    """The dry run of `train`. The plan is printed once the config and the model's shape are valid; the checks
    that follow can still fail."""
    began = time.perf_counter()
    cfg, fresh = check_start(cfg, resume, fork_of), not (resume or fork_of)
    check_environment(cfg.train.processes)
    check_claimable(cfg, resume)
    model, note = _shape(cfg)
    check_shape(cfg, model)
    task = make_task(cfg.task)  # checks the task's options; reads no data yet
    print(dump_config(cfg))
    if cfg.sft.steps:
        print(format_plan(warm_start_plan(cfg, model), WARM_START))
    print(format_plan(memory_plan(cfg, model)) + format_needs(cfg, model) + note)
    if cfg.rollout.engine == "vllm" and cfg.rollout.kv_cache_gib is None:
        print("vLLM also takes the share rollout.gpu_memory_utilization of the GPU; "
              "with rollout.kv_cache_gib the plan includes it")
    if cache := format_cache(cfg, model, CARDS, fresh):
        print(cache)
    if lack := engine_lacks(cfg):
        print(f"a run would fail here: {lack}")
    if awaited(cfg.model.path):
        checked = _without_model(cfg, task)
    else:
        data = preflight(cfg, fresh)
        if resume:
            check_data(cfg, data)
        elif fresh:
            check_demonstrations(cfg, data)
        task, checked = data.task, f"{_counts(len(data.train), len(data.held_out))}, {_of_model(cfg, fresh)}"
    open_rewards(cfg, task, workers=1).close()
    _done(f"{checked}, the scorer", began)


def dry_run_sft(cfg: Config, resume: bool = False) -> None:
    """The dry run of `sft`."""
    began = time.perf_counter()
    check_sft(cfg, resume)
    (model, note), task = _shape(cfg), make_task(cfg.task)
    check_learns(cfg, model)
    print(dump_config(cfg))
    print(format_plan(warm_start_plan(cfg, model), WARM_START) + note)
    if awaited(cfg.model.path):
        return _done(_without_model(cfg, task), began)
    _, data, _ = prepare_sft(cfg, resume)
    check_demonstrations(cfg, data)
    _done(f"{_counts(len(data.train), len(data.held_out))}, {_of_model(cfg, True)}", began)


def _shape(cfg: Config) -> tuple[ModelConfig, str]:
    """(the model's shape, a note). Without a config.json, the shape is the built-in one of a published model,
    and the note says so."""
    path = cfg.model.path
    known = known_shape(path) if path and not (Path(path) / "config.json").exists() else None
    note = f"\nbuilt-in shape of {Path(path).name}, because there is no {path}/config.json" if known else ""
    return with_options(model_config(cfg, known), cfg), note


def _without_model(cfg: Config, task: Task) -> str:
    """Check the number of problems when the model folder of a shipped config does not exist yet -> the checks
    made. The missing folder is a note, not an error."""
    path = Path(cfg.model.path)
    print(
        f"{path} does not exist yet, and a run needs it: "
        "the weights, the tokenizer and the lengths of prompts were not checked\n"
        f"  next step: {how_to_get(path)}\n"
        f"  to try it without a download: jaxfp8rl random-model {path.name} {path}")
    train, held_out = task.problems(), task.held_out()
    if len(train) < cfg.rollout.prompts_per_step:
        raise DataError(
            f"only {len(train)} problems, but a step takes rollout.prompts_per_step = "
            f"{cfg.rollout.prompts_per_step}",
            f"give the task more problems, or set rollout.prompts_per_step to {len(train)} at most")
    return _counts(len(train), len(held_out))


def _counts(train: int, held_out: int) -> str:
    return f"{train:,} problems and {held_out:,} held out"


def _of_model(cfg: Config, fresh: bool) -> str:
    return "the tokenizer" + (", names and shapes of the weights" if fresh and cfg.model.path else "")


def _done(checked: str, began: float) -> None:
    print(f"checked in {time.perf_counter() - began:.1f} s: {checked}; "
          "the checks that need a device or the engine remain")
