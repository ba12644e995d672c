"""Laws of the rollout correction: what has to hold for every config, whatever its arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from correction_batches import SHAPE, VARIED, B, Data, T, batches, compiled, data, with_live_tokens
from hypothesis import given
from hypothesis import strategies as st
from jax import Array

from benchmarks.processes import on_devices
from jaxfp8rl.losses.correction import (
    Correction,
    rollout_correction,
)
from jaxfp8rl.losses.presets import PRESETS

pytestmark = pytest.mark.usefixtures("quick_compile")
NEUTRAL = {  # of the metrics that do not start at 0
    "mismatch/token_mult_prob_error": 1, "mismatch/seq_mult_prob_error_max": 1, "mismatch/ppl_ratio": 1,
    "mismatch/prob_correlation": 1, "mismatch/equal_fraction": 1, "correction/batch_norm_factor": 1,
    "correction/ess": 1, "correction/weight_mean": 1, "correction/weight_max": 1, "correction/weight_min": 1,
    "correction/sequence_weight_mean": 1, "correction/sequence_weight_max": 1,
    "correction/sequence_weight_min": 1,
    "correction/raw_ess": 1, "correction/raw_weight_mean": 1, "correction/raw_weight_max": 1,
    "correction/raw_weight_min": 1,
}


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
correct = lambda n, old, rollout, mask, ids: rollout_correction(old, rollout, mask, PRESETS[n], ids)
run = jax.jit(lambda *fields: [correct(n, *fields) for n in sys.argv[1:]])
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
    on_devices(8, SHARDED, "slime/mis_sequence", "areal/m2po")


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
