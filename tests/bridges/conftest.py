"""One torch thread: the models are tiny, and two thread pools on two cores wait for each other. Before torch
is imported."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
from remote_servers import own, remote, served  # noqa: E402, F401  fixtures


@pytest.fixture(scope="module")
def quick_collections():
    """What other modules keep alive is not searched again at each of the collections of this one."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def found(monkeypatch):
    """live_rows of a module, its places given."""

    from bridges.inside_vllm import layout

    def find(module, places):
        monkeypatch.setattr(layout, "places", lambda model, block: places)
        return layout.live_rows(module, (128, 128))

    return find
