"""Limit torch to one thread before it is imported: the models are tiny, and two thread pools on two cores
wait for each other."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402

from bridges.engines.vllm_engine import VllmEngine  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def one_collection_an_engine():
    """When an engine closes vLLM collects garbage three times, among a million objects that stay: two seconds
    each. Here it is once."""
    close = VllmEngine.close

    def quick_close(engine: VllmEngine) -> None:
        if engine._llm is None:
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gc, "collect", lambda *_: 0)
            close(engine)
        gc.collect()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmEngine, "close", quick_close)
        yield


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
        monkeypatch.setattr(layout, "places", lambda model: places)
        return layout.live_rows(module)

    return find
