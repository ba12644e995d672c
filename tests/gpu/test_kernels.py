"""The scaled products on a Hopper GPU: their numbers, nothing left unwritten, the same every time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.precision.jit import rounding_exact_jit
from pallas_kernels.blockwise_matmul import api as matmul
from pallas_kernels.blockwise_matmul import reference, xla
from pallas_kernels.blockwise_matmul.tiles import CANDIDATES, FEW_ROWS, FOR_WGRAD
from pallas_kernels.numerics import tile_distinct, worst_tile
from pallas_kernels.quantize import api as quantize
from pallas_kernels.quantize import reference as q

pytestmark = pytest.mark.usefixtures("hopper")

ROWS, BLOCKS, TILE = (1, 128), (128, 128), (64, 64)


def kernel(f, **options):
    return jax.jit(functools.partial(f, backend="pallas", **options))


def operands(m: int, n: int, k: int, wgrad: bool, a_dtype=q.E4M3):
    a = jax.jit(q.quantize_rows, static_argnums=1)(tile_distinct((m, k), ROWS, seed=1), a_dtype)
    b = jax.jit(q.quantize_rows if wgrad
                else q.quantize_blocks)(tile_distinct((n, k), ROWS if wgrad else BLOCKS, seed=2))
    return *a, *b


def product(wgrad: bool):
    return (matmul.wgrad, reference.wgrad) if wgrad else (matmul.blockwise_matmul, reference.blockwise_matmul)


def poison(shape, dtype) -> None:
    """Leave memory of all ones, NaN in any type, for the next result of this size to be put in."""
    ones = jnp.full(shape, -1, f"int{8 * jnp.dtype(dtype).itemsize}")
    jax.block_until_ready([jax.lax.bitcast_convert_type(ones, dtype) for _ in range(4)])


SHAPES = [(1, 4096, 4096), (64, 1536, 4096), (200, 200, 200), (200, 64, 300), (200, 20, 128)]
SHAPES += [(1000, 1032, 1100), (777, 24576, 128), (384, 128, 20000)]


@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_equals_the_reference_tile_by_tile_every_time(shape, wgrad):
    """float32: the tensor cores' 14 bits; bfloat16: its rounding on top. A wrong scale in any tile would be
    over 0.5."""
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


@pytest.mark.parametrize(("name", "wgrad"), [(n, False) for n in CANDIDATES] + [(n, True) for n in FOR_WGRAD])
def test_every_candidate_gives_the_same_bits(name, wgrad):
    """Ragged in all three sizes. The order of the sum is the same in all, so results are equal, not just
    near."""
    tiles = (FOR_WGRAD if wgrad else CANDIDATES)[name]
    args, (ours, theirs) = operands(1000, 1032, 1100, wgrad), product(wgrad)
    got = np.asarray(kernel(ours, out_dtype=jnp.float32, tiles=tiles)(*args))
    assert worst_tile(got, jax.jit(theirs)(*args), TILE) < 2e-3
    np.testing.assert_array_equal(got, kernel(ours, out_dtype=jnp.float32)(*args))


@pytest.mark.parametrize("name", FEW_ROWS)
def test_every_candidate_for_few_rows_gives_the_same_bits(name):
    run = kernel(matmul.blockwise_matmul, out_dtype=jnp.float32, tiles=FEW_ROWS[name])
    many = kernel(matmul.blockwise_matmul, out_dtype=jnp.float32, tiles=CANDIDATES["2x1x128"])
    for m, k in ((1, 1100), (5, 3000), (8, 4096), (40, 4096), (64, 600)):
        args = operands(m, 1032, k, False)
        np.testing.assert_array_equal(run(*args), many(*args))


@pytest.mark.parametrize("shape", [(64, 1536, 4096), (1000, 1032, 1100), (200, 576, 1536), (4096, 6144, 4096),
                                   (4096, 4096, 640)])
def test_the_product_equals_the_tensor_cores_through_xla_bit_for_bit(shape):
    """Which equal CUTLASS's, vLLM's (test_vllm_quantizers.py): one order of sums, promoted by fused
    multiply-adds."""
    args = operands(*shape, False)
    got = kernel(matmul.blockwise_matmul, out_dtype=jnp.float32)(*args)
    np.testing.assert_array_equal(got, rounding_exact_jit(xla.blockwise_matmul)(*args))


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
