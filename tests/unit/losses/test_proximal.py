"""AReaL's decoupled objective against numpy in float64: the proximal policy between its ends, the loss and
its gradient with each action of the correction."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from objective_batches import SHAPE, batch, seeds

from jaxfp8rl.losses.correction import CorrectionConfig, rollout_correction
from jaxfp8rl.losses.objectives import ObjectiveConfig, policy_loss
from jaxfp8rl.losses.presets import get_preset
from jaxfp8rl.losses.proximal import proximal_logp

pytestmark = pytest.mark.usefixtures("quick_compile")
PPO = ObjectiveConfig("ppo_clip", clip_low=0.2, clip_high=0.28)
proximal = jax.jit(proximal_logp)


@functools.partial(jax.jit, static_argnames="config")
def decoupled(logp, mu, ages, advantages, mask, segment_ids, config):
    """(weighted loss of each token, its gradient to logp)."""
    def total(logp):
        prox = proximal_logp(logp, mu, ages, mask)
        weights = rollout_correction(prox, mu, mask, config, segment_ids).weights
        loss = weights * policy_loss(logp, prox, advantages, mask, segment_ids, PPO)[0]
        return jnp.sum(loss), loss

    grad, loss = jax.grad(total, has_aux=True)(logp)
    return loss, grad


def drawn(seed, gap=0.6):
    logp, mu, advantages, mask, segment_ids = batch(seed, gap)
    ages = np.random.default_rng(seed).integers(0, 5, SHAPE).astype(np.float32)
    return logp, mu, ages, advantages, mask, segment_ids


def reference(logp, mu, ages, advantages, v: int, config):
    """w_behave max(-A r, -A clip(r)) and its derivative by log pi, w_behave and pi_prox constants. `v`: the
    version that the step makes; a token was sampled by v_b = v - 1 - age."""
    logp, mu, a = (x.astype(np.float64) for x in (logp, mu, advantages))
    v_prox, v_b = v - 1, v - 1 - ages.astype(np.float64)
    prox = mu + (v_prox - v_b) / (v - v_b) * (logp - mu)
    r, w = np.exp(logp - prox), np.exp(prox - mu)
    near = np.minimum(np.abs(w - config.upper), np.minimum(np.abs(r - 1.28), np.abs(r - 0.8)))
    if config.action == "mask":
        w = np.where(w > config.upper, 0, w)
    w = np.minimum(w, config.upper)
    plain, held = -a * r, -a * np.clip(r, 0.8, 1.28)
    return w * np.maximum(plain, held), np.where(plain >= held, w * plain, 0.0), near


@pytest.mark.parametrize("config",
                         [CorrectionConfig(upper=1.5), get_preset("areal/token_mask")._replace(upper=1.2)])
@given(seed=seeds)
def test_loss_and_gradient_equal_the_formula_in_float64(config, seed):
    logp, mu, ages, advantages, mask, segment_ids = drawn(seed)
    loss, grad = decoupled(logp, mu, ages, advantages, mask, segment_ids, config)
    want_loss, want_grad, near = reference(logp, mu, ages, advantages, 7, config)
    assume((near[mask] > 1e-4).all())
    np.testing.assert_allclose(loss, np.where(mask, want_loss, 0), rtol=3e-5, atol=1e-6)
    np.testing.assert_allclose(grad, np.where(mask, want_grad, 0), rtol=3e-5, atol=1e-6)


@given(seed=seeds)
def test_fresh_tokens_have_the_sampler_as_proximal_policy_which_makes_it_ppo(seed):
    """a = 0: pi_prox = mu to the bit, weight 1, and the clip of pi / mu."""
    logp, mu, ages, advantages, mask, segment_ids = drawn(seed)
    fresh = np.zeros_like(ages)
    np.testing.assert_array_equal(proximal(logp, mu, fresh, mask), np.where(mask, mu, 0))
    loss, grad = decoupled(logp, mu, fresh, advantages, mask, segment_ids, CorrectionConfig())
    plain = lambda x: jnp.sum(policy_loss(x, mu, advantages, mask, segment_ids, PPO)[0])
    np.testing.assert_array_equal(loss, policy_loss(logp, mu, advantages, mask, segment_ids, PPO)[0])
    np.testing.assert_array_equal(grad, jax.grad(plain)(logp))


@given(seed=seeds)
def test_the_oldest_tokens_have_the_current_policy_which_makes_it_importance_sampling(seed):
    """a -> 1: r = 1, nothing is clipped, and the weight is the whole of pi / mu."""
    logp, mu, ages, advantages, mask, segment_ids = drawn(seed)
    old = np.full_like(ages, 1e9)
    np.testing.assert_allclose(proximal(logp, mu, old, mask), np.where(mask, logp, 0), rtol=1e-6, atol=1e-6)
    _, grad = decoupled(logp, mu, old, advantages, mask, segment_ids, CorrectionConfig(upper=1.5))
    weight = np.minimum(np.exp(logp.astype(np.float64) - mu), 1.5)
    np.testing.assert_allclose(grad, np.where(mask, -weight * advantages, 0), rtol=1e-4, atol=1e-6)


@given(seed=seeds, more=st.floats(0.5, 8))
def test_a_token_that_ages_goes_from_the_sampler_to_the_current_policy(seed, more):
    logp, mu, ages, _, mask, _ = drawn(seed)
    near, far = (np.asarray(proximal(logp, mu, a, mask)) for a in (ages, ages + np.float32(more)))
    gap = lambda prox: np.abs(prox - np.where(mask, logp, 0))
    assert (gap(far) <= gap(near) + 1e-6).all()


def test_what_is_masked_changes_nothing():
    logp, mu, ages, _, mask, _ = drawn(3)
    spoilt = [np.where(mask, x, bad) for x, bad in ((logp, np.nan), (mu, np.inf), (ages, np.nan))]
    np.testing.assert_array_equal(proximal(*spoilt, mask), proximal(logp, mu, ages, mask))
