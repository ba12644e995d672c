"""Shared by every test: CPU unless told otherwise, no network, few and undeadlined hypothesis examples."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports jax; tests/gpu is run with JAX_PLATFORMS=cuda
os.environ["HF_HUB_OFFLINE"] = "1"

from hypothesis import HealthCheck, settings

settings.register_profile("default", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")
