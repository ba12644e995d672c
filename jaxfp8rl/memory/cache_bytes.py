"""The bytes of an engine's KV cache, from the config and the model's shape."""

from __future__ import annotations

import jax.numpy as jnp

from jaxfp8rl.config.schema import Config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.transformer import page_of

PAGE = 64  # tokens: the larger of vLLM's pages on a GPU (bridges.inside_vllm.build.FP8_PAGE)


def sequence_bytes(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    """The bytes that a sequence of `max_model_len` tokens fills in an engine's cache, whose numbers take
    `itemsize` bytes unless they are FP8. Layers with a window fill less in vLLM's, but not in the embedded
    engine's (models.transformer.init_cache), so there a window saves time alone."""
    itemsize = 1 if cfg.rollout.kv_cache == "fp8" else itemsize
    numbers = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * cfg.max_model_len
    return numbers * itemsize


def embedded_cache(cfg: Config, model: ModelConfig) -> int:
    """The bytes of the embedded engine's cache: room for all that decode at once, or rollout.kv_cache_gib if
    that is less. One that is "auto" counts with the least."""
    given = cfg.rollout.kv_cache_gib
    least = least_gib(cfg, model) if given == "auto" else given
    room = _embedded(cfg, model, wanted_at_once(cfg))
    return room if least is None else min(room, int(float(least) * 2**30))


def _embedded(cfg: Config, model: ModelConfig, sequences: int) -> int:
    """The bytes with which every row can grow to `max_model_len` (bridges.engines.flights): whole pages for
    each, one for its prompt's end, and a row's for prompts that wait."""
    page = page_of(cfg.max_model_len)
    pages = -(-cfg.max_model_len // page)
    slots = (sequences * (pages + 1) + pages) * page
    sequence = sequence_bytes(cfg, model, jnp.dtype(cfg.precision.compute_dtype).itemsize)
    return slots * sequence // cfg.max_model_len


def wanted_at_once(cfg: Config) -> int:
    """The number of sequences that a step decodes at once if the cache holds them all."""
    r = cfg.rollout
    return r.rows if r.engine == "jax" else min(r.max_num_seqs, r.prompts_per_step * r.samples_per_prompt)


def cache_of(cfg: Config, model: ModelConfig, sequences: int) -> int:
    """The bytes of the engine's cache that hold so many sequences of full length at once. vLLM's: whole pages
    for each, and a page that vLLM keeps for itself."""
    if cfg.rollout.engine == "jax":
        return _embedded(cfg, model, sequences)
    token = sequence_bytes(cfg, model, jnp.dtype(cfg.precision.weight_dtype).itemsize) // cfg.max_model_len
    return (sequences * -(-cfg.max_model_len // PAGE) + 1) * PAGE * token


def least_gib(cfg: Config, model: ModelConfig) -> float:
    """The smallest cache with which an engine starts, in tenths of a GiB: for one sequence of full length."""
    return tenths_up(cache_of(cfg, model, 1))


def tenths_up(size: int) -> float:
    """Bytes in GiB, rounded up to a tenth."""
    return -(-size * 10 // 2**30) / 10
