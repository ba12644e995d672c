"""Blockwise E4M3 quantisation."""

BLOCK = 128  # defined here instead of in reference.py, so that reading a config does not import JAX
