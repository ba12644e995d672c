"""What a publish of a policy sends: its weights with or without noise, and its adapters beside them or merged
into them."""

from __future__ import annotations

from collections.abc import Callable

from jax import Array

from jaxfp8rl.config.schema import Config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.policy.adapters import adapter_product, adapter_shapes
from jaxfp8rl.policy.policy import without_adapters
from jaxfp8rl.precision.adapters import merged_policy
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.publish.adapters import AdaptedWeights, Adapters, AdapterWeights
from jaxfp8rl.publish.wire import LearnerWeights, whole
from jaxfp8rl.types import Params


def adapters_of(cfg: Config, model: ModelConfig, named: int = 0) -> Adapters | None:
    """The shape of the adapters that the engine holds, `named` of them by name; None if it has none, or gets
    them merged."""
    if not cfg.lora.rank or cfg.lora.publish == "merged":
        return None
    product, shapes = adapter_product(cfg), tuple(adapter_shapes(cfg, model).items())
    assert product is not None
    return Adapters(shapes, model.num_hidden_layers, cfg.lora.rank, product, 1 + named)


def weights_of(cfg: Config, model: ModelConfig, policy: Params, runs: tuple[LayerRun, ...],
               lend: Callable[[Params], Callable[[Array], Array]] = lambda policy: whole,
               lent: bool = False) -> LearnerWeights | AdaptedWeights:
    """The source of a publish of `policy`. lend(policy): the function that makes a leaf of what is sent
    whole, where the learner has several devices. lent: see LearnerWeights."""
    dtype = cfg.precision.weight_dtype
    if adapters := adapters_of(cfg, model):
        bare, to_one = without_adapters(policy), lend(policy)
        return AdaptedWeights(LearnerWeights(model, bare, runs, dtype, to_one),
                              AdapterWeights(policy, adapters, to_one), bare)
    if product := adapter_product(cfg):
        policy = merged_policy(policy, product)
    return LearnerWeights(model, policy, runs, dtype, lend(policy), lent)
