"""The helpers for tests of numerics: each passes what is right and says what is wrong."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import testing

E4M3 = ml_dtypes.float8_e4m3fn


# --- inputs and strategies ---


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_blocks_of_tile_distinct_are_apart_in_every_dtype(dtype):
    x = testing.tile_distinct((2, 384, 384), dtype)
    assert x.shape == (2, 384, 384) and x.dtype == dtype and np.isfinite(x.astype(np.float32)).all()
    amax = np.log2(np.abs(x.astype(np.float64)).reshape(2, 3, 128, 3, 128).max((2, 4)))
    for axis in range(3):
        assert (np.abs(np.diff(amax, axis=axis)) > 1.2).all()


def test_tile_distinct_of_no_blocks():
    assert testing.tile_distinct((0, 3, 5)).shape == (0, 3, 5)
    with pytest.raises(ValueError, match="at least two"):
        testing.tile_distinct((5,))


DRAWN = (
    testing.magnitudes(),
    testing.magnitudes(448),
    testing.segment_ids(24),
    testing.log_probabilities((2, 9)),
)


@given(testing.shapes(3), *DRAWN)
def test_strategies_draw_what_they_say(shape, magnitude, small, ids, logp):
    assert len(shape) == 3 and set(shape) <= set(testing.SIDES)
    assert 0 <= magnitude < np.inf and 0 <= small <= 448 and np.isfinite(np.float32(magnitude))
    assert ids.shape == (24,) and ids.dtype == np.int32
    runs = ids[np.flatnonzero(np.diff(ids, prepend=-1))]
    assert (np.diff(runs[runs > 0]) > 0).all()  # none comes back
    assert logp.shape == (2, 9) and logp.dtype == np.float32 and (logp <= 0).all() and np.isfinite(logp).all()


# --- blockwise ---


@given(
    testing.shapes(sides=(1, 5, 127, 129, 300)),
    testing.seeds(),
    st.sampled_from([(128, 128), (1, 128), (64, 300)]),
)
def test_an_error_is_measured_by_the_largest_of_its_own_block(shape, seed, block):
    """In one number of one block: what is allowed passes, a little more is found, there."""
    rng, x = np.random.default_rng(seed), testing.tile_distinct(shape, np.float64, seed % 1000, block)
    at = tuple(int(rng.integers(n)) for n in shape)
    first = [i // b * b for i, b in zip(at, block)]
    largest = np.abs(x[first[0] : first[0] + block[0], first[1] : first[1] + block[1]]).max()
    for off, passes in ((0.009, True), (0.011, False), (np.nan, False), (np.inf, False)):
        y = x.copy()
        y[at] += off * largest
        if passes:
            testing.assert_blockwise_close(y, x, rtol=0.01, block=block)
            continue
        named = re.escape(f"The worst is block {(at[0] // block[0], at[1] // block[1])}: at {at} actual")
        with pytest.raises(AssertionError, match=rf"^1 of \d+ blocks of {block[0]}x{block[1]} .*{named}"):
            testing.assert_blockwise_close(y, x, rtol=0.01, block=block)


def test_blocks_that_are_zero_not_finite_or_of_leading_axes():
    close = testing.assert_blockwise_close
    x = testing.tile_distinct((2, 3, 130, 200))
    (
        close(x, x, rtol=0),
        close(np.zeros((3, 3)), np.zeros((3, 3)), rtol=0),
        close([np.nan, np.inf], [np.nan, np.inf], rtol=0),
    )
    close(np.ones((0, 4)), np.ones((0, 4)), rtol=0), close(1.0, 1.0, rtol=0)
    bad = x.copy()
    bad[1, 2, 129, 150] *= 2
    with pytest.raises(AssertionError, match=r"block \(1, 2, 1, 1\): at \(1, 2, 129, 150\)"):
        close(bad, x, rtol=0.01)
    for got, want in (
        ([1e-30], [0.0]),
        ([1.0], [np.nan]),
        ([np.nan], [1.0]),
        ([np.inf], [-np.inf]),
        ([np.inf], [1.0]),
    ):
        with pytest.raises(AssertionError, match=r"block \(0, 0\)"):
            close(got, want, rtol=1.0)
    close([1e-30], [0.0], rtol=0, atol=1e-29)
    with pytest.raises(AssertionError, match=r"actual \(3, 1\), desired \(1, 3\)"):
        close(np.ones((3, 1)), np.ones((1, 3)), rtol=1)


# --- bits ---


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, E4M3, np.int8, bool]
)
def test_one_bit_is_found_and_named(dtype):
    x = np.zeros((3, 5), dtype)
    testing.assert_same_bits(x, x.copy()), testing.assert_same_bits(x.T, x.T.copy())
    y = x.copy()
    y.view(np.uint8).reshape(15, -1)[7, -1] ^= 1 if dtype is bool else 0x80  # a sign
    y.view(np.uint8).reshape(15, -1)[9, 0] ^= 1
    with pytest.raises(AssertionError, match=r"2 of 15 differ, first at \(1, 2\): .*bits 0x"):
        testing.assert_same_bits(x, y)


def test_nans_are_the_same_with_their_payload_alone():
    nans = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32).view(np.float32)
    testing.assert_same_bits(nans, nans.copy())
    for i, j in ((0, 1), (0, 2), (1, 2)):
        with pytest.raises(
            AssertionError, match=r"first at \(\): nan and nan, bits 0x[7f]fc0000[01] and 0x[7f]fc0000[01]"
        ):
            testing.assert_same_bits(nans[i], nans[j])


def test_trees_are_compared_leaf_by_leaf():
    tree = {"a": np.zeros(3), "b": [np.ones(2, np.int32), np.ones(())]}
    testing.assert_same_bits(tree, {"a": np.zeros(3), "b": [np.ones(2, np.int32), np.ones(())]})
    for other, said in (
        (
            {"a": np.zeros(3), "b": [np.ones(2, np.int32), np.zeros(())]},
            r"\['b'\]\[1\]: float64\[\].*1 of 1 differ",
        ),
        (
            {"a": np.zeros(3, np.float32), "b": tree["b"]},
            r"\['a'\]: float64\[3\] and float32\[3\] differ in dtype",
        ),
        ({"a": np.zeros(4), "b": tree["b"]}, r"\['a'\]: float64\[3\] and float64\[4\]"),
        ({"a": np.zeros(3)}, "(?i)tree"),
    ):
        with pytest.raises(AssertionError, match=said):
            testing.assert_same_bits(tree, other)


# --- laws of a correction ---


def token_tis(old, rollout, mask):
    """Truncated importance sampling, as the literature has it."""
    return np.minimum(np.exp(np.where(mask, old - rollout, 0)), 2.0), mask


def masked(old, rollout, mask):
    """Sequences whose mean ratio leaves [1/2, 2] are dropped."""
    ratio = np.exp(np.clip(np.where(mask, old - rollout, 0).sum(1) / mask.sum(1).clip(1), -50, 50))
    return np.exp(np.clip(np.where(mask, old - rollout, 0), -20, 20)), mask & (
        abs(np.log(ratio)) < np.log(2)
    )[:, None]


@pytest.mark.parametrize("correct", [token_tis, masked])
def test_what_is_right_obeys_every_law(correct):
    testing.check_correction_laws(correct)


def by_all(old, rollout, mask):
    """Of the mean over live and masked tokens."""
    mean = np.nan_to_num(np.clip(old - rollout, -20, 20), nan=0).mean()
    return np.exp(np.where(mask, old - rollout, 0)) * (np.exp(-mean) if (old != rollout).any() else 1), mask


def by_width(old, rollout, mask):
    """A sequence's mean ratio, over all its tokens and padding."""
    mean = np.where(mask, old - rollout, 0).sum(1, keepdims=True) / mask.shape[1]
    return np.minimum(np.exp(mean + 0 * mask), 2), mask


