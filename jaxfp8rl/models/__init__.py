"""The policy: a decoder (Qwen3, Qwen3-MoE, Llama 3) as pure functions over a parameter tree that mirrors
Hugging Face names."""
