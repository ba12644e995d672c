"""Packed attention as the model has it: made once what is the same for all layers, rounded in FP8 where XLA's
is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

from jaxfp8rl.models import layers
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward
from jaxfp8rl.precision.records import Precision
from pallas_kernels.attention import api
from pallas_kernels.numerics import relative_l2

pytestmark = pytest.mark.usefixtures("quick_compile")

MODEL = ModelConfig.from_hf({
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "rope_theta": 1e4, "hidden_act": "silu",
    "attention_bias": False,
})


def primitives(jaxpr: core.Jaxpr, in_loop: bool = False) -> set[tuple[str, bool]]:
    """Of a program and all within it: name, and whether it is in a loop."""
    found = set()
    for eqn in jaxpr.eqns:
        found.add((eqn.primitive.name, in_loop))
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                found |= primitives(getattr(inner, "jaxpr", inner),
                                    in_loop or eqn.primitive.name in ("scan", "while"))
    return found


def is_jaxpr(x) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


def test_tables_of_the_ids_are_made_outside_the_loop_over_layers():
    """Forward, recomputation and backward. Longest walks first: only the tables sort."""
    precision = Precision.uniform(MODEL.num_hidden_layers, "bfloat16", attention="pallas")
    params = jax.eval_shape(lambda key: init_params(MODEL, key, jnp.bfloat16), jax.random.key(0))
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def loss(params, tokens, positions, segments):
        return forward(params, MODEL, tokens, positions, segments, precision,
                       remat="layer").astype(jnp.float32).sum()

    found = primitives(jax.make_jaxpr(jax.grad(loss))(params, ids, ids, ids).jaxpr)
    assert ("sort", False) in found and ("sort", True) not in found
    assert ("copy_gmem_to_smem", True) in found


def test_in_fp8_it_rounds_as_the_models_attention_by_xla():
    @jax.jit
    def both():
        keys = jax.random.split(jax.random.key(0), 3)
        drawn = (jax.random.normal(key, (24, heads, 16)) for key, heads in zip(keys, (4, 2, 2)))
        q, k, v = (layers.round_scaled(x, 2.0).astype(jnp.bfloat16) for x in drawn)
        ids = jnp.repeat(jnp.asarray([1, 2], jnp.int32), jnp.asarray([14, 10]), total_repeat_length=24)
        ours = api.attention(q, k, v, ids, fp8=True, backend="reference")
        return ours, layers.attention(q[None], k[None], v[None], layers.attention_mask(ids[None]), fp8=True,
                                      q_scale=2.0)[0]

    assert relative_l2(*both()) < 1e-3
