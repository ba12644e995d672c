"""Mistral 7B, Nemo and others of their architecture: Llama with a sliding window in every layer, if any."""

from jaxfp8rl.models.families.family import Family, head_dim_of_width, query_heads

MISTRAL = Family(
    "MistralForCausalLM", "mistral", publisher=("Mistral", "mistralai"), sliding_window=True,
    defaults={"num_key_value_heads": query_heads, "head_dim": head_dim_of_width, "sliding_window": 4096},
    only={"layer_types": (None,)},  # transformers ignores it, and gives every layer the window
)
