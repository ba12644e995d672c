"""The estimator laboratory knows the truth, and what it says of the shipped corrections agrees with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.estimator_lab import (
    PLAIN_SEQUENCE,
    PLAIN_TURN,
    batch_gradients,
    describe,
    enumerated,
    exact_estimate,
    in_two_turns,
    of_turns,
    sample,
    simulated,
)
from benchmarks.estimator_world import ANSWERS, World, make_world, true_gradient
from jaxfp8rl.losses.presets import get_preset

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKEN_IS, TOKEN_TIS, NONE = get_preset("nemo/is"), get_preset("token_tis"), get_preset("none")


def all_sequences(world: World) -> np.ndarray:
    v = len(world.theta)
    return np.stack(np.unravel_index(np.arange(v**world.length), (v,) * world.length), -1)


def expected_reward(theta, world: World):
    """By enumeration, with nothing of the laboratory's but its world."""
    tokens = all_sequences(world)
    last = np.pad(tokens[:, :-1], ((0, 0), (1, 0)))
    logp = jax.nn.log_softmax(theta)[last, tokens]
    if world.turns:  # the environment answers as it does, whatever theta is
        logp = jnp.where(world.sampled, logp, ANSWERS[last, tokens])
    chance = jnp.exp(logp.sum(-1))
    return chance @ world.rewards[(tokens == 0).sum(-1)]


def test_true_gradient_is_that_of_the_enumerated_objective():
    world = make_world(5, 0.3)
    truth = true_gradient(world)
    autodiff = jax.grad(expected_reward)(jnp.asarray(world.theta), world)
    np.testing.assert_allclose(truth, autodiff.ravel(), atol=1e-6)
    step = 1e-2 * np.random.default_rng(1).normal(size=world.theta.shape)
    slope = expected_reward(jnp.asarray(world.theta + step),
                            world) - expected_reward(jnp.asarray(world.theta - step), world)
    assert abs(slope / 2 - truth @ step.ravel()) < 1e-4


@pytest.mark.parametrize("kind", ["shared", "outliers"])
def test_plain_sequence_importance_sampling_is_exactly_unbiased(kind):
    world = make_world(5, 0.5, kind, seed=3)
    truth = true_gradient(world)
    shipped = enumerated(world, PLAIN_SEQUENCE)
    np.testing.assert_allclose(shipped.mean, truth, atol=2e-6)
    # something to correct
    assert np.linalg.norm(enumerated(world, NONE).mean - truth) > 0.1 * np.linalg.norm(truth)


@pytest.mark.parametrize("preset", ["none", "token_tis", "icepop", "nemo/gspo"])
def test_dynamic_programming_agrees_with_the_shipped_code_on_every_sequence(preset):
    world, config = make_world(5, 0.8, "outliers", seed=2), get_preset(preset)
    a, b = exact_estimate(world, config), enumerated(world, config)
    np.testing.assert_allclose(a.mean, b.mean, atol=2e-6)
    assert a.variance == pytest.approx(b.variance, rel=1e-5)


@pytest.mark.parametrize("preset", ["sequence_tis", "geometric_mask"])
def test_simulation_agrees_with_enumeration(preset):
    """With rejected sequences in the denominator: a batch of one, as enumeration has it, knows no other."""
    world, config = make_world(4, 0.05, seed=5), get_preset(preset)._replace(denominator="all")
    samples = sample(world, batches=64, size=256, seed=1)
    plain = np.asarray(batch_gradients(*samples, NONE)[0], float)
    got = simulated(samples, config, (plain, exact_estimate(world, NONE).mean))
    want = enumerated(world, config)
    # error is of the whole vector: 2 is beyond one in a million
    assert np.linalg.norm(got.mean - want.mean) < 2 * got.error
    assert got.variance == pytest.approx(want.variance, rel=0.1)


