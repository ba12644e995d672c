"""Extraction of an answer from a completion's text, and its score. Imports neither jax nor a tokenizer
library."""
