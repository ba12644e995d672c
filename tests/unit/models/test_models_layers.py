"""The pieces of a layer against independent arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxfp8rl.models import layers
from jaxfp8rl.models.rope import Llama3Rope, Rope

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_round_e4m3_equals_the_cast_for_every_bfloat16():
    bits = jnp.arange(2**16, dtype=jnp.uint16)
    x = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    x = x[jnp.isfinite(x)]
    np.testing.assert_array_equal(jax.jit(layers.round_e4m3)(x), layers.to_e4m3(x).astype(x.dtype))


def test_round_e4m3_equals_the_cast_in_float32_and_at_its_ties():
    codes = np.arange(256, dtype=np.uint8)
    grid = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    grid = jnp.sort(grid[jnp.isfinite(grid)])
    ties = (grid[1:] + grid[:-1]) / 2
    near = jnp.concatenate([grid, ties, jnp.nextafter(ties, jnp.inf), jnp.nextafter(ties, -jnp.inf)])
    x = jnp.concatenate([near, jnp.array([449.0, 464.0, 465.0, 1e30, -1e30])])
    np.testing.assert_array_equal(jax.jit(layers.round_e4m3)(x), layers.to_e4m3(x).astype(jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_truncation_takes_the_next_code_towards_zero(dtype):
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    rng = np.random.default_rng(0)
    x = jnp.asarray(np.concatenate([rng.normal(size=5000) * np.exp2(rng.uniform(-12, 9, 5000)), codes, -codes,
                                    [1e4]]), dtype)
    x64 = np.asarray(x, np.float64)
    want = np.sign(x64) * codes[np.searchsorted(codes, np.abs(x64).clip(max=448), side="right") - 1]
    np.testing.assert_array_equal(jax.jit(layers.round_e4m3, static_argnums=1)(x, True).astype(jnp.float64),
                                  want)


def test_round_e4m3_passes_the_gradient_through():
    x, w = jnp.array([0.3, -500.0, 7.0]), jnp.array([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(jax.grad(lambda x: (layers.round_e4m3(x) * w).sum())(x), w)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_the_textbook_sum(kv_heads):
    B, T, S, H, d = 2, 3, 5, 4, 8
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, n, h, d)).astype(np.float32)
               for n, h in ((T, H), (S, kv_heads), (S, kv_heads)))
    mask = rng.random((B, T, S)) < 0.6
    mask[:, :, 0] = True
    want = np.zeros((B, T, H, d))
    for b, t, h in np.ndindex(B, T, H):
        seen = np.flatnonzero(mask[b, t])
        kv = h // (H // kv_heads)
        p = np.exp(k[b, seen, kv] @ q[b, t, h] / np.sqrt(d))
        want[b, t, h] = p @ v[b, seen, kv] / p.sum()
    np.testing.assert_allclose(layers.attention(*map(jnp.asarray, (q, k, v, mask))), want, atol=1e-5)


def test_fp8_attention_rounds_queries_and_probabilities_to_e4m3():
    """One query over five keys, by hand: E4M3 of q, then of 2^8 exp(score - max); the sum below is of
    unrounded ones."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, n, 1, 8)).astype(np.float32) for n in (1, 5, 5))

    def e4m3(a: np.ndarray) -> np.ndarray:
        return a.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)

    scores = k[0, :, 0] @ e4m3(q)[0, 0, 0] / np.sqrt(np.float32(8))
    exps = np.exp(scores - scores.max())
    want = e4m3(exps * 256) / 256 @ v[0, :, 0] / exps.sum()
    mask = jnp.ones((1, 1, 5), bool)
    got = [layers.attention(*map(jnp.asarray, (q, k, v)), mask, fp8=flag)[0, 0, 0] for flag in (True, False)]
    np.testing.assert_allclose(got[0], want, atol=1e-6)
    assert np.abs(got[1] - want).max() > 1e-3


