"""A run whose engine samples from the learner's own arrays is the run whose engine keeps copies."""

import jax
import numpy as np
import pytest
from micro_run import lasting, metrics, rewarded
from tiny_run import config, saved

from jaxfp8rl.config.schema import Config
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.training import loop


@pytest.mark.parametrize("recipe", ["fp8_unified", pytest.param("fp8_rollout", marks=pytest.mark.slow)])
def test_a_run_is_the_same_in_bits_with_and_without_copies(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(RewardRunner, "score", rewarded)
    updated = loop.run_updates
    asleep = []

    def asks(ctx, *rest):
        asleep.append(ctx.engine.weight_version() is None)
        return updated(ctx, *rest)

    monkeypatch.setattr(loop, "run_updates", asks)
    runs = {}
    for lends in (True, False):
        folder = tmp_path / f"lends-{lends}"
        monkeypatch.setattr(Config, "lends_policy", lends)
        loop.train(config(folder, run__steps=3, run__eval_every=2, precision__compute_dtype="bfloat16",
                          precision__recipe=recipe, sft__steps=5))
        runs[lends] = metrics(folder), saved(folder), (folder / "samples.jsonl").read_bytes()
    assert asleep == [True] * 3 + [False] * 3
    (lent, state, samples), (copied, want, expected) = runs[True], runs[False]
    sent = [[row.pop("publish/bytes") for row in rows[1:]] for rows in (lent, copied)]
    assert all(a < b for a, b in zip(*sent, strict=True)) and (recipe == "fp8_rollout") == (sent[0][0] > 0)
    np.testing.assert_equal(lasting(lent), lasting(copied))
    assert samples == expected
    jax.tree.map(np.testing.assert_array_equal, state[0], want[0])
