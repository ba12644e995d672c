"""A run whose completions are drafted in FP8 and go on in float32."""

import pytest
from tiny_run import config, metrics

from jaxfp8rl.training import loop


@pytest.mark.slow
def test_a_run_learns_from_drafts_that_went_on(tmp_path):
    loop.train(config(tmp_path, run__steps=2, precision__recipe="bf16", rollout__kv_cache="auto",
                      run__save_every=0,
                      selection__explore_samples=8, selection__explore_tokens=2, selection__weights="inverse",
                      selection__explore=0.2, selection__explore_kept=0.5))
    first, *steps = metrics(tmp_path)
    assert "explore/tokens" not in first, "the gate and an evaluation draft nothing"
    for m in steps:
        assert 4 * 8 < m["explore/tokens"] <= 4 * 8 * 2, "two tokens each, or one that ends the answer"
        kept = m["tokens/rollout"] - m["explore/precise_tokens"]
        assert 8 <= kept <= 8 * 2 and m["explore/kept_fraction"] == kept / m["explore/tokens"]
        assert m["explore/unreachable"] == 0
        assert m["mismatch/max_logp_diff"] > 1e-4, "the FP8 engine's tokens differ from the learner's"
        assert m["trained/completions"] == 16 and 0 < m["trained/weights_ess"] <= 1
