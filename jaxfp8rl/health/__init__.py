"""Healthy ranges of the metrics, and what tells that a run is ill."""
