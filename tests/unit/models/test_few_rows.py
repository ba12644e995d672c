"""A decoding step's layers as few kernels compute them, beside DecoderLayer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.models import few_rows
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward_cached, init_cache
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import KvFormat, Precision, Products
from jaxfp8rl.precision.weights import QuantizedWeight

pytestmark = pytest.mark.usefixtures("quick_compile")
MODEL = ModelConfig("Qwen3ForCausalLM", 97, 512, 512, 2, 4, 1, 128, 256)
ROWS = 8


def precision_of(products: str = "float32", linears: set[str] = few_rows.LINEARS) -> Precision:
    return Precision((LayerRun(0, 2, frozenset(linears)),), products=Products(products),
                     kv=KvFormat(fp8=True))


@pytest.fixture
def decoded(monkeypatch):
    """decoded(by few rows) -> hidden states of two steps, and the cache."""
    precision, rows = precision_of(), jnp.arange(ROWS, dtype=jnp.int32)[:, None]
    params = init_params(MODEL, jax.random.key(0), jnp.bfloat16)
    quantized = lambda path, x: (QuantizedWeight.of(x)
                                 if any(getattr(k, "key", "") in few_rows.LINEARS for k in path)
                                 else x)
    params["layers"] = jax.tree_util.tree_map_with_path(quantized, params["layers"])

    def run(by_few_rows: bool):
        monkeypatch.setattr(few_rows, "takes", lambda *a: by_few_rows)
        jitted = jax.jit(forward_cached, static_argnums=(1, 5),
                         compiler_options={"xla_allow_excess_precision": False})
        cache, found = init_cache(MODEL, ROWS, 16, precision), []
        for step in range(2):
            hidden, cache = jitted(params, MODEL, rows + step, jnp.full((ROWS, 1), step), cache, precision)
            found.append(hidden)
        return jnp.stack(found), cache

    return run


def test_they_compute_what_a_decoder_layer_does_to_the_last_bit(decoded):
    (hidden, cache), (wanted, its_cache) = decoded(True), decoded(False)
    assert (hidden.shape, hidden.dtype) == (wanted.shape, wanted.dtype)
    for mine, its in ((hidden, wanted), (cache.k, its_cache.k), (cache.v, its_cache.v)):
        np.testing.assert_array_equal(mine.astype(jnp.float32), its.astype(jnp.float32))


def test_which_layers_they_are():
    precision = precision_of("pallas")
    takes = lambda model=MODEL, rows=ROWS, precision=precision: few_rows.takes(model, precision,
                                                                               precision.runs[0], rows)
    assert takes()
    assert not takes(rows=7) and not takes(dataclasses.replace(MODEL, hidden_size=576))
    assert not takes(precision=precision_of())
    assert not takes(precision=dataclasses.replace(precision, activations_fp8=False))
    assert not takes(precision=dataclasses.replace(precision, runs=precision_of(linears={"q_proj"}).runs))
