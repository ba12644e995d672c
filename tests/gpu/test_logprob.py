"""The kernels of log-probabilities on a Hopper GPU, beside the same in jnp and in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.precision.jit import rounding_exact_jit
from pallas_kernels.logprob import api, reference, sm90
from pallas_kernels.numerics import relative_l2

SIZES = {  # M, N, K
    "whole tiles": (512, 4096, 512),
    "ragged": (517, 4160, 576),
    "few rows": (3, 960, 64),
    "more tiles than multiprocessors": (1024, 9024, 256),
}


def drawn(m: int, n: int, k: int, dtype=jnp.bfloat16, seed: int = 0):
    """x, w, targets, cotangents; logits have a deviation of 4."""
    keys = jax.random.split(jax.random.key(seed), 5)
    x = jax.random.normal(keys[0], (m, k)).astype(dtype)
    w = (jax.random.normal(keys[1], (n, k)) * 4 / k**0.5).astype(dtype)
    return x, w, jax.random.randint(keys[2], (m,), 0, n), *(jax.random.normal(key, (m,)) for key in keys[3:])


def run(x, w, y, g, h, live=None, **options):
    return program(**options)(x, w, y, g, h, live)


@functools.cache
def program(**options):
    """Values and gradients, compiled once for all tests."""

    def both(x, w, y, g, h, live):
        f = functools.partial(api.linear_logprob, targets=y, live=live, temperature=0.7, **options)
        found, pull = jax.vjp(lambda x, w: f(x, w), x, w)
        return *found, *pull((g, h))

    return rounding_exact_jit(both)


def float64(x, w, y, g, h, softcap=None):
    x, w, g, h = (np.asarray(a).astype(np.float64) for a in (x, w, g, h))
    z = x @ w.T
    tanh = np.tanh(z / softcap) if softcap else np.zeros_like(z)
    z = (softcap * tanh if softcap else z) / 0.7
    logp = z - z.max(1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(1, keepdims=True))
    p, rows = np.exp(logp), np.arange(len(x))
    entropy = -(p * logp).sum(1)
    dz = -p * (g[:, None] + h[:, None] * (logp + entropy[:, None]))
    dz[rows, y] += g
    dz *= 1 - tanh**2
    return logp[rows, y], entropy, dz @ w / 0.7, dz.T @ x / 0.7


@pytest.mark.parametrize(("size", "dtype"),
                         [*((size, jnp.bfloat16) for size in SIZES), ("ragged", jnp.float16)])
def test_forward_and_backward_equal_float64(size, dtype):
    args = drawn(*SIZES[size], dtype)
    logp, entropy, d_x, d_w = run(*args, backend="pallas", memory=SIZES[size][1] * 1200)
    want = float64(*args)
    # tensor cores cut off what they add to a sum
    np.testing.assert_allclose(logp, want[0], atol=1e-5, rtol=2e-6)
    np.testing.assert_allclose(entropy, want[1], atol=2e-5, rtol=0)
    assert relative_l2(d_x, want[2]) < 4e-3 and relative_l2(d_w, want[3]) < 4e-3


@pytest.mark.parametrize("size", ["whole tiles", "ragged"])
def test_with_a_soft_cap_they_equal_float64(size):
    args = drawn(*SIZES[size])
    logp, entropy, d_x, d_w = run(*args, backend="pallas", memory=SIZES[size][1] * 1200, softcap=6.0)
    want = float64(*args, softcap=6.0)
    np.testing.assert_allclose(logp, want[0], atol=2e-5, rtol=4e-6)
    np.testing.assert_allclose(entropy, want[1], atol=4e-5, rtol=0)
    assert relative_l2(d_x, want[2]) < 4e-3 and relative_l2(d_w, want[3]) < 4e-3


@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16"])
def test_its_logits_are_those_of_xla_to_the_bit(logits_dtype):
    """What the engine and the reference round to bfloat16 must be rounded the same way."""
    x, w, y, *_ = drawn(512, 4096, 4096)
    dtype = jnp.dtype(logits_dtype)
    stats = jax.jit(functools.partial(sm90.statistics, temperature=1.0, logits_dtype=dtype,
                                      tiles=sm90.Tiles()))(x, w, y)
    want = rounding_exact_jit(functools.partial(reference.statistics, temperature=1.0,
                                                logits_dtype=dtype))(x, w, y)
    np.testing.assert_array_equal(stats[3].sum(0), want[3])
    np.testing.assert_array_equal(stats[0].max(0), want[0])


def test_float32_is_exact():
    """By the reference: nothing here is rounded to TF32."""
    args = drawn(300, 2000, 256, jnp.float32)
    got, want = run(*args), float64(*args)
    for a, b in zip(got[:2], want[:2]):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=0)
    assert all(relative_l2(a, b) < 1e-5 for a, b in zip(got[2:], want[2:]))


@pytest.mark.parametrize("tiles", [sm90.Tiles(cluster=""), sm90.Tiles(n=128, stages=5)])
def test_every_schedule_gives_the_same(tiles):
    args = drawn(*SIZES["ragged"])
    for a, b in zip(run(*args, backend="pallas", tiles=tiles), run(*args, backend="pallas")):
        assert relative_l2(a, b) < 1e-4


def test_runs_are_equal_and_rows_that_are_not_live_are_nothing():
    x, w, y, g, h = drawn(3000, 1984, 256)
    live = jax.random.uniform(jax.random.key(1), (3000,)) < 0.3
    bad = jnp.where(live[:, None], x, jnp.nan)
    some = [run(bad, w, y, g, h, live, backend="pallas") for _ in range(2)]
    for a, b in zip(*some):
        np.testing.assert_array_equal(a, b)
    logp, entropy, d_x, d_w = (np.asarray(a).astype(np.float32) for a in some[0])
    every = run(x, w, y, jnp.where(live, g, 0), jnp.where(live, h, 0), backend="pallas")
    keep = np.asarray(live)
    assert not logp[~keep].any() and not entropy[~keep].any() and not d_x[~keep].any()
    np.testing.assert_array_equal(logp[keep], np.asarray(every[0])[keep])
    np.testing.assert_array_equal(d_x[keep], np.asarray(every[2]).astype(np.float32)[keep])
    assert relative_l2(d_w, every[3]) < 3e-3
