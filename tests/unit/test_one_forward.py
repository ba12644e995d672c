"""Score and update compute one forward: compiled as in a run, so that what the compiler may join it joins."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.config import Loss, Optim
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.losses.correction import CorrectionConfig
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim import init_state, make_optimizer
from jaxfp8rl.precision.recipe import Precision, fp8_runs, plain_runs
from jaxfp8rl.train_step import make_logprobs, make_policy, make_score, make_train_step

MODEL = ModelConfig.from_hf(
    {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 256, "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
)  # fmt: skip
EXACT = Loss(clip_low=1e-9, clip_high=1e-9)  # meets every ratio but 1
QUANTISED = {"runs": fp8_runs(linear_shapes(MODEL), 2), "gradients": "e4m3"}
PLAIN = {"runs": plain_runs(MODEL.sparse_layers)}
CASES = {
    "bf16": (Precision(**PLAIN), "none"), "bf16, fused": (Precision(**PLAIN, fused=True), "mlp"),
    "fp8": (Precision(**QUANTISED), "none"), "fp8, fused": (Precision(**QUANTISED, fused=True, fused_quantizer=True), "mlp"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_token_of_a_batch_has_the_same_log_probability_in_both_to_the_last_bit(case):
    precision, remat = CASES[case]
    logprobs, optimizer = make_logprobs(MODEL, precision, 1.0, remat), make_optimizer(Optim(), 10)
    update, make = make_train_step(logprobs, precision, EXACT, CorrectionConfig(), optimizer), make_policy(precision)
    weights = jax.tree.map(lambda p: 4 * p if p.ndim > 1 else p, init_params(MODEL, jax.random.key(0)))
    rng = np.random.default_rng(0)
    drawn = [(rng.integers(0, 256, 4), rng.integers(0, 256, n), rng.normal()) for n in (30, 60, 40, 80, 50, 60)]
    batch = pack([Sample(p, c, np.zeros(len(c), np.float32), advantage) for p, c, advantage in drawn], 96, 1, 5)
    old = make_score(logprobs)(make(weights), batch)
    for scores, differ in ((old, False), (old + 1e-6 * batch.response_mask, True)):
        state = init_state(jax.tree.map(jnp.copy, weights), optimizer, "bfloat16")
        metrics = update(state, make(state.params), batch, scores)[2]
        assert (metrics["clip/fraction"] > 0 or metrics["staleness/k1"] != 0) == differ, metrics["clip/fraction"]
