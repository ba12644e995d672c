"""The parts of a decoding step on a CPU: simulated against the reference, lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blockwise_matmul import api as matmul
from pallas_kernels.few_rows import api
from pallas_kernels.plgpu_compat import INTERPRET

pytestmark = pytest.mark.usefixtures("quick_compile")


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Each group of 128 in each row has its own magnitude."""
    x = np.random.default_rng(seed).standard_normal(shape)
    groups = 2.0 ** (np.arange(x.size // 128) % 23 - 11).repeat(128)
    return jnp.asarray(x * groups.reshape(shape), jnp.bfloat16)


CASES = {
    "rms_norm": lambda f, **o: f(normal(3, 1024), normal(1024, seed=2), 1e-6, **o),
    "add_norm_quantize": lambda f,
    **o: f(normal(3, 1024), normal(3, 1024, seed=1), normal(1024, seed=2), 1e-6, **o),
    "swiglu_quantize": lambda f, **o: f(normal(3, 2048).at[1].set(-100.0), **o),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_equals_its_reference(name):
    f, case = getattr(api, name), CASES[name]
    wanted = jax.tree.leaves(case(f, backend="reference"))
    made = jax.tree.leaves(case(f, backend="pallas", interpret=INTERPRET))
    for a, b in zip(made, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        assert (a == b).mean() > 0.99
        np.testing.assert_allclose(a, b, rtol=0.08, atol=1e-30)  # a step of E4M3


@pytest.mark.parametrize("name", CASES)
def test_a_row_depends_on_itself_alone(name):
    f = getattr(api, name)
    parts = 2 if name == "swiglu_quantize" else 1
    x, w = normal(3, 1024 * parts), normal(1024, seed=2)
    if name == "rms_norm":
        of = functools.partial(f, weight=w, eps=1e-6, backend="pallas", interpret=INTERPRET)
        np.testing.assert_array_equal(of(x)[1], of(x[1:2])[0])
        return
    of = lambda x: (f(x, x, w, 1e-6, backend="pallas", interpret=INTERPRET)[1] if parts == 1
                    else f(x, backend="pallas", interpret=INTERPRET))
    (all_codes, all_scales), (codes, scales) = of(x), of(x[1:2])
    np.testing.assert_array_equal(all_codes[1].view(jnp.uint8), codes[0].view(jnp.uint8))
    np.testing.assert_array_equal(all_scales[:, 1], scales[:, 0])


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_lowers_for_cuda(name):
    f = getattr(api, name)
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    arguments = {"add_norm_quantize": (like(64, 2048), like(64, 2048), like(2048)),
                 "rms_norm": (like(64, 2048), like(2048)),
                 "swiglu_quantize": (like(64, 2 * 6144),)}[name]
    eps = () if name == "swiglu_quantize" else (1e-6,)
    traced = jax.jit(lambda *a: f(*a, *eps, backend="pallas")).trace(*arguments)
    assert "mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_a_kernel_does_not_take_is_said():
    with pytest.raises(ValueError,
                       match=r"gate_up is float32\[2, 1024\]: expected bfloat16, a multiple of 1024 wide"):
        api.swiglu_quantize(jnp.ones((2, 1024)))
    with pytest.raises(ValueError, match=r"x \[2, 512\], y \[3, 512\]"):
        api.add_norm_quantize(normal(2, 512), normal(3, 512), normal(512), 1e-6)


def product_operands(rows: int, width: int, *outs: int):
    """Codes and scales, of which no two neighbours are alike."""
    rng = np.random.default_rng(0)
    codes = lambda n: jnp.asarray(64 * rng.normal(size=(n, width)), jnp.float8_e4m3fn)
    scales = lambda *shape: jnp.asarray(2.0 ** (3 * (np.add.outer(*map(np.arange, shape)) % 13 - 6)),
                                        jnp.float32)
    return codes(rows), scales(width // 128, rows), tuple(map(codes, outs)), scales(sum(outs) // 128,
                                                                                    width // 128)


def test_weights_that_lie_apart_are_one_product():
    x, x_scale, weights, w_scale = product_operands(16, 640, 256, 128, 128)
    product = lambda **o: matmul.matmul_beside(x, x_scale, weights, w_scale, out_dtype=jnp.float32, **o)
    made, wanted = product(backend="pallas", interpret=INTERPRET), product(backend="reference")
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5 * float(jnp.abs(wanted).max()))
    starts = np.cumsum([0, *map(len, weights)]) // 128
    each = [matmul.blockwise_matmul(x, x_scale.T, w, w_scale[a:b], out_dtype=jnp.float32, backend="pallas",
                                    interpret=INTERPRET) for w, a, b in zip(weights, starts, starts[1:])]
    np.testing.assert_array_equal(made, jnp.concatenate(each, 1))


def test_weights_that_lie_apart_lower_for_cuda():
    like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    e4m3 = lambda *shape: like(jnp.float8_e4m3fn, *shape)
    traced = jax.jit(lambda *a: matmul.matmul_beside(*a, backend="pallas")).trace(
        e4m3(64, 2048), like(jnp.float32, 16, 64), (e4m3(2048, 2048), e4m3(1024, 2048), e4m3(1024, 2048)),
        like(jnp.float32, 32, 16))
    assert "mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()


def rotation(dtype, norms: bool = True):
    """qkv of 3 rows, 8 heads over 4, the second of which writes nothing; the slots lie apart."""
    qkv, rng = normal(3, 16 * 128).reshape(3, 16, 128), np.random.default_rng(3)
    cos, sin = (jnp.asarray(f(rng.uniform(0, 6, (3, 64))), jnp.float32) for f in (np.cos, np.sin))
    caches = (jnp.asarray(rng.standard_normal((9, 4, 128)), dtype) for _ in range(2))
    weights = (normal(128, seed=4), normal(128, seed=5)) if norms else ()
    return qkv, cos, sin, jnp.asarray([7, -1, 2], jnp.int32), *caches, *weights


@pytest.mark.parametrize("dtype, norms", [(jnp.float8_e4m3fn, True), (jnp.bfloat16, False)])
def test_heads_are_rotated_and_written_where_they_lie(dtype, norms):
    by = lambda **o: jax.jit(lambda *a: api.rotate_and_write(*a, eps=1e-6, **o))(*rotation(dtype, norms))
    made, wanted = by(backend="pallas", interpret=INTERPRET), by(backend="reference")
    for a, b in zip(made, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        assert (a == b).mean() > 0.98
        np.testing.assert_allclose(a, b, rtol=0.08, atol=1e-3)
    np.testing.assert_array_equal(*(np.asarray(x[1].astype(jnp.float32))[[0, 1, 3, 4, 5, 6, 8]]
                                    for x in (made, rotation(dtype, norms)[3:5])))


@pytest.mark.parametrize("dtype, norms", [(jnp.float8_e4m3fn, True), (jnp.bfloat16, False)])
def test_rotated_apart_they_are_the_same(dtype, norms):
    qkv, cos, sin, at, k, v, *weights = rotation(dtype, norms)
    how = dict(eps=1e-6, backend="pallas", interpret=INTERPRET)
    q, *caches = jax.jit(functools.partial(api.rotate_and_write, **how))(qkv, cos, sin, at, k, v, *weights)
    apart = jax.jit(lambda *a: api.rotate(*a[:3], k.shape[1], dtype, *a[3:], **how))(qkv, cos, sin, *weights)
    live = np.flatnonzero(at >= 0)
    for a, b in zip((q, *(c[np.asarray(at)[live]] for c in caches)),
                    (apart[0], *(x[live] for x in apart[1:]))):
        np.testing.assert_array_equal(*(np.asarray(x.astype(jnp.float32)) for x in (a, b)))


def test_rotation_lowers_for_cuda_and_copies_no_cache():
    like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    bf16, table, cache = jnp.bfloat16, like(jnp.float32, 64, 64), like(jnp.float8_e4m3fn, 4096, 8, 128)
    traced = jax.jit(lambda *a: api.rotate_and_write(*a, eps=1e-6, backend="pallas"),
                     donate_argnums=(4, 5)).trace(
        like(bf16, 64, 32, 128), table, table, like(jnp.int32, 64), cache, cache, like(bf16, 128),
        like(bf16, 128))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1 and text.count("#stablehlo.output_operand_alias<") >= 2
