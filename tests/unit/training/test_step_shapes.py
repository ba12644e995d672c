"""A whole update, traced with the shapes of every annotated function of the step checked."""

import jax
import jax.numpy as jnp
import pytest
from learner_step import FLOAT32, KEEP, LOGPROBS, laid_out, params, policy, samples_of
from shape_checks import WrongShape, checked

from jaxfp8rl.config.learning import Loss
from jaxfp8rl.losses.correction import CorrectionConfig
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.policy.policy import partition
from jaxfp8rl.policy.routing_replay import disagreement
from jaxfp8rl.training import step

pytestmark = pytest.mark.usefixtures("quick_compile")

OF_THE_LOSS = ("rollout_correction", "policy_loss", "kl_penalty", "off_policy", "select_tokens",
               "token_scale",
               "advantage_skew", "token_logprobs")


@pytest.fixture
def update(monkeypatch):
    """update(loss, change): the metrics of a traced update; `change` is applied to the batch and scores."""
    for name in OF_THE_LOSS:
        monkeypatch.setattr(step, name, checked(getattr(step, name)))
    for name in ("correct", "select", "has_gradient", "update"):
        monkeypatch.setattr(step.TrainStep, name, checked(getattr(step.TrainStep, name)))

    def run(loss, change=lambda batch, old: (batch, old)):
        compiled = step.make_train_step(LOGPROBS, FLOAT32, loss, CorrectionConfig(), KEEP).__wrapped__
        state = init_state(jax.tree.map(jnp.copy, params()), KEEP)
        batch = jax.tree.map(jnp.asarray, laid_out(samples_of([(3, 4), (2, 6), (5, 2)]), (2, 2, 36)))
        batch, old = change(batch, batch.rollout_logp - 0.1)
        return compiled.eval_shape(state, *partition(policy(params())), batch, old, old)[2]

    return run


@pytest.mark.parametrize("loss", [
    pytest.param(Loss(), marks=pytest.mark.slow),
    Loss(objective="clip_cov", kl_coef=0.1, kl="k3+", unbiased_kl=True),
    pytest.param(Loss(old_policy="rollout", objective="prime_rl"), marks=pytest.mark.slow),
    Loss(old_policy="current", opsm_delta=1e-4, sampled_by="rollout", aggregation="seq_mean_token_mean"),
], ids=["ppo_clip", "clip_cov", "two_policies", "current"])
def test_every_part_of_an_update_has_the_shapes_of_its_signature(update, loss):
    metrics = update(loss)
    assert "loss" in metrics and all(m.shape == () for m in jax.tree.leaves(metrics))


def test_the_ages_of_tokens_have_the_shape_of_the_batch_and_may_not_be_left_out(update):
    loss = Loss(old_policy="loglinear")
    assert update(loss, lambda batch,
                  old: (batch._replace(ages=jnp.zeros_like(old)), old))["loss"].shape == ()
    with pytest.raises(ValueError, match="ages=True"):
        update(loss)
    with pytest.raises(WrongShape, match="ages"):
        update(loss, lambda batch, old: (batch._replace(ages=jnp.zeros(3)), old))


def test_a_field_of_another_shape_or_type_is_seen(update):
    with pytest.raises(WrongShape, match="old_logp"):
        update(Loss(), lambda batch, old: (batch, old[:, :, :-1]))
    with pytest.raises(WrongShape, match="batch.response_mask"):
        update(Loss(), lambda batch, old: (batch._replace(
            response_mask=batch.response_mask.astype(jnp.int32)), old))


def test_routes_that_disagree_have_the_shapes_of_the_signature():
    routes = jnp.zeros((2, 1, 5, 3, 2), jnp.uint8)
    checked(disagreement)(routes.astype(jnp.int32), routes, jnp.ones((2, 1, 5), jnp.int32))
    with pytest.raises(WrongShape, match="segment_ids"):
        checked(disagreement)(routes.astype(jnp.int32), routes, jnp.ones((2, 5), jnp.int32))
