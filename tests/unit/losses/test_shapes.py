"""The shapes and types in the signatures of `jaxfp8rl.losses` are those that its functions take and give."""

import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shape_checks import WrongShape, checked, shapes_in

from jaxfp8rl import losses

pytestmark = pytest.mark.usefixtures("quick_compile")

B, T, D, V = 2, 6, 4, 9
NORMAL = np.random.default_rng(0).standard_normal((B, T)).astype(np.float32)
LOGP, OLD = jnp.asarray(-np.abs(NORMAL)), jnp.asarray(0.1 - np.abs(NORMAL))
SIGNS = jnp.asarray(np.array([[1.0], [-1.0]], np.float32) * np.ones((B, T), np.float32))
MASK = jnp.asarray(np.arange(T) > np.array([[1], [2]]))
IDS = jnp.ones((B, T), int)
COVARIANCE = losses.ObjectiveConfig("kl_cov")
REWARDS = [np.array([1.0, 0.0, 1.0]), np.array([0.0, 1.0])]
CALLS = {
    losses.advantage_skew: dict(old_logp=OLD, rollout_logp=LOGP, advantages=SIGNS, mask=MASK),
    losses.calibrated_bounds: dict(ratio=jnp.exp(LOGP - OLD), shadow_ratio=jnp.ones((B, T)), advantages=SIGNS,
                                   mask=MASK, clip_low=0.2, clip_high=jnp.float32(0.2)),
    losses.kl_penalty: dict(logp=LOGP, ref_logp=OLD, mask=MASK, kind="k3", sampled_logp=OLD),
    losses.logits_logprobs: dict(logits=jnp.ones((B, T, V)), tokens=IDS),
    losses.mismatch_metrics: dict(diff=jnp.where(MASK, OLD - LOGP, 0), old_logp=OLD, rollout_logp=LOGP,
                                  mask=MASK, segment_ids=IDS),
    losses.off_policy: dict(logp=LOGP, sampled_logp=OLD, advantages=SIGNS, mask=MASK, segment_ids=IDS,
                            delta=1e-4),
    losses.policy_loss: dict(logp=LOGP, old_logp=OLD, advantages=SIGNS, mask=MASK, segment_ids=IDS,
                             config=COVARIANCE, selected=MASK),
    losses.proximal_logp: dict(logp=LOGP, rollout_logp=OLD, ages=jnp.ones((B, T)), mask=MASK),
    losses.rollout_correction: dict(old_logp=OLD, rollout_logp=LOGP, mask=MASK,
                                    config=losses.get_preset("ais"), segment_ids=IDS),
    losses.select_tokens: dict(old_logp=OLD, advantages=SIGNS, mask=MASK, config=COVARIANCE,
                               places=jnp.arange(B * T).reshape(B, T)),
    losses.token_logprobs: dict(hidden=jnp.ones((B, T, D)), head=jnp.ones((V, D)), tokens=IDS, mask=MASK,
                                support=jnp.full((B, T, 3), -1).at[..., 0].set(1)),
    losses.token_scale: dict(mask=MASK, segment_ids=IDS, kind="token_mean", weights=jnp.ones((B, T))),
    losses.group_advantages: dict(groups=REWARDS),
    losses.informative_groups: dict(groups=REWARDS),
    losses.overlong_penalty: dict(lengths=np.array([3, 9]), max_length=8, buffer=4),
}
each_function = pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)


@each_function
def test_what_it_takes_and_gives_has_the_shapes_of_its_signature(function):
    hints = typing.get_type_hints(function)
    assert shapes_in(hints["return"]) or function is losses.rollout_correction
    checked(function)(**CALLS[function])
    assert all(shapes_in(hints[name]) for name, x in CALLS[function].items() if isinstance(x, jax.Array))


@each_function
def test_under_jit_the_shapes_are_the_same(function):
    arrays = {name: x for name, x in CALLS[function].items() if isinstance(x, jax.Array)}
    if arrays:
        others = {name: x for name, x in CALLS[function].items() if name not in arrays}
        jax.eval_shape(lambda arrays: checked(function)(**arrays, **others), arrays)


@each_function
def test_another_shape_is_seen(function):
    """A check that never fails would check nothing."""
    for name, x in CALLS[function].items():
        if isinstance(x, jax.Array):
            with pytest.raises(WrongShape):
                checked(function)(**CALLS[function] | {name: x[None]})


def test_another_type_is_seen():
    call = CALLS[losses.policy_loss]
    for change in ({"mask": MASK.astype(jnp.float32)}, {"segment_ids": IDS.astype(jnp.float32)},
                   {"logp": LOGP.astype(jnp.int32)}, {"selected": SIGNS}):
        with pytest.raises(WrongShape, match=next(iter(change))):
            checked(losses.policy_loss)(**call | change)


def test_no_public_function_is_left_out():
    functions = {x for name in losses.__all__ if inspect.isfunction(x := getattr(losses, name))}
    assert functions == CALLS.keys() | {losses.get_preset}
