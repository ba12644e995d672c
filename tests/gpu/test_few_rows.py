"""A decoding step's layers and head by few kernels on a Hopper GPU, beside DecoderLayer's and all logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.models import few_rows
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward_cached, init_cache
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import KvFormat, Precision
from jaxfp8rl.precision.weights import QuantizedWeight
from pallas_kernels.logprob import parts, reference
from pallas_kernels.numerics import relative_l2

pytestmark = pytest.mark.usefixtures("hopper")
MODEL = ModelConfig("Qwen3ForCausalLM", 1024, 2048, 6144, 2, 16, 8, 128, 2048)
ROWS, STEPS = 64, 70


def steps(by_few_rows: bool, rows: slice = slice(ROWS)):
    """Hidden states of the last step, and the cache, of a model of Qwen3-1.7B's widths."""
    precision = Precision((LayerRun(0, 2, frozenset(few_rows.LINEARS)),), products="pallas",
                          attention="pallas",
                          kv=KvFormat(fp8=True))
    params = init_params(MODEL, jax.random.key(0), jnp.bfloat16)
    quantized = lambda path, x: (QuantizedWeight.of(x)
                                 if any(getattr(k, "key", "") in few_rows.LINEARS for k in path)
                                 else x)
    params["layers"] = jax.tree_util.tree_map_with_path(quantized, params["layers"])
    tokens = jax.random.randint(jax.random.key(1), (STEPS, ROWS, 1), 0, 1024)[:, rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_rows, "takes", lambda *a: by_few_rows)
        step = jax.jit(forward_cached, static_argnums=(1, 5), donate_argnums=4,
                       compiler_options={"xla_allow_excess_precision": False})
        cache = init_cache(MODEL, tokens.shape[1], 128, precision)
        for t in range(STEPS):
            hidden, cache = step(params, MODEL, tokens[t], jnp.full(tokens.shape[1:], t), cache, precision)
    return hidden, cache.k.astype(jnp.float32), cache.v.astype(jnp.float32)


def test_they_compute_what_a_decoder_layer_does():
    for name, made, wanted in zip(("hidden", "k", "v"), steps(True), steps(False)):
        print(name, relative_l2(made, wanted), "equal", float((made == wanted).mean()))
        assert relative_l2(made, wanted) < 0.05


def test_a_rows_bits_do_not_depend_on_the_others():
    (made, _, _), (alone, _, _) = steps(True), steps(True, slice(8, 16))
    np.testing.assert_array_equal(made[8:16].astype(jnp.float32), alone.astype(jnp.float32))


def test_the_head_by_parts_finds_the_logits():
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (ROWS, 2048)).astype(jnp.bfloat16)
    w = (0.02 * jax.random.normal(keys[1], (151936, 2048))).astype(jnp.bfloat16)
    z, part = reference.logits(x, w), jnp.arange(ROWS) * 9
    highest, total = jax.jit(lambda *a: parts.statistics(*a, backend="pallas"))(x, w, jnp.full(ROWS, 0.5))
    want_highest, want_total = parts.statistics(x, w, jnp.full(ROWS, 0.5), backend="reference")
    np.testing.assert_allclose(highest, want_highest, atol=1e-4)
    np.testing.assert_allclose(total, want_total, rtol=1e-3)
    found = jax.jit(lambda *a: parts.logits(*a, backend="pallas"))(x, w, part)
    words = part[:, None] * parts.PART + jnp.arange(parts.PART)
    inside = np.asarray(words) < len(w)
    wanted = np.asarray(jnp.take_along_axis(z, jnp.minimum(words, len(w) - 1), 1))
    np.testing.assert_allclose(np.asarray(found)[inside], wanted[inside], atol=1e-4)
