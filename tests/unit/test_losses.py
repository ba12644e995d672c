"""Laws of the loss functions: equal policies, masks, bounds, exact gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.losses.advantages import group_advantages
from jaxfp8rl.losses.correction import CorrectionConfig, rollout_correction
from jaxfp8rl.losses.logprobs import token_logprobs
from jaxfp8rl.losses.objectives import clipped_objective

seeds = st.integers(0, 2**32 - 1)


def batch(seed: int, gap: float = 1.0, shape=(3, 7)):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, shape).astype(np.float32)
    mu = (old + gap * rng.normal(size=shape)).astype(np.float32)
    return old, mu, rng.random(shape) < 0.7


# The vector of the reference page: token weights with cap 2, the two KL estimators, the multiplicative error.
P = np.array([[-0.10, -1.20, -0.50, -2.00], [-0.30, -0.05, -4.00, -0.70], [-1.00, -0.20, -9, -9]], np.float32)
G = np.array([[-0.12, -1.00, -0.55, -1.10], [-0.30, -0.06, -1.50, -0.75], [-2.00, -0.25, -1, -1]], np.float32)
M = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]], bool)


def test_correction_reproduces_the_worked_example():
    fix = rollout_correction(P, G, M, CorrectionConfig("token", 2.0))
    want = [[1.020201, 0.818731, 1.051271, 0.406570], [1, 1.010050, 0.082085, 1.051271], [2.0, 1.051271, 0, 0]]
    np.testing.assert_allclose(fix.weights, want, rtol=2e-6, atol=1e-6)
    expected = {"correction/weight_mean": 0.949145, "correction/ess": 0.803000, "mismatch/k1": 0.242,
                "mismatch/k3": 0.262973, "mismatch/token_mult_prob_error": 2.476585,
                "correction/truncated_fraction": 0.1, "mismatch/max_logp_diff": 2.5}  # fmt: skip
    for key, value in expected.items():
        np.testing.assert_allclose(fix.metrics[key], value, rtol=3e-6, err_msg=key)


@given(seeds, st.floats(0, 30), st.floats(0.5, 10))
def test_token_weights_equal_a_float64_oracle(seed, gap, cap):
    old, mu, mask = batch(seed, gap)
    fix = rollout_correction(old, mu, mask, CorrectionConfig("token", cap))
    d = (old - mu).astype(np.float64)
    want = np.where(mask, np.minimum(np.exp(np.clip(d, -20, 20)), cap), 0)
    np.testing.assert_allclose(fix.weights, want, rtol=1e-5)
    assert (np.asarray(fix.weights) <= np.float32(cap)).all()


@given(seeds)
def test_equal_policies_are_neutral(seed):
    old, _, mask = batch(seed)
    fix = rollout_correction(old, old, mask, CorrectionConfig())
    np.testing.assert_array_equal(fix.weights, mask.astype(np.float32))
    neutral = {"correction/weight_mean": 1, "correction/ess": 1, "mismatch/token_mult_prob_error": 1}
    for key, value in fix.metrics.items():
        np.testing.assert_allclose(value, neutral.get(key, 0), atol=1e-6, err_msg=key)


@given(seeds, st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_what_is_under_the_mask_changes_nothing(seed, poison):
    old, mu, mask = batch(seed)
    clean = rollout_correction(old, mu, mask, CorrectionConfig())
    dirty = rollout_correction(np.where(mask, old, poison), np.where(mask, mu, poison), mask, CorrectionConfig())
    chex.assert_trees_all_equal(clean, dirty)


def test_a_nan_at_a_live_token_reaches_the_weights():
    old, mu, mask = batch(0)
    mask[0, 0], mu[0, 0] = True, np.nan
    assert np.isnan(rollout_correction(old, mu, mask, CorrectionConfig()).weights[0, 0])


def test_an_empty_mask_is_finite():
    old, mu, mask = batch(0)
    fix = rollout_correction(old, mu, np.zeros_like(mask), CorrectionConfig())
    chex.assert_tree_all_finite(fix)


def test_weights_are_constants_to_the_gradient():
    old, mu, mask = batch(1)
    grad = jax.grad(lambda o: rollout_correction(o, mu, mask, CorrectionConfig()).weights.sum())(old)
    np.testing.assert_array_equal(grad, 0)


@given(seeds)
def test_objective_gradient_at_equal_policies_is_reinforce(seed):
    """d loss / d logp = -A where nothing has moved yet: the clip is silent at ratio 1."""
    logp, _, _ = batch(seed)
    advantages = np.random.default_rng(seed).normal(size=logp.shape).astype(np.float32)
    grad = jax.grad(lambda x: clipped_objective(x, logp, advantages, 0.2, 0.2)[0].sum())(logp)
    np.testing.assert_allclose(grad, -advantages, rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [(1.5, 1.0, -1.28, True), (0.5, 1.0, -0.5, False), (1.5, -1.0, 1.5, False), (0.5, -1.0, 0.8, True)],
)
def test_objective_clips_on_the_side_that_helps(ratio, advantage, loss, clipped):
    got, flag = clipped_objective(jnp.log(jnp.float32(ratio)), jnp.float32(0), jnp.float32(advantage), 0.2, 0.28)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    assert bool(flag) == clipped


@given(seeds, st.integers(1, 200), st.floats(0.3, 2.0))
def test_logprobs_equal_the_dense_formula_for_any_chunk(seed, chunk, temperature):
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(2, 9, 8)).astype(np.float32), rng.normal(size=(11, 8)).astype(np.float32)
    tokens = rng.integers(11, size=(2, 9))
    logp, entropy = token_logprobs(hidden, head, tokens, temperature, chunk_elements=11 * chunk)
    dense = jax.nn.log_softmax(hidden @ head.T / temperature)
    want = np.take_along_axis(np.asarray(dense)[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(logp[:, 1:], want, atol=2e-5)
    np.testing.assert_allclose(entropy[:, 1:], -(np.exp(dense) * dense).sum(-1)[:, :-1], atol=2e-5)
    assert (np.asarray(logp[:, 0]) == 0).all()


@given(seeds, st.integers(2, 8))
def test_grpo_advantages_are_centred_and_scaled_within_each_group(seed, n):
    rewards = np.random.default_rng(seed).normal(size=(4, n))
    a = group_advantages(rewards)
    np.testing.assert_allclose(a.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(a.std(-1), 1, atol=1e-5)
    shifted = group_advantages(3 * rewards + 5)
    np.testing.assert_allclose(a, shifted, atol=1e-5)


def test_degenerate_groups():
    nan = np.nan
    a = group_advantages(np.array([[1.0, 1.0, 1.0], [1.0, nan, 0.0], [nan, nan, nan], [1.0, nan, nan]]))
    np.testing.assert_array_equal(a, [[0, 0, 0], [1, 0, -1], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(group_advantages(np.array([[1.0, 0.0]]), "dr_grpo"), [[0.5, -0.5]])
    with pytest.raises(ValueError, match="grpo"):
        group_advantages(np.zeros((1, 2)), "median")
