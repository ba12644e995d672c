"""A fused multiply-add is rounded once: against whole numbers, which round nothing."""

from __future__ import annotations

from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.rounding import fused_multiply_add

fma = jax.jit(fused_multiply_add)
significands, exponents, signs = st.integers(2**23, 2**24 - 1), st.integers(-40, 40), st.sampled_from([-1, 1])
floats = st.builds(lambda sign, m, e: np.float32(sign * m * 2.0 ** (e - 23)), signs, significands, exponents)


def rounded(x: Fraction) -> np.float32:
    """To nearest, ties to even, of a number that is neither subnormal nor too large."""
    if not x:
        return np.float32(0)
    exponent = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    step = Fraction(2) ** (exponent - 23)
    # Python rounds a fraction to even; what is left is exact
    return np.float32(float(round(x / step) * step))


def exactly(a, b, c) -> Fraction:
    return Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))


@given(st.lists(st.tuples(floats, floats, floats), min_size=50, max_size=50))
def test_it_is_the_exact_sum_rounded_once(operands):
    for got, of in zip(np.asarray(fma(*np.array(operands).T)), operands):
        assert got == rounded(exactly(*of))


@given(st.lists(st.tuples(floats, floats, st.integers(-70, -20)), min_size=50, max_size=50))
def test_next_to_a_tie_too(drawn):
    """c is what is missing to a product for a tie, and to that comes, or not, what float64 cannot hold beside
    it."""
    a, b, e = (np.array(x) for x in zip(*drawn))
    small = (a.astype(np.float64) * b * 2.0**e).astype(np.float32)
    for operands in ((a, b, small), (small, np.ones_like(a), a * b)):
        for got, of in zip(np.asarray(fma(*operands)), zip(*operands)):
            assert got == rounded(exactly(*of))


@pytest.mark.parametrize("sign", [-1, 1])
def test_what_two_roundings_get_wrong(sign):
    """641 * 6700417 = 2^32 + 1 (Euler): a partial of the tensor cores, which is a whole number, by a product
    of scales.

    1 + 2^-24 + 2^-56 is nearer to 1 + 2^-23 than to 1; float64, whose bits end at 2^-52, makes 1 + 2^-24 of
    it, a tie, so 1."""
    a, b = np.float32(sign * 641 * 2.0**-28), np.float32(6700417 * 2.0**-28)
    assert np.float32(np.float64(a) * np.float64(b) + sign) == sign
    assert float(fma(a, b, np.float32(sign))) == sign * (1 + 2.0**-23)


def test_what_is_not_finite_stays_so():
    inf, one = np.float32(np.inf), np.float32(1)
    assert fma(one, one, inf) == inf and fma(-inf, one, one) == -inf and np.isnan(fma(inf, one, -inf))
    assert np.isnan(fma(np.float32(np.nan), one, one)) and fma(np.float32(3e38), np.float32(3), one) == inf
    assert fma(one, one, -one) == 0
