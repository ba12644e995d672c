"""Qwen2 and Qwen2.5: Llama with biases of q, k and v."""

from jaxfp8rl.models.families.family import Family, head_dim_of_width, query_heads

QWEN2 = Family(
    "Qwen2ForCausalLM", "qwen2", publisher=("Qwen2", "Qwen"), qkv_bias=True,
    defaults={"num_key_value_heads": query_heads, "head_dim": head_dim_of_width},
)
