"""Attention of one query a sequence over a paged cache."""
