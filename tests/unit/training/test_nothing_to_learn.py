"""An update without anything to learn from moves nothing; whatever there is to learn is learned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_step import (
    FLOAT32,
    KEEP,
    LOGPROBS,
    REINFORCE_PAIR,
    laid_out,
    learn,
    lengths,
    old_logps,
    params,
    policy,
    samples_of,
    score,
    train_step,
)

from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.data.packing import pack
from jaxfp8rl.losses.aggregation import AGGREGATIONS
from jaxfp8rl.losses.correction import CorrectionConfig
from jaxfp8rl.losses.presets import get_preset
from jaxfp8rl.models.moe import Routing
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.training.step import make_train_step

pytestmark = pytest.mark.usefixtures("quick_compile")
ADAM = make_optimizer(Optim(lr=1e-3), 10)  # whose momentum moves weights by itself


def assert_bit_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@settings(max_examples=8)
@given(st.sampled_from([np.nan, np.inf, -np.inf, 1e30]), lengths)
def test_what_stands_under_the_mask_changes_no_bit(value, lengths):
    batch = laid_out(samples_of(lengths), (2, 2, 36))
    old = old_logps(params(), batch)
    metrics, grads = learn(params(), batch, old)
    dead = ~batch.response_mask
    spoilt = batch._replace(
        rollout_logp=np.where(dead, np.float32(value), batch.rollout_logp),
        advantages=np.where(dead, np.float32(value), batch.advantages),
        tokens=np.where(batch.segment_ids == 0, 31, batch.tokens),
        positions=np.where(batch.segment_ids == 0, 7, batch.positions),
    )
    other, other_grads = learn(params(), spoilt, np.where(dead, np.float32(value), old))
    assert metrics == other and np.isfinite(metrics["grad_norm"])
    assert_bit_equal(grads, other_grads)


@pytest.mark.parametrize("field", ["rollout_logp", "advantages", "old_logp"])
def test_a_nan_at_a_live_token_is_seen_and_nothing_is_applied(field):
    batch = laid_out(samples_of([(2, 3), (3, 4)]), (2, 2, 36))
    old = old_logps(params(), batch)
    at = tuple(np.argwhere(batch.response_mask)[2])
    spoilt = {"rollout_logp": batch.rollout_logp.copy(), "advantages": batch.advantages.copy(),
              "old_logp": old.copy()}
    spoilt[field][at] = np.nan
    old = spoilt.pop("old_logp")
    state = init_state(jax.tree.map(jnp.copy, params()), KEEP)
    before = jax.tree.map(np.array, state)
    after, _, metrics = train_step(state, policy(params()), batch._replace(**spoilt), old, None)
    assert metrics["update/applied"] == 0 and metrics["update/bad_in_a_row"] == 1
    assert_bit_equal(before._replace(bad_steps=np.int32(1)), jax.tree.map(np.asarray, after))


def test_a_batch_without_a_token_to_learn_from_changes_nothing():
    batch = laid_out(samples_of([(2, 3), (3, 4)]), (2, 2, 36))
    state = init_state(jax.tree.map(jnp.copy, params()), KEEP)
    before = jax.tree.map(np.array, state)
    empty = batch._replace(response_mask=np.zeros_like(batch.response_mask))
    after, _, metrics = train_step(state, policy(params()), empty, old_logps(params(), batch), None)
    assert metrics["tokens/update"] == 0 and metrics["update/applied"] == 0 and metrics[
        "update/bad_in_a_row"] == 0
    assert_bit_equal(before, jax.tree.map(np.asarray, after))


@functools.cache
def adam_step(loss: Loss, correction: CorrectionConfig, balance_coef: float = 0.0):
    return make_train_step(LOGPROBS, FLOAT32, loss, correction, ADAM, balance_coef=balance_coef)


ICEPOP_NONE = CorrectionConfig(action="mask", lower=0.999, upper=1.001, denominator="all")
# loss, correction, what the engine's log-probabilities are above the learner's, what becomes of the
# advantages
NOTHING = {
    "all sequences rejected, counted": (Loss(), get_preset("skyrl/geo_mask"), 0.5, np.copy),
    "all tokens masked": (Loss(), ICEPOP_NONE, 0.5, np.copy),
    "all sequences masked for being off-policy": (Loss(opsm_delta=0.1), CorrectionConfig(), 0.5,
                                                  lambda a: -np.abs(a)),
    "all advantages 0": (Loss(), CorrectionConfig(), 0.0, np.zeros_like),
    "all rejected, two policies": (REINFORCE_PAIR, get_preset("verl/bypass_pg_geo_rs"), 0.5, np.copy),
    "all advantages 0, its own old policy": (Loss(old_policy="current"), CorrectionConfig(), 0.0,
                                             np.zeros_like),
}


@pytest.mark.parametrize(
    "case, layout",
    [("all sequences rejected, counted", (1, 4, 36))]
    + [pytest.param(case, layout, marks=pytest.mark.slow) for case in NOTHING
       for layout in ((1, 4, 36), (2, 2, 36))],
)
def test_an_update_whose_gradient_is_0_by_construction_moves_nothing(case, layout):
    """After an update that left momentum behind: neither weights, states nor counters."""
    loss, correction, above, made = NOTHING[case]
    batch = laid_out(samples_of([(3, 5), (2, 6), (4, 4), (1, 7)]), layout)
    step, old = adam_step(loss, correction), score(params(), batch)
    good = batch._replace(rollout_logp=np.where(batch.response_mask, old, 0).astype(np.float32))
    state, now, metrics = step(init_state(jax.tree.map(jnp.copy, params()), ADAM), policy(params()), good,
                               old)
    assert metrics["update/applied"] == 1 and metrics["tokens/update"] == 22 and metrics["grad_norm"] > 1e-3
    before = jax.tree.map(np.array, state)
    old = score(before.params, batch)
    engine = np.where(batch.response_mask, old + above, 0).astype(np.float32)
    bad = batch._replace(rollout_logp=engine, advantages=made(batch.advantages))
    after, _, metrics = step(state, now, bad, old)
    assert metrics["grad_norm"] == 0 and metrics["update/applied"] == 0 and metrics[
        "update/bad_in_a_row"] == 0
    assert metrics["tokens/update"] == 0
    assert_bit_equal(before, jax.tree.map(np.asarray, after))


@pytest.mark.parametrize("coefs",
                         [{"kl_coef": 0.1}, *(pytest.param(more, marks=pytest.mark.slow) for more in (
    {"entropy_coef": 0.1}, {"objective": "prime_rl", "old_policy": "rollout"}))])
def test_a_term_without_an_advantage_is_learned_without_one(coefs):
    batch = laid_out(samples_of([(3, 5), (2, 6)]), (2, 2, 36))
    old = old_logps(params(), batch)
    preset = get_preset("prime_rl/default") if "objective" in coefs else CorrectionConfig()
    step = adam_step(Loss(**coefs), preset)
    state = init_state(jax.tree.map(jnp.copy, params()), ADAM)
    ref = old - 0.1 if "kl_coef" in coefs else None
    _, _, metrics = step(state, policy(params()), batch._replace(advantages=0 * batch.advantages), old, ref)
    assert metrics["grad_norm"] > 1e-6 and metrics["update/applied"] == 1 and metrics["tokens/update"] == 11


@pytest.mark.parametrize(
    "aggregation",
    ["token_sum", *(pytest.param(a, marks=pytest.mark.slow) for a in AGGREGATIONS if a != "token_sum")]
)
def test_the_balance_loss_weighs_the_same_however_losses_are_aggregated(aggregation):
    """Routers that say 1.5 in one micro-batch, of 17 of 28 response tokens, and 1.1 in the other: by hand,
    over tokens. All advantages are 0, and so is the rest of the loss."""
    halves = samples_of([(3, 5), (2, 7), (4, 5)]), samples_of([(1, 7), (3, 4)])
    batch = jax.tree.map(lambda *fields: np.concatenate(fields), *(pack(half, 24, 2, 1) for half in halves))
    assert batch.response_mask.sum((1, 2)).tolist() == [17, 11]
    balance = lambda micro: jnp.where(jnp.sum(micro.response_mask) == 17, 1.5, 1.1)[None]
    routed = lambda policy, micro: (*LOGPROBS(policy, micro)[:2], Routing(None, balance(micro)))
    loss = Loss(aggregation=aggregation, horizon=9 if aggregation.endswith("norm") else None)
    step = make_train_step(routed, FLOAT32, loss, CorrectionConfig(), KEEP, balance_coef=0.5)
    still = batch._replace(advantages=0 * batch.advantages)
    metrics, _ = learn(params(), still, np.where(batch.response_mask, -2.0, 0.0).astype(np.float32),
                       step=step)
    assert metrics["loss"] == pytest.approx(0.5 * (17 * 1.5 + 11 * 1.1) / 28, rel=1e-5)


def test_one_token_with_an_advantage_is_enough_in_whichever_microbatch():
    batch = laid_out(samples_of([(3, 5), (2, 6), (4, 4), (1, 7)] * 2), (2, 2, 36))
    old, at = score(params(), batch), tuple(np.argwhere(batch.response_mask)[-1])
    assert batch.response_mask.any((1, 2)).all() or at[0] == 0
    advantages = np.zeros_like(batch.advantages)
    advantages[at] = 1
    near = batch._replace(rollout_logp=np.where(batch.response_mask, old, 0).astype(np.float32),
                          advantages=advantages)
    _, _, metrics = adam_step(Loss(), CorrectionConfig())(
        init_state(jax.tree.map(jnp.copy, params()), ADAM), policy(params()), near, old
    )
    assert metrics["update/applied"] == 1 and metrics["grad_norm"] > 0 and metrics["tokens/update"] == 44
