"""FP8 reinforcement learning for language models in JAX, on Hopper GPUs. Loads neither torch nor vllm."""

__version__ = "0.1.0"
