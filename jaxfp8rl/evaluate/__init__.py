"""Evaluation of checkpoints on held-out problems."""
