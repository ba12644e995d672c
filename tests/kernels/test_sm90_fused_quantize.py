"""RMSNorm, SwiGLU and its backward with quantisation fused, on a CPU: simulated against the reference,
lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.models import layers
from pallas_kernels.fused_quantize import api, reference
from pallas_kernels.plgpu_compat import INTERPRET
from pallas_kernels.quantize import reference as q
from pallas_kernels.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("quick_compile")
EPS = 1e-6
BF16, F32 = jnp.bfloat16, jnp.float32


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0, dtype=BF16) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), dtype)


def gate_up(t: int, f: int) -> jax.Array:
    """With gates so negative that exp(-gate) is infinite, and groups under the floor."""
    x = np.array(normal((t, 2 * f), 4, 3.0))
    x[3, :f] = -100.0
    x[4] *= 2.0**-12
    return jnp.asarray(x)


ALL = dict(tokens=True, keep=True)
CASES = {  # arrays, the function of them
    "norm": ((normal((20, 256), 1), normal((256,), 2)),
             lambda f, x, w, **o: f.rms_norm_quantize(x, w, EPS, **o)),
    "norm of float32, all results": (
        (normal((136, 128), 1, dtype=F32), normal((128,), 2, dtype=F32)),
        lambda f, x, w, **o: f.rms_norm_quantize(x, w, EPS, **ALL, **o),
    ),
    "norm of a sum, all results": (
        (normal((136, 128), 1), normal((128,), 2), normal((136, 128), 3, 4.0)),
        lambda f, x, w, residual, **o: f.rms_norm_quantize(x, w, EPS, residual, **ALL, **o),
    ),
    "norm without epsilon, all results": (
        (normal((100, 128), 1), normal((128,), 2)),
        lambda f, x, w, **o: f.rms_norm_quantize(x, w, 0.0, **ALL, **o),
    ),
    "swiglu": ((gate_up(20, 256),), lambda f, x, **o: f.swiglu_quantize(x, **o)),
    "swiglu, all results": ((gate_up(136, 128),), lambda f, x, **o: f.swiglu_quantize(x, **ALL, **o)),
    "swiglu by tokens": ((gate_up(136, 128),),
                         lambda f, x, **o: f.swiglu_quantize(x, rows=False, tokens=True, **o)),
    "swiglu in square blocks": (
        (gate_up(136, 256),),
        lambda f, x, **o: f.swiglu_quantize(x, rows=False, tokens=True, square=True, **o),
    ),
    "its backward": ((normal((136, 256), 5), gate_up(136, 256)),
                     lambda f, d_h, x, **o: f.swiglu_grad_quantize(d_h, x, **o)),
    "its backward, of float32 to E5M2": (
        (normal((136, 128), 5, dtype=F32), gate_up(136, 128)),
        lambda f, d_h, x, **o: f.swiglu_grad_quantize(d_h, x, q.E5M2, **o),
    ),
}
FULL = "norm of a sum, all results", "swiglu, all results", "its backward"  # of each producer all it makes
QUICK = *FULL, "norm without epsilon, all results"


@pytest.mark.parametrize("name",
                         [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_simulated_producers_equal_the_reference_bit_for_bit(name):
    args, f = CASES[name]
    assert_same_bits(f(api, *args, backend="pallas", interpret=INTERPRET),
                     jax.jit(functools.partial(f, reference))(*args))


@pytest.mark.parametrize("name", [*FULL, "swiglu in square blocks"])
def test_every_producer_lowers_for_cuda_as_one_kernel(name):
    args, f = CASES[name]
    text = jax.jit(functools.partial(f, api, backend="pallas")).trace(*args).lower(
        lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1


@jax.jit
def learner(x, residual, weight, joint, d_h):
    """Its forward as it mirrors an engine that fuses the quantiser, and what differentiating that gives."""
    stream = layers.UnfusedResidual(x, residual).total
    normed = layers.rms_norm(stream, weight, EPS, BF16)
    h, pull = jax.vjp(lambda joint: layers.swiglu(*jnp.split(joint, 2, -1), fused=True), joint)
    return normed, stream.astype(BF16), q.quantize_rows(h, amax_floor=q.FUSED_AMAX_FLOOR), pull(d_h)[0]


def test_the_reference_is_what_the_learner_computes():
    x, residual, weight = normal((24, 256), 1), normal((24, 256), 3, 4.0), normal((256,), 2, dtype=F32)
    joint, d_h = gate_up(24, 256), normal((24, 256), 5, dtype=F32)

    @jax.jit
    def ours(x, residual, weight, joint, d_h):
        normed, total = reference.rms_norm_quantize(x, weight, EPS, residual, keep=True)
        return normed.kept, total, reference.swiglu_quantize(joint).rows, reference.swiglu_grad(
            d_h, joint).astype(BF16)

    args = x, residual, weight, joint, d_h
    assert_same_bits(ours(*args), learner(*args))


@pytest.mark.parametrize("name", CASES)
def test_on_a_cpu_auto_is_the_reference(name):
    args, f = CASES[name]
    auto, by_name = (str(jax.make_jaxpr(functools.partial(f, api, **how))(*args))
                     for how in ({}, {"backend": "reference"}))
    assert auto == by_name and "pallas_call" not in auto and "mosaic" not in auto


@pytest.mark.parametrize("backend", ["pallas", "reference"])
def test_bad_input_is_an_error_at_trace_time(backend):
    def struct(*shape, dtype=BF16):
        return jax.ShapeDtypeStruct(shape, dtype)

    norm = functools.partial(api.rms_norm_quantize, eps=EPS, backend=backend)
    with pytest.raises(ValueError, match=r"x \(8, 200\): expected \[tokens, a multiple of 128\]"):
        jax.eval_shape(norm, struct(8, 200), struct(200))
    with pytest.raises(ValueError,
                       match=r"weight \(8,\) of x \(8, 128\): expected one number for each of the 128 "
                             "columns"):
        jax.eval_shape(norm, struct(8, 128), struct(8))
    with pytest.raises(ValueError, match=r"residual \(8, 128\) float32: expected \(8, 128\) bfloat16"):
        jax.eval_shape(norm, struct(8, 128), struct(128), residual=struct(8, 128, dtype=jnp.float32))
    with pytest.raises(ValueError, match=r"gate_up \(8, 384\): expected \[tokens, a multiple of 256\]"):
        jax.eval_shape(functools.partial(api.swiglu_quantize, backend=backend), struct(8, 384))
    with pytest.raises(ValueError, match=r"gate_up \(8, 256\) is float32: expected bfloat16"):
        jax.eval_shape(functools.partial(api.swiglu_quantize, backend=backend),
                       struct(8, 256, dtype=jnp.float32))
    with pytest.raises(ValueError, match="neither rows nor tokens"):
        jax.eval_shape(functools.partial(api.swiglu_quantize, rows=False, backend=backend), struct(8, 256))
    grad = functools.partial(api.swiglu_grad_quantize, backend=backend)
    with pytest.raises(ValueError, match=r"d_h \(8, 256\) of gate_up \(8, 256\): expected half its width"):
        jax.eval_shape(grad, struct(8, 256), struct(8, 256))
    with pytest.raises(ValueError, match="codes of type int8: float8_e4m3fn or float8_e5m2"):
        jax.eval_shape(functools.partial(grad, dtype=jnp.int8), struct(8, 128), struct(8, 256))
