"""Healthy ranges of the metrics, and the verdict on a whole run."""
