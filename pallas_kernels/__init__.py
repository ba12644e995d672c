"""Kernels for Hopper GPUs in Pallas, each beside a plain-jnp reference that is always right. Imports nothing of ours."""
