"""Limit torch to one thread before it is imported: the models are tiny, and two thread pools on two cores
wait for each other."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402


@pytest.fixture(scope="module")
def quick_collections():
    """Exclude the objects that other modules keep alive from this module's garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def found(monkeypatch):
    """The live_rows of a module at the given positions."""

    from bridges.inside_vllm import layout

    def find(module, places):
        monkeypatch.setattr(layout, "places", lambda model, block: places)
        return layout.live_rows(module, (128, 128))

    return find
