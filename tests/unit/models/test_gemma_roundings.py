"""Where the learner rounds Gemma's residual stream, beside an engine that is compiled, one that is not, and
one that rounds every sum (tests/bridges compares with vLLM itself)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxfp8rl.models import layers
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.decoder_layer import DecoderLayer
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import embed, forward
from jaxfp8rl.precision.records import EngineRounding, Precision
from pallas_kernels.numerics import relative_l2

D = 32
GEMMA = ModelConfig.from_hf({
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 9, "hidden_size": D, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 8,
})
ENGINES = {"compiled": {"fused": True, "residual_once": True}, "not compiled": {"unrounded_sums": True},
           "rounds every sum": {}}


@pytest.fixture(params=ENGINES)
def engine(request) -> str:
    return request.param


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.bfloat16)


def rounded(a: np.ndarray) -> np.ndarray:
    return a.astype(ml_dtypes.bfloat16).astype(np.float32)


def embedded(engine: str) -> tuple[Precision, layers.UnfusedResidual | jax.Array, np.ndarray]:
    """A precision, what enters the first layer in it, and that without roundings."""
    precision = Precision.uniform(1, "bfloat16", rounding=EngineRounding(**ENGINES[engine]))
    table, tokens = drawn(9, D), np.asarray([[4, 7, 0]])
    x = embed({"embed_tokens": {"weight": table}}, jnp.asarray(tokens), GEMMA, precision)
    return precision, x, np.asarray(table, np.float32)[tokens] * np.float32(ml_dtypes.bfloat16(D**0.5))


def test_the_first_norm_of_a_compiled_engine_sees_the_scaled_embedding_unrounded(engine):
    _, x, exact = embedded(engine)
    want = exact if engine == "compiled" else rounded(exact)
    np.testing.assert_array_equal(layers.materialize(x), want)
    assert (rounded(exact) != exact).mean() > 0.5


def test_a_compiled_engine_adds_the_norm_of_a_result_unrounded(engine):
    """The stream that it is added to is rounded."""
    precision, x, exact = embedded(engine)
    y, w = drawn(1, 3, D), {"norm": {"weight": drawn(D)}}
    layer = DecoderLayer(GEMMA, precision, precision.runs[0], (y, y), lambda *heads: None)
    got = layers.materialize(layer._add(x, y, w, "norm"))
    normed = np.asarray(layers.rms_norm(y.astype(jnp.float32), w["norm"]["weight"], 1e-6, unit_offset=True))
    sums = {"compiled": rounded(exact) + normed, "not compiled": rounded(exact) + rounded(normed),
            "rounds every sum": rounded(rounded(exact) + rounded(normed))}
    np.testing.assert_array_equal(got, sums[engine])
    assert all((sums[other] != sums[engine]).mean() > 0.2 for other in sums if other != engine)


def test_both_parts_of_a_stream_get_one_cotangent_of_their_own_type():
    x = layers.UnfusedResidual(drawn(3, D), drawn(3, D).astype(jnp.float32))
    (d,) = jax.vjp(layers.shared_cotangent, x)[1](layers.UnfusedResidual(x.x, jnp.zeros_like(x.added)))
    assert (d.x.dtype, d.added.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(d.added, d.x.astype(jnp.float32))


def test_gradients_through_a_compiled_engines_roundings_are_those_of_float32(quick_compile):
    cfg = dataclasses.replace(GEMMA, num_hidden_layers=2, layer_types=("sliding_attention", "full_attention"))
    params, tokens = init_params(cfg, jax.random.key(0)), jnp.asarray([[4, 7, 0, 3, 2, 5]])
    rest = jnp.arange(6)[None], jnp.ones((1, 6), jnp.int32)

    def gradient(dtype: str) -> dict:
        precision = Precision.uniform(2, dtype, rounding=EngineRounding(**ENGINES["compiled"]))
        loss = lambda params: jnp.sum(forward(params, cfg, tokens, *rest, precision, "layer").astype(
            jnp.float32)**2 * jnp.cos(jnp.arange(D)))
        return jax.jit(jax.grad(loss))(params)

    errors = jax.tree.map(relative_l2, gradient("bfloat16"), gradient("float32"))
    assert max(jax.tree.leaves(errors)) < 0.05, errors
