"""Aggregations and objectives compute the same with and without jit, and from arrays of a device."""

import functools

import chex
import jax
from objective_batches import batch

from jaxfp8rl.losses.aggregation import AGGREGATIONS, token_scale
from jaxfp8rl.losses.objectives import ObjectiveConfig, policy_loss


class TestVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_aggregations(self):
        *_, mask, segment_ids = batch(0)
        for kind in AGGREGATIONS:
            horizon = 16.0 if kind == "seq_mean_token_sum_norm" else None
            function = functools.partial(token_scale, kind=kind, horizon=horizon)
            scale = self.variant(function)(mask, segment_ids)
            chex.assert_shape(scale, mask.shape)
            chex.assert_trees_all_close(scale, jax.jit(function)(mask, segment_ids), rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_objectives(self):
        fields = batch(1)
        for kind in ("ppo_clip", "gspo"):
            function = functools.partial(policy_loss, config=ObjectiveConfig(kind))
            loss, cut = self.variant(function)(*fields)
            chex.assert_tree_all_finite((loss, cut))
            chex.assert_trees_all_close((loss, cut), jax.jit(function)(*fields), rtol=1e-5, atol=1e-6)
