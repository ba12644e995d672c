"""Objectives against formulas in float64: values, hand-derived gradients, and the laws that hold for all of
them."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from objective_batches import SHAPE, batch, seeds
from objective_formulas import oracle

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses.aggregation import AGGREGATIONS, token_scale
from jaxfp8rl.losses.kl import kl_penalty
from jaxfp8rl.losses.objectives import (
    OBJECTIVES,
    SELECTING,
    ObjectiveConfig,
    objective_parameters,
    policy_loss,
)

pytestmark = pytest.mark.usefixtures("quick_compile")
CASES = [ObjectiveConfig(kind) for kind in OBJECTIVES] + [
    ObjectiveConfig("ppo_clip", clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    ObjectiveConfig("gspo", clip_low=0.1, clip_high=0.3),
    ObjectiveConfig("cispo", clip_low=0.4, clip_high=0.2),
    ObjectiveConfig("dppo_tv", clip_low=0.05, clip_high=0.3, ratio_cap=20.0),
    ObjectiveConfig("reinforce", ratio_cap=2.0),
]
scale_of = jax.jit(token_scale, static_argnames=("kind", "horizon"))
each_case = pytest.mark.parametrize("config", CASES,
                                    ids=lambda c: "-".join(str(v) for v in c if v is not None))


@functools.partial(jax.jit, static_argnames="config")
def run(logp, old, advantages, mask, segment_ids, weights, config):
    """(loss [B, T], cut, d sum(weights * loss) / d logp)."""

    # what they select has tests of its own
    selected = jnp.zeros_like(mask) if config.kind in SELECTING else None

    def total(logp):
        loss, cut = policy_loss(logp, old, advantages, mask, segment_ids, config, selected=selected)
        return jnp.sum(weights * loss), (loss, cut)

    grad, (loss, cut) = jax.grad(total, has_aux=True)(logp)
    return loss, cut, grad


@each_case
@given(seed=seeds, gap=st.floats(0.001, 30))
# SAPO's gate nearly 1, and a ratio and an advantage that make its slope matter
@example(seed=206009, gap=2.375)
def test_values_and_gradients_equal_the_formulas(config, seed, gap):
    logp, old, advantages, mask, segment_ids = batch(seed, gap)
    # differ within a sequence
    weights = np.random.default_rng(seed + 1).uniform(0, 2, SHAPE).astype(np.float32)
    loss, cut, grad = run(logp, old, advantages, mask, segment_ids, weights, config)
    want_loss, want_grad = np.zeros(SHAPE), np.zeros(SHAPE)
    for i in range(SHAPE[0]):
        if (m := mask[i]).any():
            args = (x[i][m].astype(np.float64) for x in (logp, old, advantages))
            want_loss[i][m], jacobian, near = oracle(config, *args)
            assume(all((np.abs(x) > 1e-5).all() for x in near))
            want_grad[i][m] = jacobian.T @ weights[i][m]
    np.testing.assert_allclose(loss, want_loss, rtol=3e-5, atol=1e-6)
    np.testing.assert_allclose(grad, want_grad, rtol=3e-5, atol=1e-5)
    chex.assert_trees_all_equal(cut["clip/fraction"], functools.reduce(np.logical_or, cut.values()))
    assert not (np.asarray(cut["clip/fraction"]) & ~mask).any()


@pytest.mark.parametrize(
    ("kind", "ratio", "advantage", "loss", "cut"),
    [
        ("ppo_clip", 1.5, 1.0, -1.28, "high"), ("ppo_clip", 0.5, 1.0, -0.5, None),
        ("ppo_clip", 1.5, -1.0, 1.5, None), ("ppo_clip", 0.5, -1.0, 0.8, "low"),
        ("ppo_clip", 9.0, -2.0, 6.0, "high"),
        ("gspo", 1.5, 1.0, -1.28, "high"), ("gspo_token", 0.5, -1.0, 0.8, "low"),
        ("gspo", 0.5, 1.0, -0.5, None),
        ("gmpo", np.exp(0.9), 1.0, -np.exp(0.28), "high"), ("gmpo", np.exp(-0.9), -1.0, np.exp(-0.2), "low"),
        ("gmpo", np.exp(-0.9), 1.0, -np.exp(-0.9), None),
        ("prime_rl", 1.5, 1.0, 1e-3 * np.log(1.5) ** 2, "high"),
        ("prime_rl", 1.2, 1.0, -1.2 + 1e-3 * np.log(1.2) ** 2, None),
    ],
)
def test_worked_examples(kind, ratio, advantage, loss, cut):
    """Bounds 0.2 and 0.28, dual clip 3, one token of probability e^-0.5 now."""
    dual = {"dual_clip": 3.0} if kind == "ppo_clip" else {}
    config = ObjectiveConfig(kind, clip_low=0.2, clip_high=0.2 if kind == "prime_rl" else 0.28, **dual)
    one = lambda x: jnp.full((1,), x, jnp.float32)
    mask, segments = jnp.ones(1, bool), jnp.ones(1, jnp.int32)
    got, flags = policy_loss(one(-0.5), one(-0.5 - np.log(ratio)), one(advantage), mask, segments, config)
    np.testing.assert_allclose(got, [loss], rtol=2e-6)
    raised = {name for name in ("high", "low") if flags[f"clip/{name}"][0]}
    assert raised == ({cut} if cut else set()) and flags["clip/fraction"][0] == bool(cut)


def test_sapo_at_half_and_double():
    """tau = 1: gate 4 sigmoid(r - 1); at r = 2, 4 * 0.7310586; at r = 0.5, 4 * 0.3775407."""
    config = ObjectiveConfig("sapo", tau_positive=1.0, tau_negative=1.0)
    logp, old = jnp.log(jnp.array([2.0, 0.5])), jnp.zeros(2)
    loss, _ = policy_loss(logp, old, jnp.array([1.0, -1.0]), jnp.ones(2, bool), jnp.array([1, 2]), config)
    np.testing.assert_allclose(loss, [-2.9242343, 1.5101627], rtol=1e-6)


# Laws that hold for every objective
# ----------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_at_equal_policies_the_gradient_is_the_plain_policy_gradient(config, aggregation):
    logp, _, advantages, mask, segment_ids = batch(5)
    horizon = 9.0 if aggregation == "seq_mean_token_sum_norm" else None
    scale = scale_of(mask, segment_ids, aggregation, horizon)
    _, cut, grad = run(logp, logp, advantages, mask, segment_ids, scale, config)
    np.testing.assert_allclose(grad, -advantages * scale, rtol=3e-6, atol=1e-9)
    assert not any(np.asarray(flags).any() for flags in cut.values())


def test_gspo_and_gspo_token_agree_where_advantage_and_weight_are_constant_in_a_sequence():
    logp, old, advantages, mask, segment_ids = batch(9, 1.0)
    scale = scale_of(mask, segment_ids, "seq_mean_token_mean")
    kinds = [ObjectiveConfig(k, clip_low=0.05, clip_high=0.05) for k in ("gspo", "gspo_token")]  # cuts some
    a, b = (run(logp, old, advantages, mask, segment_ids, scale, c) for c in kinds)
    chex.assert_trees_all_close(a, b, rtol=1e-5, atol=1e-9)
    assert (np.asarray(a[2]) != 0).any() and np.asarray(a[1]["clip/fraction"]).any()


@each_case
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_under_the_mask_changes_nothing(config, poison):
    for seed in range(3):
        logp, old, advantages, mask, segment_ids = batch(seed, 2.0)
        weights = np.where(mask, 1.5, 0).astype(np.float32)
        spoilt = [np.where(mask, x, np.float32(poison)) for x in (logp, old, advantages)]
        clean = run(logp, old, advantages, mask, segment_ids, weights, config)
        chex.assert_trees_all_equal(clean, run(*spoilt, mask, segment_ids, weights, config))
        assert (np.asarray(clean[2])[~mask] == 0).all()


@each_case
@pytest.mark.parametrize("field", ["logp", "old", "advantages"])
def test_a_nan_at_a_live_token_comes_through_to_its_sequence_alone(config, field):
    for sign in (-1, 1):
        logp, old, advantages, mask, segment_ids = batch(3)
        fields = {"logp": logp, "old": old, "advantages": sign * np.abs(advantages)}
        row, at = np.argwhere(mask)[2]
        fields[field] = fields[field].copy()
        fields[field][row, at] = np.nan
        loss, _, _ = run(*fields.values(), mask, segment_ids, np.ones(SHAPE, np.float32), config)
        assert np.isfinite(np.delete(loss, row, 0)).all()
        # -A c does not look at the old policy
        blind = field == "old" and config == ObjectiveConfig("reinforce")
        assert np.isnan(loss[row, at]) != blind


@each_case
def test_an_empty_mask_gives_zeros(config):
    logp, old, advantages, mask, segment_ids = batch(4)
    none = np.zeros_like(mask)
    scale = scale_of(none, segment_ids, "seq_mean_token_mean")
    loss, cut, grad = run(logp, old, advantages, none, segment_ids, scale, config)
    assert not np.asarray(loss).any() and not np.asarray(grad).any() and not cut["clip/fraction"].any()


def test_gradients_reach_the_current_policy_alone():
    logp, old, advantages, mask, segment_ids = batch(6)
    for config in CASES:
        none = jnp.zeros_like(mask) if config.kind in SELECTING else None
        of = functools.partial(policy_loss, config=config, selected=none)
        total = jax.jit(lambda old, a: of(logp, old, a, mask, segment_ids)[0].sum())  # noqa: B023
        assert not any(np.asarray(g).any()
                       for g in jax.grad(total, (0, 1))(jnp.asarray(old), jnp.asarray(advantages)))


def test_bounds_may_change_from_step_to_step_without_compiling_anew():
    fields = batch(8)
    for config in (c for c in CASES if "clip_low" in objective_parameters(c)):
        none = jnp.zeros_like(fields[3]) if config.kind in SELECTING else None
        step = jax.jit(lambda clip: policy_loss(*fields, config, clip, none))  # noqa: B023
        own = tuple(np.float32(objective_parameters(config)[name]) for name in ("clip_low", "clip_high"))
        loss, cut, _ = run(*fields, np.ones(SHAPE, np.float32), config)
        chex.assert_trees_all_close(step(own), (loss, cut), rtol=1e-6)
        tight, loose = (int(step((np.float32(c), np.float32(c)))[1]["clip/fraction"].sum())
                        for c in (1e-6, 0.9))
        assert tight > loose and step._cache_size() == 1
    with pytest.raises(ConfigError, match="no clip bounds"):
        policy_loss(*fields, ObjectiveConfig("sapo"), (0.1, 0.1))


# No result depends on padding, packing, order or the split
# -----------------------------------------------------------


def sequences(seed: int):
    """(tokens' numbers, logp, old, advantage, weight, mask) of 7 sequences of 1 to 8 tokens, one masked
    whole."""
    rng = np.random.default_rng(seed)
    out, start = [], 0
    for i, n in enumerate(rng.integers(1, 9, 7)):
        logp = -rng.exponential(1.0, n)
        mask = rng.random(n) < 0.8 if i else np.zeros(n, bool)
        advantage = np.full(n, rng.normal())
        out.append((np.arange(start, start + n), logp, logp + 0.4 * rng.normal(size=n), advantage,
                    rng.uniform(0, 2, n), mask))
        start += n
    return out, start


def laid_out(parts, layout):
    """[M, R, T] arrays. One sequence a row where there are rows enough, else packed first fit; the rest is
    padding."""
    m, r, t = layout
    fields = [np.full(layout, -1), *(np.full(layout, 99.0, np.float32) for _ in range(4)),
              np.zeros(layout, bool)]
    segment_ids, used, count = np.zeros(layout, np.int32), np.zeros(m * r, int), np.zeros(m * r, int)
    for i, part in enumerate(parts):
        n = len(part[0])
        row = i if m * r >= len(parts) else next(j for j in range(m * r) if used[j] + n <= t)
        at = (*np.unravel_index(row, (m, r)), slice(used[row], used[row] + n))
        used[row], count[row] = used[row] + n, count[row] + 1
        segment_ids[at] = count[row]
        for field, x in zip(fields, part):
            field[at] = x
    return fields, segment_ids


LAYOUTS = ((1, 7, 24), (7, 1, 24), (3, 1, 24))  # one a row; one a micro-batch; packed and split


@each_case
def test_no_result_depends_on_the_layout(config):
    parts, total = sequences(11)
    shuffled = [parts[i] for i in np.random.default_rng(1).permutation(len(parts))]
    for aggregation in AGGREGATIONS:
        results = []
        for chosen, layout in itertools.product((parts, shuffled), LAYOUTS):
            (number, logp, old, advantages, weights, mask), segment_ids = laid_out(chosen, layout)
            scale = scale_of(mask, segment_ids, aggregation, 8.0 if aggregation.endswith("norm") else None)
            losses, grads = 0.0, np.zeros(total)
            for micro in range(layout[0]):
                x = [f[micro] for f in (logp, old, advantages, mask, segment_ids, weights * scale)]
                loss, _, grad = run(*x, config)
                losses += float(np.sum(x[-1] * np.asarray(loss, np.float64)))
                grads[number[micro][mask[micro]]] = np.asarray(grad)[mask[micro]]
            results.append((losses, grads))
        magnitude = np.abs(results[0][1]).sum()
        assert magnitude > 0
        for losses, grads in results[1:]:
            np.testing.assert_allclose(grads, results[0][1], rtol=2e-6, atol=1e-7 * magnitude)
            np.testing.assert_allclose(losses, results[0][0], rtol=1e-6, atol=1e-6 * magnitude)


# Exact gradients on a policy small enough to enumerate
# ---------------------------------------------------------------

SEQUENCES = np.array(list(itertools.product(range(3), repeat=3)))


@jax.jit
def tabular_logp(theta):
    """theta [3, 4, 3] (place, token before it, token) -> log-probabilities [27, 3] of every sequence's
    tokens."""
    before = np.concatenate([np.full((27, 1), 3), SEQUENCES[:, :-1]], 1)
    return jnp.take_along_axis(jax.nn.log_softmax(theta)[np.arange(3), before], SEQUENCES[..., None],
                               -1)[..., 0]


@each_case
def test_on_policy_every_objective_follows_the_exact_gradient_of_the_expected_reward(config):
    """Expectation over all 27 sequences, no sampling; a constant baseline drops out."""
    rng = np.random.default_rng(2)
    theta, reward = jnp.asarray(rng.normal(size=(3, 4, 3))), rng.normal(size=27)
    logp, backward = jax.vjp(tabular_logp, theta)
    probability = jnp.exp(logp.sum(-1, keepdims=True))
    exact = jax.grad(lambda theta: jnp.exp(tabular_logp(theta).sum(-1)) @ jnp.asarray(reward))(theta)
    advantages, mask = np.tile(reward[:, None] - 0.3, 3), np.ones((27, 3), bool)
    _, _, grad = run(logp, logp, advantages, mask, mask.astype(np.int32), jnp.tile(probability, 3), config)
    np.testing.assert_allclose(backward(grad)[0], -exact, atol=2e-7)
    assert np.abs(exact).max() > 0.05


# Parameters
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ObjectiveConfig("grpo"), 'here it is loss.objective = "ppo_clip"'),
        (ObjectiveConfig("gspo_tokens"), 'did you mean "gspo_token"'),
        (ObjectiveConfig("ppo_clip", clip_low=-0.2), "at least 0 and at most 1; the default is 0.2"),
        (ObjectiveConfig("ppo_clip", clip_low=1.2), "not the bound itself"),
        (ObjectiveConfig("ppo_clip", clip_high=float("nan")), "clip_high = nan"),
        (ObjectiveConfig("cispo", clip_high=float("inf")), "finite"),
        (ObjectiveConfig("dppo_tv", clip_high=1.2), "at most 1; the default is 0.15"),
        (ObjectiveConfig("ppo_clip", dual_clip=1.0), "above 1; by default it is off"),
        (ObjectiveConfig("dppo_kl", ratio_cap=0.5), "at least 1; the default is 3"),
        (ObjectiveConfig("sapo", tau_negative=0.0), "above 0; the default is 1.05"),
        (ObjectiveConfig("prime_rl", penalty=-1.0), "penalty = -1"),
        (ObjectiveConfig("sapo", clip_low=0.2), "its parameters: tau_positive, tau_negative"),
        (ObjectiveConfig("gspo", dual_clip=3.0), "dual_clip = 3.0 has no effect"),
        (ObjectiveConfig("clip_cov", cov_fraction=0.0), "above 0 and at most 1; the default is 0.0002"),
        (ObjectiveConfig("kl_cov", clip_low=0.2), "its parameters: cov_fraction, cov_kl_coef"),
    ],
)
def test_impossible_parameters(config, says):
    with pytest.raises(ValueError, match=says):
        policy_loss(*batch(0), config)


def test_every_parameter_belongs_to_an_objective_and_defaults_are_valid():
    known = set().union(*(objective_parameters(ObjectiveConfig(kind)) for kind in OBJECTIVES))
    assert known == set(ObjectiveConfig._fields) - {"kind"}
    for kind in OBJECTIVES:
        defaults = objective_parameters(ObjectiveConfig(kind))
        assert objective_parameters(ObjectiveConfig(kind, **defaults)) == defaults
    with pytest.raises(ConfigError, match='did you mean "k3'):
        kl_penalty(jnp.zeros(1), jnp.zeros(1), jnp.ones(1, bool), "k33")
