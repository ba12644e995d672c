"""The parameter tree of models/transformer.py as NNX modules own it, and fresh parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.packed import pack_params
from jaxfp8rl.models.transformer import Params, forward
from jaxfp8rl.precision.records import Precision


class Weight(nnx.Module):
    """The weight of a module, and its bias where it has one."""

    def __init__(self, value: Array, bias: Array | None = None):
        self.weight = nnx.Param(value)
        if bias is not None:
            self.bias = nnx.Param(bias)


class Norm(Weight):
    """Norms of a shape that at first multiply by 1."""

    def __init__(self, cfg: ModelConfig, *shape: int):
        super().__init__(jnp.zeros(shape) if cfg.family.unit_offset else jnp.ones(shape))


class Attention(nnx.Module):
    """The attention weights of all layers, stacked."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        L, D, d = cfg.num_hidden_layers, cfg.hidden_size, cfg.head_dim
        q, kv = cfg.num_attention_heads * d, cfg.num_key_value_heads * d
        bias = lambda n: jnp.zeros((L, n)) if cfg.family.qkv_bias else None
        self.q_proj, self.k_proj, self.v_proj = (
            Weight(_normal(rngs, (L, n, D)), bias(n)) for n in (q, kv, kv))
        self.o_proj = Weight(_normal(rngs, (L, D, q), _residual_std(cfg)))
        if cfg.family.qk_norm:
            self.q_norm, self.k_norm = (Norm(cfg, L, d) for _ in range(2))


class MLP(nnx.Module):
    """The gated MLPs of all dense layers, stacked."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        L, D, F = cfg.sparse_layers.count(False), cfg.hidden_size, cfg.intermediate_size
        self.gate_proj, self.up_proj = (Weight(_normal(rngs, (L, F, D))) for _ in range(2))
        self.down_proj = Weight(_normal(rngs, (L, D, F), _residual_std(cfg)))


class Expert(nnx.Module):
    """The SwiGLU weights of all experts of all sparse layers, stacked."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        L, E, D, F = sum(
            cfg.sparse_layers), cfg.mixture.num_experts, cfg.hidden_size, cfg.mixture.moe_intermediate_size
        self.gate_proj, self.up_proj = (Weight(_normal(rngs, (L, E, F, D))) for _ in range(2))
        self.down_proj = Weight(_normal(rngs, (L, E, D, F), _residual_std(cfg)))


class Mixture(nnx.Module):
    """Routers and experts of all sparse layers, stacked."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.gate = Weight(_normal(rngs, (sum(cfg.sparse_layers), cfg.mixture.num_experts, cfg.hidden_size)))
        self.experts = Expert(cfg, rngs)


class Layers(nnx.Module):
    """All decoder layers, stacked."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        for name in cfg.family.norms.names:
            setattr(self, name, Norm(cfg, cfg.num_hidden_layers, cfg.hidden_size))
        self.self_attn = Attention(cfg, rngs)
        if not all(cfg.sparse_layers):
            self.mlp = MLP(cfg, rngs)
        if any(cfg.sparse_layers):
            self.moe = Mixture(cfg, rngs)


class Transformer(nnx.Module):
    """Owns the parameters, float32, drawn as N(0, 0.02) with residual outputs scaled by 1/sqrt(2L) (GPT-2,
    section 2.3)."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed_tokens = Weight(_normal(rngs, (cfg.vocab_size, cfg.hidden_size)))
        self.layers = Layers(cfg, rngs)
        self.norm = Norm(cfg, cfg.hidden_size)
        if not cfg.tie_word_embeddings:
            self.lm_head = Weight(_normal(rngs, (cfg.vocab_size, cfg.hidden_size)))

    def params(self) -> Params:
        """The tree that the pure functions take."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def __call__(self, tokens_BT: Array, positions_BT: Array, segment_ids_BT: Array,
                 precision: Precision) -> Array:
        """`forward` on these parameters."""
        return forward(self.params(), self.cfg, tokens_BT, positions_BT, segment_ids_BT, precision)


def init_params(cfg: ModelConfig, key: Array, dtype: Any = jnp.float32) -> Params:
    """Fresh parameters in `dtype`, drawn in float32; in four bits those that `cfg.packed` names."""
    params = Transformer(cfg, nnx.Rngs(key)).params()
    params = jax.tree.map(lambda a: a.astype(dtype), params)
    return pack_params(cfg, params) if cfg.packed else params


def _residual_std(cfg: ModelConfig) -> float:
    return 0.02 / (2 * cfg.num_hidden_layers) ** 0.5


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float = 0.02) -> Array:
    return std * jax.random.normal(rngs.params(), shape, jnp.float32)
