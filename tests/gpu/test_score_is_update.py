"""The scoring pass and the update are two programs of one forward: at equal weights every token's
log-probability has the same bits in both, so that the ratio of one update a step is 1 and nothing is clipped.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
import pytest

from benchmarks.common import config
from benchmarks.step import batch_of, precision_of, rows_of
from jaxfp8rl.config.correction import Correction
from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step

ARGS = argparse.Namespace(row_tokens=2048, segments=8, microbatches=2, data=1, fsdp=1, tensor=1)
CASES = [
    *(("0.6b", "fp8_unified", remat) for remat in ("mlp", "products", "layer", "none")),
    *(("0.6b", "bf16", remat) for remat in ("mlp", "none")),
    *((size, recipe, "mlp") for size in ("8b", "30b-a3b") for recipe in ("fp8_unified", "bf16")),
]


@pytest.mark.parametrize(("size", "recipe", "remat"), CASES)
def test_an_update_has_the_log_probabilities_that_were_scored(size, recipe, remat):
    model = ModelConfig.from_hf(config(size, layers=2))
    precision, optimizer = precision_of(model, recipe), make_optimizer(Optim(lr=1e-6), 10)
    logprobs = make_logprobs(model, precision, 1.0, remat)
    # any ratio but 1 is clipped on one side, whatever the sign of the advantage
    train = make_train_step(logprobs, precision, Loss(clip_low=1e-9, clip_high=1e-9), Correction().resolve(),
                            optimizer)
    params = jax.tree.map(lambda w: 4 * w if w.ndim > 1 else w, init_params(model, jax.random.key(0)))
    state = init_state(params, optimizer, "bfloat16")
    policy, batch = make_policy(precision)(state.params), batch_of(rows_of(ARGS, model), ARGS)
    old = make_score(logprobs)(policy, batch)
    assert np.asarray(old)[batch.response_mask].std() > 0.5
    # some units of the last place: the test can fail
    off = old + np.where(batch.response_mask, np.float32(1e-5), 0)
    for scores, fails in ((off, True), (old, False)):
        copies = jax.tree.map(jax.numpy.copy, (state, policy))
        metrics = train(*copies, batch, scores)[2]
        differ = float(metrics["clip/fraction"]) > 0 or float(metrics["staleness/k1"]) != 0
        print(
            f"{size}, {recipe}, remat {remat}: clip/fraction {metrics['clip/fraction']}, staleness "
            f"{metrics['staleness/k1']}")
        assert differ == fails
