"""The residual stream beside a compiled engine that fuses no quantiser: a layer rounds it once, as the result
of attention is added."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from bridges.api import EngineFormats
from jaxfp8rl.models import layers
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.decoder_layer import DecoderLayer
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import embed
from jaxfp8rl.precision.recipe import rounding_of
from jaxfp8rl.precision.records import EngineRounding, Precision

pytestmark = pytest.mark.usefixtures("quick_compile")

D = 32
MODEL = ModelConfig.from_hf({
    "architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": D, "intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 8,
})


def drawn(seed: int) -> np.ndarray:
    """Normal numbers of bfloat16, in float32."""
    return rounded(np.random.default_rng(seed).normal(size=(1, 4, D)))


def rounded(a: np.ndarray) -> np.ndarray:
    return a.astype(ml_dtypes.bfloat16).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class GivenLayer(DecoderLayer):
    """A layer whose attention and MLP give known numbers."""

    parts: tuple = ()

    def attention(self, h, w):
        return jnp.asarray(self.parts[0], jnp.bfloat16), None

    def mlp(self, h, w):
        return jnp.asarray(self.parts[1], jnp.bfloat16)


CASES = {
    "once a layer": ({"fused": True, "residual_once": True},
                     lambda x, a, b, c, d: rounded(x + a + b) + c + d),
    "each but the last": ({"fused": True},
                          lambda x, a, b, c, d: rounded(rounded(rounded(x + a) + b) + c) + d),
    "each": ({}, lambda x, a, b, c, d: rounded(rounded(rounded(rounded(x + a) + b) + c) + d)),
}


@pytest.mark.parametrize("case", CASES)
def test_two_layers_round_the_sums_that_the_engine_rounds(case):
    precision = Precision.uniform(2, "bfloat16", rounding=EngineRounding(**CASES[case][0]))
    numbers, w = [drawn(i) for i in range(5)], init_params(MODEL, jax.random.key(0))["layers"]
    table = {"embed_tokens": {"weight": jnp.asarray(numbers[0][0], jnp.bfloat16)}}
    x = embed(table, jnp.arange(4)[None], MODEL, precision)
    for parts in (numbers[1:3], numbers[3:]):
        layer = GivenLayer(MODEL, precision, precision.runs[0], (x, x), lambda *heads: None,
                           parts=tuple(parts))
        x, _ = layer(x, jax.tree.map(lambda leaf: leaf[0], w))
    wants = {name: sums(*numbers) for name, (_, sums) in CASES.items()}
    np.testing.assert_array_equal(layers.materialize(x), wants[case])
    assert all((wants[other] != wants[case]).mean() > 0.2 for other in wants if other != case)


@pytest.mark.parametrize("formats, once", [
    ({"fused": True}, True), ({"fused": True, "fused_quantizer": True}, False),
    ({"unrounded_sums": True}, False),
])
def test_a_compiled_engine_does_so_unless_its_norms_quantise(formats, once):
    """A fused norm that quantises writes the sum with attention, rounded."""
    found = rounding_of(EngineFormats("bfloat16", "bfloat16", "bfloat16", "bfloat16", **formats))
    assert found.residual_once == once
