"""Saving a run, resuming it, and reading one that may still be running."""
