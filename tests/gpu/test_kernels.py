"""The Hopper kernels on the GPU: bits of the quantisers, numbers of the products, nothing left unwritten, the same every time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.exact import exact_jit
from pallas_kernels.blockwise_matmul import api as matmul
from pallas_kernels.blockwise_matmul import reference, sm90, xla
from pallas_kernels.numerics import tile_distinct, worst_tile
from pallas_kernels.plgpu_compat import HOPPER
from pallas_kernels.quantize import api as quantize
from pallas_kernels.quantize import reference as q

ROWS, BLOCKS, TILE = (1, 128), (128, 128), (64, 64)
OPTIONS = {
    "e4m3": {},
    "e5m2": dict(dtype=q.E5M2),
    "powers of two": dict(power_of_two=True),
    "e5m2, powers of two": dict(dtype=q.E5M2, power_of_two=True),
}


@pytest.fixture(autouse=True)
def hopper():
    if str(getattr(jax.devices()[0], "compute_capability", "")) != HOPPER:
        pytest.skip("needs a Hopper GPU")


def kernel(f, **options):
    return jax.jit(functools.partial(f, backend="pallas", **options))


def bits(x) -> np.ndarray:
    """Of codes or scales; NaNs alike, whose signs and payloads mean nothing."""
    x = np.asarray(x)
    found = x.view(np.uint8 if x.dtype.itemsize == 1 else np.uint32).copy()
    found[np.isnan(x.astype(np.float32))] = 0x7F
    return found


def same(got, want) -> None:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


@functools.cache
def hard_cases(shape: tuple[int, int], dtype) -> jax.Array:
    """Groups of 1e-30 to 1e30, of everyday magnitudes, of subnormals, of zeros of both signs; ties; infinities and NaNs."""
    rng = np.random.default_rng(0)
    groups = 10.0 ** rng.uniform(-30, 30, (shape[0], -(-shape[1] // 128)))
    groups[: shape[0] // 2] = np.exp2(rng.uniform(-12, 12, groups[: shape[0] // 2].shape))
    groups[10:20], groups[20:30, ::2] = 1e-39, 0
    x = rng.normal(size=shape) * np.repeat(groups, 128, 1)[:, : shape[1]]
    codes = np.arange(127, dtype=np.uint8).view(q.E4M3).astype(np.float32)
    ties = np.append(codes[:-1] + codes[1:], [896.0, -896.0])[: shape[1]]
    x[30:100, : ties.size] = ties * np.exp2(np.arange(-35, 35))[:, None]
    x[7, 0], x[8, 1], x[9, 2] = np.nan, np.inf, -np.inf
    return jnp.asarray(x.astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(2688, 4096), (1001, 576), (130, 72)])
def test_quantisers_equal_the_reference_bit_for_bit(shape, dtype, name):
    x, options = hard_cases(shape, dtype), OPTIONS[name]
    rows = jax.jit(functools.partial(q.quantize_rows, **options))(x)
    tokens = jax.jit(functools.partial(q.quantize_tokens, **options))(x)
    same(kernel(quantize.quantize_rows, **options)(x), rows)
    same(kernel(quantize.quantize_tokens, **options)(x), tokens)
    same(kernel(quantize.quantize_both, **options)(x), (rows, tokens))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(2688, 4096), (1000, 576)])
def test_weights_and_transposed_codes_equal_the_reference_bit_for_bit(shape, dtype, power_of_two):
    w = jnp.asarray(tile_distinct(shape, BLOCKS)).astype(dtype)
    codes, scale = jax.jit(functools.partial(q.quantize_blocks, power_of_two=power_of_two))(w)
    same(kernel(quantize.quantize_blocks, power_of_two=power_of_two)(w), (codes, scale))
    same(kernel(quantize.quantize_blocks, power_of_two=power_of_two, transposed=True)(w), (codes, scale, codes.T))


NORMAL_TIES = [(16 + j) / 16 * 2.0**e for e in (0, 7) for j in range(1, 16, 2)]  # just between two codes
TIES = np.array(NORMAL_TIES + [(2 * i + 1) * 2.0**-10 for i in range(8)])


@jax.jit
def every_scale(start) -> jax.Array:
    """2^20 groups, of the significands of amax from `start` on; in each, 2 floats to either side of scale * tie for every tie."""
    amax = jax.lax.bitcast_convert_type((start + jnp.arange(2**20, dtype=jnp.uint32)) | jnp.uint32(0x43800000), jnp.float32)
    scale = q._divide(amax, jnp.float32(q.E4M3_MAX))
    with jax.enable_x64(True):
        near = jax.lax.convert_element_type(scale, jnp.float64)[:, None] * jnp.asarray(TIES, jnp.float64)
        near = jax.lax.convert_element_type(jax.lax.reduce_precision(near, 8, 23), jnp.float32)
    near = jax.lax.bitcast_convert_type(near, jnp.int32)[..., None] + jnp.arange(-2, 3)
    x = jnp.minimum(jax.lax.bitcast_convert_type(near, jnp.float32).reshape(2**20, -1), amax[:, None])
    return jnp.concatenate([amax[:, None], x, jnp.zeros((2**20, 127 - x.shape[1]))], 1)


def test_division_is_exact_for_every_scale_there_is():
    """All 2^23 significands of a group's largest, so of its scale, with elements where a wrong last place changes the code."""
    run, want = kernel(quantize.quantize_rows), jax.jit(q.quantize_rows)
    unequal = jax.jit(lambda a, b: sum((x != y).sum() for x, y in zip(*(jax.tree.map(_words, t) for t in (a, b)))))
    for start in range(0, 2**23, 2**20):
        x = every_scale(jnp.uint32(start))
        assert unequal(run(x), want(x)) == 0


