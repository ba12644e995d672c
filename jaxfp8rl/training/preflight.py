"""Check all of a run that needs no device, before anything expensive starts."""

from __future__ import annotations

from jaxfp8rl.config.rules import check
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import check_weights
from jaxfp8rl.policy.adapters import adapter_shapes, check_adapters, check_base
from jaxfp8rl.policy.hardware import check_kernels
from jaxfp8rl.policy.routing_replay import check_moe, with_options
from jaxfp8rl.policy.shapes import check_divides, engine_runs, model_config
from jaxfp8rl.precision.jit import check_kept
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.recipe import get_recipe
from jaxfp8rl.rollout.engines import check_engine_settings
from jaxfp8rl.rollout.noise import check_family
from jaxfp8rl.rollout.problems import Data, load_data
from jaxfp8rl.training.teacher import check_teacher


def preflight(cfg: Config, fresh: bool = False) -> Data:
    """Check all of a run that needs no device, for `--dry-run`, and return its data.

    `fresh`: the run starts from the weights in model.path, not from a checkpoint. Raises UserErrors, with the
    cheapest checks first: config, model shape, the headers of the weights, tokenizer, data.
    """
    model, _ = checked(cfg, fresh)
    data = load_data(cfg, model)
    check_teacher(cfg, model, data.tokenizer)
    data.questions(cfg)  # refuses what is held out now and was learned before
    return data


def checked(cfg: Config, fresh: bool) -> tuple[ModelConfig, tuple[LayerRun, ...]]:
    """The model, and the linears that the engine holds in FP8, after all checks of `preflight` but those of
    the data."""
    check(cfg)
    check_kept(cfg.train.compilation_cache)
    check_engine_settings(cfg)
    model = with_options(model_config(cfg), cfg)
    runs = check_shape(cfg, model)
    if fresh and cfg.model.path:
        check_weights(cfg.model.path, model)
    if fresh and cfg.lora.rank and cfg.lora.path:
        check_adapters(cfg, model)
    return model, runs


def check_shape(cfg: Config, model: ModelConfig) -> tuple[LayerRun, ...]:
    """The linears that the engine holds in FP8, by layer. Raises ConfigError if the config does not suit the
    model."""
    check_moe(cfg, model)
    check_base(cfg, model)
    check_family(cfg, model)
    if cfg.lora.rank:
        adapter_shapes(cfg, model)
    if cfg.run.samples_top_k > model.vocab_size:
        raise ConfigError(
            f"run.samples_top_k = {cfg.run.samples_top_k}: the vocabulary has {model.vocab_size} tokens",
            "set it to the few likeliest tokens that you want to see, for example 5")
    if cfg.train.shared_prefix and any(kind.window_within(cfg.train.row_tokens) for kind in model.kinds):
        raise ConfigError(
            f"train.shared_prefix = {cfg.train.shared_prefix}: layers of this model see a window of keys, "
            "which in a tree are not the last ones of a row", "set train.shared_prefix = 0")
    runs = engine_runs(cfg, model)
    recipe = get_recipe(cfg.precision.recipe)
    quantized = recipe.forward_fp8 or (recipe.engine_fp8 and cfg.rollout.engine == "served")  # by each device
    check_divides(cfg.train.fsdp, cfg.train.tensor, model, quantized)
    check_kernels(cfg.precision.products, cfg.precision.attention, cfg.precision.compute_dtype, model)
    return runs
