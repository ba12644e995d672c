"""Which adapters a run publishes beside its base."""

from __future__ import annotations

from jaxfp8rl.config.schema import Config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.policy.adapters import adapter_shapes
from jaxfp8rl.publish.adapters import Adapters


def adapters_of(cfg: Config, model: ModelConfig) -> Adapters | None:
    """The shape of the adapters that the engine holds; None if it has none, or gets them merged."""
    if not cfg.lora.rank or cfg.lora.publish == "merged":
        return None
    shapes = tuple(adapter_shapes(cfg, model).items())
    return Adapters(shapes, model.num_hidden_layers, cfg.lora.rank, cfg.lora.dtype)