def _words(x):
    return jax.lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint32)


def operands(m: int, n: int, k: int, wgrad: bool, a_dtype=q.E4M3):
    a = jax.jit(q.quantize_rows, static_argnums=1)(tile_distinct((m, k), ROWS, seed=1), a_dtype)
    b = jax.jit(q.quantize_rows if wgrad else q.quantize_blocks)(tile_distinct((n, k), ROWS if wgrad else BLOCKS, seed=2))
    return *a, *b


def product(wgrad: bool):
    return (matmul.wgrad, reference.wgrad) if wgrad else (matmul.blockwise_matmul, reference.blockwise_matmul)


def poison(shape, dtype) -> None:
    """Leave memory of all ones, NaN in any type, for the next result of this size to be put in."""
    ones = jnp.full(shape, -1, f"int{8 * jnp.dtype(dtype).itemsize}")
    jax.block_until_ready([jax.lax.bitcast_convert_type(ones, dtype) for _ in range(4)])


SHAPES = [(1, 4096, 4096), (64, 1536, 4096), (200, 200, 200), (1000, 1032, 1100), (777, 24576, 128), (384, 128, 20000)]


@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_equals_the_reference_tile_by_tile_every_time(shape, wgrad):
    """float32: the tensor cores' 14 bits; bfloat16: its rounding on top. A wrong scale in any tile would be over 0.5."""
    args, (ours, theirs) = operands(*shape, wgrad), product(wgrad)
    want = np.asarray(jax.jit(theirs)(*args))
    for dtype, limit in ((jnp.float32, 2e-3), (jnp.bfloat16, 4e-3)):
        run = kernel(ours, out_dtype=dtype)
        results = []
        for _ in range(3):
            poison(shape[:2], dtype)
            results.append(np.asarray(run(*args)))
        assert worst_tile(results[0].astype(np.float32), want, TILE) < limit
        assert all((r.view(np.uint8) == results[0].view(np.uint8)).all() for r in results)


@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("name", sm90.CANDIDATES)
def test_every_candidate_gives_the_same_bits(name, wgrad):
    """Ragged in all three sizes. The order of the sum is the same in all, so results are equal, not just near."""
    tiles = sm90.CANDIDATES[name]
    args, (ours, theirs) = operands(1000, 1032, 1100, wgrad), product(wgrad)
    got = np.asarray(kernel(ours, out_dtype=jnp.float32, tiles=tiles)(*args))
    assert worst_tile(got, jax.jit(theirs)(*args), TILE) < 2e-3
    np.testing.assert_array_equal(got, kernel(ours, out_dtype=jnp.float32)(*args))


@pytest.mark.parametrize("shape", [(64, 1536, 4096), (1000, 1032, 1100), (200, 576, 1536), (4096, 6144, 4096)])
def test_the_product_equals_the_tensor_cores_through_xla_bit_for_bit(shape):
    """Which equal CUTLASS's, vLLM's (test_vllm_quantizers.py): one order of sums, promoted by fused multiply-adds."""
    args = operands(*shape, False)
    got = kernel(matmul.blockwise_matmul, out_dtype=jnp.float32)(*args)
    np.testing.assert_array_equal(got, exact_jit(xla.blockwise_matmul)(*args))


@pytest.mark.parametrize("wgrad", [False, True])
def test_gradients_in_e5m2(wgrad):
    args, (ours, theirs) = operands(1000, 1032, 1100, wgrad, a_dtype=q.E5M2), product(wgrad)
    assert worst_tile(kernel(ours, out_dtype=jnp.float32)(*args), jax.jit(theirs)(*args), TILE) < 2e-3


def test_auto_is_the_kernel_here():
    args = operands(256, 256, 256, False)
    assert "mosaic_gpu" in jax.jit(matmul.blockwise_matmul).lower(*args).as_text()
    assert "mosaic_gpu" in jax.jit(quantize.quantize_rows).lower(jnp.ones((128, 128), jnp.bfloat16)).as_text()


def test_in_one_jit_the_scales_are_not_transposed():
    """Quantise and multiply: two kernels, and no transpose or copy of a scale between them."""

    def linear(x, codes, scale):
        return matmul.blockwise_matmul(*quantize.quantize_rows(x), codes, scale)

    x, (codes, scale) = jnp.ones((1024, 512), jnp.bfloat16), q.quantize_blocks(jnp.ones((256, 512)))
    text = jax.jit(linear).lower(x, codes, scale).compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 2 and "transpose(" not in text
