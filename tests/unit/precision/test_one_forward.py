"""Score and update compute one forward: compiled as in a run, so that what the compiler may join it joins."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_program import MODEL, PRECISION  # noqa: E402

from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.losses.correction import CorrectionConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.precision.layer_runs import plain_runs
from jaxfp8rl.precision.records import EngineRounding, Precision
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step

EXACT = Loss(clip_low=1e-9, clip_high=1e-9)  # meets every ratio but 1
QUANTISED = {"runs": PRECISION.runs, "gradients": "e4m3"}
PLAIN = {"runs": plain_runs(MODEL.sparse_layers)}
FUSED = EngineRounding(fused=True, residual_once=True)
FUSED_QUANTIZER = EngineRounding(fused=True, fused_quantizer=True)
CASES = {
    "bf16": (Precision(**PLAIN), "none"), "bf16, fused": (Precision(**PLAIN, rounding=FUSED), "mlp"),
    "fp8": (Precision(**QUANTISED), "none"),
    "fp8, fused": (Precision(**QUANTISED, rounding=FUSED_QUANTIZER), "mlp"),
}


# tests/unit/rollout/test_one_policy.py has the scoring forward's bits, of the engine's own order
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_token_of_a_batch_has_the_same_log_probability_in_both_to_the_last_bit(case):
    precision, remat = CASES[case]
    logprobs, optimizer = make_logprobs(MODEL, precision, 1.0, remat), make_optimizer(Optim(), 10)
    update, make = make_train_step(logprobs, precision, EXACT, CorrectionConfig(),
                                   optimizer), make_policy(precision)
    weights = jax.tree.map(lambda p: 4 * p if p.ndim > 1 else p, init_params(MODEL, jax.random.key(0)))
    rng = np.random.default_rng(0)
    drawn = [(rng.integers(0, 128, 4), rng.integers(0, 128, n), rng.normal())
             for n in (30, 60, 40, 80, 50, 60)]
    batch = pack([Sample(p, c, np.zeros(len(c), np.float32), advantage) for p, c, advantage in drawn], 96, 1,
                 5)
    old = make_score(logprobs)(make(weights), batch)
    for scores, differ in ((old, False), (old + 1e-6 * batch.response_mask, True)):
        state = init_state(jax.tree.map(jnp.copy, weights), optimizer, "bfloat16")
        metrics = update(state, make(state.params), batch, scores)[2]
        assert (metrics["clip/fraction"] > 0
                or metrics["staleness/k1"] != 0) == differ, metrics["clip/fraction"]
