"""Saving a run, reading one that may still be running, and exporting it as a Hugging Face folder."""