BROKEN = {  # law: corrections that break it
    "equal policies give weight 1 and keep every token": [
        lambda o, r, m: (1.1 * token_tis(o, r, m)[0], m),
        lambda o, r, m: (token_tis(o, r, m)[0], m & (np.where(m, o - r, 0) != 0)),
    ],
    "values under the mask have no effect": [by_all],
    "weights of kept tokens are finite and not negative": [
        lambda o, r, m: (np.exp(np.where(m, o - r, 0)), m),  # which overflows
        lambda o, r, m: (1 + np.where(m, o - r, 0), m),
    ],
    "permuting the sequences permutes the weights": [
        lambda o, r, m: (token_tis(o, r, m)[0] ** (1 + np.arange(len(m))[:, None]), m)
    ],
    "padding changes nothing": [by_width],
}


@pytest.mark.parametrize(
    ("law", "number"), [(law, i) for law, broken in BROKEN.items() for i in range(len(broken))]
)
def test_what_is_wrong_breaks_its_law_by_name(law, number):
    with pytest.raises(AssertionError, match=f"broken law: {law} .seed 0"):
        testing.check_correction_laws(BROKEN[law][number], laws=[law])


def test_laws_are_named():
    assert BROKEN.keys() == testing.CORRECTION_LAWS.keys()
    with pytest.raises(ValueError, match="no such law: gravity; known: equal policies"):
        testing.check_correction_laws(token_tis, laws=["gravity"])


def test_the_losses_of_the_learner_obey_them():
    import jax
    import jax.numpy as jnp

    from jaxfp8rl.losses.correction import rollout_correction
    from jaxfp8rl.losses.presets import PRESETS

    for name in ("token_tis", "verl/decoupled_seq_is_rs", "slime/mis"):

        @jax.jit
        def correct(old, rollout, mask, name=name):
            fix = rollout_correction(old, rollout, mask, PRESETS[name], jnp.ones(mask.shape, jnp.int32))
            return fix.weights, fix.mask

        testing.check_correction_laws(correct)
