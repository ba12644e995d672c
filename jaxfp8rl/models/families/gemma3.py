"""Gemma 3, text alone: 270M, 1B, and the language models of the larger ones once they are saved alone.

Norms stand before and after attention and MLP and multiply by 1 + weight. Five of six layers see a window
and have a RoPE base of their own.
"""

from collections.abc import Mapping
from typing import Any

from jaxfp8rl.models.families.family import FULL, SANDWICH, SLIDING, Activation, Family


def _layer_types(raw: Mapping[str, Any]) -> list[str] | None:
    """Every layer whose number, from 1, divides by the pattern sees everything (transformers'
    Gemma3TextConfig)."""
    pattern = raw.get("_sliding_window_pattern", raw.get("sliding_window_pattern", 6))
    layers = raw.get("num_hidden_layers")
    if not (isinstance(layers, int) and isinstance(pattern, int) and pattern > 0):
        return None
    return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]


GEMMA3 = Family(
    "Gemma3ForCausalLM", "gemma3_text", publisher=("gemma-3", "google"), qk_norm=True, norms=SANDWICH,
    unit_offset=True, activation=Activation.GELU_TANH, activation_key="hidden_activation",
    scaled_embedding=True, sliding_window=True, rope_theta=1e6, local_rope_theta=1e4,
    defaults={"head_dim": 256, "sliding_window": 4096, "layer_types": _layer_types,
              "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "bos_token_id": 2, "eos_token_id": 1,
              "pad_token_id": 0},
    logit_softcap=True,
    only={"attn_logit_softcapping": (None,), "use_bidirectional_attention": (False, None)},
)
