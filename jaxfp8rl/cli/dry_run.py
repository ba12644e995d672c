"""`--dry-run`: the resolved config, a memory plan, and what a run refuses before it asks for a device, in its
words.

It calls what a run calls (`resume.check_start`, `run_directory.check_claimable`, `build.preflight`,
`open_rewards`), so that neither can refuse what the other takes. Nothing is written and no accelerator is
asked for: a login node will do.
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
from jaxfp8rl.memory.fit import format_needs
from jaxfp8rl.memory.plan import format_plan, memory_plan, warm_start_plan
from jaxfp8rl.models.config import ModelConfig, how_to_get
from jaxfp8rl.models.known import awaited, known_shape
from jaxfp8rl.policy.routing_replay import with_options
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.rollout.engines import engine_lacks
from jaxfp8rl.run.run_directory import check_claimable
from jaxfp8rl.training.context import check_shape, open_rewards, preflight
from jaxfp8rl.training.resume import check_data, check_start
from jaxfp8rl.training.sft import check_demonstrations, check_sft, prepare_sft

WARM_START = "memory of the warm start, on one device, without an engine"


def dry_run(cfg: Config, resume: bool = False, fork_of: str = "") -> None:
    """Of `train`. The plan is printed as soon as config and shape are right; what is refused after it is
    refused all the same."""
    began = time.perf_counter()
    cfg, fresh = check_start(cfg, resume, fork_of), not (resume or fork_of)
    check_environment(cfg.train.processes)
    check_claimable(cfg, resume)
    model, of = _shape(cfg)
    check_shape(cfg, model)
    task = make_task(cfg.task)  # it knows its options, and reads no data yet
    print(dump_config(cfg))
    if cfg.sft.steps:
        print(format_plan(warm_start_plan(cfg, model), WARM_START))
    print(format_plan(memory_plan(cfg, model)) + (needs := format_needs(cfg, model)) + of)
    if cfg.rollout.engine == "vllm" and not needs:
        print(
            "vLLM beside it takes rollout.gpu_memory_utilization of the GPU; with rollout.kv_cache_gib it is in the plan")
    if lack := engine_lacks(cfg):
        print(f"a run would end here: {lack}")
    if awaited(cfg.model.path):
        checked = _without_model(cfg, task)
    else:
        data = preflight(cfg, fresh).data
        if resume:
            check_data(cfg, data)
        elif fresh:
            check_demonstrations(cfg, data)
        task, checked = data.task, f"{_counts(len(data.train), len(data.held_out))}, {_of_model(cfg, fresh)}"
    open_rewards(cfg, task, workers=1).close()
    _done(f"{checked}, the scorer", began)


def dry_run_sft(cfg: Config) -> None:
    """Of `sft`."""
    began = time.perf_counter()
    check_sft(cfg)
    (model, of), task = _shape(cfg), make_task(cfg.task)
    print(dump_config(cfg))
    print(format_plan(warm_start_plan(cfg, model), WARM_START) + of)
    if awaited(cfg.model.path):
        return _done(_without_model(cfg, task), began)
    _, data, _ = prepare_sft(cfg)
    check_demonstrations(cfg, data)
    _done(f"{_counts(len(data.train), len(data.held_out))}, {_of_model(cfg, True)}", began)


def _shape(cfg: Config) -> tuple[ModelConfig, str]:
    """(that of config.json, ""); where there is none, that which is known of a published model, and what to
    say of it."""
    path = cfg.model.path
    known = known_shape(path) if path and not (Path(path) / "config.json").exists() else None
    said = f"\nof the shape that is built in for {Path(path).name}: there is no {path}/config.json" if known else ""
    return with_options(model_config(cfg, known), cfg), said


def _without_model(cfg: Config, task: Task) -> str:
    """What is checked where the folder that a shipped config names has not been made yet: said, and no
    mistake."""
    path = Path(cfg.model.path)
    print(
        f"{path} is not there yet, and a run needs it: its weights, its tokenizer and the length of prompts are not checked\n"
        f"  next step: {how_to_get(path)}")
    train, held_out = task.problems(), task.held_out()
    if len(train) < cfg.rollout.prompts_per_step:
        raise DataError(
            f"{len(train)} problems, a step takes rollout.prompts_per_step = {cfg.rollout.prompts_per_step}")
    return _counts(len(train), len(held_out))


def _counts(train: int, held_out: int) -> str:
    return f"{train:,} problems and {held_out:,} held out"


def _of_model(cfg: Config, fresh: bool) -> str:
    return "the tokenizer" + (", names and shapes of the weights" if fresh and cfg.model.path else "")


def _done(checked: str, began: float) -> None:
    print(
        f"checked in {time.perf_counter() - began:.1f} s: {checked}; what only a device or the engine can refuse is left")
