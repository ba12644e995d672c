"""NVFP4, MXFP4 and INT4: codes and scales against numpy and ml_dtypes, and laws of what they lose."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import four_bits, testing
from pallas_kernels.numerics import relative_l2

pytestmark = pytest.mark.usefixtures("quick_compile")

E2M1, E4M3, BF16 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
SHAPE = (3, 128)  # one: each is compiled
forms = pytest.mark.parametrize("form", four_bits.GROUPS)
QUANTIZE = jax.jit(four_bits.quantize, static_argnums=1)
DECODE, VALUES = jax.jit(four_bits.decode), jax.jit(four_bits.values)


def wild(seed: int) -> np.ndarray:
    """Groups of 16 with magnitudes over 12 octaves, some of zeros, some numbers far below their group's."""
    rng = np.random.default_rng(seed)
    groups = 2.0 ** rng.uniform(-12, 0, (SHAPE[0], SHAPE[1] // 16)) * (rng.random((SHAPE[0], 1)) > 0.1)
    values = np.kron(groups, np.ones(16)) * rng.normal(size=SHAPE)
    return (values * 2.0 ** rng.integers(-40, 41)).astype(np.float32)


def oracle(w: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes [N, K], scales, values [N, K]), by numpy in float64 and the casts of ml_dtypes."""
    groups = w.astype(np.float64).reshape(len(w), -1, four_bits.GROUPS[form])
    amax = np.abs(groups).max(-1)
    if form == "nvfp4":
        divisor = 2.0 ** np.floor(np.log2(2688 / max(amax.max(), 2.0**-100)))
        scale = np.maximum((amax / 6).astype(np.float32) * divisor, 2.0**-6).astype(E4M3)
        whole = scale.astype(np.float64)[..., None] / divisor
    elif form == "mxfp4":
        mantissa, exponent = np.frexp(np.where(amax > 0, amax, 2.0**-140))
        scale = np.clip(exponent - 1 - 2 + (mantissa >= 0.875) + 127, 2, 252).astype(np.uint8)
        whole = 2.0 ** (scale.astype(np.float64)[..., None] - 127)
    else:
        scale = np.maximum((amax / 7.5).astype(np.float32), 2.0**-100).astype(BF16)
        whole = scale.astype(np.float64)[..., None]
        codes = np.clip(np.rint(groups / whole), -8, 7)
        return (codes + 8).astype(np.uint8).reshape(w.shape), scale, (codes
                                                                      * whole).astype(BF16).reshape(w.shape)
    codes = np.clip(groups / whole, -6, 6).astype(np.float32).astype(E2M1)
    return codes.view(np.uint8).reshape(w.shape), scale, (codes.astype(np.float64) * whole).reshape(w.shape)


@forms
@given(testing.seeds())
def test_codes_scales_and_values_are_the_oracles(form, seed):
    w = wild(seed)
    got, (codes, scale, values) = QUANTIZE(w, form), oracle(w, form)
    assert got.format == form and got.shape == SHAPE
    np.testing.assert_array_equal(got.scale, scale)
    np.testing.assert_array_equal(four_bits.unpack(got.packed), codes)
    np.testing.assert_array_equal(np.asarray(VALUES(got), np.float64), values.astype(np.float64))


@forms
@given(testing.seeds())
def test_what_is_lost_is_at_most_half_a_step_or_the_end_of_the_codes(form, seed):
    w = wild(seed)
    packed = QUANTIZE(w, form)
    scale = np.asarray(packed.scale).astype(np.float64)
    if form == "nvfp4":
        scale = scale / float(packed.global_scale)
    elif form == "mxfp4":
        scale = 2.0 ** (scale - 127)
    bound = np.repeat(scale, four_bits.GROUPS[form], -1) * (0.57 if form == "int4" else 1)
    assert (np.abs(np.asarray(VALUES(packed), np.float64) - w) <= bound).all()


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
@given(testing.seeds())
def test_decoded_numbers_quantise_to_the_codes_that_they_came_from(form, seed):
    first = QUANTIZE(wild(seed), form)
    args = () if first.global_scale is None else (first.global_scale,)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(four_bits.quantize, static_argnums=1)(
        VALUES(first), form, *args), first)


@given(testing.seeds())
def test_any_bytes_decode_to_exact_products(seed):
    """Also codes, scales and a divisor that `quantize` does not make."""
    rng = np.random.default_rng(seed)
    packed = jnp.asarray(rng.integers(0, 256, (2, 32), np.uint8))
    np.testing.assert_array_equal(four_bits.pack(four_bits.unpack(packed)), packed)
    codes = np.asarray(four_bits.unpack(packed)).astype(np.float64)
    e2m1 = np.asarray(four_bits.unpack(packed)).view(E2M1).astype(np.float64)
    each = lambda scale, group: np.repeat(np.asarray(scale).astype(np.float64), group, -1)
    e4m3 = rng.integers(0, 127, (2, 4), np.uint8).view(E4M3)
    divisor = jnp.float32(rng.uniform(1, 1e4))
    nvfp4 = four_bits.FourBits(packed, jnp.asarray(e4m3), divisor)
    np.testing.assert_array_equal(np.asarray(DECODE(nvfp4), np.float64), e2m1 * each(e4m3, 16))
    np.testing.assert_array_equal(VALUES(nvfp4),
                                  (e2m1 * each(e4m3, 16)).astype(np.float32) / np.float32(divisor))
    exponents = rng.integers(2, 250, (2, 2), np.uint8)
    np.testing.assert_array_equal(np.asarray(DECODE(four_bits.FourBits(packed, jnp.asarray(exponents))),
                                             np.float64),
                                  e2m1 * 2.0 ** (each(exponents, 32) - 127))
    scale = rng.uniform(1e-3, 1, (2, 2)).astype(BF16)
    np.testing.assert_array_equal(DECODE(four_bits.FourBits(packed, jnp.asarray(scale))),
                                  ((codes - 8) * each(scale, 32)).astype(BF16))


@given(st.lists(st.floats(-8, 8, width=32), min_size=16, max_size=16))
def test_e2m1_rounds_to_the_nearest(xs):
    x = np.array([*xs, *np.arange(-7, 7.25, 0.25)], np.float32)  # every number and every tie among them
    codes = np.asarray(four_bits.e2m1_codes(jnp.asarray(x)))
    np.testing.assert_array_equal(codes, np.clip(x, -6, 6).astype(E2M1).view(np.uint8))
    np.testing.assert_array_equal(four_bits.e2m1_values(codes),
                                  np.clip(x, -6, 6).astype(E2M1).astype(np.float32))


def test_e4m3_rounds_and_saturates():
    x = np.array([0, 1, 17, 447, 500, 1e9, -1e9, 2.0**-10, 3 * 2.0**-11], np.float32)
    np.testing.assert_array_equal(four_bits.e4m3(x), np.clip(x, -448, 448).astype(E4M3))


@pytest.mark.parametrize(("form", "error"), [("nvfp4", 0.095), ("mxfp4", 0.112), ("int4", 0.095)])
def test_errors_of_gaussian_weights(form, error):
    w = np.random.default_rng(0).normal(0, 0.02, (256, 1024)).astype(np.float32)
    assert relative_l2(VALUES(QUANTIZE(w, form)), w) == pytest.approx(error, abs=0.001)


def test_parts_of_a_fused_product_share_a_power_of_two():
    q_, k, v = (np.random.default_rng(i).normal(0, 0.02 * 10**i, SHAPE).astype(np.float32) for i in range(3))
    shared = four_bits.global_scale(q_, k, v)
    assert np.frexp(shared)[0] == 0.5 and shared == four_bits.global_scale(v)
    assert 1344 < float(shared) * np.abs(v).max() <= 2688
    small = QUANTIZE(q_, "nvfp4", shared)
    assert small.global_scale == shared and relative_l2(VALUES(small), q_) < 0.12
    stack = np.stack([q_, v])  # layers have a divisor each
    both = jax.jit(functools.partial(four_bits.quantize, form="nvfp4"))(stack)
    assert both.global_scale.shape == (2,) and both.global_scale[1] == shared
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b), both, QUANTIZE(q_, "nvfp4"))


def test_groups_must_divide_the_width():
    with pytest.raises(ValueError, match=r"nvfp4 has groups of 16 along K, which do not divide \[4, 24\]"):
        four_bits.quantize(jnp.ones((4, 24)), "nvfp4")


def test_there_is_no_derivative():
    with pytest.raises(TypeError, match="does not learn"):
        jax.grad(lambda w: four_bits.values(four_bits.quantize(w, "nvfp4")).sum())(jnp.ones((1, 32)))
