"""Blockwise E4M3 quantisation."""

BLOCK = 128  # here, not in reference.py, so that reading a config does not load JAX
