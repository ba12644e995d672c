"""Qwen3, dense and with mixtures of experts: each query and key head is normalised before RoPE."""

from jaxfp8rl.models.families.family import Family, head_dim_of_width

QWEN3 = Family("Qwen3ForCausalLM", "qwen3", publisher=("Qwen3", "Qwen"), qk_norm=True)
QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", publisher=("Qwen3", "Qwen"), qk_norm=True,
                   experts=True, defaults={"head_dim": head_dim_of_width})
