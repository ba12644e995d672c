"""Which settings may change when a run is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfp8rl.config.overrides import parse_overrides
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config, to_toml
from jaxfp8rl.errors import CheckpointError

# Where things are, what is watched and how the same numbers are computed may change, and so may the settings
# that a run in trouble is advised to change. The contents of a model's config.json, of a data set, of a
# tokenizer and of a teacher are compared with the run's own, wherever they lie.
MAY_CHANGE = {
    "run": {"dir", "steps", "eval_every", "eval_problems", "save_every", "keep_checkpoints",
            "save_patience_s", "watchdog_s",
            "samples_per_step", "samples_top_k", "trackers"},
    "model": {"path", "tokenizer"},
    "task": {"path", "held_out_path", "reward_timeout_s", "reward_workers", "scorer_folder"},
    "rollout": {"max_num_seqs", "min_num_seqs", "gpu_memory_utilization", "kv_cache_gib", "publish",
                "enforce_eager",
                "torch_compile", "sleep", "link", "engines", "server_gpus", "restarts",
                "tensor_parallel_size", "engine_urls", "engine_token_file", "request_timeout_s", "order",
                "admit"},
    "precision": {"products", "attention"},
    "train": {"row_tokens", "rows_per_microbatch", "shared_prefix", "remat", "compilation_cache", "data",
              "fsdp", "tensor",
              "processes"},
    "optim": {"lr", "warmup_steps", "total_steps", "min_lr_ratio", "clip_norm", "max_bad_steps", "offload",
              "gradient_sums"},
    "sft": {"save_every"},
    "gate": {"completions", "max_new_tokens", "max_mean_gap", "max_gap"},
    "monitor": {"profile_step", "precision_every"},
    "reference": {"path"},
    "environment": {"timeout_s", "workers", "concurrency", "lanes"},
}


def settled(cfg: Config, resume: bool = False) -> Config:
    """The config with what a run settles when it begins, and keeps when it is resumed: the end of a decaying
    learning rate and the stages of noise, from run.steps; and for a resumed run the size of a cache that was
    "auto"."""
    decays = cfg.optim.schedule != "constant" and not cfg.optim.total_steps
    stages = cfg.noise.start and not cfg.noise.total_steps
    if not (decays or stages or cfg.rollout.kv_cache_gib == "auto"):
        return cfg
    own = Path(cfg.run.dir) / "config.toml"
    begun = load_config(str(own)) if resume and own.is_file() else cfg
    if decays:
        cfg = cfg.having("optim", total_steps=begun.optim.total_steps or begun.updates)
    if stages:
        cfg = cfg.having("noise", total_steps=begun.noise.total_steps or begun.run.steps)
    if cfg.rollout.kv_cache_gib == "auto" and begun.rollout.kv_cache_gib:
        cfg = cfg.having("rollout", kv_cache_gib=begun.rollout.kv_cache_gib)
    return check(cfg)


def changes(before: Config, now: Config) -> dict[tuple[str, str], tuple[Any, Any]]:
    """(section, key) -> (value before, value now) of every setting that differs."""
    pairs = ((s, k, getattr(getattr(before, s), k), getattr(getattr(now, s), k))
             for s in Config.model_fields for k in type(getattr(now, s)).model_fields)
    return {(s, k): (old, new) for s, k, old, new in pairs if old != new}


def described(found: dict[tuple[str, str], tuple[Any, Any]]) -> list[str]:
    """A line for each setting that differs, with both values as in a config file. Of tables: for each key."""
    shown = lambda value: "absent" if value is None else to_toml(value)
    pairs = [pair for (section, key), (old, new) in found.items()
             for pair in _apart(f"{section}.{key}", old, new)]
    return [f"{name}: {shown(old)} -> {shown(new)}" for name, old, new in pairs]


def _apart(name: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [(name, old, new)]
    return [pair for key in {**old, **new} if old.get(key) != new.get(key)
            for pair in _apart(f"{name}.{key}", old.get(key), new.get(key))]


def refused_changes(before: Config, now: Config) -> list[str]:
    """The settings that differ although they may not, described."""
    return described({(s, k): values for (s, k), values in changes(before, now).items()
                      if k not in MAY_CHANGE.get(s, ())})


def check_typed(cfg: Config, overrides: Sequence[str]) -> None:
    """Raise CheckpointError, with the difference, if `cfg` differs from the run in its run directory in a
    setting that is not among the `overrides`: a file or a preset that has changed since the run began changes
    nothing by itself."""
    own = Path(cfg.run.dir) / "config.toml"
    if not own.is_file():  # no run, which `check_run_directory` refuses
        return
    typed = {o.path[:2] for o in parse_overrides(overrides)} | {("run", "dir")}
    if unasked := {key: values for key, values in changes(load_config(str(own)), cfg).items()
                   if key not in typed}:
        listing = "\n  ".join(described(unasked))
        raise CheckpointError(
            f"run.dir: {cfg.run.dir} was begun with other settings:\n  {listing}",
            f"jaxfp8rl train {cfg.run.dir} --resume goes on with its own; what is to change is typed, "
            "--section.key VALUE",
        )


def check_resumable(cfg: Config) -> None:
    """Raise CheckpointError, with the difference, if `cfg` belongs to another run than the one in its run
    directory."""
    if refused := refused_changes(load_config(str(Path(cfg.run.dir) / "config.toml")), cfg):
        listing = "\n  ".join(refused)
        raise CheckpointError(
            f"run.dir: {cfg.run.dir} is resumed with the settings it was begun with; these are others:\n"
            f"  {listing}",
            f"jaxfp8rl train {cfg.run.dir} --resume goes on with its own; or begin another run from it: "
            f"--fork {cfg.run.dir} --run.dir NEW",
        )
