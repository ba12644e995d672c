"""Start-up warnings: untested releases, FP8 without a correction, adapters of a base by another name, an FP8
cache of keys without norm."""

from __future__ import annotations

from pathlib import Path

from bridges.api import Capabilities, EngineFormats
from jaxfp8rl import tested
from jaxfp8rl.config.correction import is_uncorrected
from jaxfp8rl.config.noise import is_unseen
from jaxfp8rl.config.schema import Config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.peft import adapter_base
from jaxfp8rl.precision.recipe import FP8_KV
from jaxfp8rl.tested import OF_VLLM


def version_warnings(cfg: Config) -> list[str]:
    """Warnings about the installed packages that this run uses, in releases that have not been tested."""
    unused = () if cfg.rollout.engine == "vllm" else OF_VLLM
    return tested.warnings(name for name in tested.BY_NAME if name not in unused)


def engine_warning(cfg: Config, engine: Capabilities) -> str | None:
    """A warning if a served engine, which has an environment of its own, is of a release that has not been
    tested."""
    return tested.warning(engine.engine, engine.engine_version) if (
        cfg.rollout.engine == "served") else None


def uncorrected_warning(cfg: Config) -> str | None:
    """A warning if the engine samples in FP8 or with noise and the run has no correction
    (correction.allow_uncorrected_fp8)."""
    noisy = cfg.noise.start and is_unseen(cfg)
    if not (is_uncorrected(cfg) or noisy):
        return None
    return (
        f'precision.recipe "{cfg.precision.recipe}" samples {"with noise" if noisy else "in FP8"} and '
        f'correction.preset "{cfg.correction.preset}" corrects nothing '
        "(correction.allow_uncorrected_fp8). Papers report that this baseline collapses.\n"
        '  next step: watch mismatch/k3 and reward/mean; correction.preset = "token_tis" is usually stable'
    )


def base_warning(cfg: Config) -> str | None:
    """A warning if the adapters in lora.path name another base than model.path and have no digest of it.
    Raises ModelError for a folder that is none."""
    name, digest = adapter_base(cfg.lora.path) if cfg.lora.path else ("", "")
    same = Path(name).name.lower() == Path(cfg.model.path).name.lower()
    if digest or same or not name:
        return None
    return (f'lora.path: {cfg.lora.path} was trained over "{name}", and model.path is '
            f'"{cfg.model.path}"; it has no digest that would tell whether their weights are the same.\n'
            "  next step: name that base as model.path, unless this is a copy of it")


def kv_fp8_warning(model: ModelConfig, formats: EngineFormats, calibrated: bool = False) -> str | None:
    """A warning if the engine caches keys and values in E4M3 for a model without query/key norm. None if
    their scales are `calibrated`, since calibrated scales follow the largest key."""
    if formats.kv_cache != FP8_KV or model.family.qk_norm or calibrated:
        return None
    return (
        f"{model.architecture} has no query/key norm, and the engine caches keys and values in E4M3 with "
        "scale 1. Nothing bounds the keys, and those above 448 are clipped; "
        "similar models were seen to write gibberish.\n"
        "  next step: watch precision/key_clipped and precision/key_amax (monitor.precision_every), or set "
        'rollout.kv_cache = "auto"'
    )
