"""Laws of the rollout correction: what has to hold for every config, whatever its arithmetic."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import Array

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses.correction import (
    AdaptiveMix,
    Correction,
    CorrectionConfig,
    Rejection,
    rollout_correction,
)
from jaxfp8rl.losses.presets import PRESETS, get_preset

pytestmark = pytest.mark.usefixtures("quick_compile")
B, T = 3, 8
SHAPE = (5, 24)  # room for the same sequences moved, padded or packed: one shape, one compilation a config
GARBAGE = np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0], np.float32)
# one of each kind of dependence: none, a sequence, two sequence statistics, the batch's mean, its order, its
# spread
VARIED = ["token_tis", "verl/decoupled_seq_is_rs", "nemo/seq_mask_tis", "slime/mis", "slime/mis_sequence",
          "areal/m2po", "ais"]
NEUTRAL = {  # of the metrics that do not start at 0
    "mismatch/token_mult_prob_error": 1, "mismatch/seq_mult_prob_error_max": 1, "mismatch/ppl_ratio": 1,
    "mismatch/prob_correlation": 1, "correction/batch_norm_factor": 1,
    "correction/ess": 1, "correction/weight_mean": 1, "correction/weight_max": 1, "correction/weight_min": 1,
    "correction/sequence_weight_mean": 1, "correction/sequence_weight_max": 1,
    "correction/sequence_weight_min": 1,
    "correction/raw_ess": 1, "correction/raw_weight_mean": 1, "correction/raw_weight_max": 1,
    "correction/raw_weight_min": 1,
}


class Data(NamedTuple):
    """old, rollout, mask, ids, all of SHAPE: B sequences, one a row from its first token; lengths 0 to T,
    holes in the mask, garbage under it."""

    old: Array
    rollout: Array
    mask: Array
    ids: Array

    def correct(self, config: CorrectionConfig) -> Correction:
        return rollout_correction(self.old, self.rollout, self.mask, config, self.ids)

    def moved(self, move: Callable[[Array], Array]) -> Data:
        return Data(*(move(x) for x in self))


@cache
def compiled(config: CorrectionConfig) -> Callable[[Data], Correction]:
    return jax.jit(lambda batch: batch.correct(config))


def data(seed: int, scale: float, rows: int = B) -> Data:
    """scale: mismatch in nats; the live log-probabilities are at most 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, T + 1, (SHAPE[0], 1)) * (np.arange(SHAPE[0]) < rows)[:, None]
    spans = np.arange(SHAPE[1]) < lengths
    mask = spans & (rng.random(SHAPE) < 0.8)
    d, top = scale * rng.uniform(-1, 1, SHAPE), -rng.exponential(1.0, SHAPE)
    old, rollout = (np.where(mask, top + np.minimum(x, 0), rng.choice(GARBAGE, SHAPE)).astype(np.float32)
                    for x in (d, -d))
    return Data(*(jnp.asarray(x) for x in (old, rollout, mask, spans.astype(np.int32))))


@st.composite
def batches(draw, scales=(1e-3, 0.1, 1.0, 10.0, 30.0)) -> Data:
    return data(draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(scales)))


def with_live_tokens(batch: Data) -> Data:
    """At least one live token, with a mismatch of 1 nat."""
    old, rollout, mask, ids = batch
    return Data(old.at[0, 0].set(-1), rollout.at[0, 0].set(-2), mask.at[0, 0].set(True), ids.at[0, 0].set(1))


# --- neutral, empty, under the mask: for the weights of every preset see test_correction_presets.py
# -------------------


@pytest.mark.parametrize("name", VARIED)
def test_metrics_of_equal_policies_are_neutral(name: str):
    batch = data(1, 1.0)
    metrics = compiled(PRESETS[name])(batch._replace(rollout=batch.old)).metrics
    assert metrics["mismatch/learner_ppl"] == metrics["mismatch/rollout_ppl"]
    for key, value in metrics.items():
        if not key.endswith(("_ppl", "/mix")):
            assert abs(float(value) - NEUTRAL.get(key, 0)) < 1e-6, key


@pytest.mark.parametrize("name", VARIED)
def test_an_empty_mask_gives_finite_neutral_metrics(name: str):
    batch = data(2, 10.0)
    fix = compiled(PRESETS[name])(batch._replace(mask=jnp.zeros_like(batch.mask)))
    assert not fix.weights.any() and not fix.mask.any()
    for key, value in fix.metrics.items():
        if not key.endswith(("_ppl", "/mix")):
            assert float(value) == NEUTRAL.get(key, 0), key
    chex.assert_tree_all_finite(fix.metrics)


