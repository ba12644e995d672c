"""The grouped Hopper products on the GPU: numbers, nothing left unwritten, the same every time, whatever the
group sizes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import api, reference, sm90
from pallas_kernels.numerics import tile_distinct, worst_tile
from pallas_kernels.quantize import reference as q

pytestmark = pytest.mark.usefixtures("hopper")

TILE = (64, 64)
SIZES = {
    "uneven": [300, 1, 0, 0, 577, 128, 90, 900],
    "one huge": [0, 0, 2000, 0, 0, 0, 0, 0],
    "none at all": [0] * 8,
    "rows of no expert": [64, 0, 65, 191, 192, 193, 0, 3],
}
ROWS = 2000
SHAPES = [(1600, 384), (128, 128)]  # (N, K)


def kernel(f, **options):
    return jax.jit(functools.partial(f, backend="pallas", **options))


def poison(shape, dtype) -> None:
    """Leave memory of all ones, NaN in any type, for the next result of this size to be put in."""
    ones = jnp.full(shape, -1, f"int{8 * jnp.dtype(dtype).itemsize}")
    jax.block_until_ready([jax.lax.bitcast_convert_type(ones, dtype) for _ in range(4)])


@functools.cache
def operands(name: str, n: int, k: int, wgrad: bool, dtype=q.E4M3):
    """Tile-distinct numbers, so that a scale, a block or an expert of another tile is an error over 0.5."""
    groups = jax.jit(api.plan_groups, static_argnums=1)(jnp.asarray(SIZES[name], jnp.int32), ROWS)
    block = (128, 1) if wgrad else (1, 128)
    x = api.pad_rows(jnp.asarray(tile_distinct((ROWS, k), block)), groups)
    if wgrad:
        dy = api.pad_rows(jnp.asarray(tile_distinct((ROWS, n), block, seed=1)), groups)
        return *q.quantize_tokens(dy, dtype), *q.quantize_tokens(x), groups
    w = jnp.asarray(tile_distinct((len(SIZES[name]) * n, k), (128, 128), seed=1)).reshape(-1, n, k)
    return *q.quantize_rows(x, dtype), *q.quantize_blocks(w), groups


def product(wgrad: bool):
    return (api.grouped_wgrad,
            reference.grouped_wgrad) if wgrad else (api.grouped_matmul, reference.grouped_matmul)


def flat(y) -> np.ndarray:
    return np.asarray(y).astype(np.float32).reshape(-1, y.shape[-1])


@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SIZES)
def test_it_equals_the_reference_tile_by_tile_every_time(name, shape, wgrad):
    args, (ours, theirs) = operands(name, *shape, wgrad), product(wgrad)
    want = np.asarray(jax.jit(theirs)(*args))
    for dtype, limit in ((jnp.float32, 2e-3), (jnp.bfloat16, 4e-3)):
        run, results = kernel(ours, out_dtype=dtype), []
        for _ in range(3):
            poison(want.shape, dtype)
            results.append(np.asarray(run(*args)))
        assert worst_tile(flat(results[0]), flat(want), TILE) < limit
        assert all((r.view(np.uint8) == results[0].view(np.uint8)).all() for r in results)


@pytest.mark.parametrize(
    ("wgrad", "name"), [(False, name) for name in sm90.FORWARD] + [(True, name) for name in sm90.WEIGHTS]
)
def test_every_candidate_gives_the_same_bits(wgrad, name):
    tiles = (sm90.WEIGHTS if wgrad else sm90.FORWARD)[name]
    args, (ours, theirs) = operands("uneven", 1536, 2048, wgrad), product(wgrad)
    got = np.asarray(kernel(ours, out_dtype=jnp.float32, tiles=tiles)(*args))
    assert worst_tile(flat(got), flat(jax.jit(theirs)(*args)), TILE) < 2e-3
    np.testing.assert_array_equal(got, kernel(ours, out_dtype=jnp.float32)(*args))


@pytest.mark.parametrize("wgrad", [False, True])
def test_gradients_in_e5m2(wgrad):
    args, (ours, theirs) = operands("uneven", 1536, 2048, wgrad, q.E5M2), product(wgrad)
    assert worst_tile(flat(kernel(ours, out_dtype=jnp.float32)(*args)), flat(jax.jit(theirs)(*args)),
                      TILE) < 2e-3


def test_sizes_that_change_need_no_compilation():
    run = jax.jit(lambda sizes, x, w, scale: _from_sizes(sizes, x, w, scale))
    x, (w, scale) = jnp.ones((ROWS, 256), jnp.bfloat16), q.quantize_blocks(jnp.ones((8, 128, 256)))
    for name in SIZES:
        rows = sum(SIZES[name])
        y = np.asarray(run(jnp.asarray(SIZES[name], jnp.int32), x, w, scale).astype(jnp.float32))
        assert (y[:rows] == 256).all() and (y[rows:] == 0).all()
    assert run._cache_size() == 1


def _from_sizes(sizes, x, w, scale):
    groups = api.plan_groups(sizes, ROWS)
    codes = q.quantize_rows(api.pad_rows(x, groups))
    return api.unpad_rows(api.grouped_matmul(*codes, w, scale, groups, backend="pallas"), groups)
