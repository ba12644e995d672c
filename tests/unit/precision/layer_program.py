"""Two layers of a learner whose FP8 products are the Hopper kernels, forward and backward, for tests of the
compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward
from jaxfp8rl.policy.policy import grad_slots, policy_of
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import EngineRounding, Precision
from jaxfp8rl.precision.weights import trainable

MODEL = ModelConfig.from_hf(
    {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 128, "hidden_size": 256,
     "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
     "head_dim": 128,
     "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
     "tie_word_embeddings": True}
)
LINEARS = frozenset(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
# [N, K], gate and up being one
WEIGHTS = [(256, 256), (128, 256), (128, 256), (256, 256), (768, 256), (256, 384)]
TURNED = [(512, 256), (256, 256), (768, 256), (256, 384)]  # what comes back goes by q, k and v as one, too
BATCH = 2, 512  # 1024 tokens: no axis of a weight
PRECISION = Precision((LayerRun(0, 2, LINEARS),), products="pallas", gradients="e4m3",
                      rounding=EngineRounding(fused=True, fused_quantizer=True))
# The kernels that run, by loop. An input is quantised once for all its consumers, by rows and along the
# tokens; down's input is quantised by its producer. The backward pass recomputes its layer's forward pass up
# to SwiGLU. It quantises the gradients of results; SwiGLU's is quantised by its producer.
INPUTS, PRODUCTS = 4, len(WEIGHTS)
KERNELS = (INPUTS + PRODUCTS) + (INPUTS + PRODUCTS - 2) + (INPUTS + 3 * len(TURNED))


def gradients(policy, leaves, tokens, positions, segments, precision=PRECISION, remat="layer"):
    """The gradients of a micro-batch, with a simpler loss."""

    def total(leaves):
        hidden = forward(trainable(policy, leaves), MODEL, tokens, positions, segments, precision, remat)
        return hidden.astype(jnp.float32).sum()

    return jax.value_and_grad(total)(leaves)


def shapes() -> tuple:
    """The shapes of the arguments of `gradients`."""
    policy = jax.eval_shape(lambda: policy_of(init_params(MODEL, jax.random.key(0)), PRECISION))
    leaves = jax.eval_shape(lambda policy: grad_slots(policy, "bfloat16"), policy)
    return policy, leaves, *(jax.ShapeDtypeStruct(BATCH, jnp.int32) for _ in range(3))


def kernels(text: str) -> list[str]:
    """The calls of kernels in a compiled module."""
    return [line.strip() for line in text.splitlines() if 'custom_call_target="mosaic_gpu_v2"' in line]
