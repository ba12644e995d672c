"""The config in vLLM's words, for vLLM in this process and for `vllm serve`."""

from __future__ import annotations

from typing import Any

from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.recipe import FP8_KV, FP8_WEIGHT, get_recipe
from jaxfp8rl.publish.wire import high_precision_modules


def vllm_options(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...]) -> dict[str, Any]:
    """The keyword arguments of VllmEngine."""
    return dict(
        weights=weights_format(cfg, model),
        kv_cache=FP8_KV if cfg.rollout.kv_cache == "fp8" else "auto",
        kv_scales=cfg.rollout.kv_scales == "calibrated",
        dtype=cfg.precision.weight_dtype,
        high_precision_modules=high_precision_modules(model, runs),
        max_model_len=cfg.max_model_len,
        max_num_seqs=cfg.rollout.max_num_seqs,
        gpu_memory_utilization=cfg.rollout.gpu_memory_utilization,
        kv_cache_bytes=cache_bytes(cfg.rollout.kv_cache_gib),
        enforce_eager=cfg.rollout.enforce_eager,
        torch_compile=cfg.rollout.torch_compile,
        fp8_kernel=cfg.rollout.fp8_kernel,
        attention=cfg.rollout.attention,
        routed_experts=cfg.moe.replay == "R3",
        sleep=cfg.rollout.sleep,
        drafts=drafts_of(cfg, model),
        order=cfg.rollout.order,
        admit=cfg.rollout.admit,
        seed=cfg.run.seed,
    )


def weights_format(cfg: Config, model: ModelConfig) -> str:
    """The format of the linears in vLLM."""
    if model.packed:
        return model.packed.form
    return FP8_WEIGHT if get_recipe(cfg.precision.recipe).engine_fp8 else cfg.precision.weight_dtype


def drafts_of(cfg: Config, model: ModelConfig) -> int:
    """How many tokens of a completion an engine may draft."""
    if cfg.rollout.speculation == "off":
        return 0
    if cfg.rollout.engine == "jax" and model.experts:
        raise ConfigError(f'rollout.speculation = "{cfg.rollout.speculation}": the embedded engine '
                          f'records the experts '
                          "of each token that it feeds, and drafts would be among them",
                          'set rollout.speculation = "off" for a model with experts')
    return cfg.rollout.draft_tokens


def cache_bytes(gib: float | str | None) -> int | None:
    """The size of the cache that the config gives, in bytes; None if it gives none."""
    if gib == "auto":
        raise ConfigError('rollout.kv_cache_gib = "auto" has not been chosen yet',
                          "jaxfp8rl.memory.cache.with_cache(cfg) chooses it")
    return None if gib is None else int(float(gib) * 2**30)
