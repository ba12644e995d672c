"""Llama 2, 3, 3.1 and 3.2, SmolLM2, and others of their architecture."""

from jaxfp8rl.models.families.family import Family, head_dim_of_width, query_heads

LLAMA = Family(
    "LlamaForCausalLM", "llama", publisher=("Llama", "meta-llama"),
    defaults={"num_key_value_heads": query_heads, "head_dim": head_dim_of_width},
)
