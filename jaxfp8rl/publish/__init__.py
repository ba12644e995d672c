"""Weights on their way out: the wire format of a weight sync, and export to a Hugging Face folder."""
