"""Clip-Cov and KL-Cov: which tokens they select, and what becomes of the selected."""


import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from objective_batches import SHAPE, batch, seeds

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses.covariance import covariances, select_tokens
from jaxfp8rl.losses.objectives import (
    SELECTING,
    ObjectiveConfig,
    policy_loss,
)

pytestmark = pytest.mark.usefixtures("quick_compile")


# Covariance: Clip-Cov and KL-Cov
# -------------------------------------------------------------------------------------

WIDE = (20, 50)


def wide_batch(seed: int):
    """1,000 tokens, a fifth of them masked with anything under the mask; each has its own place."""
    rng = np.random.default_rng(seed)
    mask = rng.random(WIDE) < 0.8
    old = np.where(mask, -rng.exponential(1.0, WIDE),
                   rng.choice([np.nan, np.inf, -1e30], WIDE)).astype(np.float32)
    advantages = np.where(mask, rng.normal(size=WIDE), np.nan).astype(np.float32)
    return old, advantages, mask, np.arange(mask.size).reshape(WIDE)


def cov_oracle(old, advantages, mask):
    """Of the live tokens, float64: the paper's eq. 10, as verl's masked means have it."""
    a, p = advantages[mask].astype(np.float64), old[mask].astype(np.float64)
    return (a - a.mean()) * (p - p.mean())


def test_a_covariance_by_hand():
    """A = (1, -1, 0), logp = (-1, -2, -3): means 0 and -2, so 1, 0 and 0; the masked token is in no mean."""
    got = covariances(jnp.array([-1.0, -2, -3, -50]), jnp.array([1.0, -1, 0, 9]),
                      jnp.array([True, True, True, False]))
    np.testing.assert_allclose(got, [1, 0, 0, 0], atol=1e-7)


@given(seeds, st.floats(1e-4, 1.0))
def test_kl_cov_selects_the_largest_covariances(seed, fraction):
    old, advantages, mask, places = wide_batch(seed)
    want = np.zeros(WIDE, bool)
    cov = cov_oracle(old, advantages, mask)
    count = max(1, int(np.floor(np.float32(fraction) * np.float32(mask.sum()))))
    order = np.sort(cov)[::-1]
    assume(count == len(cov) or order[count - 1] - order[count] > 1e-6)
    want[mask] = cov >= order[count - 1]
    got = select_tokens(old, advantages, mask, places, ObjectiveConfig("kl_cov", cov_fraction=fraction))
    assert np.asarray(got).sum() == count and np.array_equal(got, want)


@given(seeds, st.floats(1e-4, 1.0))
def test_clip_cov_draws_among_the_covariances_between_its_bounds_however_they_are_packed(seed, fraction):
    old, advantages, mask, places = wide_batch(seed)
    config = ObjectiveConfig("clip_cov", cov_fraction=fraction, cov_low=0.2, cov_high=1.5)
    got = np.asarray(select_tokens(old, advantages, mask, places, config))
    cov, among = cov_oracle(old, advantages, mask), np.zeros(WIDE, bool)
    assume((np.abs(cov[:, None] - [0.2, 1.5]) > 1e-5).all())
    among[mask] = (cov > 0.2) & (cov < 1.5)
    assert got.sum() == min(among.sum(), max(1, int(np.floor(np.float32(fraction) * mask.sum()))))
    assert not (got & ~among).any()
    order = np.random.default_rng(seed).permutation(mask.size)
    moved = (x.reshape(-1)[order].reshape(WIDE) for x in (old, advantages, mask, places))
    assert np.array_equal(np.asarray(select_tokens(*moved, config)).reshape(-1), got.reshape(-1)[order])


def test_the_draw_of_clip_cov_favours_no_token():
    """Over 300 batches every candidate is drawn about equally often, be it likely or not."""
    config = ObjectiveConfig("clip_cov", cov_fraction=0.05, cov_low=0.0, cov_high=99.0)
    select = jax.jit(lambda *batch: (covariances(*batch[:3]), select_tokens(*batch, config)))
    low_half, drawn = 0, 0
    for seed in range(300):
        old, advantages, mask, places = wide_batch(seed)
        covariance, got = map(np.asarray, select(old, advantages, mask, places))
        among = mask & (covariance > 0)
        low_half += int((got & (old < np.median(old[among]))).sum())
        drawn += int(got.sum())
    assert abs(low_half / drawn - 0.5) < 0.02  # 12,000 draws: four standard deviations


@pytest.mark.parametrize("kind", SELECTING)
def test_what_is_selected_is_not_learned_from_or_pays_for_its_change(kind):
    logp, old, advantages, mask, segment_ids = batch(21)
    selected = np.random.default_rng(1).random(SHAPE) < 0.4
    total = lambda logp, chosen: policy_loss(logp, old, advantages, mask, segment_ids, ObjectiveConfig(kind),
                                             selected=chosen)
    slope = jax.grad(lambda logp, chosen: total(logp, chosen)[0].sum())
    chosen, none = jnp.asarray(selected), jnp.zeros(SHAPE, bool)
    (loss, cut), grad = total(logp, chosen), slope(logp, chosen)
    plain, plain_grad = total(logp, none)[0], slope(logp, none)
    on = selected & mask
    if kind == "clip_cov":
        assert not np.asarray(loss)[on].any() and not np.asarray(grad)[on].any()
        chex.assert_trees_all_equal(np.asarray(cut["clip/covariance"]), on)
    else:
        moved = (logp.astype(np.float64) - old)[on]
        np.testing.assert_allclose(np.asarray(loss - plain)[on], np.abs(moved), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.asarray(grad - plain_grad)[on], np.sign(moved), rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_equal(np.asarray(loss)[~on], np.asarray(plain)[~on])
    with pytest.raises(ConfigError, match="needs `selected`"):
        policy_loss(logp, old, advantages, mask, segment_ids, ObjectiveConfig(kind))
    with pytest.raises(ConfigError, match="takes no `selected`"):
        policy_loss(logp, old, advantages, mask, segment_ids, ObjectiveConfig("gspo"), selected=none)