def test_truncation_loses_what_the_engine_undersamples():
    """One token, two answers. The engine gives the right one a tenth where pi_old gives it half: its weight
    of 5 is cut to 2.

    Then E_mu[min(rho, 2) A dlogp] - gradient = (2 mu - pi) A dlogp of that token alone: the gradient comes
    out too small.
    """
    noise = np.log(np.array([[[0.1, 0.9], [0.5, 0.5]]]) / 0.5)
    world = World(np.zeros((2, 2)), noise, threshold=0)
    truth, tis = true_gradient(world), exact_estimate(world, TOKEN_TIS).mean
    score_of_right = np.array([0.5, -0.5, 0, 0])
    np.testing.assert_allclose(tis - truth, (2 * 0.1 - 0.5) * (1 - world.baseline) * score_of_right,
                               atol=1e-6)
    assert 0 < tis @ truth < truth @ truth
    # one token: no state to get wrong
    np.testing.assert_allclose(exact_estimate(world, TOKEN_IS).mean, truth, atol=1e-6)


def test_token_weights_keep_the_engines_states():
    """Two tokens, both must be right. Token weights correct each action and not how often its state is
    reached, nor what follows it: the first token's gradient is scaled by mu/pi of the second, the second's by
    mu/pi of the first."""
    mu = np.array([[[0.2, 0.8], [0.5, 0.5]], [[0.3, 0.7], [0.5, 0.5]]])
    world = World(np.zeros((2, 2)), np.log(mu / 0.5), threshold=1)
    # mu's value; it adds nothing here: token weights make the score's mean zero at every state
    baseline = world.baseline
    assert baseline == pytest.approx(0.2 * 0.3)
    score = np.array([0.5, -0.5, 0, 0])
    first, second = 0.25 * score, 0.25 * score
    np.testing.assert_allclose(true_gradient(world), first + second, atol=1e-9)
    got = exact_estimate(world, TOKEN_IS).mean
    np.testing.assert_allclose(got, 0.3 / 0.5 * first + 0.2 / 0.5 * second, atol=1e-6)


def test_adaptive_mixing_of_weights_mixes_gradients():
    """(1 - a) plain + a weighted, with one a a batch, whichever of the two is mixed."""
    world = make_world(8, 0.1, seed=1)
    samples = sample(world, batches=4, size=32)
    plain, weighted, mixed = (np.asarray(batch_gradients(*samples, get_preset(n))[0])
                              for n in ("none", "token_tis", "ais"))
    along = weighted - plain
    a = ((mixed - plain) * along).sum(-1) / (along**2).sum(-1)
    assert ((a > 0.05) & (a < 0.95)).all()
    np.testing.assert_allclose(mixed, (1 - a)[:, None] * plain + a[:, None] * weighted, atol=1e-6)


def test_description_is_of_the_sampled_tokens():
    world = make_world(3, 0.4, seed=7)
    samples = describe(world, np.array([[[0, 2, 1]]], np.int32))
    assert float(samples.rollout_logp[0, 0, 1]) == pytest.approx(world.log_mu[1, 0, 2], rel=1e-6)
    assert float(samples.advantages[0, 0]) == pytest.approx(world.rewards[1] - world.baseline, rel=1e-6)


@pytest.mark.parametrize("config", [NONE, TOKEN_IS, PLAIN_TURN, PLAIN_SEQUENCE],
                         ids=["none", "token", "turn", "trajectory"])
def test_two_turns_are_exact_too(config):
    """The shipped code, with an environment's token between the turns that no one learns from."""
    world = in_two_turns(make_world(5, 0.8, seed=2))
    truth = jax.grad(expected_reward)(jnp.asarray(world.theta), world)
    np.testing.assert_allclose(true_gradient(world), truth.ravel(), atol=1e-6)
    a, b = exact_estimate(world, config), enumerated(world, config)
    np.testing.assert_allclose(a.mean, b.mean, atol=2e-6)
    assert a.variance == pytest.approx(b.variance, rel=1e-5)
    biased = np.linalg.norm(a.mean - truth.ravel()) > 0.02 * np.linalg.norm(truth)
    assert biased == (config != PLAIN_SEQUENCE)


def test_a_weight_by_turn_lies_between_those_of_token_and_trajectory():
    """A turn's product corrects what is reached within the turn, and not in the turns before it. Its variance
    is that of the turn's length alone."""
    found = {r["weight"]: r for r in of_turns(64, 0.1)}
    assert 0 == pytest.approx(found["trajectory"]["bias"], abs=1e-6)
    assert found["turn"]["bias"] < found["token"]["bias"] < found["none"]["bias"]
    assert found["token"]["variance"] < found["turn"]["variance"] < found["trajectory"]["variance"]
