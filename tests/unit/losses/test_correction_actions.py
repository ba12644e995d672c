"""Actions, statistics and rejections of the rollout correction keep their bounds."""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from correction_batches import SHAPE, VARIED, Data, batches, compiled, data, with_live_tokens
from hypothesis import given
from hypothesis import strategies as st
from jax import Array

from jaxfp8rl.losses.correction import (
    CorrectionConfig,
    Rejection,
    rollout_correction,
)
from jaxfp8rl.losses.presets import PRESETS

pytestmark = pytest.mark.usefixtures("quick_compile")


# --- actions and statistics
# -----------------------------------------------------------------------------------------


def many(scale: float, count: int = 40, rows: int = SHAPE[0]) -> Data:
    """Stacked batches [count, *SHAPE]."""
    return Data(*(jnp.stack(x) for x in zip(*(data(seed, scale, rows) for seed in range(count)),
                                            strict=True)))


@pytest.mark.parametrize("overflow", ["cap", "zero"])
@pytest.mark.parametrize("weight", ["token", "sequence", "geometric"])
def test_actions_hold_their_bounds(weight: str, overflow: str):
    lower, upper, batch = 0.7, 1.6, many(2.0)
    actions = [("truncate", 0, math.inf), ("truncate", 0, upper), ("mask", lower, upper),
               ("clip", lower, upper)]
    configs = [CorrectionConfig(weight, *action, overflow) for action in actions]
    raw, *acted = jax.jit(jax.vmap(lambda batch: [batch.correct(c).weights for c in configs]))(batch)
    raw, truncated, masked, clipped = (np.asarray(x)[np.asarray(batch.mask)] for x in (raw, *acted))
    lo, hi = np.float32(lower), np.float32(upper)
    assert (raw < lo).any() and (raw > hi).any()
    assert np.array_equal(truncated, np.minimum(raw, hi))
    assert np.array_equal(masked, np.where((raw >= lo) & (raw <= hi), raw, 0))
    assert np.array_equal(clipped, np.clip(raw, lo, hi))


@given(batch=batches(), name=st.sampled_from([n for n in VARIED if PRESETS[n].denominator == "kept"]))
def test_ess_is_kish_and_follows_from_the_coefficient_of_variation(batch: Data, name: str):
    """(sum w)^2 / (n sum w^2) = 1 / (1 + CV^2), over the tokens that are kept."""
    batch = with_live_tokens(batch)
    fix = compiled(PRESETS[name])(batch)
    w, m = np.asarray(fix.weights,
                      np.float64)[np.asarray(fix.mask)], {k: float(v) for k, v in fix.metrics.items()}
    if w.any():
        assert m["correction/ess"] == pytest.approx(np.sum(w) ** 2 / (w.size * np.sum(w**2)), rel=1e-4)
    # raw_ess is that before the clamp
    clamped = np.abs(np.where(batch.mask, batch.old - batch.rollout, 0)).sum() > 20
    for prefix in ("correction/", *(["correction/raw_"] if not clamped else [])):
        if m[f"{prefix}weight_mean"] > 1e-6:
            cv = m[f"{prefix}weight_std"] / m[f"{prefix}weight_mean"]
            assert m[f"{prefix}ess"] == pytest.approx(1 / (1 + cv**2), rel=1e-4)


@pytest.mark.parametrize("apart", [20.0, 45.0, 60.0, 88.0, 100.0])
@pytest.mark.parametrize("name", ["token_tis", "nemo/is", "nemo/gspo", "areal/token_k2"])
def test_large_weights_overflow_no_metric(name: str, apart: float):
    """One token of 1,000 in ten sequences is `apart` nats likelier to the learner: its mean square is past
    float32's range."""
    old, mask = jnp.full((10, 100), -1.0), jnp.ones((10, 100), bool)
    rollout = old.at[3, 7].add(-apart)
    m = rollout_correction(old, rollout, mask, PRESETS[name], jnp.ones((10, 100), int)).metrics
    assert all(np.isfinite(float(value)) for value in m.values())
    share = 0.1 if PRESETS[name].weight == "sequence" else 0.001  # what weighs anything
    assert float(m["correction/raw_ess"]) == pytest.approx(share, rel=1e-2)
    if name == "nemo/is":  # past 88.7 the weight is 0
        assert float(m["correction/ess"]) == pytest.approx(share if apart < 88.7 else 1 - share, rel=1e-2)


def test_the_raw_sample_size_sees_a_collapse_beyond_the_clamp():
    """Sequences of 1,024 tokens, each token a little less likely to the learner (top_p): every weight is
    clamped to e^-20."""
    d = -np.random.default_rng(0).exponential(0.05, (64, 1024)).astype(np.float32)
    mask, old = jnp.ones(d.shape, bool), jnp.full(d.shape, -1.0)
    m = rollout_correction(old, old - d, mask, PRESETS["sequence_mis"], jnp.ones(d.shape, int)).metrics
    total = d.sum(1, dtype=np.float64)
    w = np.exp(total - total.max())
    assert total.max() < -40 and w.sum() ** 2 / (64 * (w**2).sum()) < 0.3
    assert float(m["correction/raw_ess"]) == pytest.approx(w.sum() ** 2 / (64 * (w**2).sum()), rel=1e-3)
    # weights are as they were
    assert float(m["correction/weight_mean"]) == pytest.approx(math.exp(-20), rel=1e-4)
    infinite = rollout_correction(old, (old - d).at[0, 0].set(-jnp.inf), mask, PRESETS["token_tis"]).metrics
    assert float(infinite["correction/raw_ess"]) == pytest.approx(1 / d.size, rel=1e-5)


