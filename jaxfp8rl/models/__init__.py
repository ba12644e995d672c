"""The policy: a dense decoder (Qwen3, Llama 3) as pure functions over a parameter tree that mirrors Hugging Face names."""
