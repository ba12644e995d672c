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

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses.aggregation import AGGREGATIONS, token_scale
from jaxfp8rl.losses.covariance import covariances, select_tokens
from jaxfp8rl.losses.objectives import (
    KL_KINDS,
    OBJECTIVES,
    SELECTING,
    ObjectiveConfig,
    kl_penalty,
    objective_parameters,
    off_policy,
    policy_loss,
)

pytestmark = pytest.mark.usefixtures("quick_compile")
seeds = st.integers(0, 2**32 - 1)
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
SHAPE = (6, 9)


def batch(seed: int, gap: float = 1.0):
    """One sequence a row, ragged, with holes in the mask; row 0 is masked whole. One advantage a sequence."""
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(1.0, SHAPE).astype(np.float32)
    old = np.minimum(logp + gap * rng.normal(size=SHAPE), 0).astype(np.float32)
    length = rng.integers(1, SHAPE[1] + 1, (SHAPE[0], 1))
    segment_ids = (np.arange(SHAPE[1]) < length).astype(np.int32)
    mask = (segment_ids > 0) & (rng.random(SHAPE) < 0.8)
    mask[0] = False
    advantages = np.broadcast_to(rng.normal(size=(SHAPE[0], 1)), SHAPE).astype(np.float32)
    return logp, old, advantages, mask, segment_ids


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


# Oracle: of one sequence's live tokens in float64, (losses, Jacobian dloss_t/dlogp_u, distances to a bound)
# ----------


def oracle(config: ObjectiveConfig, c, p, a):
    kind, given_ = config.kind, {k: v for k, v in config._asdict().items() if v is not None and k != "kind"}
    return {"ppo_clip": o_ppo, "gspo": o_gspo, "gspo_token": functools.partial(o_gspo, token=True),
            "cispo": o_cispo,
            "sapo": o_sapo, "gmpo": o_gmpo, "dppo_tv": o_dppo_tv, "dppo_kl": o_dppo_kl,
            "reinforce": o_reinforce,
            "prime_rl": o_prime, "clip_cov": o_ppo, "kl_cov": o_plain}[kind](c, p, a, **given_)


def bounded(c, p):
    d = c - p
    return np.exp(np.clip(d, -20, 20)), (np.abs(d) < 20).astype(float)


def o_ppo(c, p, a, clip_low=0.2, clip_high=0.2, dual_clip=None):
    r, free = bounded(c, p)
    value = -np.minimum(r * a, np.clip(r, 1 - clip_low, 1 + clip_high) * a)
    live = np.where(a > 0, r <= 1 + clip_high, r >= 1 - clip_low)
    near = [r - 1 - clip_high, r - 1 + clip_low]
    if dual_clip:
        live = live & ~((a < 0) & (value > -dual_clip * a))
        value = np.where(a < 0, np.minimum(value, -dual_clip * a), value)
        near.append(r - dual_clip)
    return value, np.diag(-a * r * live * free), near


def o_gspo(c, p, a, clip_low=3e-4, clip_high=4e-4, token=False):
    n, mean = len(c), (c - p).mean()
    s, free = np.exp(min(mean, 10)), mean < 10
    value = -np.minimum(s * a, np.clip(s, 1 - clip_low, 1 + clip_high) * a)
    slope = -a * s * free * np.where(a > 0, s <= 1 + clip_high, s >= 1 - clip_low)
    jacobian = np.diag(slope) if token else slope[:, None] * np.full((n, n), 1 / n)
    return value, jacobian, [s - 1 - clip_high, s - 1 + clip_low]


def o_cispo(c, p, a, clip_low=1.0, clip_high=5.0):
    w = np.clip(bounded(c, p)[0], 1 - clip_low, 1 + clip_high)
    return -w * a * c, np.diag(-w * a), []


def o_sapo(c, p, a, tau_positive=1.0, tau_negative=1.05):
    r, free = bounded(c, p)
    tau = np.where(a > 0, tau_positive, tau_negative)
    gate = 1 / (1 + np.exp(-tau * (r - 1)))
    gate_slope = np.exp(-tau * (r - 1)) * gate**2  # 1 - gate would round to 0
    return -a * 4 / tau * gate, np.diag(-a * 4 * gate_slope * r * free), []


def o_gmpo(c, p, a, clip_low=0.4, clip_high=0.4):
    n, d, sign = len(c), c - p, np.sign(a)
    inner = sign * np.minimum(sign * d, sign * np.clip(d, -clip_low, clip_high))
    free = (inner == d) & (inner.mean() < 20)
    s = np.exp(min(inner.mean(), 20))
    return -a * s, (-a * s)[:, None] * free[None] / n, [d - clip_high, d + clip_low]


def o_trust(c, p, a, keep, cap):
    w = np.minimum(bounded(c, p)[0], cap) * keep
    return -w * a * c, np.diag(-w * a)


def o_dppo_tv(c, p, a, clip_low=0.15, clip_high=0.15, ratio_cap=3.0):
    moved = np.exp(c) - np.exp(p)
    keep = np.where(a > 0, moved <= clip_high, moved >= -clip_low)
    return *o_trust(c, p, a, keep, ratio_cap), [moved - clip_high, moved + clip_low]


def o_dppo_kl(c, p, a, clip_low=0.05, clip_high=0.05, ratio_cap=3.0):
    now, old = np.exp(c), np.exp(p)
    kl = old * (p - c) + (1 - old) * np.log((1 - old + 1e-8) / (1 - now + 1e-8))
    keep = np.where(a > 0, (kl <= clip_high) | (now <= old), (kl <= clip_low) | (now >= old))
    return *o_trust(c, p, a, keep, ratio_cap), [kl - clip_high, kl - clip_low]


def o_reinforce(c, p, a, ratio_cap=None):
    return o_trust(c, p if ratio_cap else c, a, 1.0, ratio_cap or np.inf)[:2] + ([],)


def o_prime(c, p, a, clip_low=0.2, clip_high=0.2, penalty=1e-3):
    (r, free), moved = bounded(c, p), np.exp(c) - np.exp(p)
    keep = np.where(a > 0, moved <= clip_high, moved >= -clip_low)
    slope = -r * a * keep * free + 2 * penalty * (c - p)
    return -r * a * keep + penalty * (c - p) ** 2, np.diag(slope), [moved - clip_high, moved + clip_low]


def o_plain(c, p, a):
    r, free = bounded(c, p)
    return -r * a, np.diag(-r * a * free), []


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
    count = max(1, int(np.floor(np.float32(fraction) * mask.sum())))
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
    low_half, drawn = 0, 0
    for seed in range(300):
        old, advantages, mask, places = wide_batch(seed)
        among = mask & (np.asarray(covariances(old, advantages, mask)) > 0)
        config = ObjectiveConfig("clip_cov", cov_fraction=0.05, cov_low=0.0, cov_high=99.0)
        got = np.asarray(select_tokens(old, advantages, mask, places, config))
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
        (ObjectiveConfig("ppo_clip", dual_clip=1.0), "above 1; left out, it is off"),
        (ObjectiveConfig("dppo_kl", ratio_cap=0.5), "at least 1; the default is 3"),
        (ObjectiveConfig("sapo", tau_negative=0.0), "above 0; the default is 1.05"),
        (ObjectiveConfig("prime_rl", penalty=-1.0), "penalty = -1"),
        (ObjectiveConfig("sapo", clip_low=0.2), "its parameters: tau_positive, tau_negative"),
        (ObjectiveConfig("gspo", dual_clip=3.0), "dual_clip = 3.0 means nothing"),
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