@pytest.mark.parametrize("name", VARIED)
def test_what_stands_under_the_mask_changes_no_metric(name: str):
    dirty = data(3, 2.0)
    clean = dirty._replace(old=jnp.where(dirty.mask, dirty.old, -1.0),
                           rollout=jnp.where(dirty.mask, dirty.rollout, -1.0))
    run = compiled(PRESETS[name])
    chex.assert_trees_all_equal(run(dirty), run(clean))
    chex.assert_tree_all_finite(run(dirty))


def test_everything_is_float32_also_from_bfloat16():
    batch = data(6, 1.0)
    half = batch._replace(old=batch.old.astype(jnp.bfloat16), rollout=batch.rollout.astype(jnp.bfloat16))
    fix = compiled(PRESETS["token_tis"])(half)
    chex.assert_type([fix.weights, fix.mask], [jnp.float32, bool])
    chex.assert_type(list(fix.metrics.values()), jnp.float32)
    chex.assert_shape(list(fix.metrics.values()), ())


# --- invariances
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIED)
@given(batch=batches(), seed=st.integers(0, 1000))
def test_order_padding_rows_and_packing_do_not_matter(name: str, batch: Data, seed: int):
    order, run = np.random.default_rng(seed).permutation(B), compiled(PRESETS[name])
    here, rows = run(batch), SHAPE[0]

    def place(x: Array, spot: Callable[[int, int], tuple[int, int]], fill: float = 0) -> Array:
        """x with sequence order[i], the i-th of the new batch, at the (row, column) that spot gives it."""
        target = np.full(SHAPE, fill, x.dtype)
        for i, b in enumerate(order):
            row, column = spot(i, b)
            target[row, column : column + T] = np.asarray(x)[b, :T]
        return jnp.asarray(target)

    layouts = {
        "shuffled": lambda i, b: (i, 0), "after padding": lambda i, b: (b, 5 + b),
        "other rows": lambda i, b: (rows - B + i, 0),
        "one row": lambda i, b: (1, i * T), "two rows": lambda i, b: (i % 2, (i // 2) * T),
    }
    numbered = batch._replace(ids=jnp.where(batch.ids > 0, jnp.arange(1, rows + 1)[:, None], 0))
    for spot in layouts.values():
        there = run(
            Data(*(place(x, spot, fill) for x, fill in zip(numbered, (np.nan, np.inf, 0, 0), strict=True))))
        assert_same(here, there, lambda x, spot=spot: place(x, spot))


def assert_same(a: Correction, b: Correction, moved) -> None:
    """Weights and masks move with their tokens; metrics stay. Sums may be added up in another order."""
    chex.assert_trees_all_equal(moved(a.mask), b.mask)
    chex.assert_trees_all_close(moved(a.weights), b.weights, rtol=2e-4)
    chex.assert_trees_all_close(a.metrics, b.metrics, rtol=2e-4, atol=1e-5)


def test_leading_axes_are_any():
    """[T], [B, T] and [2, B, T] are the same function."""
    batch, config = data(7, 1.0), PRESETS["nemo/seq_mask_tis"]
    fix = compiled(config)(batch)
    row, stacked = (compiled(config)(batch.moved(move))
                    for move in (lambda x: x[1], lambda x: jnp.stack([x, x])))
    chex.assert_trees_all_close((row.weights, row.mask), (fix.weights[1], fix.mask[1]), rtol=1e-6)
    for half in (0, 1):
        chex.assert_trees_all_close((stacked.weights[half], stacked.mask[half]), (fix.weights, fix.mask),
                                    rtol=1e-6)
    chex.assert_trees_all_close(stacked.metrics, fix.metrics, rtol=1e-5, atol=1e-6)


SHARDED = """
import sys
import chex, jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxfp8rl.losses.correction import rollout_correction
from jaxfp8rl.losses.presets import PRESETS

assert jax.device_count() == 8
rng = np.random.default_rng(0)
shape = (16, 8)
mask = rng.random(shape) < 0.7
old, noise = -rng.exponential(1.0, shape), rng.normal(size=shape)
old[~mask] = np.nan
ids = np.repeat([[1] * 5 + [2] * 3], 16, 0).astype(np.int32)
arrays = [jnp.asarray(x) for x in (old.astype(np.float32), (old + noise).astype(np.float32), mask, ids)]
rows = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
run = jax.jit(lambda old, rollout, mask, ids: [rollout_correction(old, rollout, mask, PRESETS[n], ids) for n in sys.argv[1:]])
one, eight = run(*arrays), run(*(jax.device_put(x, rows) for x in arrays))
assert len(eight[0].weights.sharding.device_set) == 8
for a, b in zip(one, eight):
    chex.assert_trees_all_equal(a.mask, b.mask)
    assert 0 < np.count_nonzero(a.weights)
    chex.assert_trees_all_close((a.weights, a.metrics), (b.weights, b.metrics), rtol=1e-5, atol=1e-6)
"""


def test_the_number_of_devices_does_not_matter():
    """Rows over 8 devices: the mean that normalises, M2's order and every metric are those of the whole
    batch."""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu",
                        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    names = ["slime/mis_sequence", "areal/m2po"]
    done = subprocess.run([sys.executable, "-c", SHARDED, *names], env=env, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


# --- gradients
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIED)
def test_weights_and_metrics_are_constants_to_the_gradient(name: str):
    """Zero, not NaN, also for the garbage under the mask; in two-policy mode the weight's own input carries
    the gradient."""
    batch, config = data(8, 1.0), PRESETS[name]

    def everything(old: Array, rollout: Array) -> Array:
        fix = rollout_correction(old, rollout, batch.mask, config, batch.ids)
        return jnp.sum(fix.weights) + sum(jnp.sum(x) for x in fix.metrics.values())

    for gradient in jax.jit(jax.grad(everything, argnums=(0, 1)))(batch.old, batch.rollout):
        chex.assert_trees_all_equal(gradient, jnp.zeros(SHAPE))

    def reinforce(logp: Array) -> Array:
        fix = rollout_correction(logp, batch.rollout, batch.mask, config, batch.ids)
        return jnp.sum(fix.weights * jnp.where(batch.mask, logp, 0.0))

    chex.assert_trees_all_close(jax.jit(jax.grad(reinforce))(batch.old), compiled(config)(batch).weights,
                                rtol=1e-6)


@given(batch=batches(scales=(0.01, 0.1, 1.0)), seed=st.integers(0, 1000))
def test_mixing_weights_is_mixing_gradients(batch: Data, seed: int):
    """The loss is linear in the weight: the gradient with (1 - a) + a w is (1 - a) that without and a that
    with weights."""
    batch, rng = with_live_tokens(batch), np.random.default_rng(seed)
    logits, advantages = rng.normal(size=(*SHAPE,
                                          5)).astype(np.float32), rng.normal(size=SHAPE).astype(np.float32)
    mixed, plain, weighted = (compiled(PRESETS[name])(batch) for name in ("ais", "none", "token_tis"))
    a = mixed.metrics["correction/mix"]
    assert 0 <= a <= 1
    of_plain, of_weighted, of_mixed = (policy_gradient(logits, fix.weights, advantages)
                                       for fix in (plain, weighted, mixed))
    chex.assert_trees_all_close(of_mixed, (1 - a) * of_plain + a * of_weighted, rtol=1e-4, atol=1e-5)


@jax.jit
@jax.grad
def policy_gradient(logits: Array, weights: Array, advantages: Array) -> Array:
    """Of the surrogate -w r A, for action 0 of a softmax at each token with old probability 1/5."""
    return -jnp.sum(weights * advantages * 5 * jax.nn.softmax(logits)[..., 0])


def test_adaptive_mixing_asks_for_more_as_the_policies_part():
    """From no correction when they agree to a full one, less what the spread of the weights takes off."""
    shares = [float(compiled(PRESETS["ais"])(data(9, scale)).metrics["correction/mix"])
              for scale in (0.0, 0.01, 0.05, 0.2)]
    assert shares == sorted(shares) and shares[0] < 0.2 and shares[-1] > 0.7


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


# --- compilation
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["slime/mis", "areal/m2po"])
def test_only_the_config_compiles_anew(name: str):
    run = jax.jit(lambda batch: batch.correct(PRESETS[name]))
    for seed, scale in enumerate((0.0, 1.0, 30.0, 1e-3)):
        batch = data(seed, scale)
        run(batch)
        run(batch._replace(mask=batch.mask & False, ids=batch.ids * 7))
    assert run._cache_size() == 1


def test_a_config_is_a_static_argument():
    assert len({hash(c) for c in PRESETS.values()}) > 30
    assert len({hash(CorrectionConfig(rejections=(Rejection("token", "k2"),))) for _ in range(2)}) == 1


# --- bad input
# ------------------------------------------------------------------------------------------------------

SEQUENCE_K3 = Rejection("sequence", "k3", upper=0.01)


@pytest.mark.parametrize(
    "config",
    [CorrectionConfig("sequence"), CorrectionConfig("geometric"),
     CorrectionConfig("none", rejections=(SEQUENCE_K3,))],
)
def test_sequence_level_without_segments_says_what_is_missing(config: CorrectionConfig):
    batch = data(0, 1.0)
    with pytest.raises(ValueError, match=r"segment_ids \[\.\.\., T\]"):
        rollout_correction(batch.old, batch.rollout, batch.mask, config)


def rejects(**fields) -> CorrectionConfig:
    return CorrectionConfig(rejections=(Rejection(**{"level": "token", "statistic": "ratio"} | fields),))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CorrectionConfig(action="mask", lower=3.0, upper=2.0), "reversed.*write"),
        (CorrectionConfig(action="clip", lower=-1.0), "positive"),
        (CorrectionConfig(upper=-2.0), "reversed|positive"),
        (CorrectionConfig(upper=0.0), "positive"),
        (CorrectionConfig(upper=math.nan), "must be numbers"),
        (CorrectionConfig(action="clip", lower=math.nan), "must be numbers"),
        (CorrectionConfig(lower=0.5), "no effect"),
        (rejects(lower=2.0, upper=0.5), "reversed.*write"),
        (rejects(lower=-0.5, upper=0.5), "positive"),
        (rejects(upper=math.nan), "must be numbers"),
        (rejects(), "token_ratio has no bounds"),
        (rejects(lower=0.0), "token_ratio has no bounds"),
        (rejects(level="sequence", statistic="k1"), "sequence_mean_k1 has no bounds"),
        (rejects(statistic="mult_error", lower=1.0), "token_mult_error has no bounds"),
        (rejects(statistic="mult_error", upper=0.5), "upper = 0.5 rejects all"),
        (rejects(aggregation="max", upper=2.0), 'aggregation "max" has no effect at level "token"'),
        (rejects(statistic="k3", upper=-0.01), "positive|reversed"),
        (rejects(level="sequence", statistic="k1", lower=0.5, upper=-0.5), "sequence_mean_k1.*reversed"),
        (CorrectionConfig(m2_limit=0.0), "m2_limit"),
        (CorrectionConfig(m2_limit=-1.0), "m2_limit"),
        (CorrectionConfig(m2_limit=math.inf), "m2_limit"),
        (CorrectionConfig(m2_limit=math.nan), "m2_limit"),
        (CorrectionConfig(adaptive=AdaptiveMix(slope=0.0)), "adaptive"),
        (CorrectionConfig(adaptive=AdaptiveMix(power=math.inf)), "adaptive"),
    ],
)
def test_bad_bounds_are_refused_in_words(config: CorrectionConfig, words: str):
    with pytest.raises(ValueError, match=words):
        data(0, 1.0).correct(config)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (CorrectionConfig(weight="tokens"), "tokens"), (CorrectionConfig(action="trunc"), "trunc"),
        (CorrectionConfig(overflow="clamp"), "clamp"), (CorrectionConfig(denominator="live"), "live"),
        (rejects(level="seq"), "seq"), (rejects(statistic="k4"), "k4"),
        (rejects(level="sequence", aggregation="median"), "median"),
    ],
)
def test_a_misspelt_choice_is_refused_by_name(config: CorrectionConfig, word: str):
    """A NamedTuple takes any string; none of them may be taken for something it is not."""
    with pytest.raises(ValueError, match=f'"{word}"'):
        data(0, 1.0).correct(config)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("nemo/icepob", "nemo/icepop"), ("verl/decoupled_token_tis", "verl/decoupled_token_is")]
)
def test_an_unknown_preset_names_the_nearest(name: str, nearest: str):
    with pytest.raises(ConfigError, match=nearest):
        get_preset(name)


def test_a_known_preset_is_found_and_checks():
    for name, config in PRESETS.items():
        assert get_preset(name) is config and config.check() is config
