"""Tests that need an NVIDIA GPU: `JAX_PLATFORMS=cuda pytest -m gpu tests/gpu`. Elsewhere they are skipped
with a message."""

from __future__ import annotations

import jax
import pytest

from pallas_kernels.plgpu_compat import HOPPER


def pytest_collection_modifyitems(items):
    here = [item for item in items if "tests/gpu" in str(item.path)]
    lacking = None if jax.default_backend() == "gpu" else pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if lacking:
            item.add_marker(lacking)


@pytest.fixture
def hopper():
    if str(getattr(jax.devices()[0], "compute_capability", "")) != HOPPER:
        pytest.skip("needs a Hopper GPU")
