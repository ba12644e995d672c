"""The learner's FP8 product by the Hopper kernels and by XLA: equal forward, near backward, and what is
compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.models.layers import swiglu
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.linear import fused_linears, linear
from jaxfp8rl.precision.mlp import swiglu_mlp
from jaxfp8rl.precision.records import EngineRounding, Precision
from jaxfp8rl.precision.weights import QuantizedWeight, WeightWithGradSlot
from pallas_kernels.numerics import relative_l2, tile_distinct
from pallas_kernels.quantize.reference import FUSED_AMAX_FLOOR

pytestmark = pytest.mark.usefixtures("hopper")

WIDTHS = 1536, 640  # K, N


def precision(products: str, **options) -> Precision:
    return Precision.uniform(1, **{"compute_dtype": "bfloat16", "gradients": "e4m3", "products": products}
                             | options)


def data(tokens: tuple[int, ...], dtype=jnp.bfloat16):
    k, n = WIDTHS
    count = int(np.prod(tokens))
    x, dy = (jnp.asarray(tile_distinct((count, w), (1, 128), seed=s)).reshape(*tokens, w)
             for s, w in enumerate((k, n)))
    w = QuantizedWeight.of(jnp.asarray(tile_distinct((n, k), (128, 128), seed=2)).astype(jnp.bfloat16))
    return x.astype(dtype), w, dy.astype(jnp.bfloat16)


def both_passes(p: Precision, x, weight, dy):
    """(y, dx, dw)"""
    grad_slot = jnp.zeros(weight.codes.shape, p.compute_dtype)
    y, pull = jax.vjp(lambda x, h: linear(x, WeightWithGradSlot(weight, h), p, fp8=True), x, grad_slot)
    return y, *pull(dy)


passes = rounding_exact_jit(both_passes, static_argnums=0)


OPTIONS = {}, {"gradients": "e5m2"}, {"saved_activations": "fp8"}, {"gradients": "high"}, {
    "wgrad_inputs": "128x128"}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("tokens", [(512,), (2, 150), (3,)])
def test_the_kernels_compute_what_the_reference_does(tokens, dtype, options):
    """The forward to the last bit, as the engine's CUTLASS; the backward within the tensor cores' 14 bits and
    BF16's rounding."""
    args = data(tokens, dtype)
    ours, engine, exact = (passes(precision(name, **options), *args)
                           for name in ("pallas", "tensor_core", "float32"))
    np.testing.assert_array_equal(ours[0].astype(jnp.float32), engine[0].astype(jnp.float32))
    for got, want in zip(ours[1:], exact[1:]):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert relative_l2(got, want) < 4e-3


def all_passes(p: Precision, x, weights, dys):
    """(y of each weight, dx, dw of each)"""
    grad_slots = [jnp.zeros(w.codes.shape, p.compute_dtype) for w in weights]
    ys, pull = jax.vjp(lambda x, hs: fused_linears(x, [*map(WeightWithGradSlot, weights, hs)], p), x,
                       grad_slots)
    return ys, *pull(dys)


@pytest.mark.parametrize("options", [{}, {"wgrad_inputs": "128x128"}], ids=str)
def test_of_several_weights_the_backward_is_one_product_and_computes_what_the_reference_does(options):
    """As above; x's gradient is one sum over all columns, quantised where they lie, side by side."""
    x, w, dy = data((512,))
    weights = [QuantizedWeight(w.codes, w.scale * s) for s in (1, 2, 3)]
    run = rounding_exact_jit(all_passes, static_argnums=0)
    args = x, weights, tuple(jnp.roll(dy, s) for s in range(3))
    ours, engine, exact = (run(precision(name, **options), *args)
                           for name in ("pallas", "tensor_core", "float32"))
    for got, want in zip(ours[0], engine[0]):
        np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
    for got, want in zip(jax.tree.leaves(ours[1:]), jax.tree.leaves(exact[1:])):
        assert got.dtype == want.dtype and relative_l2(got, want) < 4e-3


def test_what_is_shared_is_quantised_once_and_no_weight_is_made_of_its_codes():
    """q, k and v read one x: one quantisation of it by rows, one by tokens; no float array of a weight's
    shape."""
    x, w, dy = data((512,))

    def qkv(x, weights, dy):
        outs = [both_passes(precision("pallas"), x, w, dy) for w in weights]
        return [o[0] for o in outs], sum(o[1] for o in outs), [o[2] for o in outs]

    weights = [w, *(QuantizedWeight(w.codes, w.scale * s) for s in (2, 3))]
    text = rounding_exact_jit(qkv).lower(x, weights, dy).compile().as_text()
    calls = [line for line in text.splitlines() if "mosaic_gpu" in line and "custom-call(" in line]
    print("\n".join(line.strip()[:200] for line in calls))
    k, n = WIDTHS
    assert f"f32[{n},{k}]" not in text
    # x by rows and by tokens, dy; of each weight y and dx. dy is one array here, so wgrad is the same for all
    # three.
    assert len(calls) == 3 + 3 * 2 + 1


def mlp_passes(mlp, p: Precision, x, weights, grad_slots, dy):
    """(y, dx, gradients of weights)"""
    y, pull = jax.vjp(lambda x, grad_slots: mlp(x, *map(WeightWithGradSlot, weights, grad_slots), p), x,
                      grad_slots)
    return y, *pull(dy)


def apart(x, gate, up, down, p: Precision):
    product = lambda x, w: linear(x, w, p, True, FUSED_AMAX_FLOOR)
    return product(swiglu(product(x, gate), product(x, up), fused=True), down)


@pytest.mark.parametrize("tokens", [(512,), (2, 75)])
def test_swiglu_inside_the_quantisers_computes_what_it_does_apart(tokens):
    """The results to the last bit; gradients as far from those in high precision as they are product by
    product."""
    d, f = 512, 1280
    shapes = (*tokens, d), (f, d), (f, d), (d, f), (*tokens, d)
    x, gate, up, down, dy = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16)
                             for i, s in enumerate(shapes))
    weights = [QuantizedWeight.of(w / 16) for w in (gate, up, down)]
    args = x, weights, [jnp.zeros(w.codes.shape, jnp.bfloat16) for w in weights], dy
    fused = {"rounding": EngineRounding(fused=True, fused_quantizer=True)}
    run = rounding_exact_jit(mlp_passes, static_argnums=(0, 1))
    y, *ours = run(swiglu_mlp, precision("pallas", **fused), *args)
    want, *theirs = run(apart, precision("tensor_core", **fused), *args)
    _, *exact = run(apart, precision("float32", **fused | {"gradients": "high"}), *args)
    print(f"{np.mean(np.asarray(y != want)):.1e} of the results differ")
    np.testing.assert_array_equal(y.astype(jnp.float32), want.astype(jnp.float32))
    for got, other, best in zip(*map(jax.tree.leaves, (ours, theirs, exact))):
        print(got.shape,
              f"{relative_l2(got, best):.4f} {relative_l2(other, best):.4f} {relative_l2(got, other):.4f}")
        assert relative_l2(got, best) < 1.01 * relative_l2(other, best)
