"""Rollout engines in this process: vLLM, the embedded JAX engine, and a small one for tests."""
