"""The policy: a decoder of a declared family (Llama, Qwen, Mistral, Gemma) as pure functions over a parameter
tree that mirrors Hugging Face names."""
