"""Losses of other frameworks against ours under the names that docs/objectives.md gives them: values and
gradients.

Theirs are written here anew in torch, from reading them (SkyRL a9564572, AReaL 4aef98d8, slime 624b824a, NeMo
RL 7ea279ab), so that torch's autograd says what their gradients are.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.losses.advantages import advantages as advantages_of
from jaxfp8rl.losses.aggregation import token_scale
from jaxfp8rl.losses.correction import rollout_correction
from jaxfp8rl.losses.objectives import ObjectiveConfig, policy_loss
from jaxfp8rl.losses.presets import get_preset

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("quick_compile")
seeds = st.integers(0, 2**32 - 1)
SHAPE = (5, 7)
EPS = 0.2


def batch(seed: int):
    """logp, the policy that p stands for, advantages, mask [5, 7]: one sequence a row, each with a live
    token."""
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(1.0, SHAPE)
    other = np.minimum(logp + 0.4 * rng.normal(size=SHAPE), -1e-3)
    mask = rng.random(SHAPE) < 0.7
    mask[:, 0] = True
    return logp, other, np.broadcast_to(rng.normal(size=(SHAPE[0], 1)), SHAPE).copy(), mask


def mean_of_sequences(loss, mask):
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


def mean_of_tokens(loss, mask):
    return (loss * mask).sum() / mask.sum()


def pessimist(ratio, a):
    return -torch.min(ratio * a, ratio.clamp(1 - EPS, 1 + EPS) * a)


def through_the_mean(c, p, a, mask):
    """slime's, AReaL's and NeMo RL's GSPO: the ratio of a sequence, and its gradient to every token of it."""
    d = ((c - p) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return mean_of_sequences(pessimist(d.exp().expand_as(c), a), mask)


def skyrl_gspo(c, p, a, mask):
    d = ((c - p) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return mean_of_sequences(pessimist((c - c.detach() + d.detach()).clamp(max=10).exp(), a), mask)


def skyrl_dppo_tv(c, g, a, mask):
    moved = (c.exp() - g.exp()).detach()
    keep = ~(((a > 0) & (moved > EPS)) | ((a < 0) & (-moved > EPS)))
    return mean_of_tokens(-(c - g).exp() * a * keep, mask)


def skyrl_rollout_is(c, g, a, mask):
    r = (c - g).exp().detach()
    return mean_of_tokens(-torch.where((r > 1 - EPS) & (r < 1 + EPS), r, 0.0) * a * c, mask)


def skyrl_cispo_of_rollout(c, g, a, mask):
    return mean_of_tokens(-(c - g).exp().clamp(1 - EPS, 1 + EPS).detach() * a * c, mask)


SEQUENCES, TOKENS = "seq_mean_token_mean", "token_mean"
CLIP = dict(clip_low=EPS, clip_high=EPS)
BYPASS_ICEPOP = get_preset("verl/bypass_pg_token_icepop")._replace(lower=1 - EPS, upper=1 + EPS)
CASES = {  # theirs; our objective, correction and aggregation
    "GSPO through the mean": (through_the_mean, ObjectiveConfig("gspo", **CLIP), "none", SEQUENCES),
    "SkyRL gspo": (skyrl_gspo, ObjectiveConfig("gspo_token", **CLIP), "none", SEQUENCES),
    "SkyRL dppo": (skyrl_dppo_tv, ObjectiveConfig("prime_rl", penalty=0.0, **CLIP), "none", TOKENS),
    "SkyRL rollout_is": (skyrl_rollout_is, ObjectiveConfig("reinforce"), BYPASS_ICEPOP, TOKENS),
    "SkyRL cispo, anchor rollout": (skyrl_cispo_of_rollout, ObjectiveConfig("cispo", **CLIP), "none", TOKENS),
}


@functools.partial(jax.jit, static_argnames=("objective", "correction", "aggregation"))
def ours(c, p, a, mask, objective, correction, aggregation):
    ids = jnp.ones(SHAPE, jnp.int32)

    def total(c):
        fix = rollout_correction(c, p, mask, correction, ids)  # of pi now: two policies
        loss, _ = policy_loss(c, p, a, mask, ids, objective)
        return jnp.sum(token_scale(mask, ids, aggregation) * fix.weights * loss)

    return jax.value_and_grad(total)(c)


@pytest.mark.parametrize("name", CASES)
@given(seeds)
def test_the_equivalent_has_their_value_and_their_gradient(name, seed):
    theirs, objective, correction, aggregation = CASES[name]
    c, p, a, mask = batch(seed)
    leaf = torch.tensor(c, requires_grad=True)
    loss = theirs(leaf, *(torch.tensor(x) for x in (p, a, mask)))
    loss.backward()
    correction = get_preset(correction) if isinstance(correction, str) else correction
    value, slope = ours(*(x.astype(np.float32) for x in (c, p, a)), mask, objective, correction, aggregation)
    np.testing.assert_allclose(value, loss.item(), rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(slope, leaf.grad, rtol=2e-4, atol=2e-6)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0]), min_size=2, max_size=8))
def test_normalize_rewards_without_leave_one_out(rewards):
    """NeMo RL: baseline the mean of all, std with Bessel's correction, 1e-6 added where it is above 0."""
    r = np.array(rewards)
    n, mean = len(r), r.mean()
    std = np.sqrt(max((np.mean(r**2) - mean**2) * n / (n - 1), 0.0))
    want = (r - mean) / (std + 1e-6) if std > 1e-6 else r - mean
    np.testing.assert_allclose(advantages_of([r], "grpo_sample_std")[0], want, rtol=1e-5, atol=1e-6)