def rejection(level: str, aggregation: str, statistic: str, width: float) -> Rejection:
    """Bounds that hold the neutral value: ratios from e^-width to e^width, k1 in nats, the others up to
    width."""
    bounds = {"ratio": (math.exp(-width), math.exp(width)), "k1": (-width, width),
              "mult_error": (0.0, 1 + width)}
    return Rejection(level, statistic, aggregation, *bounds.get(statistic, (0.0, width)),
                     clamp=aggregation != "max")


@pytest.mark.parametrize(
    "statistic",
    ["ratio", "k2", *(pytest.param(s, marks=pytest.mark.slow) for s in ("k1", "k3", "mult_error"))]
)
def test_rejection_is_monotone(statistic: str):
    """Narrower bounds, one rule more, or twice the mismatch: none of them ever keeps a token that was not
    kept before."""
    batch = many(1.5)
    d = jnp.where(batch.mask, batch.old - batch.rollout, 0.0)
    batch = batch._replace(old=d, rollout=jnp.zeros_like(d))  # so that doubling is exact
    # k2 is symmetric; so named, it is not the rule of kind "k2"
    another = Rejection("token", "k2", upper=0.5, inverse=True)
    kinds = [("token", "mean"), ("sequence", "sum"), ("sequence", "mean"), ("sequence", "max"),
             ("sequence", "min")]
    wide, narrow = ([rejection(*kind, statistic, width) for kind in kinds] for width in (1.0, 0.4))
    rules = [[(w,), (n,), (w, another)] for w, n in zip(wide, narrow, strict=True)]

    @jax.jit
    @jax.vmap
    def kept(batch: Data) -> list[list[Array]]:
        return [[batch.correct(CorrectionConfig("none", rejections=r)).mask for r in kind] for kind in rules]

    for (level, _), plain, doubled in zip(kinds, kept(batch), kept(batch._replace(old=2 * d)), strict=True):
        before, narrower, one_more = (np.asarray(x) for x in plain)
        assert 0 < np.mean(before[np.asarray(batch.mask)]) < 1
        for fewer in (narrower, one_more, np.asarray(doubled[0])):
            assert not (fewer & ~before).any()
        if level == "sequence":  # all of a sequence or nothing
            whole = np.asarray(batch.mask)
            assert np.all(np.all(before == whole, -1) | ~before.any(-1))


@pytest.mark.parametrize("inverse", [False, True])
def test_inverse_bounds_the_inverse_ratio(inverse: bool):
    """verl's k1 with bounds "0.6_1.4" keeps 1/rho in them: asymmetric bounds tell."""
    d = jnp.log(jnp.array([[0.55, 0.65, 1.0, 1.35, 1.5, 1.7]]))
    mask = jnp.ones_like(d, bool)
    config = CorrectionConfig("none", rejections=(Rejection("token", "ratio", lower=0.6, upper=1.4,
                                                            inverse=inverse),))
    kept = rollout_correction(d, jnp.zeros_like(d), mask, config).mask
    assert kept.tolist() == [[False, False, True, True, True, False] if inverse
                             else [False, True, True, True, False, False]]


def test_a_rejected_token_leaves_the_denominator_or_stays_in_it():
    batch = data(10, 1.0)
    rule = Rejection("token", "k2", upper=0.1)
    kept, everyone = (batch.correct(CorrectionConfig(rejections=(rule,), denominator=d))
                      for d in ("kept", "all"))
    chex.assert_trees_all_equal(kept.weights, everyone.weights)
    chex.assert_trees_all_equal(everyone.mask, batch.mask)
    chex.assert_trees_all_equal(kept.mask, kept.weights > 0)
    rejected = jnp.sum(batch.mask & ~kept.mask) / jnp.sum(batch.mask)
    assert 0 < rejected < 1 and everyone.metrics["correction/rejected_fraction"] == pytest.approx(
        float(rejected))


def test_normalised_weights_have_mean_one_before_anyone_is_rejected():
    batch = data(11, 1.0)
    for weight in ("token", "sequence", "geometric"):
        w = batch.correct(CorrectionConfig(weight, batch_normalize=True)).weights
        rows = [row[live] for row, live in zip(np.asarray(w), np.asarray(batch.mask), strict=True)
                if live.any()]
        members = np.concatenate(rows) if weight == "token" else np.array([row[0] for row in rows])
        assert np.mean(members) == pytest.approx(1.0, abs=1e-5)


def test_m2_keeps_as_many_tokens_as_its_limit_allows():
    batch = with_live_tokens(data(12, 0.6))
    fix = batch.correct(CorrectionConfig("none", m2_limit=0.04))
    squares = np.asarray(batch.old - batch.rollout, np.float64) ** 2
    kept, live = squares[np.asarray(fix.mask)], np.sort(squares[np.asarray(batch.mask)])
    assert 0 < kept.size < live.size and np.mean(kept) < 0.04 <= np.mean(live[: kept.size + 1])
    far = batch._replace(old=batch.old - 30.0)
    assert np.count_nonzero(far.correct(CorrectionConfig("none", m2_limit=0.04)).mask) == 1
