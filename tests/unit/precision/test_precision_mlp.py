"""The MLP with SwiGLU inside the quantisers beside the same product by product: equal forward, near backward,
fewer kernels."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.models.layers import swiglu
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.linear import linear
from jaxfp8rl.precision.mlp import fuses, swiglu_mlp
from jaxfp8rl.precision.records import EngineRounding, Precision
from jaxfp8rl.precision.weights import QuantizedWeight, WeightWithGradSlot
from pallas_kernels.numerics import relative_l2
from pallas_kernels.quantize.reference import FUSED_AMAX_FLOOR

pytestmark = pytest.mark.usefixtures("quick_compile")

D, F = 256, 384
PRECISION = Precision.uniform(1, "bfloat16", gradients="e4m3",
                              rounding=EngineRounding(fused=True, fused_quantizer=True))
KERNELS = dataclasses.replace(PRECISION, products="pallas")
MODULES = frozenset({"gate_proj", "up_proj", "down_proj"})


def apart(x, gate, up, down, p):
    """As a decoder layer has it."""
    product = lambda x, w: linear(x, w, p, True, FUSED_AMAX_FLOOR)
    return product(swiglu(product(x, gate), product(x, up), fused=True), down)


def both(mlp, p, x, weights, grad_slots, dy):
    """(y, dx, dws)"""
    run = lambda x, grad_slots: mlp(x, *map(WeightWithGradSlot, weights, grad_slots), p)
    y, pull = jax.vjp(run, x, grad_slots)
    return y, *pull(dy)


def drawn(tokens: tuple[int, ...]):
    shapes = (*tokens, D), (F, D), (F, D), (D, F), (*tokens, D)
    x, gate, up, down, dy = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16)
                             for i, s in enumerate(shapes))
    weights = [QuantizedWeight.of(w / 16) for w in (gate, up, down)]
    return x, weights, [jnp.zeros(w.codes.shape, jnp.bfloat16) for w in weights], dy


@pytest.mark.parametrize(("tokens", "gradients", "inputs"),
                         [pytest.param((256,), "e4m3", "128x128", marks=pytest.mark.slow),
                          ((2, 75), "e5m2", "1x128")])
def test_it_computes_what_the_products_do_apart(tokens, gradients, inputs):
    """The forward to the last bit. One more rounding to bfloat16 moves codes of gradients, which makes them
    no worse: both are as far from those in high precision."""
    p, args = dataclasses.replace(PRECISION, gradients=gradients, wgrad_inputs=inputs), drawn(tokens)
    run = rounding_exact_jit(both, static_argnums=(0, 1))
    (y, *ours), (want, *theirs) = run(swiglu_mlp, p, *args), run(apart, p, *args)
    _, *exact = run(apart, dataclasses.replace(p, gradients="high"), *args)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(want, np.float32))
    for got, other, best in zip(*map(jax.tree.leaves, (ours, theirs, exact))):
        assert got.shape == other.shape and got.dtype == other.dtype
        far, near = relative_l2(other, best), relative_l2(got, other)
        assert relative_l2(got, best) < 1.01 * far and near < far / 2, (got.shape, far, near)


def test_without_handles_it_is_the_forward_alone():
    x, weights, grad_slots, _ = drawn((2, 40))
    run = jax.jit(swiglu_mlp, static_argnums=4)
    trained = run(x, *map(WeightWithGradSlot, weights, grad_slots), PRECISION)
    np.testing.assert_array_equal(np.asarray(run(x, *weights, PRECISION), np.float32),
                                  np.asarray(trained, np.float32))


def test_it_is_taken_where_it_computes_what_is_asked_for():
    assert fuses(KERNELS, MODULES | {"q_proj"})
    assert not fuses(KERNELS, MODULES - {"up_proj"})
    for other in (
        {"products": "tensor_core"}, {"compute_dtype": "float32"}, {"rounding": EngineRounding(fused=True)},
        {"activations_fp8": False},
        {"gradients": "high"}, {"saved_activations": "fp8"},
    ):
        assert not fuses(dataclasses.replace(KERNELS, **other), MODULES), other


@pytest.mark.parametrize("inputs", ["128x128", pytest.param("1x128", marks=pytest.mark.slow)])
def test_kernels_and_nothing_between_them(inputs):
    """quantise, gate and up, SwiGLU, down; dy both ways, d_h, SwiGLU again along the tokens, its derivative,
    dx, x along the tokens, two gradients of weights."""
    shapes = jax.eval_shape(lambda: drawn((512,)))
    lowered = jax.jit(both, static_argnums=(0, 1)).trace(
        swiglu_mlp, dataclasses.replace(KERNELS, wgrad_inputs=inputs), *shapes
    ).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("@mosaic_gpu_v2") == 4 + 8
    assert f"tensor<512x{F}xf32>" not in text and f"tensor<512x{2 * F}xf32>" not in text
