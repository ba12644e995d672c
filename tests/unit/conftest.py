"""Shared by the unit tests."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compile():
    """For a module whose tests compile many large programs and run each once: without the compiler's expensive passes."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
