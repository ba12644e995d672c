"""`jax.lax.dot_general` in FP8, forward and backward."""
