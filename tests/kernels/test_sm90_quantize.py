"""The Hopper quantisers on a CPU: simulated, bit by bit against the reference; and lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.numerics import tile_distinct
from pallas_kernels.plgpu_compat import INTERPRET
from pallas_kernels.quantize import api, sm90
from pallas_kernels.quantize import reference as q

pytestmark = pytest.mark.usefixtures("quick_compile")
quantize_rows = jax.jit(q.quantize_rows, static_argnames=("dtype", "power_of_two", "amax_floor"))
SIMULATED = functools.partial(dict, backend="pallas", interpret=INTERPRET)


def same(got, want) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


def bits(x) -> np.ndarray:
    """But for the sign of a NaN, which no processor promises."""
    x = np.asarray(x)
    return np.where(np.isnan(x), np.abs(x), x).view(np.uint8)


def hard(shape: tuple[int, int], dtype) -> jax.Array:
    """Groups of magnitudes 8^-6 to 8^6, zeros of both signs, elements at the ties between codes,
    infinities."""
    x = tile_distinct(shape, (1, 128))
    x[1], x[2] = 0.0, -0.0
    codes = np.arange(127, dtype=np.uint8).view(q.E4M3).astype(np.float32)
    x[3, :127] = np.append((codes[:-1] + codes[1:]) / 2, 448)[: x[3, :127].size]
    x[4, 0], x[5, 100] = np.inf, -np.inf
    return jnp.asarray(x).astype(dtype)


def test_simulated_both_directions_equal_the_reference_bit_for_bit():
    x = hard((136, 264), jnp.bfloat16)
    rows, tokens = api.quantize_both(x, **SIMULATED())
    same(rows, quantize_rows(x))
    same(tokens, quantize_rows(x.T))


def test_simulated_arrays_side_by_side_equal_the_reference_of_one():
    x, parts = hard((136, 520), jnp.bfloat16), ((0, 256), (256, 384), (384, 520))
    first, *beside = (x[:, start:end] for start, end in parts)
    for options in (SIMULATED(), {"backend": "reference"}):
        rows, tokens = api.quantize_both(first, beside=beside, **options)
        same(rows, quantize_rows(x))
        same(tokens, quantize_rows(x.T))


@pytest.mark.parametrize("shapes", [((8, 128), (9, 128)), ((8, 100), (8, 128)), ((8, 128), (2, 8, 64))])
def test_what_cannot_lie_side_by_side_is_refused(shapes):
    x, *beside = (jnp.ones(shape, jnp.bfloat16) for shape in shapes)
    with pytest.raises(ValueError, match="side by side|has 3 axes"):
        api.quantize_both(x, beside=beside)
    with pytest.raises(ValueError, match="side by side"):
        api.quantize_both(jnp.ones((8, 128)), beside=[jnp.ones((8, 128), jnp.bfloat16)])


def test_simulated_rows_of_any_rank_in_e5m2_by_powers_of_two_with_the_fused_floor():
    x = hard((6, 136), jnp.float32).reshape(2, 3, 136) * 2.0**-16
    options = dict(dtype=q.E5M2, power_of_two=True, amax_floor=q.FUSED_AMAX_FLOOR)
    same(api.quantize_rows(x, **options, **SIMULATED()), quantize_rows(x, **options))


def test_simulated_weights_and_their_transposed_codes_equal_the_reference():
    w = jnp.asarray(tile_distinct((200, 264), (128, 128))).astype(jnp.bfloat16)
    codes, scale = jax.jit(q.quantize_blocks)(w)
    same(api.quantize_blocks(w, transposed=True, **SIMULATED()), (codes, scale, codes.T))


def test_simulated_square_blocks_along_the_tokens_equal_the_reference():
    x = jnp.asarray(tile_distinct((200, 264), (128, 128))).astype(jnp.bfloat16)
    want = jax.jit(q.quantize_blocks)(x.T)
    same(api.quantize_tokens(x, square=True, **SIMULATED()), want)
    same(api.quantize_tokens(x, square=True, backend="reference"), want)
    with pytest.raises(ValueError, match="codes of type float8_e5m2 in 128x128 blocks"):
        api.quantize_tokens(x, q.E5M2, square=True)


def test_a_window_is_quantised_where_it_is():
    w = jnp.asarray(tile_distinct((512, 256), (128, 128))).astype(jnp.bfloat16)
    want = jax.jit(q.quantize_blocks)(w[128:384])
    same(api.quantize_blocks(w, first=jnp.int32(1), rows=256, **SIMULATED()), want)
    same(api.quantize_blocks(w, first=jnp.int32(1), rows=256, backend="reference"), want)


def test_division_by_a_known_divisor_is_exact():
    """Quotients next to the middle between two floats, where one wrong rounding on the way shows.

    The GPU's own reciprocal and every scale are tests/gpu/test_kernels.py's.
    """
    rng = np.random.default_rng(0)
    y = (rng.integers(0, 2**23, 2**16) | 0x3F800000).astype(np.uint32).view(np.float32)
    middles = (rng.integers(2**23, 2**24, y.size) * 2 + 1) / 2.0**24
    x = (middles * y).astype(np.float32)
    fused = sm90.fused_multiply_add(INTERPRET)
    r = jax.jit(lambda y: sm90._reciprocal(y, fused))(y)
    np.testing.assert_array_equal(r, (1 / y.astype(np.float64)).astype(np.float32))
    got = jax.jit(lambda x, y, r: sm90._divide(x, y, r, fused))(x, y, r)
    np.testing.assert_array_equal(got, (x.astype(np.float64) / y.astype(np.float64)).astype(np.float32))


LOWERED = {
    "rows": (api.quantize_rows, {}),
    "rows, E5M2, powers of two": (api.quantize_rows, dict(dtype=q.E5M2, power_of_two=True)),
    "tokens": (api.quantize_tokens, {}),
    "tokens, square": (api.quantize_tokens, dict(square=True)),
    "both": (api.quantize_both, {}),
    "both, side by side": (
        lambda x, **options: api.quantize_both(x, beside=(x[:, :1024], x[:, 1024:1280]), **options), {}),
    "blocks": (api.quantize_blocks, {}),
    "blocks, transposed": (api.quantize_blocks, dict(transposed=True)),
    "blocks of a window": (
        lambda w, **options: api.quantize_blocks(w, first=jnp.int32(3), rows=1024, **options), {}),
}


@pytest.mark.parametrize("name", LOWERED)
def test_every_variant_lowers_for_cuda(name):
    lowers(name, (4096, 4096), jnp.bfloat16)


def test_odd_shapes_and_float32_lower_for_cuda():
    lowers("both", (1001, 576), jnp.float32)
    lowers("blocks, transposed", (1001, 576), jnp.float32)


def lowers(name: str, shape: tuple[int, int], dtype) -> None:
    f, options = LOWERED[name]
    lowered = jax.jit(functools.partial(f, backend="pallas",
                                        **options)).trace(jax.ShapeDtypeStruct(shape, dtype))
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1
    assert ("stablehlo.pad" in text) == (shape != (4096, 4096))


@pytest.mark.parametrize("f",
                         [api.quantize_rows, api.quantize_tokens, api.quantize_both, api.quantize_blocks])
def test_on_a_cpu_auto_is_the_reference(f):
    x = jnp.asarray(tile_distinct((5, 200), (1, 128))).astype(jnp.bfloat16)
    same(jax.tree.leaves(f(x)), jax.tree.leaves(f(x, backend="reference")))
    with pytest.raises(ValueError, match=r"x \(0, 200\) is empty"):
        f(x[:0])


@pytest.mark.parametrize("backend", ["pallas", "reference"])
def test_bad_input_is_an_error_at_trace_time(backend):
    struct = jax.ShapeDtypeStruct
    half, vector, fine = struct((8, 128),
                                jnp.float16), struct((128,), jnp.bfloat16), struct((8, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"x \(8, 128\) is float16: bfloat16 or float32"):
        jax.eval_shape(functools.partial(api.quantize_rows, backend=backend), half)
    with pytest.raises(ValueError, match=r"x \(128,\) has 1 axes, expected 2"):
        jax.eval_shape(functools.partial(api.quantize_tokens, backend=backend), vector)
    with pytest.raises(ValueError, match="codes of type int8: float8_e4m3fn or float8_e5m2"):
        jax.eval_shape(functools.partial(api.quantize_rows, dtype=jnp.int8, backend=backend), fine)
