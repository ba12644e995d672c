"""Paged decode attention on a Hopper GPU: its numbers, nothing left unwritten, the same every time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward_cached, init_cache
from jaxfp8rl.precision.records import KvFormat, Precision
from pallas_kernels.decode_attention import api
from tests.kernels.test_sm90_decode_attention import BF16, E4M3, float64, operands, window_of

pytestmark = pytest.mark.usefixtures("hopper")

CASES = {  # name: (lengths, query heads, KV heads, d, page, type of the cache, of the queries, window)
    "fp8": ([0, 1, 16, 17, 64, 65, 700, 3, 0, 5000], 32, 8, 128, 16, E4M3),
    "fp8, one long": ([9_000], 32, 8, 128, 64, E4M3),
    "fp8, groups of eight, heads of 64": ([300, 0, 129, 1000], 64, 8, 64, 32, E4M3),
    "fp8, groups of one": ([64, 1, 500], 8, 8, 128, 128, E4M3),
    "fp8, two passes": ([77, 640, 1], 80, 2, 128, 8, E4M3),
    "fp8, float16 queries": ([77, 640, 1], 32, 8, 128, 16, E4M3, jnp.float16),
    "fp8, groups of seven": ([900, 4], 14, 2, 64, 16, E4M3),
    "bf16, heads of 64, groups of seven": ([900, 4], 14, 2, 64, 16, BF16),
    "bf16": ([0, 1, 16, 17, 64, 65, 700, 3, 0, 5000], 32, 8, 128, 16, BF16),
    "bf16, heads of 64, groups of four": ([300, 0, 129, 1000], 32, 8, 64, 128, BF16),
    "float16": ([77, 640, 1], 32, 8, 128, 64, jnp.float16),
    "many": ([*range(0, 1200, 9)], 32, 8, 128, 64, E4M3),
    "fp8, a window": ([0, 1, 16, 17, 64, 65, 700, 3, 0, 5000], 32, 8, 128, 16, E4M3, None, 512),
    "bf16, a window inside a page": ([300, 129, 3, 5000], 32, 8, 64, 128, BF16, None, 33),
    "bf16, heads of 256": ([0, 1, 16, 17, 64, 65, 700, 3, 0, 5000], 4, 1, 256, 16, BF16),
    "bf16, heads of 256, a window": ([900, 0, 5000, 1], 8, 4, 256, 64, BF16, None, 512),
    "float16, heads of 256": ([77, 640, 1], 16, 8, 256, 64, jnp.float16),
    "fp8, heads of 256": ([0, 1, 16, 17, 64, 65, 700, 3, 0, 5000], 4, 1, 256, 16, E4M3),
    "fp8, float16, heads of 256, a window": ([900, 0, 5000, 1], 8, 4, 256, 64, E4M3, jnp.float16, 512),
    "many, heads of 256, a window": ([*range(0, 1200, 9)], 4, 1, 256, 64, E4M3, None, 512),
}


def kernel(name: str):
    return jax.jit(functools.partial(api.attention_and_lse, backend="pallas", window=window_of(CASES[name])))


def relative(got, want) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / max(np.linalg.norm(want), 1e-30))


@pytest.mark.parametrize("name", CASES)
def test_it_is_exact_but_for_its_last_rounding(name):
    args = operands(*CASES[name])
    want, want_lse = float64(*args, CASES[name][3] ** -0.5, window_of(CASES[name]))
    o, lse = kernel(name)(*args)
    print(
        name, "o", relative(o, want), "lse",
        np.nanmax(np.abs(np.where(np.isinf(want_lse), 0, np.asarray(lse) - want_lse)))
    )
    np.testing.assert_allclose(lse, want_lse, atol=4e-3 if CASES[name][5] == E4M3 else 1e-5)
    assert relative(o, want) < 4e-3
    assert not np.asarray(o, np.float64)[np.asarray(args[4]) == 0].any()


@pytest.mark.parametrize("name", ["fp8", "bf16", "many", "many, heads of 256, a window"])
def test_the_same_every_time_wherever_it_is_put(name):
    """Results and what lies between are put where memory was all ones, NaN in any type."""
    args, run = operands(*CASES[name]), kernel(name)
    first = run(*args)
    for _ in range(3):
        ones = [jnp.full(x.shape, -1, f"int{8 * x.dtype.itemsize}") for x in first for _ in range(4)]
        ones.append(jnp.full((600, 128, 64), -1, jnp.int32))
        jax.block_until_ready(ones)
        del ones
        for x, y in zip(first, run(*args)):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("kv_fp8", [False, True])
def test_the_embedded_engine_decodes_by_it(kv_fp8):
    """A prompt of 40 and steps over the border of a page, beside XLA over the whole cache."""
    cfg = ModelConfig("Qwen3ForCausalLM", 97, 256, 512, 2, 8, 2, 64, 256)
    params = init_params(cfg, jax.random.key(0), jnp.bfloat16)
    tokens = jax.random.randint(jax.random.key(1), (3, 80), 0, 97)
    run, found = jax.jit(forward_cached, static_argnums=(1, 5)), {}
    for attention in ("xla", "pallas"):
        precision = Precision.uniform(2, "bfloat16", kv=KvFormat(fp8=kv_fp8), attention=attention)
        cache, places = init_cache(cfg, 3, 96, precision), jnp.broadcast_to(jnp.arange(80), (3, 80))
        hidden, cache = run(params, cfg, tokens[:, :40], places[:, :40], cache, precision)
        steps = []
        for t in range(40, 80):
            hidden, cache = run(params, cfg, tokens[:, t : t + 1], places[:, t : t + 1], cache, precision)
            steps.append(np.asarray(hidden, np.float64))
        found[attention] = np.concatenate(steps, 1)
    assert relative(found["pallas"], found["xla"]) < 1e-2