def test_rope_tables_are_rounded_to_the_engines_type():
    for exact, rounded in zip(*(layers.rope_tables(jnp.arange(64)[None], Rope(1e4), 16, dtype)
                                for dtype in ("float32", "bfloat16"))):
        np.testing.assert_array_equal(rounded,
                                      np.asarray(exact).astype(ml_dtypes.bfloat16).astype(np.float32))
        assert (rounded != exact).mean() > 0.5


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("theta, head_dim", [(1e4, 64), (5e5, 128), (1e6, 128)])
def test_rope_frequencies_are_those_of_transformers(theta, head_dim, scaled):
    """To the bit, but where torch's vectorised power is a last place off."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
    kind = {"rope_type": "llama3", **scaling} if scaled else {"rope_type": "default"}
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    hf = llama.LlamaConfig(**sizes, rope_parameters={"rope_theta": theta, **kind})
    want = llama.LlamaRotaryEmbedding(hf).inv_freq.numpy()
    got = Rope(theta, Llama3Rope(**scaling) if scaled else None).frequencies(head_dim)
    assert got.dtype == want.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=3e-7)
    assert (got != want).sum() <= 1


def test_rope_scores_depend_on_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def score(at_q: int, at_k: int) -> float:
        rotated = [layers.apply_rope(x, *layers.rope_tables(jnp.array([[at]]), Rope(1e4), 16))
                   for x, at in ((q, at_q), (k, at_k))]
        return float((rotated[0] * rotated[1]).sum())

    assert score(17, 12) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(17, 12) != pytest.approx(score(17, 13), abs=1e-2)


def test_rms_norm_rounds_before_the_weight():
    x, w = jnp.array([[1.0, 2.0, 3.0]], jnp.bfloat16), jnp.array([1.1, 0.9, 1.3], jnp.bfloat16)
    got = layers.rms_norm(x, w, 1e-6)
    normed = np.array([1.0, 2.0, 3.0]) / np.sqrt(14 / 3)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[0], w * jnp.asarray(normed, jnp.bfloat16))


def test_what_a_compiled_engine_fuses_is_rounded_once():
    """Norm and weight; SiLU and product; and the sum with the residual, which the norm sees unrounded and the
    stream does not."""
    rng = np.random.default_rng(0)
    x, y, w = (jnp.asarray(rng.normal(size=(4, 64)), jnp.bfloat16) for _ in range(3))
    x64, y64, w64 = (np.asarray(a, np.float64) for a in (x, y, w))

    def rounded(a: np.ndarray) -> np.ndarray:
        return a.astype(ml_dtypes.bfloat16).astype(np.float32)

    stream = layers.add_residual(layers.UnfusedResidual(x, jnp.zeros_like(x)), y)
    total = layers.materialize(stream)
    np.testing.assert_array_equal(total, (x64 + y64).astype(np.float32))
    np.testing.assert_array_equal(layers.add_residual(stream, y).total,
                                  rounded(np.asarray(total)) + np.asarray(y, np.float32))
    np.testing.assert_array_equal(layers.add_residual(x, y), rounded(x64 + y64))
    s = np.asarray(total, np.float64)
    want = rounded(s / np.sqrt((s**2).mean(-1, keepdims=True) + 1e-6) * w64[0])
    once, twice = (np.asarray(layers.rms_norm(total, w[0], 1e-6, "bfloat16", o), np.float32)
                   for o in (True, False))
    assert (once != want).mean() < 0.01 < 0.1 < (twice != want).mean()
    product = x64 / (1 + np.exp(-x64)) * y64
    fused, apart = layers.swiglu(x, y, fused=True), layers.swiglu(x, y)
    assert (fused.dtype, apart.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(fused, product, rtol=1e-6)
    assert (np.asarray(apart, np.float32) != rounded(product)).mean() > 0.1


def test_attention_mask():
    mask = layers.attention_mask(jnp.array([[1, 1, 2, 0]]))
    np.testing.assert_array_equal(mask[0], [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
