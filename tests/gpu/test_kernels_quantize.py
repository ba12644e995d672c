"""The quantisers and the fused producers on a Hopper GPU: bit by bit against the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.precision.jit import rounding_exact_jit
from pallas_kernels.fused_quantize import api as fused
from pallas_kernels.fused_quantize import reference as fused_reference
from pallas_kernels.numerics import tile_distinct
from pallas_kernels.quantize import api as quantize
from pallas_kernels.quantize import reference as q

pytestmark = pytest.mark.usefixtures("hopper")

BLOCKS = (128, 128)
OPTIONS = {
    "e4m3": {},
    "e5m2": dict(dtype=q.E5M2),
    "powers of two": dict(power_of_two=True),
    "e5m2, powers of two": dict(dtype=q.E5M2, power_of_two=True),
}


def kernel(f, **options):
    return jax.jit(functools.partial(f, backend="pallas", **options))


def bits(x) -> np.ndarray:
    """Of any floats; NaNs alike, whose signs and payloads mean nothing."""
    x = np.asarray(x)
    found = x.view(f"u{x.dtype.itemsize}").copy()
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
    """Groups of 1e-30 to 1e30, of everyday magnitudes, of subnormals, of zeros of both signs; ties;
    infinities and NaNs."""
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


@pytest.mark.parametrize("shape", [(2688, 6144), (1001, 648)])
def test_arrays_side_by_side_are_quantised_as_one(shape):
    x = hard_cases(shape, jnp.bfloat16)
    first, *beside = jnp.split(x, (shape[1] // 3 // 128 * 128, shape[1] // 2 // 128 * 128), axis=1)
    same(kernel(quantize.quantize_both, beside=beside)(first), kernel(quantize.quantize_both)(x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(2688, 4096), (1001, 576)])
def test_square_blocks_along_the_tokens_equal_the_reference_bit_for_bit(shape, dtype):
    x = jnp.asarray(tile_distinct(shape, BLOCKS)).astype(dtype)
    same(kernel(quantize.quantize_tokens, square=True)(x),
         jax.jit(functools.partial(q.quantize_tokens, square=True))(x))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(2688, 4096), (1000, 576)])
def test_weights_and_transposed_codes_equal_the_reference_bit_for_bit(shape, dtype, power_of_two):
    w = jnp.asarray(tile_distinct(shape, BLOCKS)).astype(dtype)
    codes, scale = jax.jit(functools.partial(q.quantize_blocks, power_of_two=power_of_two))(w)
    same(kernel(quantize.quantize_blocks, power_of_two=power_of_two)(w), (codes, scale))
    same(kernel(quantize.quantize_blocks, power_of_two=power_of_two, transposed=True)(w),
         (codes, scale, codes.T))


NORMAL_TIES = [(16 + j) / 16 * 2.0**e for e in (0, 7) for j in range(1, 16, 2)]  # just between two codes
TIES = np.array(NORMAL_TIES + [(2 * i + 1) * 2.0**-10 for i in range(8)])


@jax.jit
def every_scale(start) -> jax.Array:
    """2^20 groups, of the significands of amax from `start` on; in each, 2 floats to either side of scale *
    tie for every tie."""
    amax = jax.lax.bitcast_convert_type((start + jnp.arange(2**20, dtype=jnp.uint32))
                                        | jnp.uint32(0x43800000), jnp.float32)
    scale = q._divide(amax, jnp.float32(q.E4M3_MAX))
    with jax.enable_x64(True):
        near = jax.lax.convert_element_type(scale, jnp.float64)[:, None] * jnp.asarray(TIES, jnp.float64)
        near = jax.lax.convert_element_type(jax.lax.reduce_precision(near, 8, 23), jnp.float32)
    near = jax.lax.bitcast_convert_type(near, jnp.int32)[..., None] + jnp.arange(-2, 3)
    x = jnp.minimum(jax.lax.bitcast_convert_type(near, jnp.float32).reshape(2**20, -1), amax[:, None])
    return jnp.concatenate([amax[:, None], x, jnp.zeros((2**20, 127 - x.shape[1]))], 1)


def test_division_is_exact_for_every_scale_there_is():
    """All 2^23 significands of a group's largest, so of its scale, with elements where a wrong last place
    changes the code."""
    run, want = kernel(quantize.quantize_rows), jax.jit(q.quantize_rows)
    unequal = jax.jit(lambda a, b: sum((x != y).sum()
                                       for x, y in zip(*(jax.tree.map(_words, t) for t in (a, b)))))
    for start in range(0, 2**23, 2**20):
        x = every_scale(jnp.uint32(start))
        assert unequal(run(x), want(x)) == 0


def _words(x):
    return jax.lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint32)


def normal(shape: tuple[int, int], seed: int, scale: float = 1.0) -> jax.Array:
    return scale * jax.random.normal(jax.random.key(seed), shape)


def unequal(got, want) -> dict[str, float]:
    """The share of codes, scales and bfloat16 numbers whose bits differ, by name."""
    (got, _), (want, _) = (jax.tree_util.tree_flatten_with_path(t) for t in (got, want))
    assert [path for path, _ in got] == [path for path, _ in want]
    return {jax.tree_util.keystr(path): float((bits(a) != bits(b)).mean())
            for (path, a), (_, b) in zip(got, want)}


BF16, F32 = jnp.bfloat16, jnp.float32
FUSED = {  # arrays of so many tokens, the function of them
    "norm of float32": (
        lambda t: (normal((t, 4096), 1), normal((4096,), 2)),
        lambda f, x, w: f.rms_norm_quantize(x, w, 1e-6, tokens=True, keep=True),
    ),
    "norm of a sum": (
        lambda t: (normal((t, 4096), 1).astype(BF16), normal((4096,), 2),
                   normal((t, 4096), 3, 3.0).astype(BF16)),
        lambda f, x, w, residual: f.rms_norm_quantize(x, w, 1e-6, residual, tokens=True, keep=True),
    ),
    "swiglu": (
        lambda t: (normal((t, 8192), 4, 3.0).astype(BF16),),
        lambda f, gate_up: f.swiglu_quantize(gate_up, tokens=True, keep=True),
    ),
    "its backward": (
        lambda t: (normal((t, 4096), 5), normal((t, 8192), 4, 3.0).astype(BF16)),
        lambda f, d_h, gate_up: f.swiglu_grad_quantize(d_h, gate_up),
    ),
}


@pytest.mark.parametrize("tokens", [2048, 1001])
@pytest.mark.parametrize("name", FUSED)
def test_fused_producers_equal_the_learners_arithmetic(name, tokens):
    """As the learner is compiled, all roundings kept. exp may be an ulp of float32 apart: that moves a code
    where it is at a tie, and a scale by an ulp where it is the group's largest."""
    draw, f = FUSED[name]
    args = draw(tokens)
    got = jax.jit(functools.partial(f, fused))(*args)
    found = unequal(got, rounding_exact_jit(functools.partial(f, fused_reference))(*args))
    assert max(found.values()) < 1e-4, found


@pytest.mark.parametrize("name", ["norm of a sum", "swiglu"])
def test_fused_producers_equal_the_engines(name):
    """vLLM's kernels. Its division in the sigmoid is rounded, the learner's and ours is not: an ulp of some
    scales."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    import torch
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C

    draw, f = FUSED[name]
    args = tuple(a.astype(BF16) for a in draw(1024))
    ours = jax.tree.leaves(jax.jit(functools.partial(f, fused))(*args))[:2]
    codes = torch.empty((1024, 4096), dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty((32, 1024), device="cuda").T
    x, *more = (torch.from_dlpack(a) for a in args)
    if name == "swiglu":
        torch.ops._C.silu_and_mul_per_block_quant(codes, x, scale, 128, None, True)
    else:
        torch.ops._C.rms_norm_per_block_quant(codes, x, more[0], scale, 1e-6, None, more[1].clone(), 128,
                                              True)
    theirs = codes.view(torch.uint8).cpu().numpy(), scale.contiguous().cpu().numpy()
    assert (np.asarray(ours[0]).view(np.uint8) != theirs[0]).mean() < 1e-5
    assert np.isclose(ours[1], theirs[1], rtol=1e-6, atol=0).mean() > 0.999
