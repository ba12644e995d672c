"""A learner in plain JAX drives vLLM: a Llama in thirty lines, its layers stacked for `lax.scan`.

The mapping says where each leaf goes: `{i}` unstacks the layers, `axes` turns kernels into [out, in].
Needs vLLM. On a GPU: weights="fp8_e4m3_128x128" for both, and VllmInplace for VllmReload.
"""

import importlib.util
import sys

if not importlib.util.find_spec("vllm"):
    sys.exit("skipped: vLLM is not installed (pip install vllm)")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bridges import GenRequest, SamplingParams, To, TreeSource, VllmEngine, VllmReload
from jaxfp8rl import losses

V, D, H, K, F, L, N, NEW = 40, 64, 2, 32, 96, 2, 32, 8  # N completions of NEW tokens
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V, "hidden_size": D,
          "num_attention_heads": H, "num_key_value_heads": H, "head_dim": K, "intermediate_size": F,
          "num_hidden_layers": L, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
          "hidden_act": "silu", "tie_word_embeddings": True}
SHAPES = {"q": (L, D, H, K), "k": (L, D, H, K), "v": (L, D, H, K), "o": (L, H, K, D),
          "gate": (L, D, F), "up": (L, D, F), "down": (L, F, D)}
LAYER = "model.layers.{i}."
MAPPING = {
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight",
    "layers.norm_1": LAYER + "input_layernorm.weight", "layers.norm_2": LAYER + "post_attention_layernorm.weight",
    **{f"layers.{x}": To(f"{LAYER}self_attn.{x}_proj.weight", axes="d h k -> (h k) d") for x in "qkv"},
    "layers.o": To(LAYER + "self_attn.o_proj.weight", axes="h k d -> d (h k)"),
    **{f"layers.{x}": To(f"{LAYER}mlp.{x}_proj.weight", axes="i o -> o i") for x in ("gate", "up", "down")},
}
