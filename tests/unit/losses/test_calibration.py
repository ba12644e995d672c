"""Calibrated clipping: what the bounds promise, at equal ratios, under noise and at the edges."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.config.learning import Loss
from jaxfp8rl.losses.calibration import calibrated_bounds
from jaxfp8rl.losses.objectives import ObjectiveConfig, policy_loss
from jaxfp8rl.training.calibrate import ClipCalibration
from jaxfp8rl.types import TrainBatch

pytestmark = pytest.mark.usefixtures("quick_compile")

seeds = st.integers(0, 2**32 - 1)
calibrate = jax.jit(calibrated_bounds)
SHAPE = (8, 64)


def batch(seed: int, noise: float = 0.2):
    """BF16 ratios near 1, their FP8 copies with more noise, advantages, mask."""
    rng = np.random.default_rng(seed)
    shadow = np.exp(0.15 * rng.normal(size=SHAPE)).astype(np.float32)
    ratio = (shadow * np.exp(noise * rng.normal(size=SHAPE))).astype(np.float32)
    return ratio, shadow, rng.normal(size=SHAPE).astype(np.float32), rng.random(SHAPE) < 0.8


def contributions(ratio, advantages, mask, low, high):
    """(positive, negative) sums of the clipped surrogate in float64."""
    r, a = ratio.astype(np.float64), np.where(mask, advantages, 0).astype(np.float64)
    return np.sum(np.maximum(a, 0)
                  * np.minimum(r, 1 + high)), np.sum(np.maximum(-a, 0) * np.maximum(r, 1 - low))


@given(seeds, st.sampled_from([0.1, 0.2, 0.3]), st.sampled_from([0.1, 0.2, 0.28]))
def test_equal_ratios_give_back_the_nominal_bounds_exactly(seed, low, high):
    _, shadow, advantages, mask = batch(seed)
    got = calibrate(shadow, shadow, advantages, mask, low, high)
    np.testing.assert_array_equal(got, np.float32([low, high]))


@given(seeds, st.floats(0.0, 1.0), st.booleans())
def test_as_many_negative_tokens_are_cut_as_in_the_shadow_and_the_sides_balance_as_there(seed, noise, swap):
    ratio, shadow, advantages, mask = batch(seed, noise)
    ratio, shadow = (shadow, ratio) if swap else (ratio, shadow)  # the bounds come in, not only out
    low, high = (float(x) for x in calibrate(ratio, shadow, advantages, mask, 0.2, 0.2))
    negative = mask & (advantages < 0)
    nominal = np.float32(1) - np.float32(0.2)
    allowed = int((negative & (shadow < nominal)).sum())
    bound = np.float32(1) - np.float32(low)
    if low > 0:  # L = 1 where the shadow asks for more
        # 1 - (1 - L) is exact from 0.5 up
        assert abs(int((negative & (ratio < bound)).sum()) - allowed) <= (bound < 0.5)
    positive, loss = contributions(ratio, advantages, mask, low, high)
    want_positive, want_loss = contributions(shadow, advantages, mask, 0.2, 0.2)
    reachable = contributions(ratio, advantages, mask, low, np.inf)[0] / loss >= want_positive / want_loss
    if high > 0 and reachable:
        np.testing.assert_allclose(positive / loss, want_positive / want_loss, rtol=2e-6)
    assert 0 <= low <= 1 and high >= 0


def test_noise_alone_is_not_punished():
    """Noise in FP8 lowers the lower bound, and the calibrated loss cuts exactly as many negative tokens as
    BF16 would."""
    ratio, shadow, advantages, mask = batch(0)
    low, high = calibrate(ratio, shadow, advantages, mask, 0.2, 0.2)
    assert low > 0.25
    zero, segments, config = jnp.zeros(SHAPE), jnp.ones(SHAPE, jnp.int32), ObjectiveConfig("ppo_clip")
    cut = lambda r, clip: int(policy_loss(jnp.log(r), zero, advantages, mask, segments, config,
                                          clip)[1]["clip/low"].sum())
    assert cut(ratio, (low, high)) == cut(shadow, None) < 0.6 * cut(ratio, None)


@pytest.mark.parametrize("sign", [1, -1])
def test_with_one_sign_alone_what_needs_the_other_stays_nominal(sign):
    ratio, shadow, advantages, mask = batch(1)
    low, high = calibrate(ratio, shadow, sign * np.abs(advantages), mask, 0.2, 0.28)
    assert high == np.float32(0.28)
    assert (low == np.float32(0.2)) == (sign == 1)
    np.testing.assert_array_equal(calibrate(ratio, shadow, advantages, np.zeros_like(mask), 0.2, 0.28),
                                  np.float32([0.2, 0.28]))


def test_targets_out_of_reach_end_at_one_and_at_the_largest_ratio():
    advantages, mask = np.array([1.0, -1.0], np.float32), np.ones(2, bool)
    bounds = lambda ratio, shadow: calibrate(np.float32(ratio), np.float32(shadow), advantages, mask, 0.2,
                                             0.2)
    # even H = 1 gives more than 0.5
    np.testing.assert_allclose(bounds([2.0, 1.0], [0.5, 1.0]), [0.2, 0.0], atol=1e-6)
    # 4.4 wanted, 1.1 is all there is
    np.testing.assert_allclose(bounds([1.1, 4.0], [1.1, 1.0]), [0.2, 0.2], atol=1e-6)
    np.testing.assert_allclose(bounds([3.0, 1.5], [1.1, 1.0]), [0.2, 0.65], atol=1e-6)  # 1.65 / 1.5 = 1.1 / 1
    # 4.4 wanted: nothing is cut
    np.testing.assert_allclose(bounds([3.0, 4.0], [1.1, 1.0]), [0.2, 2.0], atol=1e-6)


@given(seeds, st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_what_is_under_the_mask_changes_nothing(seed, poison):
    ratio, shadow, advantages, mask = batch(seed)
    spoilt = (np.where(mask, x, np.float32(poison)) for x in (ratio, shadow, advantages))
    np.testing.assert_array_equal(
        calibrate(ratio, shadow, advantages, mask, 0.2, 0.2), calibrate(*spoilt, mask, 0.2, 0.2)
    )


@pytest.mark.parametrize("field", [0, 1, 2])
def test_a_nan_at_a_live_token_comes_through(field):
    arrays = list(batch(2))
    arrays[field][tuple(np.argwhere(arrays[3])[0])] = np.nan
    assert np.isnan(calibrate(*arrays, 0.2, 0.2)).all()


def test_no_gradient_and_one_compilation():
    ratio, shadow, advantages, mask = batch(3)
    grad = jax.jit(jax.grad(lambda r: sum(calibrated_bounds(r, shadow, advantages, mask, 0.2, 0.2))))(
        jnp.asarray(ratio))
    assert not np.asarray(grad).any()
    step = jax.jit(lambda *x: calibrated_bounds(*x))
    for low in (0.1, 0.2):
        step(ratio, shadow, advantages, mask, low, 0.2)
    assert step._cache_size() == 1


def test_the_shadow_is_asked_when_due_and_a_nan_moves_no_bound():
    """The learner's ratios are twice as far from 1 as the shadow's, so its bounds move out."""
    rng = np.random.default_rng(3)
    shape = (1, 2, 64)
    drift = 0.3 * rng.normal(size=shape).astype(np.float32)
    batch = TrainBatch(*(np.zeros(shape, np.int32),) * 3, np.ones(shape, bool), np.zeros(shape, np.float32),
                       np.sign(drift))
    asked = []

    def shadow_score(params, batch):
        asked.append(params)
        return np.float32(0) if params == "before" else drift

    calibration = ClipCalibration(shadow_score, Loss(calibrate_clip_every=5))
    assert [calibration.begin(step, "before", batch) is None
            for step in (1, 4, 5, 6)] == [True, True, False, True]
    calibration.finish("after", batch, np.full(shape, np.nan, np.float32), np.zeros(shape, np.float32),
                       np.zeros(shape))
    assert calibration.clip == tuple(map(np.float32, (0.2, 0.2)))
    calibration.finish("after", batch, 2 * drift, np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    assert calibration.clip[0] > 0.25 and calibration.clip != (np.float32(0.2),) * 2 and asked == [
        "before", "after", "after"]


def test_bounds_are_a_moving_average_that_begins_where_it_is_told():
    """Equal ratios give the nominal pair, which a quarter of each calibration brings nearer."""
    shape = (1, 1, 8)
    zeros = np.zeros(shape, np.float32)
    batch = TrainBatch(*(np.zeros(shape, np.int32),) * 3, np.ones(shape, bool), zeros,
                       np.ones(shape, np.float32))
    loss = Loss(calibrate_clip_every=1, calibrate_clip_newest=0.25, calibrate_clip_start=(0.4, 0.8))
    calibration = ClipCalibration(lambda params, batch: zeros, loss)
    assert calibration.clip == tuple(map(np.float32, (0.4, 0.8)))
    for _ in range(2):
        calibration.finish("after", batch, zeros, zeros, zeros)
    np.testing.assert_allclose(calibration.clip, (0.2 + 0.2 * 0.75**2, 0.2 + 0.6 * 0.75**2), rtol=1e-6)


def test_a_fork_with_distances_of_its_own_begins_from_them():
    """A resumed run, and a fork that sets the same, goes on with what was calibrated."""
    kept = {"clip": [0.3, 0.25], "clip_of": [0.2, 0.2]}
    for loss, clip in ((Loss(calibrate_clip_every=5), (0.3, 0.25)),
                       (Loss(calibrate_clip_every=5, clip_high=0.28), (0.2, 0.28))):
        calibration = ClipCalibration(None, loss)
        calibration.take_up(kept)
        assert calibration.clip == tuple(map(np.float32, clip))
    calibration.clip = (np.float32(0.3), np.float32(0.4))
    again = ClipCalibration(None, loss)
    again.take_up(json.loads(json.dumps(calibration.state())))
    assert again.clip == calibration.clip
