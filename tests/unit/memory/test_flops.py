"""Operations of an update, counted another way."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxfp8rl.data.packing import Sample
from jaxfp8rl.memory import flops
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import param_table

MODEL = ModelConfig.from_hf({
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
})


def sample(prompt: int, completion: int) -> Sample:
    return Sample([1] * prompt, [2] * completion, np.zeros(completion), 1.0)


def test_six_a_parameter_and_token_and_attention_by_pairs():
    of = {e.hf_name: int(np.prod(e.shape)) for e in param_table(MODEL)}
    linears = sum(size for name, size in of.items() if "_proj" in name)
    pairs = sum(1 for n in (7, 20) for i in range(n) for j in range(n) if j <= i)
    want = 6 * linears * 27 + 6 * of["lm_head.weight"] * 20 + 3.5 * 4 * pairs * 4 * 64 * 3
    assert flops.update_flops(MODEL, [sample(3, 4), sample(4, 16)]) == pytest.approx(want, rel=1e-12)
    assert flops.update_flops(MODEL, []) == 0
    twice, once = ([sample(3, 4), sample(3, 4)._replace(shared=n)] for n in (0, 2))
    pairs = 3 * 3.5 * 4 * MODEL.num_hidden_layers * MODEL.num_attention_heads * MODEL.head_dim  # of 2 tokens
    linears = flops.update_flops(MODEL, twice) - flops.update_flops(MODEL, once) - pairs
    assert linears == pytest.approx(2 * 6 * sum(
        n * k * flops._uses(MODEL, name) for name, (n, k) in flops.linear_shapes(MODEL).items()))


def test_attention_counts_the_pairs_inside_a_window():
    windowed = dataclasses.replace(MODEL, architecture="MistralForCausalLM", sliding_window=5)
    samples = [sample(3, 4), sample(4, 16), sample(1, 2)]
    outside = sum(1 for n in (7, 20, 3) for i in range(n) for j in range(n) if j <= i - 5)
    less = flops.update_flops(MODEL, samples) - flops.update_flops(windowed, samples)
    assert less == pytest.approx(3.5 * 4 * outside * 4 * 64 * 3, rel=1e-9)


def test_utilisation_is_of_a_known_peak_or_unsaid(monkeypatch):
    assert flops.mfu(1e12, 1.0) is None
    monkeypatch.setitem(flops.PEAK, jax.local_devices()[0].device_kind, 1e12)
    assert flops.mfu(1e12, 4.0, devices=2) == 0.125
