"""The model's shape for a run, and which of its linears are FP8: from the configuration alone."""

from __future__ import annotations

from pathlib import Path

from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.precision.recipe import LayerRun, fp8_runs, get_recipe, plain_runs


def model_config(cfg: Config, known: ModelConfig | None = None) -> ModelConfig:
    """The model's shape, or that which is `known` of it, checked against the lengths the run asks for."""
    model = known or ModelConfig.from_hf(Path(cfg.model.path) if cfg.model.path else cfg.model.config)
    if cfg.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"task.max_prompt_tokens + rollout.max_new_tokens = {cfg.max_model_len} exceeds the model's "
            f"max_position_embeddings = {model.max_position_embeddings}"
        )
    return model


def engine_runs(cfg: Config, model: ModelConfig) -> tuple[LayerRun, ...]:
    """Which linears of which layers the engine holds in FP8, or none under a recipe without FP8."""
    if not get_recipe(cfg.precision.recipe).engine_fp8:
        return plain_runs(model.sparse_layers)
    return weights_in_fp8(cfg, model)


def weights_in_fp8(cfg: Config, model: ModelConfig) -> tuple[LayerRun, ...]:
    """Which linears of which layers FP8 takes, whatever the recipe. Raises ConfigError for shapes that it
    cannot take."""
    p, layers = cfg.precision, model.num_hidden_layers
    return fp8_runs(linear_shapes(model), layers, p.first_layers_bf16, p.last_layers_bf16, p.exclude,
                    model.sparse_layers)
