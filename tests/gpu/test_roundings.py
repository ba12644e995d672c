"""Roundings that XLA for GPUs would drop unless told otherwise: each test fails when one is lost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxfp8rl.models.layers import round_e4m3
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.linear import round_to
from jaxfp8rl.precision.weights import QuantizedWeight
from pallas_kernels.quantize import reference as q


@pytest.fixture
def x() -> np.ndarray:
    """[256, 384], every 128x128 block of its own magnitude."""
    rng = np.random.default_rng(0)
    blocks = np.kron(np.exp2(rng.uniform(-12, 12, (2, 3))), np.ones((128, 128)))
    return (rng.normal(size=(256, 384)) * blocks).astype(np.float32)


@pytest.mark.parametrize("jit", [jax.jit, rounding_exact_jit], ids=["jit", "rounding_exact_jit"])
def test_kv_rounding_survives_jit(jit, x):
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(jit(round_e4m3)(x), want)


@pytest.mark.parametrize("jit", [jax.jit, rounding_exact_jit], ids=["jit", "rounding_exact_jit"])
def test_quantising_and_reading_back_survives_jit(jit, x):
    codes, scale = q.quantize_blocks(x)
    np.testing.assert_array_equal(jit(lambda x: q.dequantize_blocks(*q.quantize_blocks(x)))(x),
                                  q.dequantize_blocks(codes, scale))
    codes, scale = q.quantize_rows(x)
    np.testing.assert_array_equal(jit(lambda x: q.dequantize_rows(*q.quantize_rows(x)))(x),
                                  q.dequantize_rows(codes, scale))


def test_round_to_bfloat16_survives_jit(x):
    want = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: round_to(x, "bfloat16") * 1.0)(x), want)


def test_exact_jit_keeps_bfloat16_between_operations(x):
    """x + x^2 in bfloat16: the square is rounded before the sum."""
    b = x.astype(ml_dtypes.bfloat16)
    square = (b.astype(np.float32) ** 2).astype(ml_dtypes.bfloat16)
    want = (b.astype(np.float32) + square.astype(np.float32)).astype(ml_dtypes.bfloat16)
    got = rounding_exact_jit(lambda b: b + b * b)(jnp.asarray(b))
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want.view(np.uint16))


def test_codes_and_scales_are_those_of_exact_divisions(x):
    """XLA's float32 division on a GPU is not correctly rounded; the quantiser's goes through float64."""
    codes, scale = jax.jit(q.quantize_blocks)(x)
    amax = np.abs(x).reshape(2, 128, 3, 128).max((1, 3))
    np.testing.assert_array_equal(np.asarray(scale), np.maximum(amax, np.float32(1e-10)) / np.float32(448))
    exact = np.clip(x / np.kron(np.asarray(scale), np.ones((128, 128), np.float32)), -448, 448)
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8),
                                  exact.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_published_bytes_are_the_forwards(x):
    """Quantising inside another program gives the same codes and scales: what is published is what the
    learner computes with."""
    alone, inside = jax.jit(QuantizedWeight.of)(x), rounding_exact_jit(lambda x: QuantizedWeight.of(x * 1.0))(
        x)
    for a, b in zip(alone, inside):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
