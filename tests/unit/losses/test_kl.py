"""KL estimators and off-policy masking: values, gradients, and what is under the mask."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from objective_batches import batch, seeds

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses.kl import KL_KINDS, kl_penalty
from jaxfp8rl.losses.objectives import off_policy

pytestmark = pytest.mark.usefixtures("quick_compile")


# KL to a reference
# ---------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="kind")
def run_kl(logp, ref, mask, kind):
    """(estimates, gradient of their sum)."""
    value = lambda x: kl_penalty(x, ref, mask, kind)
    return value(logp), jax.grad(lambda x: value(x).sum())(logp)


@given(seeds, st.floats(0.01, 30))
def test_kl_estimators_and_their_gradients(seed, gap):
    logp, ref, _, mask, _ = batch(seed, gap)
    d = np.where(mask, logp.astype(np.float64) - ref, 0)
    bounded = np.clip(d, -20, 20)
    k3 = np.exp(-bounded) + bounded - 1
    free = (k3 < 10) & (np.abs(d) < 20)
    assume((np.abs(k3 - 10) > 1e-3).all())
    value = {"k1": d, "abs": np.abs(d), "k2": d**2 / 2, "k3": np.minimum(k3, 10)}
    slope = {"k1": 1.0, "abs": np.sign(d), "k2": d,
             "k3": (1 - np.exp(-bounded)) * free} | {f"{k}+": d for k in value}
    value |= {f"{k}+": v for k, v in value.items()}
    # NeMo RL: estimates and weight held, with their gradients
    inside = {"k1": bounded, "k2": bounded**2 / 2, "k3": k3}
    own = {"k1": d + 1, "k2": d + d**2 / 2, "k3": d}
    assume(all((np.abs(np.abs(x) - 10) > 1e-3).all() for x in inside.values()))
    value |= {f"{k}_score": np.clip(x, -10, 10) for k, x in inside.items()}
    slope |= {f"{k}_score": own[k] * (np.abs(x) < 10) * (np.abs(d) < 20) for k, x in inside.items()}
    assert set(value) == set(KL_KINDS)
    for kind in KL_KINDS:
        got, grad = run_kl(logp, ref, mask, kind)
        np.testing.assert_allclose(got, value[kind], rtol=1e-5, atol=2e-6, err_msg=kind)
        np.testing.assert_allclose(grad, np.where(mask, slope[kind], 0), rtol=1e-5, atol=3e-6, err_msg=kind)


@given(seeds, st.floats(-5, 5))
def test_with_any_baseline_the_mean_gradient_is_that_of_the_kl(seed, b):
    """Over all words of one draw, each as often as it is sampled. Near the mean of log pi - log reference it
    varies less."""
    x, y = np.random.default_rng(seed).normal(size=(2, 11)).astype(np.float32)
    ref, words = jax.nn.log_softmax(y), jnp.arange(11)
    gradient = lambda baseline: jax.vmap(jax.grad(lambda x, word: kl_penalty(
        jax.nn.log_softmax(x)[word], ref[word], jnp.bool_(True), "k1+", baseline=baseline)),
                                         (None, 0))(x, words)
    logp = jax.nn.log_softmax(x)
    of_kl = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - ref)))(x)
    pi = jnp.exp(logp)
    chex.assert_trees_all_close(pi @ gradient(jnp.float32(b)), of_kl, atol=2e-5)
    spread = lambda baseline: float(pi @ jnp.sum((gradient(jnp.float32(baseline)) - of_kl) ** 2, 1))
    assert spread(kl := float(pi @ (logp - ref))) < spread(kl + 6) and spread(kl) < spread(kl - 6)
    with pytest.raises(ConfigError, match='take "k3\\+"'):
        kl_penalty(logp[0], ref[0], jnp.bool_(True), "k3_score", baseline=jnp.float32(b))


def test_no_token_owns_the_unbiased_kl():
    """The token of the issue: mu = -14, reference -2.1, pi -2. Uncapped its gradient is e^12 * 0.1 = 16,275;
    by k3+ alone 0.1."""
    one = lambda x: jnp.full((1,), x, jnp.float32)
    slope = lambda cap: float(jax.grad(
        lambda logp: kl_penalty(logp, one(-2.1), jnp.ones(1, bool), "k3+", one(-14.0),
                                cap).sum())(one(-2.0))[0])
    assert slope(1e6) == pytest.approx(np.exp(12) * 0.1, rel=1e-4)
    assert slope(2.0) == pytest.approx(0.2, rel=1e-4) and slope(1.0) == pytest.approx(0.1, rel=1e-4)
    own = jax.grad(lambda logp: kl_penalty(logp, one(-2.1), jnp.ones(1, bool), "k3+",
                                           one(-14.0)).sum())(one(-2.0))
    assert float(own[0]) == pytest.approx(0.2, rel=1e-4), "the default cap is 2"
    # weight e^-1, which no cap touches
    below = kl_penalty(one(-3.0), one(-2.1), jnp.ones(1, bool), "k3+", one(-2.0))
    np.testing.assert_allclose(below, np.exp(-1.0) * (np.exp(0.9) - 0.9 - 1), rtol=1e-5)
    with pytest.raises(ConfigError, match="kl_weight_cap = 0.5"):
        kl_penalty(one(-3.0), one(-2.1), jnp.ones(1, bool), "k3+", one(-2.0), 0.5)


def test_expected_gradients_of_the_kl_estimators():
    """Over one distribution of 5 outcomes, exactly: k2 and every "+" give that of KL(now || ref), k3 that of
    KL(ref || now)."""
    rng = np.random.default_rng(0)
    theta, ref = jnp.asarray(rng.normal(size=5)), jax.nn.log_softmax(jnp.asarray(rng.normal(size=5)))
    log = jax.nn.log_softmax
    forward = jax.grad(lambda t: jnp.sum(jnp.exp(log(t)) * (log(t) - ref)))(theta)
    reverse = jax.grad(lambda t: jnp.sum(jnp.exp(ref) * (ref - log(t))))(theta)
    want = {k: forward for k in KL_KINDS if k.endswith("+")} | {"k1": 0 * theta, "k2": forward, "k3": reverse}
    want |= {"k1_score": forward, "k3_score": forward}
    for kind, gradient in want.items():
        expected = lambda t: jnp.sum(jnp.exp(log(theta))
                                     * kl_penalty(log(t), ref, jnp.ones(5, bool), kind))  # noqa: B023
        np.testing.assert_allclose(jax.grad(expected)(theta), gradient, atol=1e-6, err_msg=kind)
    assert np.abs(forward - reverse).max() > 0.05

    # by another policy: each outcome weighed by now / sampled
    sampled = jax.nn.log_softmax(jnp.asarray(rng.normal(size=5)))
    weighed = lambda t, kind: kl_penalty(log(t), ref, jnp.ones(5, bool), kind, sampled, 1e9)
    for kind in (k for k in KL_KINDS if k.endswith("+") or k in ("k1_score", "k3_score")):
        gradient = jax.grad(lambda t: jnp.sum(jnp.exp(sampled) * weighed(t, kind)))(theta)  # noqa: B023
        np.testing.assert_allclose(gradient, forward, atol=1e-6, err_msg=kind)
    kl = jnp.sum(jnp.exp(log(theta)) * (log(theta) - ref))
    np.testing.assert_allclose(jnp.sum(jnp.exp(sampled) * weighed(theta, "k3+")), kl, rtol=1e-5)
    # as the paper writes it
    theirs = lambda t: jnp.sum(jnp.exp(log(t) - sampled) * (jnp.expm1(ref - log(t)) - (ref - log(t))))
    np.testing.assert_allclose(jax.grad(lambda t: jnp.sum(weighed(t, "k3+")))(theta), jax.grad(theirs)(theta),
                               atol=1e-5)


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_kl_under_the_mask_and_at_a_live_nan(kind, poison):
    logp, ref, _, mask, _ = batch(1)
    dirty = run_kl(np.where(mask, logp, np.float32(poison)), np.where(mask, ref, np.float32(poison)), mask,
                   kind)
    chex.assert_trees_all_equal(run_kl(logp, ref, mask, kind), dirty)
    at = tuple(np.argwhere(mask)[0])
    for spoilt in (logp.copy(), ref.copy()):
        spoilt[at] = np.nan
        assert np.isnan(run_kl(spoilt, ref, mask, kind)[0][at])


@given(seeds, st.floats(0.01, 3), st.sampled_from([0.0, 1e-4, 0.1, 1.0]))
def test_off_policy_masking_is_of_whole_sequences_with_a_negative_advantage(seed, gap, delta):
    logp, sampled, advantages, mask, segment_ids = batch(seed, gap)
    gone = np.where(mask, sampled.astype(np.float64) - logp, 0).sum(1) / np.maximum(mask.sum(1), 1)
    assume((np.abs(gone - delta) > 1e-5).all())
    want = mask & (advantages < 0) & (gone > delta)[:, None]
    chex.assert_trees_all_equal(np.asarray(off_policy(logp, sampled, advantages, mask, segment_ids, delta)),
                                want)
    dirty = [np.where(mask, x, np.float32(np.nan)) for x in (logp, sampled, advantages)]
    chex.assert_trees_all_equal(np.asarray(off_policy(*dirty, mask, segment_ids, delta)), want)
    equal = off_policy(logp, logp, advantages, mask, segment_ids, delta)
    assert not np.asarray(equal).any(), "equal policies mask nothing"
    at = tuple(np.argwhere(mask)[0])
    spoilt = logp.copy()
    spoilt[at] = np.nan
    assert not np.asarray(off_policy(spoilt, sampled, advantages, mask, segment_ids,
                                     delta))[at[0]].any(), "the guard sees it"
