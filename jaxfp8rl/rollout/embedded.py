"""The embedded engine's model: the learner's own functions, in the formats that a config's engine computes
in. `jaxfp8rl.rollout.engines` builds the engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bridges.api import EngineFormats
from jaxfp8rl.config.schema import Config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.recipe import FP8_ACTIVATION, FP8_KV, FP8_WEIGHT, get_recipe, kv_of, rounding_of
from jaxfp8rl.precision.records import AttentionBackend, Precision
from jaxfp8rl.publish.draft_head import draft_head_of, draft_manifest
from jaxfp8rl.publish.wire import assemble, wire_manifest

if TYPE_CHECKING:
    from bridges.engines.draw import Parts
    from bridges.engines.embedded_engine import EngineModel
    from jaxfp8rl.models.transformer import KVCache


def embedded_precision(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...],
                       named: int = 0) -> Precision:
    """How the embedded engine, with so many adapters by name, computes on this machine."""
    from jaxfp8rl.policy.hardware import attention_of, products_of
    from jaxfp8rl.rollout.adapters import adapters_of

    formats = embedded_formats(cfg)
    return Precision(
        runs, activations_fp8=formats.activations == FP8_ACTIVATION,
        kv=kv_of(formats), rounding=rounding_of(formats),
        compute_dtype=cfg.precision.compute_dtype, weight_dtype=cfg.precision.weight_dtype,
        products=products_of(cfg.precision.products, cfg.precision.compute_dtype),
        attention=attention_of(cfg.precision.attention, cfg.precision.compute_dtype, model),
        exact=cfg.exact,
        adapters=adapters.in_engine if (adapters := adapters_of(cfg, model, named)) else None,
    )


def embedded_model(cfg: Config, model: ModelConfig, precision: Precision, named: int = 0) -> EngineModel:
    """The functions by which the embedded engine, with so many adapters by name, computes."""
    from bridges.engines.embedded_engine import EngineModel, NamedAdapters
    from jaxfp8rl.losses.logprobs import logits_of
    from jaxfp8rl.models import transformer
    from jaxfp8rl.models.draft_head import guessed
    from jaxfp8rl.policy.policy import over_base
    from jaxfp8rl.precision.adapters import choosing
    from jaxfp8rl.precision.four_bits import FourBits
    from jaxfp8rl.precision.weights import QuantizedWeight
    from jaxfp8rl.rollout.adapters import adapters_of

    kept = QuantizedWeight | FourBits

    def to_compute(w: Any) -> Any:
        return w if isinstance(w, kept) else w.astype(precision.compute_dtype)

    def to_params(tensors: Mapping[str, Array]) -> dict:
        params = jax.tree.map(to_compute, assemble(model, precision.runs, tensors),
                              is_leaf=lambda w: isinstance(w, kept))
        params = over_base(adapters.assemble(precision.runs, tensors), params) if adapters else params
        return params | {"draft": draft_head_of(model, tensors)} if draft else params

    def decode(params: dict, tokens: Array, positions: Array, table: Array,
               cache: KVCache) -> tuple[Array, KVCache]:
        hidden, cache = transformer.forward_cached(params, model, tokens[:, None], positions[:, None],
                                                   cache._replace(table=table), precision)
        return hidden[:, 0], cache._replace(table=None)

    page, calibrated = transformer.page_of(cfg.max_model_len), cfg.rollout.kv_scales == "calibrated"
    manifest, adapters = wire_manifest(model, precision.runs, precision.weight_dtype,
                                       calibrated), adapters_of(
        cfg, model, named)
    draft = cfg.rollout.speculation == "head"
    manifest += adapters.manifest() if adapters else ()
    return EngineModel(
        manifest=manifest + (draft_manifest(model, precision.weight_dtype) if draft else ()),
        assemble=to_params,
        init_cache=lambda pages: transformer.empty_pages(model, pages, page, precision),
        prefill=lambda params, tokens, positions, segments, pages, cache: transformer.prefill(
            params, model, tokens, positions, segments, pages, cache, precision),
        decode=decode,
        logits=lambda params, hidden: logits_of(hidden, transformer.head_weight(params, model),
                                                model.final_logit_softcapping),
        formats=embedded_formats(cfg),
        vocab_size=model.vocab_size,
        page=page,
        routes=functools.partial(_routes_of_all_layers, model) if model.experts else None,
        parts=_parts_of(model, precision),
        adapters=NamedAdapters(named, adapters.manifest(), adapters.in_slot, choosing) if named and adapters
        else None,
        draft=(lambda params, hidden, tokens: guessed(params["draft"], params, model, precision, hidden,
                                                      tokens))
        if draft else None,
    )


def _parts_of(model: ModelConfig, precision: Precision) -> Parts | None:
    """The head that keeps no logits, by its kernels, or of an exact engine also in plain jnp; None where
    engines draw from all logits."""
    from bridges.engines.draw import PART, Parts
    from jaxfp8rl.losses.logprobs import parts
    from jaxfp8rl.models.transformer import head_weight

    assert parts.PART == PART
    refused = parts.why_reference(jnp.dtype(precision.compute_dtype), model.hidden_size, model.vocab_size)
    by_kernels = precision.attention == AttentionBackend.PALLAS and not refused
    if not (by_kernels or precision.exact):
        return None
    head = lambda params, hidden: (hidden, head_weight(params, model).astype(hidden.dtype))
    # an exact learner's head says "auto", too
    how: dict[str, Any] = dict(softcap=model.final_logit_softcapping,
                               backend="auto" if precision.exact else "pallas")
    return Parts(lambda params, hidden, inverse: parts.statistics(*head(params, hidden), inverse, **how),
                 lambda params, hidden, part: parts.logits(*head(params, hidden), part, **how),
                 parts.logprob if precision.exact else None)


def _routes_of_all_layers(model: ModelConfig, cache: KVCache, pages: Array, positions: Array) -> Array:
    """The experts of the tokens in these slots, [..., L, k]; 0 in dense layers, as in vLLM."""
    assert cache.routes is not None  # a model with experts has them
    routes = cache.routes.at[:, pages, positions % cache.routes.shape[2]].get(mode="clip")
    routes = jnp.moveaxis(routes, 0, -2)
    every = jnp.zeros((*routes.shape[:-2], model.num_hidden_layers, routes.shape[-1]), routes.dtype)
    return every.at[..., np.flatnonzero(model.sparse_layers), :].set(routes)


def embedded_formats(cfg: Config) -> EngineFormats:
    """The number formats of the embedded engine, from the recipe and the config."""
    compute, fp8 = cfg.precision.compute_dtype, get_recipe(cfg.precision.recipe).engine_fp8
    return EngineFormats(
        weights=FP8_WEIGHT if fp8 else cfg.precision.weight_dtype,
        activations=FP8_ACTIVATION if fp8 and cfg.precision.embedded_activations == "fp8" else compute,
        kv_cache=FP8_KV if cfg.rollout.kv_cache == "fp8" else compute,
        compute=compute,
    )
